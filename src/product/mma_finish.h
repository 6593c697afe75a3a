// SPDX-License-Identifier: Apache-2.0
//
// From the sums that the warps of a block left in shared memory to y: eight outputs a thread at a time.
#pragma once

#include "product/mma_math.h"
#include "product/mma_shape.h"
#include "product/unit.h"

namespace quantfuse::product_mma {
namespace {

// What a thread needs to make outputs of the sums in shared memory, as Multiplier::store() left them.
template <class Math, class S>
struct Finish {
  static constexpr int kStride = S::kN + 4;
  const Product& p;
  const Plan& plan;
  const uint32_t* words;

  // Eight sums of a token from column `from` of the tile on, warps along k in their order.
  template <class T>
  __device__ __forceinline__ void load(int token, int from, T (&v)[kUnit]) const {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] = 0;
#pragma unroll
    for (int warp = 0; warp < S::kWarpsK; ++warp) {
      const auto* part = reinterpret_cast<const uint4*>(words + (warp * S::kM + token) * kStride + from);
      const uint4 low = part[0], high = part[1];
      const uint32_t bits[kUnit] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        if constexpr (std::is_same_v<T, float>) v[i] += float_from_bits(bits[i]);
        else v[i] += bits[i];  // unsigned, which wraps
      }
    }
  }
  __device__ int add_sums(const uint32_t* sums, int stride) const {
    uint32_t sum = 0;
    for (int warp = 0; warp < S::kWarpsK; ++warp) sum += sums[warp * stride];
    return static_cast<int>(sum);
  }

  // use(index, sum in 32 or 64 bits) for those of the eight columns of b, `col` and on, that there are.
  template <class Use>
  __device__ __forceinline__ void each_sum(int token, int64_t row, int from, int64_t col, int count,
                                           const Use& use) const {
    uint32_t sums[kUnit];
    load(token, from, sums);
    const bool has_zeros = (plan.has_row_sums || plan.has_column_sums) && plan.cut.k > 0;
    const uint32_t* rows = words + S::kWarpsK * S::kM * kStride;
    const int row_sum = plan.has_row_sums ? add_sums(rows + token, S::kM) : 0;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (i >= count) continue;
      int64_t sum = static_cast<int>(sums[i]);
      if (has_zeros) {
        const uint32_t* columns = rows + S::kWarpsK * S::kM + from + i;
        sum = subtract_zeros(sum, row_sum, plan.has_column_sums ? add_sums(columns, S::kN) : 0,
                             p.a.zero_at(row, 0), p.b.zero_at(col + i, 0), plan.cut.k);
      }
      use(i, sum);
    }
  }

  __device__ __forceinline__ void store_exact(int token, int64_t row, int from, int64_t col,
                                              int count) const {
    int v[kUnit] = {};
    each_sum(token, row, from, col, count, [&](int i, int64_t sum) { v[i] = static_cast<int32_t>(sum); });
    product::store_exact(p, row, col, count, v);
  }

  // Eight numbers, scaled.
  __device__ __forceinline__ void numbers(int token, int64_t row, int from, int64_t col, int count,
                                          float (&v)[kUnit]) const {
    if constexpr (Math::kPromotes) {
      load(token, from, v);
    } else {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) v[i] = 0.0f;
      each_sum(token, row, from, col, count, [&](int i, int64_t sum) {
        v[i] = plan.has_row_sums || plan.has_column_sums ? static_cast<float>(sum)
                                                         : static_cast<float>(static_cast<int>(sum));
      });
    }
    if (!plan.has_scales_at_end || plan.cut.k == 0) return;  // no columns have no scales
    scale_unit(p, row, col, count, v);
  }

  __device__ void run(float* staged, const TileRows& a, const TileRows& b) const {
    const int units = b.half / kUnit;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < S::kM * units; i += S::kThreads) {
      const int token = i / units, from = i % units * kUnit;
      const int64_t row = a.row(token), col = b.first + from;
      if (row < 0) return;
      if (col >= p.n_out) continue;
      const int count = static_cast<int>(min(p.n_out - col, int64_t{kUnit}));
      if constexpr (!Math::kPromotes) {
        if (p.is_exact()) {
          store_exact(token, row, from, col, count);
          continue;
        }
      }
      float v[kUnit], up[kUnit] = {};
      numbers(token, row, from, col, count, v);
      if (p.is_gated()) numbers(token, row, b.half + from, p.n_out + col, count, up);
      linear::finish_unit(p, staged, row, col, v, up);
    }
  }
};

}  // namespace
}  // namespace quantfuse::product_mma
