// SPDX-License-Identifier: Apache-2.0
//
// For few rows of a, by product/product_stream.h.
#include "scaled_mm/scaled_mm_product.h"

namespace quantfuse::scaled_mm_stream_sm90 {
using scaled_mm::Problem;
namespace {

Verdict accepts(const Problem& p) { return accepts_product(product_stream_sm90::kernel, p); }

void launch(const Problem& p, const Launch& launch) {
  product_stream_sm90::kernel.launch(product::from(p), nullptr, launch);
}

}  // namespace

extern const Kernel<Problem> entry = {"scaled_mm_stream_sm90", Target::sm90, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::scaled_mm_stream_sm90
