// SPDX-License-Identifier: Apache-2.0
//
// How the tiles of a product come to shared memory: as rows of 128 bytes, eight units each, unit u of row r at
// place u ^ r % 8, so that eight rows of a column of units lie in different banks.
//
//   kAsync     bytes as they are, by cp.async
//   kWide      loaded to registers, then decoded and stored
//   kCareful   the same code by code, for rows that begin anywhere
//
// The last columns and rows are filled with zeros, whichever way.
#pragma once

#include "cuda/ptx/shared_memory.h"
#include "product/cut.h"
#include "product/mma_units.h"

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

// kRows rows of codes that follow each other along k.
template <class Math, class S, int kRows, int kFirstRow>
struct RowFeed {
  static constexpr int kCodes = Math::kUnitCodes;
  static constexpr int kHeld = (S::kWarpsK * kRows * kRowUnits + S::kThreads - 1) / S::kThreads;  // units
  const Operand& o;
  const TileRows& rows;
  const Cut& cut;

  __device__ __forceinline__ void copy_async(int stage, uint32_t to) const {
    each(stage, [&](int, int64_t row, int k, int count, int at) {
      const int bytes = row < 0 ? 0 : count;
      ptx::copy16_async(to + at, bytes ? codes_of(row) + k : o.codes.data, bytes);
    });
  }
  __device__ __forceinline__ void load(Way way, int stage, uint4* held) const {
    const bool is_4bit = is_packed_4bit(o.format);
    each(stage, [&](int j, int64_t row, int k, int count, int) {
      held[j] = {};
      if (row < 0 || count == 0) return;
      held[j] = way == Way::kWide && count == kCodes
                    ? load_codes(codes_of(row) + (is_4bit ? k / 2 : k), is_4bit ? kCodes / 2 : kCodes)
                    : gather_codes(codes_of(row), k, count, is_4bit);
    });
  }
  __device__ __forceinline__ void store(int stage, uint32_t to, const uint4* held) const {
    each(stage, [&](int j, int64_t row, int k, int count, int at) {
      int zero = 0;
      if (Math::kSubtractsZeros && o.has_zeros() && row >= 0 && count > 0)
        zero = o.zero_at(row, o.group_of(k));
      ptx::store_shared16(to + at, Math::unit(o.format, held[j], zero));
    });
  }

 private:
  __device__ const uint8_t* codes_of(int64_t row) const {
    return static_cast<const uint8_t*>(o.codes.data) + row * o.codes.row_stride;
  }
  // use(index, row or -1, first column, columns that there are, where to)
  template <class Use>
  __device__ __forceinline__ void each(int stage, const Use& use) const {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int i = j * S::kThreads + static_cast<int>(threadIdx.x);
      const int unit = i % kRowUnits, row = i / kRowUnits % kRows, part = i / kRowUnits / kRows;
      const int tile = stage * S::kWarpsK + part;
      if (part >= S::kWarpsK || tile >= cut.tiles) continue;
      const int first = cut.first(tile), k = unit * kCodes;
      const int count = min(max(cut.count(tile, first) - k, 0), kCodes);
      use(j, rows.row(row), first + k, count,
          part * S::kTileBytes + (kFirstRow + row) * kRowBytes + (unit ^ row % 8) * kUnitBytes);
    }
  }
};

// b in order KN: a thread takes four neighbouring columns of n, and of each a unit along k.
template <class Math, class S>
struct ColumnFeed {
  static constexpr int kCodes = Math::kUnitCodes, kUnitsOfQuad = kCodes / 4;
  static constexpr int kTotal = S::kWarpsK * (S::kN / 4) * kRowUnits;
  static constexpr int kQuads = (kTotal + S::kThreads - 1) / S::kThreads;
  static constexpr int kHeld = kQuads * kUnitsOfQuad;
  const Operand& o;
  const TileRows& rows;
  const Cut& cut;

