// SPDX-License-Identifier: Apache-2.0
//
// How a product is divided: the tile of a block, its rows in shared memory, and what the host decides.
#pragma once

#include "product/cut.h"

namespace quantfuse::product_mma {
using namespace product;

constexpr int kRowBytes = 128, kRowUnits = 8, kUnitBytes = 16;

// A block's tile: so many tokens and rows of b, divided among warps, some of which take other columns.
template <int kM_, int kN_, int kWarpsM_, int kWarpsN_, int kWarpsK_, int kBlocksPerSm_>
struct Shape {
  static constexpr int kM = kM_, kN = kN_, kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kWarpsK = kWarpsK_;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN * kWarpsK, kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kRows = kM + kN;                    // of shared memory, first those of a
  static constexpr int kTileBytes = kRows * kRowBytes;     // of one of the warps along k
  static constexpr int kCodeBytes = kWarpsK * kTileBytes;  // of a stage
};

enum class Way : uint8_t { kAsync, kWide, kCareful };

struct Plan {
  Cut cut;
  unsigned m_tiles, n_tiles;
  Way a_way, b_way;
  bool has_scales_at_end;  // one scale for a whole row of either operand
  bool has_row_sums;       // of a, which zero points of b are multiplied with
  bool has_column_sums;    // of b, likewise
  bool has_wide_zeros;     // zero points of 32 bits
  int stages, stage_bytes, zero_offset, smem_bytes;

  QF_HD bool stages_zeros() const { return has_row_sums && !has_wide_zeros; }
};

// The rows of an operand that a tile has. Of a gated one the second half are those of the up projection.
struct TileRows {
  int64_t first, end;  // rows from `end` on are not there
  int half;
  int64_t gap;
  __device__ int64_t row(int i) const {  // or -1
    const int64_t row = first + (i < half ? i : i - half);
    return row < end ? row + (i < half ? 0 : gap) : -1;
  }
};
template <class S>
__device__ TileRows rows_of_a(const Product& p, unsigned m_tile) {
  return {static_cast<int64_t>(m_tile) * S::kM, p.m, S::kM, 0};
}
template <class S>
__device__ TileRows rows_of_b(const Product& p, unsigned n_tile) {
  const int out = p.is_gated() ? S::kN / 2 : S::kN;
  return {static_cast<int64_t>(n_tile) * out, p.n_out, out, p.n_out};
}

}  // namespace quantfuse::product_mma
