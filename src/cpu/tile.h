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
  QF_INLINE static void store(int32_t* w, typename S::I v) { S::store_i(w, v); }
  QF_INLINE static Sum add(Sum sum, typename S::I w, typename S::I x) { return S::dot4(sum, w, x); }
};

// ---- What is fetched meanwhile ----

struct NothingAhead {
  template <int NP>
  QF_INLINE void fetch(const void*, int64_t) {}
};

// How far ahead codes are fetched that come from memory and are used once: of all panels together. They are
// fetched into L2: panels are powers of two apart, and would crowd each other out of a few places of L1. A
// core of a Zen 4 reads 34 GB/s so. Twice as far ahead there is more on its way than it can hold, and INT4
// times INT8, which waits for nothing else, fell to 26.
inline constexpr int64_t kBytesAhead = 4096;

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

// A run of k in packed panels, and the zero points of its group.
struct PackedRun {
  const uint8_t* codes;
  int64_t panel_bytes;  // from panel to panel
  const float* zeros;   // [2][lanes]
  int64_t panel_zeros;
};

// Up to two steps that a tile has not added yet.
template <class Word>
struct LastSteps {
  const Word* x;
  const Word* w;
  int64_t panel_stride;
  int64_t count;
};

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
  // The products of `steps` steps of k, but for the last few, which finish() adds. Panel q of w is
  // q * panel_stride words behind the first.
  template <class Ahead>
  QF_INLINE LastSteps<typename Dot::Word> add(const typename Dot::Word* x, const typename Dot::Word* w,
                                              int64_t panel_stride, int64_t steps, Ahead ahead) {
    // Two steps at a time, for fewer instructions of the loop itself and fewer fetches: 1 to 3% on an Ice
    // Lake.
    for (; steps > 2; steps -= 2, x += 2 * MT, w += 4 * S::kLanes) {
      ahead.template fetch<NP>(w, panel_stride);
      add_step(x, w, panel_stride);
      add_step(x + MT, w + 2 * S::kLanes, panel_stride);
    }
    return {x, w, panel_stride, steps};
  }
  // The same for codes that are decoded on the way (cpu/panel_codes.h), `words` of a lane's packed words, and
  // stored as the w of further tiles: both take turns with products, where decoding alone waits for its
  // stores.
  template <bool HasZeros, class Decoder, class Ahead>
  QF_INLINE void add_decoding(const Decoder& decoder, const PackedRun& run, int64_t words,
                              const typename Dot::Word* x, typename Dot::Word* w, int64_t panel_stride,
                              Ahead ahead) {
    constexpr int64_t L = S::kLanes;
    for (int64_t word = 0; word < words; ++word) {
      const uint8_t* codes = run.codes + word * 8 * L;
      unrolled<Decoder::kSteps>([&](auto step) __attribute__((always_inline)) {
        if constexpr (step % 2 == 0) ahead.template fetch<NP>(codes, run.panel_bytes);
        decltype(Dot::load(w)) columns[kVectors];
        unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
          const auto packed = S::load_i(codes + v / 2 * run.panel_bytes + v % 2 * 4 * L);
          typename S::F zero = {};
          if constexpr (HasZeros) zero = S::load(run.zeros + v / 2 * run.panel_zeros + v % 2 * L);
          columns[v] = decoder.template step<step.value, HasZeros>(packed, zero);
          Dot::store(w + v / 2 * panel_stride + v % 2 * L, columns[v]);
        });
        add_columns(x, columns);
        x += MT, w += 2 * L;
      });
    }
  }
  // The last steps, and body(sum, row, vector) for every accumulator. Row by row, so that what a body stores
  // is spread over products: a burst of 24 stores of 64 bytes holds up a Zen 4 for 48 cycles.
  template <class Body>
  QF_INLINE void finish(const LastSteps<typename Dot::Word>& last, const Body& body) {
    unrolled<MT>([&](auto m) __attribute__((always_inline)) {
      for (int64_t i = 0; i < last.count; ++i) {
        const auto row = S::set1(last.x[i * MT + m]);
        unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
          const auto* w = last.w + i * 2 * S::kLanes + v / 2 * last.panel_stride + v % 2 * S::kLanes;
          acc[m][v] = Dot::add(acc[m][v], Dot::load(w), row);
        });
      }
      unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
        body(acc[m][v], std::integral_constant<int, m>{}, std::integral_constant<int, v>{});
      });
    });
  }

 private:
  QF_INLINE void add_step(const typename Dot::Word* x, const typename Dot::Word* w, int64_t panel_stride) {
    decltype(Dot::load(w)) columns[kVectors];
    unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
      columns[v] = Dot::load(w + v / 2 * panel_stride + v % 2 * S::kLanes);
    });
    add_columns(x, columns);
  }
  template <class Columns>
  QF_INLINE void add_columns(const typename Dot::Word* x, const Columns& columns) {
    unrolled<MT>([&](auto m) __attribute__((always_inline)) {
      const auto row = S::set1(x[m]);
      unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
        acc[m][v] = Dot::add(acc[m][v], columns[v], row);
      });
    });
  }
};

// Rows are cut into tiles of equal size, but for the last: 7 rows are 4 + 3, not 6 + 1.
QF_INLINE int64_t tile_rows_for(int64_t rows, int64_t most = kMaxTileRows) {
  const int64_t tiles = ceil_div(rows, most);
  return tiles == 0 ? 1 : ceil_div(rows, tiles);
}

// Calls body(std::integral_constant<int, rows>) for 1 <= rows <= kMost.
template <int kMost, class Body>
QF_INLINE void choose_rows(int64_t rows, const Body& body) {
  unrolled<kMost>([&](auto before) __attribute__((always_inline)) {
    if (rows == before + 1) body(std::integral_constant<int, before + 1>{});
  });
}

// Brings words of `count` rows, `stride` apart, into the order of a tile: out [step][count].
template <class S, class Word>
QF_INLINE void interleave_rows(const Word* rows, int64_t stride, int64_t count, int64_t steps, Word* out) {
  static_assert(sizeof(Word) == 4);
  constexpr int64_t L = S::kLanes, kTogether = 8;
  const int64_t whole = steps / L * L;
  // The first 8 rows last: what is stored behind the rows of a step is theirs.
  for (int64_t first = (count - 1) / kTogether * kTogether; first >= 0; first -= kTogether) {
    const int64_t n = count - first < kTogether ? count - first : kTogether;
    for (int64_t step = 0; step < whole; step += L) {
      typename S::I words[kTogether];
      unrolled<kTogether>([&](auto m) __attribute__((always_inline)) {
        words[m] = m < n ? S::load_i(rows + (first + m) * stride + step) : S::zero_i();
      });
      auto* to = reinterpret_cast<int32_t*>(out + step * count + first);
      if ((steps - step - L) * count >= kTogether - n) {
        S::store_interleaved(words, count, to);
      } else {  // what is behind the last words is not ours
        int32_t own[L * kTogether];
        S::store_interleaved(words, kTogether, own);
        for (int64_t i = 0; i < L; ++i)
          __builtin_memcpy(to + i * count, own + i * kTogether, static_cast<size_t>(n) * 4);
      }
    }
  }
  for (int64_t step = whole; step < steps; ++step) {
    for (int64_t m = 0; m < count; ++m) out[step * count + m] = rows[m * stride + step];
  }
}

}  // namespace quantfuse
