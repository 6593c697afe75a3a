// SPDX-License-Identifier: Apache-2.0
//
// The product of a warp: its part of a block's tile, in registers.
//
//   smem --ldmatrix--> mma.sync --> sums of a part of k [--less zero points, times scales--> float32 totals]
#pragma once

#include "cuda/ptx/mma.h"
#include "cuda/ptx/shared_memory.h"
#include "product/mma_math.h"
#include "product/mma_shape.h"

namespace quantfuse::product_mma {
namespace {

template <class Math, class S>
class Multiplier {
 public:
  static constexpr int kMTiles = S::kM / S::kWarpsM / 16, kNTiles = S::kN / S::kWarpsN / 8;
  static_assert(kNTiles % 2 == 0 && kMTiles > 0);

  __device__ Multiplier(const Product& p, const Plan& plan, const TileRows& a, const TileRows& b)
      : p_(p), plan_(plan), a_(a), b_(b) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    m_ = warp % S::kWarpsM * kMTiles * 16;
    n_ = warp / S::kWarpsM % S::kWarpsN * kNTiles * 8;
    k_warp_ = warp / S::kWarpsM / S::kWarpsN;
    clear();
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) row_sums_[i][0] = row_sums_[i][1] = 0;
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) column_sums_[j] = 0;
  }

  // Its tile of the stage at shared address `at`.
  __device__ __forceinline__ void add(int stage, uint32_t at) {
    const int tile = stage * S::kWarpsK + k_warp_;
    if (tile >= plan_.cut.tiles) return;
    const uint32_t codes = at + k_warp_ * S::kTileBytes;
    // Lane l gives row l % 16 of a and unit l / 16 to ldmatrix, row l % 8 (+ 8) of b and unit l / 8 % 2. A
    // step changes the unit by an xor.
    const uint32_t a = codes + (m_ + lane() % 16) * kRowBytes + (lane() / 16 ^ lane() % 8) * kUnitBytes;
    const uint32_t b = codes + (S::kM + n_ + lane() / 16 * 8 + lane() % 8) * kRowBytes +
                       (lane() / 8 % 2 ^ lane() % 8) * kUnitBytes;
    if constexpr (!Math::kPromotes) {
      add_steps<4>(a, b);
    } else if (plan_.cut.parts == 1) {
      clear();
      add_steps<4>(a, b);
      promote(tile, 0, at);
    } else {
      const int part_steps = 4 / plan_.cut.parts;
#pragma unroll 1
      for (int part = 0; part < plan_.cut.parts; ++part) {
        clear();
#pragma unroll 1
        for (int step = part * part_steps; step < (part + 1) * part_steps; ++step)
          add_steps<1>(a ^ step * 32, b ^ step * 32);
        promote(tile, part, at);
      }
    }
  }

  // Sums or totals to [warp along k][token][kN + 4], then those of rows and of columns, [warp along k][kM]
  // and [kN].
  __device__ void store(uint32_t* to) const {
    constexpr int kStride = S::kN + 4;
    uint32_t* tile = to + k_warp_ * S::kM * kStride;
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint32_t* pair = tile + (m_ + i * 16 + h * 8 + lane() / 4) * kStride + n_ + j * 8 + lane() % 4 * 2;
          *reinterpret_cast<uint2*>(pair) = {word(i, j, 2 * h), word(i, j, 2 * h + 1)};
        }
      }
    }
    if constexpr (!Math::kPromotes) {
      uint32_t* rows = to + S::kWarpsK * S::kM * kStride;
      uint32_t* columns = rows + S::kWarpsK * S::kM;
      if (plan_.has_row_sums && n_ == 0) {
#pragma unroll
        for (int i = 0; i < 2 * kMTiles; ++i) {
          const int sum = sum_over_quad(row_sums_[i / 2][i % 2]);
          if (lane() % 4 == 0) rows[k_warp_ * S::kM + m_ + i * 8 + lane() / 4] = static_cast<uint32_t>(sum);
        }
      }
      if (plan_.has_column_sums && m_ == 0) {
#pragma unroll
        for (int j = 0; j < kNTiles; ++j) {
          const int sum = sum_over_quad(column_sums_[j]);
          if (lane() % 4 == 0)
            columns[k_warp_ * S::kN + n_ + j * 8 + lane() / 4] = static_cast<uint32_t>(sum);
        }
      }
    }
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int sum_over_quad(int x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }
  __device__ uint32_t word(int i, int j, int at) const {
    if constexpr (Math::kPromotes) return float_bits(totals_[i][j][at]);
    else return static_cast<uint32_t>(sums_[i][j][at]);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums_[i][j][c] = Math::kInitial;
      }
    }
  }

  template <int kSteps>
  __device__ __forceinline__ void add_steps(uint32_t a_row, uint32_t b_row) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[kMTiles][4];
