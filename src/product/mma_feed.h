// SPDX-License-Identifier: Apache-2.0
//
// How the tiles of a product come to shared memory: as rows of 128 bytes, eight units each, unit u of row r
// at place u ^ r % 8, so that eight rows of a column of units lie in different banks.
//
//   kAsync     bytes as they are, by cp.async
//   kWide      loaded to registers, then decoded and stored
//   kCareful   the same code by code, for rows that begin anywhere
//
// Behind the last column come zeros, whichever way.
#pragma once

#include "cuda/ptx/shared_memory.h"
#include "product/mma_shape.h"
#include "product/mma_units.h"

namespace quantfuse::product_mma {
namespace {

// kRows rows of codes that follow each other along k. Rows that are not there are the tile's first: their
// sums are not used.
template <class Math, class S, int kRows, int kFirstRow>
class RowFeed {
 public:
  static constexpr int kCodes = Math::kUnitCodes;
  static constexpr int kPass = S::kThreads / kRowUnits;  // rows that all threads take at once
  static constexpr int kPasses = kRows / kPass;          // of a tile
  static constexpr int kHeld = S::kWarpsK * kPasses;     // units of a thread
  static_assert(kRows % kPass == 0 && kPass % kRowUnits == 0);

  __device__ RowFeed(const Operand& o, const TileRows& rows, const Cut& cut)
      : o_(o), rows_(rows), cut_(cut), unit_(static_cast<int>(threadIdx.x) % kRowUnits) {
    const int row = static_cast<int>(threadIdx.x) / kRowUnits;
    at_ = (kFirstRow + row) * kRowBytes + (unit_ ^ row % 8) * kUnitBytes;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) codes_[pass] = codes_of(pass);
  }

  __device__ __forceinline__ void copy_async(int stage, uint32_t to) const {
    if (is_whole(stage)) {
      const int k = stage * S::kWarpsK * Math::kTileColumns + unit_ * kCodes;
#pragma unroll
      for (int j = 0; j < kHeld; ++j)
        ptx::copy16_async(to + at(j), codes_[j % kPasses] + k + j / kPasses * Math::kTileColumns, 16);
    } else {
      each(stage, [&](int j, const uint8_t* codes, int k, int count) {
        ptx::copy16_async(to + at(j), count ? codes + k : o_.codes.data, count);
      });
    }
  }
  template <int kSize>
  __device__ __forceinline__ void load(Way way, int stage, uint4 (&held)[kSize]) const {
    if (way != Way::kWide || !is_whole(stage)) return;
    const int k = stage * S::kWarpsK * Math::kTileColumns + unit_ * kCodes;
    if (is_packed_4bit(o_.format)) {
#pragma unroll
      for (int j = 0; j < kHeld; ++j)
        held[j] = load_codes<kCodes / 2>(codes_[j % kPasses] + (k + j / kPasses * Math::kTileColumns) / 2);
    } else {
#pragma unroll
      for (int j = 0; j < kHeld; ++j)
        held[j] = load_codes<kCodes>(codes_[j % kPasses] + k + j / kPasses * Math::kTileColumns);
    }
  }
  template <int kSize>
  __device__ __forceinline__ void store(Way way, int stage, uint32_t to, const uint4 (&held)[kSize]) const {
    const bool has_zeros = Math::kSubtractsZeros && o_.has_zeros();
    if (way != Way::kWide || !is_whole(stage)) {
      each(stage, [&](int j, const uint8_t* codes, int k, int count) {
        const uint4 unit = gather_codes(codes, k, count, is_packed_4bit(o_.format));
        const int zero = has_zeros && count > 0 ? o_.zero_at(row_of(j % kPasses), o_.group_of(k)) : 0;
        ptx::store_shared16(to + at(j), Math::unit(o_.format, unit, zero));
      });
      return;
    }
    const int k = stage * S::kWarpsK * Math::kTileColumns + unit_ * kCodes;
    Math::with_format(o_.format, [&](auto format) {
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        int zero = 0;
        if constexpr (Math::kSubtractsZeros && is_integer(format.value)) {
          if (has_zeros) {
            const int64_t group = o_.group_of(k + j / kPasses * Math::kTileColumns);
            zero = o_.zero_at(row_of(j % kPasses), group);
          }
        }
        ptx::store_shared16(to + at(j), Math::unit(format.value, held[j], zero));
      }
    });
  }

