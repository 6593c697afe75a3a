// SPDX-License-Identifier: Apache-2.0
//
// A panel's part of b in one segment of k, from memory to words of 4 consecutive k: [ceil(k / 4)][2][lanes].
//
// Integer codes become unsigned on the way, INT8 as code + 128 and INT4 as code + 8, because the 8-bit dot
// products want one unsigned operand. Where there is no number (columns beyond n, the last word's end) there
// is the code 0.
#pragma once

#include "scaled_mm/scaled_mm_plan.h"

namespace quantfuse::scaled_mm {

QF_INLINE constexpr int32_t code_offset(qf_format format) {
  return format == QF_INT8 ? 128 : format == QF_INT4 ? 8 : 0;
}

// What makes 4 codes unsigned: their sign bits flipped.
QF_INLINE constexpr int32_t sign_bits(qf_format format) {
  return static_cast<int32_t>(static_cast<uint32_t>(code_offset(format)) * 0x01010101u);
}

// ---- b as [n, k]: transposed in registers, lanes x lanes words at a time ----

// The same words where memory ends: `columns` rows of b and `count` codes of each, from code k on, in a block
// of zeros.
template <class S>
__attribute__((noinline)) void gather_edge(const Problem& p, int64_t col, int64_t columns, int64_t k,
                                           int64_t count, uint8_t (*block)[4 * S::kLanes]) {
  __builtin_memset(block, 0, 4 * S::kLanes * S::kLanes);
  for (int64_t i = 0; i < columns && i < S::kLanes; ++i) {
    const auto* row = reinterpret_cast<const uint8_t*>(p.b.row_bytes_at(col + i));
    if (p.b_format != QF_INT4) {
      __builtin_memcpy(block[i], row + k, static_cast<size_t>(count));
    } else {
      for (int64_t j = 0; j < count; ++j) {
        block[i][j / 2] |= static_cast<uint8_t>(nibble_at(row, k + j) << 4 * (j & 1));
      }
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

// Writes whole blocks: `out` has room for the segment rounded up to 8 * lanes of k.
template <class S, qf_format Format>
QF_INLINE void pack_rows(const Problem& p, int64_t panel, const Segment& segment, int32_t* out) {
  constexpr int64_t L = S::kLanes;
  constexpr int64_t kPerBlock = Format == QF_INT4 ? 8 * L : 4 * L;  // codes of a row that fill a vector
  const auto flip = S::set1(sign_bits(Format));
  const bool is_whole_bytes = Format != QF_INT4 || segment.begin % 2 == 0;
  for (int64_t half = 0; half < 2; ++half) {
    const int64_t col = (panel * 2 + half) * L, columns = p.n - col;
    int32_t* to = out + half * L;
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
//
// A row of b is a page of memory or more, which makes every step from row to row expensive. So a thread takes
// several panels at each step, and asks for rows ahead of time.

// Rows between asking and reading. 8 and 16 gained a sixth over none (INT8, m = 64, n = k = 4096), 32 no
// more.
inline constexpr int64_t kRowsAhead = 16;

// Rows of b from segment.begin on, cut to the columns of a group of panels.
template <class S, qf_format Format>
struct GroupRows {
  static constexpr int64_t L = S::kLanes;
  const char* first;
  int64_t stride, rows, bytes;  // bytes: of a row in the group
  int64_t columns;              // from the group's first one to n

  QF_INLINE GroupRows(const Problem& p, const Block& block, const Segment& segment) {
    const int64_t col = block.panel * 2 * L;
    columns = p.n - col;
    stride = p.b.row_stride;
    first = static_cast<const char*>(p.b.data) + segment.begin * stride + row_bytes(Format, col);
    rows = segment.count;
    bytes = row_bytes(Format, columns < block.panels * 2 * L ? columns : block.panels * 2 * L);
  }
  // Codes of vector `half` of row r, one per lane in its low bits; 0 beyond n and, where IsEdge, beyond the
  // last row.
  template <bool IsEdge>
  QF_INLINE typename S::I load(int64_t r, int64_t half) const {
    const char* at = first + r * stride + row_bytes(Format, half * L);
    if constexpr (IsEdge) {
      const int64_t left = r < rows ? columns - half * L : 0;
      if (left <= 0) return S::zero_i();
      if (left < L) {
        return Format == QF_INT4 ? S::select(S::first(left), S::load_u4(at, left), S::zero_i())
                                 : S::load_u8(at, left);
      }
    }
    return Format == QF_INT4 ? S::load_u4(at) : S::load_u8(at);
  }
  QF_INLINE void prefetch(int64_t r) const {
    if (r >= rows) return;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(first + r * stride + i);
  }
};

template <class S, qf_format Format>
QF_INLINE void pack_columns(const Problem& p, const Block& block, const Segment& segment, int32_t* out) {
  constexpr int64_t L = S::kLanes;
  const int64_t stride = segment.words * 2 * L;  // of panels in out
  const GroupRows<S, Format> b(p, block, segment);
  const auto flip = S::set1(sign_bits(Format));
  auto weave = [&](int64_t k, auto is_edge) __attribute__((always_inline)) {
    for (int64_t half = 0; half < 2 * block.panels; ++half) {
      auto word = b.template load<is_edge.value>(k, half);
      word = S::or_(word, S::template shl<8>(b.template load<is_edge.value>(k + 1, half)));
      word = S::or_(word, S::template shl<16>(b.template load<is_edge.value>(k + 2, half)));
      word = S::or_(word, S::template shl<24>(b.template load<is_edge.value>(k + 3, half)));
      S::store_i(out + half / 2 * stride + half % 2 * L, S::xor_(word, flip));
    }
  };
  for (int64_t k = 0; k < b.rows; k += 4, out += 2 * L) {
    for (int64_t i = 0; i < 4; ++i) b.prefetch(k + kRowsAhead + i);
    if (k + 4 <= b.rows && b.columns >= block.panels * 2 * L) {
      weave(k, std::false_type{});
    } else {
      weave(k, std::true_type{});
    }
  }
}

// ---- Either order: [panel][words][2][lanes] ----

template <class S, qf_format Format>
__attribute__((noinline)) void pack_segment(const Problem& p, const Block& block, const Segment& segment,
                                            int32_t* out) {
  if (p.b_order == QF_KN) return pack_columns<S, Format>(p, block, segment, out);
  for (int64_t i = 0; i < block.panels; ++i) {
    pack_rows<S, Format>(p, block.panel + i, segment, out + i * segment.words * 2 * S::kLanes);
  }
}

}  // namespace quantfuse::scaled_mm
