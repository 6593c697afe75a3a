// SPDX-License-Identifier: Apache-2.0
//
// INT4 weights by INT8 activations for many tokens, by product/product_int4.h.
#include "linear/linear_product.h"

namespace quantfuse::linear_product_int4_sm90 {
using linear::Problem;
using product_int4_sm90::kernel;
namespace {

Verdict accepts(const Problem& p) { return accepts_product(kernel, p); }
size_t workspace_bytes(const Problem& p) { return product_workspace_bytes(kernel, p); }
void launch(const Problem& p, const Launch& launch) { launch_product(kernel, p, launch); }

}  // namespace

extern const Kernel<Problem> entry = {"linear_product_int4_sm90", Target::sm90, accepts, workspace_bytes,
                                      launch};

}  // namespace quantfuse::linear_product_int4_sm90