 private:
  __device__ int64_t row_of(int pass) const {
    const int64_t row = rows_.row(static_cast<int>(threadIdx.x) / kRowUnits + pass * kPass);
    return row < 0 ? rows_.first : row;
  }
  __device__ const uint8_t* codes_of(int pass) const {
    return static_cast<const uint8_t*>(o_.codes.data) + row_of(pass) * o_.codes.row_stride;
  }
  // Where unit j goes: the passes of the first warp along k, then those of the next.
  __device__ uint32_t at(int j) const {
    return at_ + j / kPasses * S::kTileBytes + j % kPasses * kPass * kRowBytes;
  }
  // All tiles of a stage are there, and all their columns.
  __device__ bool is_whole(int stage) const {
    return !cut_.unit && (stage + 1) * (S::kWarpsK * Math::kTileColumns) <= cut_.k;
  }
  // use(j, codes of the row, first column, columns that there are), for stages that are not whole and rows
  // that begin anywhere.
  template <class Use>
  __device__ __forceinline__ void each(int stage, const Use& use) const {
#pragma unroll 1
    for (int j = 0; j < kHeld; ++j) {
      const int tile = stage * S::kWarpsK + j / kPasses, first = cut_.first(tile), k = unit_ * kCodes;
      const int count = tile < cut_.tiles ? cut_.count(tile, first) - k : 0;
      use(j, codes_of(j % kPasses), first + k, min(max(count, 0), kCodes));
    }
  }

  const Operand& o_;
  const TileRows& rows_;
  const Cut& cut_;
  int unit_;
  uint32_t at_;
  const uint8_t* codes_[kPasses];
};

// b in order KN: a thread takes four neighbouring columns of n, and of each a unit along k.
template <class Math, class S>
class ColumnFeed {
 public:
  static constexpr int kCodes = Math::kUnitCodes, kUnitsOfQuad = kCodes / 4;
  static constexpr int kTotal = S::kWarpsK * (S::kN / 4) * kRowUnits;
  static constexpr int kQuads = (kTotal + S::kThreads - 1) / S::kThreads;
  static constexpr int kHeld = kQuads * kUnitsOfQuad;

  __device__ ColumnFeed(const Operand& o, const TileRows& rows, const Cut& cut)
      : o_(o), rows_(rows), cut_(cut) {}

