// SPDX-License-Identifier: Apache-2.0
//
// y = epilogue( x_q w^T ) with quantized activations by a kernel of product/kernels.h.
//
//   [x --quantize_rows--> codes]  -->  product, epilogue  -->  y   [--quantize_rows--> codes of y]
//
// The last step is for codes of y with dynamic scales that the kernel does not make itself.
#pragma once

#include "cuda/tensor_map.h"
#include "product/kernels.h"

namespace quantfuse::linear {

// As it will be once x has been quantized.
inline product::Product quantized_product(const Problem& p) {
  product::Product product = product::from(p);
  const int64_t groups = ceil_div(p.k, product.a.block.cols);
  if (!p.x_scale) product.a.scale = {nullptr, p.m, groups, groups, DType::f32};
  return product;
}

inline Verdict accepts_product(const product::Choosy& kernel, const Problem& p) {
  Requirements requirements = product::accepts_linear(p);
  if (Verdict(requirements).reason) return requirements;
  const bool has_codes = static_cast<bool>(p.x_scale);
  return kernel.accepts(quantized_product(p))
      .require(!has_codes || has_boxes(p.x), "rows of x do not begin at multiples of 16 bytes");
}

inline size_t product_workspace_bytes(const product::Choosy& kernel, const Problem& p) {
  return static_cast<size_t>(plan_canonical(p, kernel.quantizes(p.out)).total_bytes);
}

inline void launch_product(const product::Choosy& kernel, const Problem& problem, const Launch& launch) {
  launch_canonical(
      problem, launch,
      [&](const Problem& p, float* staged) { kernel.launch(product::from(p), staged, launch); },
      kernel.quantizes(problem.out));
}

}  // namespace quantfuse::linear
