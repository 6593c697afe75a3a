// SPDX-License-Identifier: Apache-2.0
//
// Register tiles: a few rows of x against the columns of one panel of w or two (2 vectors each), over a run
// of k.
//
//   x  [step][MT] words: one broadcast per row and step, all from one stream
//   w  [step][2][lanes] words per panel: what cpu/panel_codes.h decodes a packed panel into
//
// A step is one k of floats, or 4 of bytes: a Dot says which. The accumulators and the vectors of w fill the
// register file: 6 rows by 4 vectors with 32 registers, by 2 with 16. (12 rows by 2 vectors have 14 loads for
// 24 products where these have 10, and are 8% slower on an Ice Lake.)
//
// Every accumulator is one chain in order of k, so a result does not depend on how many rows are computed
// beside it.
#pragma once

#include <cstdint>

#include "cpu/vector_math.h"

namespace quantfuse {

inline constexpr int kMaxTileRows = 6;
template <class S>
inline constexpr int kMaxTilePanels = S::kRegisters == 32 ? 2 : 1;

// ---- What a step multiplies ----

template <class Simd>
struct FloatDot {
  using S = Simd;
  using Word = float;  // of x and of w
  using Sum = typename S::F;
  static constexpr int kPerWord = 1;

  QF_INLINE static typename S::F load(const float* w) { return S::load(w); }
  QF_INLINE static void store(float* w, typename S::F v) { S::store(w, v); }
  QF_INLINE static Sum add(Sum sum, typename S::F w, typename S::F x) { return S::fma(x, w, sum); }
};

// Bytes, w unsigned and x signed.
template <class Simd>
struct ByteDot {
  using S = Simd;
  using Word = int32_t;
  using Sum = typename S::Sums;
  static constexpr int kPerWord = 4;

  QF_INLINE static typename S::I load(const int32_t* w) { return S::load_i(w); }
  QF_INLINE static Sum add(Sum sum, typename S::I w, typename S::I x) { return S::dot4(sum, w, x); }
};

// ---- What is fetched meanwhile ----

struct NothingAhead {
  template <int NP>
  QF_INLINE void fetch(const void*, int64_t) {}
};

// How far ahead codes are fetched that come from memory and are used once: of all panels together. They are
// fetched into L2: panels are powers of two apart, and would crowd each other out of a few places of L1.
inline constexpr int64_t kBytesAhead = 8192;

// A share of what the tiles will read after all of them have been through this w: they use it so often that
// the hardware has long stopped to look ahead when the next run of codes is wanted. A little at every step,
// because a burst of misses would hold up the loads of x.
struct ShareAhead {
  const uint8_t* at;
  int64_t panel_stride;  // bytes
  int64_t step;          // bytes of a panel per two steps of k

  template <int NP>
  QF_INLINE void fetch(const void*, int64_t) {
    unrolled<NP>([&](auto q)
                     __attribute__((always_inline)) { __builtin_prefetch(at + q * panel_stride, 0, 2); });
    at += step;
  }
};

// The same for a matrix as it lies, of which the tiles have a packed part: the part behind it, kRows rows of
// `row_bytes`, a line of every row and then the next.
template <int64_t kRows>
struct RowsAhead {
  const char* rows;
  int64_t row_bytes;
  int64_t line, last;  // of all rows together

  template <int NP>
  QF_INLINE void fetch(const void*, int64_t) {
    if (line < last) __builtin_prefetch(rows + line % kRows * row_bytes + line / kRows * 64, 0, 2);
    ++line;
  }
};

// ---- The tile ----

template <class Dot, int MT, int NP>
struct Tile {
  using S = typename Dot::S;
  static constexpr int kVectors = 2 * NP;
  typename Dot::Sum acc[MT][kVectors];

  // Calls body(sum, row, vector) for every accumulator; row and vector are constants.
  template <class Body>
  QF_INLINE void each(const Body& body) {
    unrolled<MT * kVectors>([&](auto i) __attribute__((always_inline)) {
      constexpr int m = i / kVectors, v = i % kVectors;
      body(acc[m][v], std::integral_constant<int, m>{}, std::integral_constant<int, v>{});
    });
  }
  QF_INLINE void clear() {
    each([](auto& sum, auto, auto) __attribute__((always_inline)) { sum = typename Dot::Sum{}; });
  }
  // Panel q of w is q * panel_stride words behind the first.
  template <class Ahead>
  QF_INLINE void add(const typename Dot::Word* x, const typename Dot::Word* w, int64_t panel_stride,
                     int64_t steps, Ahead ahead) {
    // Two steps at a time, for fewer instructions of the loop itself and fewer fetches: 1 to 3% on an Ice
    // Lake.
    int64_t i = 0;
    for (; i + 2 <= steps; i += 2, x += 2 * MT, w += 4 * S::kLanes) {
      ahead.template fetch<NP>(w, panel_stride);
      add_step(x, w, panel_stride);
      add_step(x + MT, w + 2 * S::kLanes, panel_stride);
    }
    if (i < steps) add_step(x, w, panel_stride);
  }

 private:
  QF_INLINE void add_step(const typename Dot::Word* x, const typename Dot::Word* w, int64_t panel_stride) {
    decltype(Dot::load(w)) columns[kVectors];
    unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
      columns[v] = Dot::load(w + v / 2 * panel_stride + v % 2 * S::kLanes);
    });
    unrolled<MT>([&](auto m) __attribute__((always_inline)) {
      const auto row = S::set1(x[m]);
      unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
        acc[m][v] = Dot::add(acc[m][v], columns[v], row);
      });
    });
  }
};

// Rows are cut into tiles of equal size, but for the last: 7 rows are 4 + 3, not 6 + 1.
QF_INLINE int64_t tile_rows_for(int64_t rows) {
  const int64_t tiles = ceil_div(rows, kMaxTileRows);
  return tiles == 0 ? 1 : ceil_div(rows, tiles);
}

// Calls body(std::integral_constant<int, rows>) for 1 <= rows <= kMaxTileRows.
template <class Body>
QF_INLINE void choose_tile_rows(int64_t rows, const Body& body) {
  switch (rows) {
    case 1: return body(std::integral_constant<int, 1>{});
    case 2: return body(std::integral_constant<int, 2>{});
    case 3: return body(std::integral_constant<int, 3>{});
    case 4: return body(std::integral_constant<int, 4>{});
    case 5: return body(std::integral_constant<int, 5>{});
    case 6: return body(std::integral_constant<int, 6>{});
  }
}

// Brings words of `count` rows, `stride` apart, into the order of a tile: out [step][count].
template <class Word>
QF_INLINE void interleave_rows(const Word* rows, int64_t stride, int64_t count, int64_t steps, Word* out) {
  choose_tile_rows(
      count, [&](auto mt) __attribute__((always_inline)) {
        for (int64_t step = 0; step < steps; ++step, out += mt.value) {
          unrolled<mt.value>([&](auto m)
                                 __attribute__((always_inline)) { out[m] = rows[m * stride + step]; });
        }
      });
}

}  // namespace quantfuse