  template <int kSize>
  __device__ __forceinline__ void load(Way way, int stage, uint4 (&held)[kSize]) const {
    const bool is_4bit = o_.format == QF_INT4;
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      const Quad quad = quad_at(j, stage);
      if (!is_held(way, quad)) continue;
      const uint8_t* from = static_cast<const uint8_t*>(o_.codes.data) + quad.k * o_.codes.row_stride +
                            (is_4bit ? (rows_.first + quad.column) / 2 : rows_.first + quad.column);
      const auto word = [&](int i) -> uint32_t {
        const uint8_t* at = from + i * o_.codes.row_stride;
        return is_4bit ? *reinterpret_cast<const uint16_t*>(at) : *reinterpret_cast<const uint32_t*>(at);
      };
#pragma unroll
      for (int u = 0; u < kUnitsOfQuad; ++u)
        held[j * kUnitsOfQuad + u] = {word(4 * u), word(4 * u + 1), word(4 * u + 2), word(4 * u + 3)};
    }
  }
  template <int kSize>
  __device__ __forceinline__ void store(Way way, int stage, uint32_t to, const uint4 (&held)[kSize]) const {
    const bool is_4bit = o_.format == QF_INT4;
    const qf_format format = is_4bit ? QF_INT8 : o_.format;
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      const Quad quad = quad_at(j, stage);
      if (quad.part >= S::kWarpsK) continue;
      if (!is_held(way, quad)) {
#pragma unroll 1
        for (int c = 0; c < 4; ++c) {
          const uint4 codes = gather_column(o_, quad.k, quad.count, rows_.first + quad.column + c, rows_.end);
          ptx::store_shared16(to + at(quad, c), Math::unit(format, codes, 0));
        }
        continue;
      }
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
        ptx::store_shared16(to + at(quad, c), Math::unit(format, codes, 0));
      }
    }
  }

 private:
  struct Quad {
    int column, unit, part;  // of the tile, of the row, the warp along k
    int k, count;            // first column along k, and those that there are
  };
  __device__ __forceinline__ Quad quad_at(int j, int stage) const {
    const int i = j * S::kThreads + static_cast<int>(threadIdx.x);
    Quad quad = {i % (S::kN / 4) * 4, i / (S::kN / 4) % kRowUnits, i / (S::kN / 4) / kRowUnits, 0, 0};
    const int tile = stage * S::kWarpsK + quad.part, first = cut_.first(tile);
    quad.k = first + quad.unit * kCodes;
    if (tile < cut_.tiles) quad.count = min(max(cut_.count(tile, first) - quad.unit * kCodes, 0), kCodes);
    return quad;
  }
  // Loaded early, by words.
  __device__ bool is_held(Way way, const Quad& quad) const {
    return way == Way::kWide && quad.count == kCodes && rows_.first + quad.column + 4 <= rows_.end &&
           quad.part < S::kWarpsK;
  }
  // Where the unit of column c of the four goes.
  __device__ static uint32_t at(const Quad& quad, int c) {
    const int row = quad.column + c;
    return quad.part * S::kTileBytes + (S::kM + row) * kRowBytes + (quad.unit ^ row % 8) * kUnitBytes;
  }

  const Operand& o_;
  const TileRows& rows_;
  const Cut& cut_;
};

// The scales of a stage, [part][warp along k][rows of a, of b], where they change along k, and the zero
// points of b likewise.
template <class S>
class ScaleFeed {
 public:
  // Held between load() and store() where a tile has one part; more of them go straight to shared memory.
  static constexpr int kHeld = (S::kWarpsK * S::kRows + S::kThreads - 1) / S::kThreads;
  struct Held {
    float scales[kHeld];
    int zeros[kHeld];
  };

  __device__ ScaleFeed(const Product& p, const Plan& plan, const TileRows& a, const TileRows& b)
      : p_(p),
        plan_(plan),
        a_(a),
        b_(b),
        items_(plan.has_scales_at_end && !plan.stages_zeros() ? 0 : plan.cut.parts * S::kWarpsK * S::kRows) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) index_[j] = index_of(item(j));
  }

  __device__ __forceinline__ void load(int stage, uint32_t to, Held& held) const {
    if (!items_) return;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) load_item(item(j), index_[j], stage, held.scales[j], held.zeros[j]);
#pragma unroll 1
    for (int i = item(kHeld); i < items_; i += S::kThreads) {
      float scale;
      int zero;
      load_item(i, index_of(i), stage, scale, zero);
      store_item(i, to, scale, zero);
    }
  }
  __device__ __forceinline__ void store(uint32_t to, const Held& held) const {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if (item(j) < items_) store_item(item(j), to, held.scales[j], held.zeros[j]);
    }
  }

 private:
  __device__ static int item(int j) { return j * S::kThreads + static_cast<int>(threadIdx.x); }
  __device__ static bool is_a(int i) { return i % S::kRows < S::kM; }
  // Of the scale of the item's row in group 0; or -1.
  __device__ int64_t index_of(int i) const {
    const int64_t row = is_a(i) ? a_.row(i % S::kRows) : b_.row(i % S::kRows - S::kM);
    if (row < 0) return -1;
    return is_a(i) ? p_.a.scale_index(row, 0) : p_.b.scale_index(row, 0);
  }
  __device__ __forceinline__ void load_item(int i, int64_t index, int stage, float& scale, int& zero) const {
    const int warp = i / S::kRows % S::kWarpsK, part = i / S::kRows / S::kWarpsK;
    const int k = plan_.cut.first(stage * S::kWarpsK + warp) + part * plan_.cut.part;
    scale = 0.0f, zero = 0;
    if (part >= plan_.cut.parts || index < 0 || k >= plan_.cut.k) return;
    if (is_a(i)) {
      if (!plan_.has_scales_at_end) scale = p_.a.scale_value(index + p_.a.group_of(k));
    } else {
      if (!plan_.has_scales_at_end) scale = p_.b.scale_value(index + p_.b.group_of(k));
      if (plan_.stages_zeros()) zero = p_.b.zero_value(index + p_.b.group_of(k));
    }
  }
  __device__ __forceinline__ void store_item(int i, uint32_t to, float scale, int zero) const {
    if (!plan_.has_scales_at_end) ptx::store_shared_float(to + S::kCodeBytes + i * 4, scale);
    if (plan_.stages_zeros()) ptx::store_shared4(to + plan_.zero_offset + i * 4, static_cast<uint32_t>(zero));
  }

  const Product& p_;
  const Plan& plan_;
  const TileRows& a_;
  const TileRows& b_;
  int items_;
  int64_t index_[kHeld];
};

