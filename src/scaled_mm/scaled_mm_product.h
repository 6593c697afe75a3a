// SPDX-License-Identifier: Apache-2.0
//
// c = a a_scale * b b_scale + bias by a kernel of product/kernels.h.
#pragma once

#include "cuda/tensor_map.h"
#include "product/kernels.h"

namespace quantfuse::scaled_mm {

inline Verdict accepts_product(const product::Choosy& kernel, const Problem& p) {
  const Verdict sizes = product::accepts_sizes(p.m, p.n, p.k);
  return kernel.accepts(product::from(p))
      .require(!sizes.reason, sizes.reason)
      .require(has_boxes(p.a), "rows of a do not begin at multiples of 16 bytes");
}

}  // namespace quantfuse::scaled_mm
