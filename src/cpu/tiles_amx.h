// SPDX-License-Identifier: Apache-2.0
//
// Tiles of AMX: 16 rows of 64 bytes in a register. A block of sums is 16 or 32 rows of x by a panel of w, 32
// columns:
//
//                    w: tile 6  tile 7     [step][2 halves]: 16 words of 4 k (bytes) or 2 k (BF16) by 16
//   x: tile 4           tile 0  tile 1     columns, as packed panels have them (linear/packed.h)
//      tile 5           tile 2  tile 3
//
// 4 products for 4 loads: a product takes 16 cycles, a load 8, and two are loaded at once. (1 by 4 tiles
// would be 5 loads.)
#pragma once

#include <atomic>

#include "cpu/simd_avx512.h"
#include "cpu/vector_math.h"

namespace quantfuse {

// Vectors of the kernels that use tiles. A type of its own: what is compiled for it must not be linked into
// kernels for CPUs without them.
struct Amx : Avx512 {
  // The first n bytes from memory, the rest zero; nothing beyond them is touched.
  QF_SIMD I load_bytes(const void* p, int64_t n) {
    return _mm512_maskz_loadu_epi8(n >= 64 ? ~0ull : (1ull << (n < 0 ? 0 : n)) - 1, p);
  }
};

inline constexpr int64_t kTileRows = 16, kTileBytes = 1024;
inline constexpr int64_t kBlockRows = 2 * kTileRows, kPanelColumns = 32;

// The shape of the tile registers, for as long as it lives, of the thread that makes it. Released afterwards:
// a thread with tiles in use has 8 KB more to be saved.
class TileRegisters {
 public:
  QF_INLINE TileRegisters() {
    struct alignas(64) Shape {  // Intel's manual, LDTILECFG
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static constexpr Shape kShape;
    _tile_loadconfig(&kShape);
  }
  QF_INLINE ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// What is multiplied: signed bytes of x by unsigned ones of w, or BF16 numbers. kPerStep k at once.
struct ByteTiles {
  using Sum = int32_t;
  static constexpr int64_t kPerStep = 64, kPerWord = 4;
  QF_INLINE static void multiply_upper() {
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
  }
  QF_INLINE static void multiply_lower() {
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
  }
};
struct Bf16Tiles {
  using Sum = float;
  static constexpr int64_t kPerStep = 32, kPerWord = 2;
  QF_INLINE static void multiply_upper() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  QF_INLINE static void multiply_lower() {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
};

// Sums of a block of kRowTiles * 16 rows: in tiles, and in memory as rows of 32.
inline constexpr int64_t kSumsStride = kPanelColumns * 4;

template <int kRowTiles>
QF_INLINE void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kRowTiles == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
}
template <int kRowTiles>
QF_INLINE void load_sums(const void* from) {
  const char* at = static_cast<const char*>(from);
  std::atomic_signal_fence(std::memory_order_seq_cst);  // the compiler does not see what these read
  _tile_loadd(0, at, kSumsStride);
  _tile_loadd(1, at + 64, kSumsStride);
  if constexpr (kRowTiles == 2) {
    _tile_loadd(2, at + kTileRows * kSumsStride, kSumsStride);
    _tile_loadd(3, at + kTileRows * kSumsStride + 64, kSumsStride);
  }
}
template <int kRowTiles>
QF_INLINE void store_sums(void* to) {
  char* at = static_cast<char*>(to);
  _tile_stored(0, at, kSumsStride);
  _tile_stored(1, at + 64, kSumsStride);
  if constexpr (kRowTiles == 2) {
    _tile_stored(2, at + kTileRows * kSumsStride, kSumsStride);
    _tile_stored(3, at + kTileRows * kSumsStride + 64, kSumsStride);
  }
}

// sums += x w, of x as [row tile][step][part][16 rows][64 bytes], row tiles `x_tile` bytes apart: x is the
// sum of kParts parts. w: [step][16][2][16] words. beside(step) is what the CPU's other units do meanwhile.
template <class Tiles, int kRowTiles, int kParts, class Beside>
QF_INLINE void add_products(const char* x, int64_t x_tile, const void* w, int64_t steps,
                            const Beside& beside) {
  constexpr int64_t kWordRow = kPanelColumns * 4, kStep = kTileRows * kWordRow;
  const char* at = static_cast<const char*>(w);
  std::atomic_signal_fence(std::memory_order_seq_cst);  // as above
  for (int64_t step = 0; step < steps; ++step, at += kStep) {
    _tile_loadd(6, at, kWordRow);
    _tile_loadd(7, at + 64, kWordRow);
    unrolled<kParts>([&](auto part) __attribute__((always_inline)) {
      const char* rows = x + part * kTileBytes;
      _tile_loadd(4, rows, 64);
      Tiles::multiply_upper();
      if constexpr (kRowTiles == 2) {
        _tile_loadd(5, rows + x_tile, 64);
        Tiles::multiply_lower();
      }
    });
    x += kParts * kTileBytes;
    beside(step);
  }
}

// The same for a block of `rows` rows, at most 32, into `sums` in memory; or added to what is there.
template <class Tiles, int kParts, class Beside>
QF_INLINE void multiply_block(int64_t rows, const char* x, int64_t x_tile, const void* w, int64_t steps,
                              bool is_added, void* sums, const Beside& beside) {
  const auto multiply = [&](auto row_tiles) __attribute__((always_inline)) {
    constexpr int kRowTiles = row_tiles.value;
    is_added ? load_sums<kRowTiles>(sums) : clear_sums<kRowTiles>();
    add_products<Tiles, kRowTiles, kParts>(x, x_tile, w, steps, beside);
    store_sums<kRowTiles>(sums);
  };
  if (rows > kTileRows) {
    multiply(std::integral_constant<int, 2>{});
  } else {
    multiply(std::integral_constant<int, 1>{});
  }
}

}  // namespace quantfuse