// All of a stage. kIsAsync: codes of both operands come by cp.async, and nothing is held for them.
template <class Math, class S, bool kIsAsync>
class Feed {
 public:
  __device__ Feed(const Product& p, const Plan& plan, const TileRows& a, const TileRows& b)
      : plan_(plan),
        is_nk_(p.b_order == QF_NK),
        a_(p.a, a, plan.cut),
        b_(p.b, b, plan.cut),
        b_columns_(p.b, b, plan.cut),
        scales_(p, plan, a, b) {}

  // To a free place of the ring. What is held is there after store().
  __device__ __forceinline__ void fetch(int stage, uint32_t to) {
    if constexpr (Math::kPromotes) scales_.load(stage, to, held_scales_);
    if constexpr (kIsAsync) {
      a_.copy_async(stage, to);
      b_.copy_async(stage, to);
    } else {
      if (is_nk_) {
        if (Math::kHasAsyncCopies && plan_.b_way == Way::kAsync) b_.copy_async(stage, to);
        else b_.load(plan_.b_way, stage, held_b_);
      } else {
        b_columns_.load(plan_.b_way, stage, held_b_);
      }
      if (Math::kHasAsyncCopies && plan_.a_way == Way::kAsync) {
        a_.copy_async(stage, to);
      } else {
        a_.load(plan_.a_way, stage, held_a_);
        if (!kHoldsA) a_.store(plan_.a_way, stage, to, held_a_);
      }
    }
  }
  __device__ __forceinline__ void store(int stage, uint32_t to) {
    if constexpr (Math::kPromotes) scales_.store(to, held_scales_);
    if constexpr (!kIsAsync) {
      if (kHoldsA && !(Math::kHasAsyncCopies && plan_.a_way == Way::kAsync))
        a_.store(plan_.a_way, stage, to, held_a_);
      if (!is_nk_) b_columns_.store(plan_.b_way, stage, to, held_b_);
      else if (!(Math::kHasAsyncCopies && plan_.b_way == Way::kAsync))
        b_.store(plan_.b_way, stage, to, held_b_);
    }
  }

 private:
  // Where a mostly comes by cp.async, and totals stand beside the sums, registers for it are not worth it.
  static constexpr bool kHoldsA = !(Math::kHasAsyncCopies && Math::kPromotes);
  const Plan& plan_;
  bool is_nk_;
  RowFeed<Math, S, S::kM, 0> a_;
  RowFeed<Math, S, S::kN, S::kM> b_;
  ColumnFeed<Math, S> b_columns_;
  ScaleFeed<S> scales_;
  uint4 held_a_[RowFeed<Math, S, S::kM, 0>::kHeld];
  uint4 held_b_[std::max(RowFeed<Math, S, S::kN, S::kM>::kHeld, ColumnFeed<Math, S>::kHeld)];
  typename ScaleFeed<S>::Held held_scales_;
};

}  // namespace
}  // namespace quantfuse::product_mma
