// SPDX-License-Identifier: Apache-2.0
//
// c = a a_scale * b b_scale + bias for many rows of a, by product/product_wgmma.h.
#include "cuda/tensor_map.h"
#include "product/kernels.h"

namespace quantfuse::scaled_mm_wgmma_sm90 {
using scaled_mm::Problem;
namespace {

Verdict accepts(const Problem& p) {
  const Verdict sizes = product::accepts_sizes(p.m, p.n, p.k);
  return product_wgmma_sm90::accepts(product::from(p))
      .require(!sizes.reason, sizes.reason)
      .require(has_boxes(p.a), "rows of a do not begin at multiples of 16 bytes");
}

void launch(const Problem& p, const Launch& launch) {
  product_wgmma_sm90::launch(product::from(p), nullptr, launch);
}

}  // namespace

extern const Kernel<Problem> entry = {"scaled_mm_wgmma_sm90", Target::sm90, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::scaled_mm_wgmma_sm90
