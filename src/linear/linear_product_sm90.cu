// SPDX-License-Identifier: Apache-2.0
//
// y = epilogue( x_q w^T ) with quantized activations for many tokens, by product/product_wgmma.h.
//
//   [x --quantize_rows--> codes]  -->  product, epilogue  -->  y   [--quantize_rows--> codes of y]
//
// The last step is for codes of y with a scale that more than 128 columns share.
#include "cuda/tensor_map.h"
#include "product/kernels.h"

namespace quantfuse::linear_product_sm90 {
using linear::Problem;
namespace {

// As it will be once x has been quantized.
product::Product quantized(const Problem& p) {
  product::Product product = product::from(p);
  const int64_t groups = ceil_div(p.k, product.a.block.cols);
  if (!p.x_scale) product.a.scale = {nullptr, p.m, groups, groups, DType::f32};
  return product;
}

Verdict accepts(const Problem& p) {
  Requirements requirements = product::accepts_linear(p);
  if (Verdict(requirements).reason) return requirements;
  const bool has_codes = static_cast<bool>(p.x_scale), finishes_y = product_wgmma_sm90::quantizes(p.out);
  return product_wgmma_sm90::accepts(quantized(p))
      .require(!has_codes || has_boxes(p.x), "rows of x do not begin at multiples of 16 bytes")
      .require(!p.out.is_quantized() || !p.out.is_static || finishes_y,
               "y's codes are E5M2, or do not begin at multiples of 16 bytes");
}

size_t workspace_bytes(const Problem& p) {
  return static_cast<size_t>(linear::plan_canonical(p, product_wgmma_sm90::quantizes(p.out)).total_bytes);
}

void launch(const Problem& problem, const Launch& launch) {
  linear::launch_canonical(
      problem, launch,
      [&](const Problem& p, float* staged) { product_wgmma_sm90::launch(product::from(p), staged, launch); },
      product_wgmma_sm90::quantizes(problem.out));
}

}  // namespace

extern const Kernel<Problem> entry = {"linear_product_sm90", Target::sm90, accepts, workspace_bytes, launch};

}  // namespace quantfuse::linear_product_sm90
