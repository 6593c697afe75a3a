// SPDX-License-Identifier: Apache-2.0
//
// c = (a - a_zero) a_scale * (b - b_zero) b_scale + bias on the tensor cores of sm_80 and newer: any call, by
// product/product_mma.h.
#include "product/kernels.h"

namespace quantfuse::scaled_mm_mma_sm80 {
using scaled_mm::Problem;
namespace {

Verdict accepts(const Problem& p) { return product::accepts_sizes(p.m, p.n, p.k); }

void launch(const Problem& p, const Launch& launch) {
  product_mma_sm80::launch(product::from(p), nullptr, launch);
}

}  // namespace

extern const Kernel<Problem> entry = {"scaled_mm_mma_sm80", Target::sm80, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::scaled_mm_mma_sm80
