// SPDX-License-Identifier: Apache-2.0
//
// The packed weight of the CUDA kernels: one layout for every architecture, every m and both 16-bit types.
//
// A strip is 16 rows of w (a gated weight: 8 gate rows, then the 8 up rows that belong to them), a tile a
// strip's 128 columns. Tiles lie one after the other along k, strips one after the other, so that any run of
// a strip's tiles is one copy:
//
//   strip 0: | tile 0 | tile 1 | ... |   strip 1: | tile 0 | ...
//   tile:    | codes 1024 or 2048 bytes | scales [groups][16 rows] f32 | zeros [groups][16 rows] i8, or
//              offsets [groups][16 rows] f32 |
//
// Codes are in the order in which the lanes of a warp feed them to the tensor cores as the 16 x k operand:
// lane 4 g + q has rows g and g + 8, and of each 16 columns (a step) 2 q, 2 q + 1, 2 q + 8, 2 q + 9.
//
//   4 bits   [2][lane 0..31][4 words]: word j of half h is step 4 h + j. Nibbles, the lowest first:
//              g: 2q   g+8: 2q   g: 2q+8   g+8: 2q+8   g: 2q+1   g+8: 2q+1   g: 2q+9   g+8: 2q+9
//            so that (word >> 4 i) & 0x000f000f is register i of mma.m16n8k16, and word & 0x0f0f0f0f four
//            columns of row g in bytes, word >> 4 & 0x0f0f0f0f those of row g + 8. INT4 is stored as
//            code + 8. E2M1 has its bits in another order: mxfp4_strips.h. Codes of codebooks have the order
//            g: 2q 2q+1   g+8: 2q 2q+1   g: 2q+8 2q+9   g+8: 2q+8 2q+9, one register after the other.
//   8 bits   [4][lane 0..31][2 steps][row g, row g + 8]: a word has columns 2q, 2q + 8, 2q + 1, 2q + 9.
//
// Zero points that are integers are zeros, and the codes less them are exact in 16 bits. Others, and offsets,
// are offsets: w = q scale + offset. No 16-bit number holds such a w, so that kernels multiply the codes, and
// add the offset times the sum of the group's x, in float32 (linear_sums_first_sm75 has who makes the sums).
//
// A weight with g_idx (act-order) has its columns sorted by group, and behind the strips the column of w, and
// so of x, that each of them is: [k] i32, and some zeros up to 8 bytes behind a multiple of 16, which tell
// that it is there: strips are multiples of 16 bytes. linear_gather_first_sm75 brings x into that order.
//
// Scales are float32, those of MXFP4 bytes (mxfp4_strips.h). A tile has 1, 2, 4 or 8 groups, the fewest that
// the weight's groups are made of, and repeats a scale where these are larger: 256 columns have one group in
// every tile, 96 have three of 32 columns. Rows beyond the matrix, and groups of columns, have scale 0. Codes
// of columns beyond it are of value 0, or of a codebook code 0, which is another number: kernels have zeros
// in their x.
//
// Nothing in the bytes says what they are: they are in the device's memory, where a call must not look. What
// a call knows is format, n, k, block, is_gated, and the size, which tells whether there are zeros or
// offsets, sorted columns and scales of a byte.
#pragma once

#include "linear/weight.h"

namespace quantfuse::linear {

struct StripLayout {
  static constexpr int kRows = 16, kCols = 128, kStepCols = 16;
  int64_t n, k;
  int64_t strips, tiles;  // of the weight; of a strip
  qf_format format;
  int32_t groups;      // of a tile: 1, 2, 4 or 8
  int32_t code_bytes;  // of a tile
  int32_t tile_bytes;
  bool has_zeros, has_offsets, has_k_map, is_gated;

  QF_HD int64_t strip_bytes() const { return strips * tiles * tile_bytes; }
  QF_HD int64_t k_map_words() const { return has_k_map ? (k + 3) / 4 * 4 + 2 : 0; }
  QF_HD int64_t total_bytes() const { return strip_bytes() + k_map_words() * 4; }
  QF_HD int scale_offset() const { return code_bytes; }
  QF_HD int zero_offset() const { return code_bytes + groups * kRows * 4; }  // of zeros, or of offsets
  QF_HD int group_cols() const { return kCols / groups; }
  // The row of w, or -1 beyond it.
  QF_HD int64_t source_row(int64_t strip, int row) const {
    if (!is_gated) return strip * kRows + row < n ? strip * kRows + row : -1;
    const int64_t column = strip * (kRows / 2) + row % 8;
    return column < n / 2 ? column + (row < 8 ? 0 : n / 2) : -1;
  }
};

// Scales of codebooks are multiplied by this, so that what is looked up is exact in 16 bits.
constexpr float codebook_unit(qf_format f) { return f == QF_FP4_BNB ? 1.0f / 192 : 1.0f; }

// Why a weight of these groups has no such form, or null.
const char* not_in_strips(const Weight& w);

StripLayout plan_strips(const Weight& w);  // where the canonical form is there

// The packed bytes of a weight, found out from their number; data is null where only shapes are asked about.
struct StripView {
  const uint8_t* data = nullptr;
  StripLayout layout = {};
  bool is_there = false;  // in the order of x; not where there is a k_map

  const int32_t* k_map() const {
    return data ? reinterpret_cast<const int32_t*>(data + layout.strip_bytes()) : nullptr;
  }
};
StripView view_strips(const Arguments& arg, const Weight& w);

// Checks the values (scales finite and positive, zeros, offsets and codes finite, groups of g_idx whole) and
// packs. Returns when it is done, so that no later kernel can be early.
void pack_strips(const Arguments& arg, const Weight& w, const StripLayout& layout, void* out, void* stream);

}  // namespace quantfuse::linear