#pragma unroll
      for (int i = 0; i < kMTiles; ++i) ptx::load_matrices(a[i], (a_row ^ step * 32) + i * 16 * kRowBytes);
      if constexpr (std::is_same_v<typename Math::Sum, int>) {
        if (plan_.has_row_sums) {
#pragma unroll
          for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
              row_sums_[i][h] = add_bytes(a[i][h], add_bytes(a[i][2 + h], row_sums_[i][h]));
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kNTiles; j += 2) {
        uint32_t b[4];
        ptx::load_matrices(b, (b_row ^ step * 32) + j * 8 * kRowBytes);
        if constexpr (std::is_same_v<typename Math::Sum, int>) {
          if (Math::kHasWideZeros && plan_.has_column_sums) {
            column_sums_[j] = add_bytes(b[0], add_bytes(b[1], column_sums_[j]));
            column_sums_[j + 1] = add_bytes(b[2], add_bytes(b[3], column_sums_[j + 1]));
          }
        }
#pragma unroll
        for (int i = 0; i < kMTiles; ++i) {
          Math::multiply(sums_[i][j], a[i], b[0], b[1]);
          Math::multiply(sums_[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
  __device__ static int add_bytes(uint32_t bytes, int sum) {
    return __dp4a(static_cast<int>(bytes), 0x01010101, sum);
  }

  // totals += sums * scales of a part.
  __device__ __forceinline__ void promote(int tile, int part, uint32_t at) {
    const uint32_t first = (part * S::kWarpsK + k_warp_) * S::kRows;  // of scales, and of zero points
    const uint32_t a_at = at + S::kCodeBytes + (first + m_ + lane() / 4) * 4;
    const uint32_t b_index = first + S::kM + n_ + lane() % 4 * 2;
    float a_scales[kMTiles][2];
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        a_scales[i][h] = plan_.has_scales_at_end ? 1.0f : ptx::load_shared_float(a_at + (i * 16 + h * 8) * 4);
    }
    const auto add = [&](const auto& value) {  // value(i, j, c) of the sums
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) {
        float2 b_scales = {1.0f, 1.0f};
        if (!plan_.has_scales_at_end) {
          b_scales = ptx::load_shared_float2(at + S::kCodeBytes + (b_index + j * 8) * 4);
        }
#pragma unroll
        for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const float scale = a_scales[i][c / 2] * (c % 2 ? b_scales.y : b_scales.x);
            totals_[i][j][c] = fmaf(value(i, j, c), scale, totals_[i][j][c]);
          }
        }
      }
    };
    if constexpr (std::is_same_v<typename Math::Sum, int>) {
      if constexpr (Math::kHasWideZeros) return add_less_wide_zeros(tile, part, add);
      if (plan_.has_row_sums) subtract_staged_zeros(at + plan_.zero_offset + b_index * 4);
    }
    add([&](int i, int j, int c) { return Math::to_float(sums_[i][j][c]); });
  }

  // sum a b - zero * sum a, where zero points of b are bytes.
  __device__ __forceinline__ void subtract_staged_zeros(uint32_t zeros) {
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) row_sums_[i][h] = sum_over_quad(row_sums_[i][h]);
    }
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      const int zero[2] = {static_cast<int>(ptx::load_shared4(zeros + j * 32)),
                           static_cast<int>(ptx::load_shared4(zeros + j * 32 + 4))};
#pragma unroll
      for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums_[i][j][c] -= zero[c % 2] * row_sums_[i][c / 2];
      }
    }
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) row_sums_[i][0] = row_sums_[i][1] = 0;
  }

  // Zero points of 32 bits with groups, which scaled_mm allows and nobody needs to be fast.
  template <class Add>
  __device__ __forceinline__ void add_less_wide_zeros(int tile, int part, const Add& add) {
    const int first = plan_.cut.first(tile), columns = plan_.cut.count(tile, first) - part * plan_.cut.part;
    const int count = min(max(columns, 0), plan_.cut.part);
    int a_zeros[kMTiles][2], b_zeros[kNTiles][2], column_sums[kNTiles][2];
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_sums_[i][h] = sum_over_quad(row_sums_[i][h]);
        const int64_t row = a_.row(m_ + i * 16 + h * 8 + lane() / 4);
        a_zeros[i][h] = row < 0 ? 0 : p_.a.zero_at(row, 0);
      }
    }
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      column_sums_[j] = sum_over_quad(column_sums_[j]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int column = lane() % 4 * 2 + h;
        column_sums[j][h] = __shfl_sync(~0u, column_sums_[j], column * 4);
        const int64_t col = b_.row(n_ + j * 8 + column);
        b_zeros[j][h] = col < 0 ? 0 : p_.b.zero_at(col, 0);
      }
    }
    add([&](int i, int j, int c) {
      return static_cast<float>(subtract_zeros(sums_[i][j][c] - Math::kInitial, row_sums_[i][c / 2],
                                               column_sums[j][c % 2], a_zeros[i][c / 2], b_zeros[j][c % 2],
                                               count));
    });
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) row_sums_[i][0] = row_sums_[i][1] = 0;
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) column_sums_[j] = 0;
  }

  const Product& p_;
  const Plan& plan_;
  const TileRows& a_;
  const TileRows& b_;
  int m_, n_, k_warp_;
  typename Math::Sum sums_[kMTiles][kNTiles][4];
  float totals_[kMTiles][kNTiles][4] = {};
  int row_sums_[kMTiles][2], column_sums_[kNTiles];
};

}  // namespace
}  // namespace quantfuse::product_mma
