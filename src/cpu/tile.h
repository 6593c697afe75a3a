// SPDX-License-Identifier: Apache-2.0
//
// Register tiles: a few rows of x against one panel of w (2 vectors of columns), over a run of k.
//
//   x  [k][MT] floats, or [k / 4][MT] words of 4 bytes: one broadcast per row and k, all from one stream
//   w  [k][2][lanes] floats, or [k / 4][2][lanes] words: what cpu/panel_codes.h decodes a packed panel into
//
// MT x 2 accumulators plus the 2 vectors of w fill the register file: 12 rows with 32 registers, 6 with 16.
// Every accumulator is one chain in order of k, so a result does not depend on how many rows are computed
// beside it.
#pragma once

#include <cstdint>

#include "cpu/vector_math.h"

namespace quantfuse {

template <class S>
inline constexpr int kMaxTileRows = S::kRegisters == 32 ? 12 : 6;

template <class S, int MT>
struct FloatTile {
  typename S::F acc[MT][2];

  QF_INLINE void clear() {
    unrolled<MT>([&](auto m) __attribute__((always_inline)) { acc[m][0] = acc[m][1] = S::zero(); });
  }
  QF_INLINE void add(const float* x, const float* w, int64_t k) {
    for (int64_t i = 0; i < k; ++i, x += MT, w += 2 * S::kLanes) {
      const auto w0 = S::load(w), w1 = S::load(w + S::kLanes);
      unrolled<MT>([&](auto m) __attribute__((always_inline)) {
        const auto broadcast = S::set1(x[m]);
        acc[m][0] = S::fma(broadcast, w0, acc[m][0]);
        acc[m][1] = S::fma(broadcast, w1, acc[m][1]);
      });
    }
  }
};

template <class S, int MT>
struct IntTile {
  typename S::Sums acc[MT][2];

  QF_INLINE void clear() {
    unrolled<MT>([&](auto m) __attribute__((always_inline)) { acc[m][0] = acc[m][1] = typename S::Sums{}; });
  }
  // w is unsigned, x signed.
  QF_INLINE void add(const int32_t* x, const uint32_t* w, int64_t words) {
    for (int64_t i = 0; i < words; ++i, x += MT, w += 2 * S::kLanes) {
      const auto w0 = S::load_i(w), w1 = S::load_i(w + S::kLanes);
      unrolled<MT>([&](auto m) __attribute__((always_inline)) {
        const auto broadcast = S::set1(x[m]);
        acc[m][0] = S::dot4(acc[m][0], w0, broadcast);
        acc[m][1] = S::dot4(acc[m][1], w1, broadcast);
      });
    }
  }
};

// Rows are cut into tiles of equal size, but for the last: 13 rows are 7 + 6, not 12 + 1.
template <class S>
QF_INLINE int64_t tile_rows_for(int64_t rows) {
  const int64_t tiles = ceil_div(rows, kMaxTileRows<S>);
  return tiles == 0 ? 1 : ceil_div(rows, tiles);
}

// Calls body(std::integral_constant<int, rows>) for 1 <= rows <= kMaxTileRows<S>.
template <class S, class Body>
QF_INLINE void choose_tile_rows(int64_t rows, const Body& body) {
  switch (rows) {
    case 1: return body(std::integral_constant<int, 1>{});
    case 2: return body(std::integral_constant<int, 2>{});
    case 3: return body(std::integral_constant<int, 3>{});
    case 4: return body(std::integral_constant<int, 4>{});
    case 5: return body(std::integral_constant<int, 5>{});
    case 6: return body(std::integral_constant<int, 6>{});
  }
  if constexpr (kMaxTileRows<S> == 12) {
    switch (rows) {
      case 7: return body(std::integral_constant<int, 7>{});
      case 8: return body(std::integral_constant<int, 8>{});
      case 9: return body(std::integral_constant<int, 9>{});
      case 10: return body(std::integral_constant<int, 10>{});
      case 11: return body(std::integral_constant<int, 11>{});
      case 12: return body(std::integral_constant<int, 12>{});
    }
  }
}

}  // namespace quantfuse
