// SPDX-License-Identifier: Apache-2.0
//
// One panel's part of b in one segment of k, from memory to words of 4 consecutive k: [ceil(k / 4)][2][lanes].
//
// Integer codes become unsigned on the way, INT8 as code + 128 and INT4 as code + 8, because the 8-bit dot products want
// one unsigned operand. Where there is no number (columns beyond n, the last word's end) there is the code 0.
#pragma once

#include "scaled_mm/scaled_mm_plan.h"

namespace quantfuse::scaled_mm {

QF_INLINE constexpr int32_t code_offset(qf_format format) { return format == QF_INT8 ? 128 : format == QF_INT4 ? 8 : 0; }

// What makes 4 codes unsigned: their sign bits flipped.
QF_INLINE constexpr int32_t sign_bits(qf_format format) { return code_offset(format) * 0x01010101; }

// ---- b as [n, k]: transposed in registers, lanes x lanes words at a time ----

// The same words where memory ends: `columns` rows of b and `count` codes of each, from code k on, in a block of zeros.
template <class S>
__attribute__((noinline)) void gather_edge(const Problem& p, int64_t col, int64_t columns, int64_t k, int64_t count,
                                           uint8_t (*block)[4 * S::kLanes]) {
  __builtin_memset(block, 0, 4 * S::kLanes * S::kLanes);
  for (int64_t i = 0; i < columns && i < S::kLanes; ++i) {
    const auto* row = reinterpret_cast<const uint8_t*>(p.b.row_bytes_at(col + i));
    if (p.b_format != QF_INT4) {
      __builtin_memcpy(block[i], row + k, static_cast<size_t>(count));
    } else {
      for (int64_t j = 0; j < count; ++j) block[i][j / 2] |= static_cast<uint8_t>(nibble_at(row, k + j) << 4 * (j & 1));
    }
  }
}

// The 4 low nibbles of each word to its 4 bytes.
template <class S>
QF_INLINE typename S::I spread_low_nibbles(typename S::I word) {
  const auto low = S::and_(word, S::set1(0xffff));
  const auto pairs = S::and_(S::or_(low, S::template shl<8>(low)), S::set1(0x00ff00ff));
  return S::and_(S::or_(pairs, S::template shl<4>(pairs)), S::set1(0x0f0f0f0f));
}

template <class S, qf_format Format>
QF_INLINE void pack_rows(const Problem& p, int64_t panel, const Segment& segment, uint32_t* out) {
  constexpr int64_t L = S::kLanes;
  constexpr int64_t kPerBlock = Format == QF_INT4 ? 8 * L : 4 * L;  // codes of a row that fill a vector
  const auto flip = S::set1(sign_bits(Format));
  const bool is_whole_bytes = Format != QF_INT4 || segment.begin % 2 == 0;
  for (int64_t half = 0; half < 2; ++half) {
    const int64_t col = (panel * 2 + half) * L, columns = p.n - col;
    uint32_t* to = out + half * L;
    for (int64_t k = 0; k < segment.count; k += kPerBlock) {
      typename S::I r[L];
      if (columns >= L && k + kPerBlock <= segment.count && is_whole_bytes) {
        const int64_t byte = row_bytes(Format, segment.begin + k);
#pragma GCC unroll 16
        for (int64_t i = 0; i < L; ++i) r[i] = S::load_i(p.b.row_bytes_at(col + i) + byte);
      } else {
        alignas(64) uint8_t block[L][4 * L];
        const int64_t count = segment.count - k < kPerBlock ? segment.count - k : kPerBlock;
        gather_edge<S>(p, col, columns, segment.begin + k, count, block);
#pragma GCC unroll 16
        for (int64_t i = 0; i < L; ++i) r[i] = S::load_i(block[i]);
      }
      S::transpose(r);
#pragma GCC unroll 16
      for (int64_t i = 0; i < L; ++i) {
        if constexpr (Format == QF_INT4) {
          S::store_i(to, S::xor_(spread_low_nibbles<S>(r[i]), flip));
          S::store_i(to + 2 * L, S::xor_(spread_low_nibbles<S>(S::template shr<16>(r[i])), flip));
          to += 4 * L;
        } else {
          S::store_i(to, S::xor_(r[i], flip));
          to += 2 * L;
        }
      }
    }
  }
}

// ---- b as [k, n]: 4 rows woven into words ----

// Codes of `lanes` columns from column col on of row k, one per lane in its low bits; those beyond n are 0.
template <class S, qf_format Format>
QF_INLINE typename S::I load_row_codes(const Problem& p, int64_t k, int64_t col) {
  const char* at = p.b.row_bytes_at(k) + row_bytes(Format, col);
  const int64_t columns = p.n - col;
  if (columns <= 0) return S::zero_i();
  if constexpr (Format == QF_INT4) {
    return columns >= S::kLanes ? S::load_u4(at) : S::select(S::first(columns), S::load_u4(at, columns), S::zero_i());
  } else {
    return columns >= S::kLanes ? S::load_u8(at) : S::load_u8(at, columns);
  }
}

template <class S, qf_format Format>
QF_INLINE void pack_columns(const Problem& p, int64_t panel, const Segment& segment, uint32_t* out) {
  constexpr int64_t L = S::kLanes;
  const auto flip = S::set1(sign_bits(Format));
  const int64_t end = segment.begin + segment.count;
  for (int64_t k = segment.begin; k < end; k += 4) {
#pragma GCC unroll 2
    for (int64_t half = 0; half < 2; ++half, out += L) {
      const int64_t col = (panel * 2 + half) * L;
      auto word = load_row_codes<S, Format>(p, k, col);
      if (k + 1 < end) word = S::or_(word, S::template shl<8>(load_row_codes<S, Format>(p, k + 1, col)));
      if (k + 2 < end) word = S::or_(word, S::template shl<16>(load_row_codes<S, Format>(p, k + 2, col)));
      if (k + 3 < end) word = S::or_(word, S::template shl<24>(load_row_codes<S, Format>(p, k + 3, col)));
      S::store_i(out, S::xor_(word, flip));
    }
  }
}

// Writes whole blocks: `out` has room for the segment rounded up to 8 * lanes of k.
template <class S, qf_format Format>
__attribute__((noinline)) void pack_segment(const Problem& p, int64_t panel, const Segment& segment, uint32_t* out) {
  if (p.b_order == QF_NK) {
    pack_rows<S, Format>(p, panel, segment, out);
  } else {
    pack_columns<S, Format>(p, panel, segment, out);
  }
}

// Brings part `part` of `parts` of a segment of b nearer: between two tiles, so that packing it later finds it in L2.
template <class S>
QF_INLINE void prefetch_segment(const Problem& p, int64_t panel, const Segment& segment, int64_t part, int64_t parts) {
  constexpr int64_t kLine = 64, kCols = 2 * S::kLanes;
  const bool is_nk = p.b_order == QF_NK;
  const int64_t cols = p.n - panel * kCols < kCols ? p.n - panel * kCols : kCols;
  const int64_t first_row = is_nk ? panel * kCols : segment.begin, rows = is_nk ? cols : segment.count;
  const int64_t begin = row_bytes(p.b_format, is_nk ? segment.begin : panel * kCols);
  const int64_t bytes = row_bytes(p.b_format, is_nk ? segment.count : cols);
  for (int64_t row = first_row + rows * part / parts; row < first_row + rows * (part + 1) / parts; ++row) {
    const char* at = p.b.row_bytes_at(row) + begin;
    for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(at + i, 0, 2);
  }
}

}  // namespace quantfuse::scaled_mm
