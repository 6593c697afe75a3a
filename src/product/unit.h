// SPDX-License-Identifier: Apache-2.0
//
// Eight neighbouring outputs of a token, before the epilogue: those `count` of them that there are.
#pragma once

#include "linear/finish_unit.h"
#include "product/product.h"

namespace quantfuse::product {

using linear::kUnit;

// Scales that are the same for all of k.
__device__ __forceinline__ void scale_unit(const Product& p, int64_t row, int64_t col, int count,
                                           float (&v)[kUnit]) {
  const float a_scale = p.a.scale_at(row, 0);
  const Matrix& scale = p.b.scale;
  if (scale && scale.dtype == DType::f32 && p.b.block.rows == 1 && count == kUnit) {
    const float* b_scales = static_cast<const float*>(scale.data) + col;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] *= a_scale * b_scales[i];
  } else {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (i < count) v[i] *= a_scale * p.b.scale_at(col + i, 0);
    }
  }
}

__device__ __forceinline__ void store_exact(const Product& p, int64_t row, int64_t col, int count,
                                            const int (&v)[kUnit]) {
  auto* to = p.out.y.row<int32_t>(row) + col;
  if (count == kUnit && reinterpret_cast<uint64_t>(to) % 16 == 0) {
    uint32_t words[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) words[i] = static_cast<uint32_t>(v[i]);
    ptx::store16(to, {words[0], words[1], words[2], words[3]});
    ptx::store16(to + 4, {words[4], words[5], words[6], words[7]});
  } else {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (i < count) to[i] = v[i];
    }
  }
}

}  // namespace quantfuse::product
