// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of products of few tokens share (product_stream.h, product_columns.h): which rows of the
// weight a tile has, and how sums become y.
#pragma once

#include "cuda/ptx/matrix.h"
#include "cuda/ptx/shared_memory.h"
#include "product/unit.h"

namespace quantfuse::product {

// Of row `row` of a tile of a gated weight, which has 8 gate rows and their 8 up rows in turn, or of another.
__device__ __forceinline__ int64_t weight_row(const Product& q, int64_t row) {
  if (q.has_gate) row = row / 16 * 8 + row % 8 + (row / 8 % 2 ? q.n_out : 0);
  return min(row, q.n - 1);
}

// What a tile's sums are multiplied with and get added, in shared memory: [row] scale, bias, then [token]
// scale. Loaded early by one warp: at the end there is nothing to hide that behind.
template <int kRows, int kTokens>
struct Factors {
  static constexpr int kBytes = kRows * 8 + kTokens * 4;
  uint32_t at;

  __device__ uint32_t row(int i) const { return at + i * 8; }
  __device__ uint32_t token(int i) const { return at + kRows * 8 + i * 4; }

  // Scales that are not the factors' are 1; `code_scale` is that of all codes.
  __device__ void load(const Product& q, const Vector& bias, bool has_row_scales, bool has_token_scales,
                       float code_scale, int64_t first_row, int64_t first_token, int lane) const {
#pragma unroll 4
    for (int i = lane; i < kRows; i += 32) {
      const int64_t r = weight_row(q, first_row + i);
      ptx::store_shared_float2(row(i), {has_row_scales ? q.b.scale_at(r, 0) * code_scale : code_scale,
                                        bias ? float_at(bias, r) : 0.0f});
    }
#pragma unroll
    for (int i = lane; i < kTokens; i += 32) {
      const int64_t t = min(first_token + i, q.m - 1);
      ptx::store_shared_float(token(i), has_token_scales ? q.a.scale_at(t, 0) : 1.0f);
    }
  }
  template <class Total>
  __device__ __forceinline__ void apply(const Total (&sums)[kUnit], int first_row, int of_token,
                                        float (&v)[kUnit]) const {
    const float token_scale = ptx::load_shared_float(token(of_token));
#pragma unroll
    for (int i = 0; i < kUnit; i += 2) {
      const uint4 two = ptx::load_shared16(row(first_row + i));
      v[i] = fmaf(static_cast<float>(sums[i]), token_scale * __uint_as_float(two.x), __uint_as_float(two.y));
      v[i + 1] =
          fmaf(static_cast<float>(sums[i + 1]), token_scale * __uint_as_float(two.z), __uint_as_float(two.w));
    }
  }
};

// v += the numbers of a part of a sum, in shared memory.
__device__ __forceinline__ void add_bits(const uint4& low, const uint4& high, float (&v)[kUnit]) {
  const uint32_t bits[kUnit] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < kUnit; ++i) v[i] += __uint_as_float(bits[i]);
}
__device__ __forceinline__ void add_bits(const uint4& low, const uint4& high, int (&v)[kUnit]) {
  const uint32_t bits[kUnit] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < kUnit; ++i) v[i] = static_cast<int>(static_cast<uint32_t>(v[i]) + bits[i]);  // wraps
}

// y is 16 bits wide, rows of whole units, and no more is to be done than scales and bias: worth a way of its
// own, because to fetch the instructions of the other takes 0.5 us.
inline bool is_plain(const Product& p, bool is_staged) {
  const Matrix& y = p.out.y;
  const bool has_whole_units =
      p.n % kUnit == 0 && y.row_stride % kUnit == 0 && reinterpret_cast<uintptr_t>(y.data) % 16 == 0;
  return (y.dtype == DType::f16 || y.dtype == DType::bf16) && has_whole_units && !p.has_gate &&
         p.activation == QF_IDENTITY && !p.residual && !p.out.is_quantized() && !is_staged;
}

// The 8 outputs of token `row` from column `col` on. load(second, sums): the sums of the unit, of a gated
// weight first those of gates, then those of ups; their factors are those of the tile's rows from `tile_row`
// on and of its token `tile_token`.
template <class Total, class F, class Load>
__device__ __forceinline__ void finish_sums(const Product& q, bool is_plain, float* staged, const F& factors,
                                            int tile_row, int tile_token, int64_t row, int64_t col,
                                            const Load& load) {
  Total sums[kUnit];
  load(0, sums);
  if constexpr (!std::is_same_v<Total, float>) {
    if (q.is_exact()) {
      store_exact(q, row, col, static_cast<int>(min(q.n_out - col, int64_t{kUnit})), sums);
      return;
    }
  }
  float v[kUnit], up[kUnit] = {};
  factors.apply(sums, tile_row, tile_token, v);
  if (is_plain) {
    const bool is_bf16 = q.out.y.dtype == DType::bf16;
    ptx::store16(q.out.y.row<uint16_t>(row) + col,
                 {ptx::pack_two(v[0], v[1], is_bf16), ptx::pack_two(v[2], v[3], is_bf16),
                  ptx::pack_two(v[4], v[5], is_bf16), ptx::pack_two(v[6], v[7], is_bf16)});
    return;
  }
  if (q.has_gate) {
    load(1, sums);
    factors.apply(sums, tile_row + kUnit, tile_token, up);
  }
  linear::finish_unit(q, staged, row, col, v, up);
}

}  // namespace quantfuse::product
