// SPDX-License-Identifier: Apache-2.0
//
// For many rows of a, by product/product_wgmma.h.
#include "scaled_mm/scaled_mm_product.h"

namespace quantfuse::scaled_mm_wgmma_sm90 {
using scaled_mm::Problem;
namespace {

Verdict accepts(const Problem& p) { return accepts_product(product_wgmma_sm90::kernel, p); }

void launch(const Problem& p, const Launch& launch) {
  product_wgmma_sm90::kernel.launch(product::from(p), nullptr, launch);
}

}  // namespace

extern const Kernel<Problem> entry = {"scaled_mm_wgmma_sm90", Target::sm90, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::scaled_mm_wgmma_sm90