  __device__ __forceinline__ void load(Way way, int stage, uint4* held) const {
    const bool is_4bit = o.format == QF_INT4;
    each(stage, [&](int j, int column, int k, int count, int) {
      const int64_t col = rows.first + column;
      const bool is_wide = way == Way::kWide && col + 4 <= rows.end;
      const auto word = [&](int i) -> uint32_t {
        if (i >= count || col >= rows.end) return 0;
        const auto* row = static_cast<const uint8_t*>(o.codes.data) + (k + i) * o.codes.row_stride;
        if (!is_wide) return gather_columns(row, col, rows.end, is_4bit);
        if (is_4bit) return *reinterpret_cast<const uint16_t*>(row + col / 2);
        return *reinterpret_cast<const uint32_t*>(row + col);
      };
#pragma unroll
      for (int u = 0; u < kUnitsOfQuad; ++u)
        held[j * kUnitsOfQuad + u] = {word(4 * u), word(4 * u + 1), word(4 * u + 2), word(4 * u + 3)};
    });
  }
  __device__ __forceinline__ void store(int stage, uint32_t to, const uint4* held) const {
    const bool is_4bit = o.format == QF_INT4;
    each(stage, [&](int j, int column, int, int, int at) {
      uint32_t units[4][4] = {};  // of each column, words
#pragma unroll
      for (int u = 0; u < kUnitsOfQuad; ++u) {
        const uint4 words = held[j * kUnitsOfQuad + u];
        uint32_t v[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int r = 0; r < 4; ++r) v[r] = is_4bit ? extend_signs(nibbles_to_bytes(v[r]).x) : v[r];
        transpose_bytes(v);
#pragma unroll
        for (int c = 0; c < 4; ++c) units[c][u] = v[c];
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const uint4 codes = {units[c][0], units[c][1], units[c][2], units[c][3]};
        const int row = column + c;
        ptx::store_shared16(to + (at ^ (row % 8) * kUnitBytes) + row * kRowBytes,
                            Math::unit(is_4bit ? QF_INT8 : o.format, codes, 0));
      }
    });
  }

 private:
  // use(index, first column of the four, first of k, how many, where the unit of column 0 would be)
  template <class Use>
  __device__ __forceinline__ void each(int stage, const Use& use) const {
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      const int i = j * S::kThreads + static_cast<int>(threadIdx.x);
      const int column = i % (S::kN / 4) * 4, unit = i / (S::kN / 4) % kRowUnits,
                part = i / (S::kN / 4) / kRowUnits;
      const int tile = stage * S::kWarpsK + part;
      if (part >= S::kWarpsK || tile >= cut.tiles) continue;
      const int first = cut.first(tile), k = unit * kCodes;
      use(j, column, first + k, min(max(cut.count(tile, first) - k, 0), kCodes),
          part * S::kTileBytes + S::kM * kRowBytes + unit * kUnitBytes);
    }
  }
};

// The scales of a stage, [part][warp along k][rows of a, of b], where they change along k, and the zero points
// of b likewise.
template <class S>
struct ScaleFeed {
  // Held between load() and store() where a tile has one part; more of them go straight to shared memory.
  static constexpr int kHeld = (S::kWarpsK * S::kRows + S::kThreads - 1) / S::kThreads;
  struct Held {
    float scales[kHeld];
    int zeros[kHeld];
  };
  const Product& p;
  const Plan& plan;
  const TileRows& a;
  const TileRows& b;

  __device__ __forceinline__ void load(int stage, uint32_t to, Held& held) const {
    if (!is_needed()) return;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) load_item(item(j), stage, held.scales[j], held.zeros[j]);
#pragma unroll 1
    for (int i = item(kHeld); i < plan.cut.parts * S::kWarpsK * S::kRows; i += S::kThreads) {
      float scale;
      int zero;
      load_item(i, stage, scale, zero);
      store_item(i, to, scale, zero);
    }
  }
  __device__ __forceinline__ void store(uint32_t to, const Held& held) const {
    if (!is_needed()) return;
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
      if (item(j) < plan.cut.parts * S::kWarpsK * S::kRows)
        store_item(item(j), to, held.scales[j], held.zeros[j]);
  }

 private:
  __device__ bool is_needed() const { return !plan.has_scales_at_end || plan.stages_zeros(); }
  __device__ static int item(int j) { return j * S::kThreads + static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ void load_item(int i, int stage, float& scale, int& zero) const {
    const int c = i % S::kRows, warp = i / S::kRows % S::kWarpsK, part = i / S::kRows / S::kWarpsK;
    const int tile = stage * S::kWarpsK + warp, k = plan.cut.first(tile) + part * plan.cut.part;
    const bool is_a = c < S::kM;
    const Operand& o = is_a ? p.a : p.b;
    const int64_t row = is_a ? a.row(c) : b.row(c - S::kM);
    scale = 0.0f, zero = 0;
    if (part >= plan.cut.parts || tile >= plan.cut.tiles || row < 0 || k >= p.k) return;
    if (!plan.has_scales_at_end) scale = o.scale_at(row, o.group_of(k));
    if (plan.stages_zeros()) zero = o.zero_at(row, o.group_of(k));
  }
  __device__ __forceinline__ void store_item(int i, uint32_t to, float scale, int zero) const {
    if (!plan.has_scales_at_end) ptx::store_shared_float(to + S::kCodeBytes + i * 4, scale);
    if (plan.stages_zeros()) ptx::store_shared4(to + plan.zero_offset + i * 4, static_cast<uint32_t>(zero));
  }
};

}  // namespace quantfuse::product_mma
