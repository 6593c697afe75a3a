// SPDX-License-Identifier: Apache-2.0
//
// dequantize over either vector type S: bit for bit what dequantize_ref computes. Rows are independent and
// divided among the threads. Where a scale covers at least a vector of columns, a row is cut at the blocks
// and a block's scale fills all lanes. Otherwise (narrow blocks, g_idx) the scales of a piece of a row are
// first laid out one per column; rows of the same band of blocks share that work.
#pragma once

#include "core/choose.h"
#include "cpu/threads.h"
#include "cpu/vector_math.h"
#include "dequantize/dequantize.h"

namespace quantfuse::dequantize {

template <class S, class T, qf_format Format>
class RowsDequantizer {
  using F = typename S::F;
  using I = typename S::I;
  static constexpr int kLanes = S::kLanes;

 public:
  explicit RowsDequantizer(const Problem& problem) : p_(problem) {
    if constexpr (Format == QF_FP4_E2M1) table_ = S::table16(codebook_of(problem.format));
  }

  void run() const {
    constexpr int64_t kTaskElements =
        1 << 15;  // less than this is not worth another thread: about 10 us of work
    const bool has_wide_blocks = !p_.g_idx && p_.block.cols >= kLanes;
    parallel_ranges(p_.rows, ceil_div(kTaskElements, p_.cols), [&](int64_t begin, int64_t end) {
      if (has_wide_blocks) {
        for (int64_t r = begin; r < end; ++r) row_by_blocks(r);
      } else {
        rows_by_columns(begin, end);
      }
    });
  }

 private:
  const uint8_t* q(int64_t r) const { return reinterpret_cast<const uint8_t*>(p_.q.row_bytes_at(r)); }
  T* x(int64_t r) const { return p_.x.template row<T>(r); }

  // Codes [c, c + n), n lanes at most; c is even where two codes share a byte.
  QF_INLINE F decode(const uint8_t* row, int64_t c) const {
    if constexpr (Format == QF_FP4_E2M1) return S::lookup(table_, S::load_u4(row + c / 2));
    if constexpr (Format == QF_INT4) return decode_vector<S, Format>(S::load_u4(row + c / 2));
    if constexpr (Format == QF_INT8) return decode_vector<S, Format>(S::load_i8(row + c));
    if constexpr (is_fp8(Format)) return decode_vector<S, Format>(S::load_u8(row + c));
  }
  QF_INLINE F decode(const uint8_t* row, int64_t c, int64_t n) const {
    if constexpr (Format == QF_FP4_E2M1) return S::lookup(table_, S::load_u4(row + c / 2, n));
    if constexpr (Format == QF_INT4) return decode_vector<S, Format>(S::load_u4(row + c / 2, n));
    if constexpr (Format == QF_INT8) return decode_vector<S, Format>(S::load_i8(row + c, n));
    if constexpr (is_fp8(Format)) return decode_vector<S, Format>(S::load_u8(row + c, n));
  }

  QF_INLINE void row_by_blocks(int64_t r) const {
    const uint8_t* codes = q(r);
    T* out = x(r);
    const int64_t first_block = r / p_.block.rows * p_.col_blocks();
    for (int64_t col_block = 0; col_block < p_.col_blocks(); ++col_block) {
      int64_t c = col_block * p_.block.cols;
      const int64_t end = p_.cols - c < p_.block.cols ? p_.cols : c + p_.block.cols;
      const float scale = scale_at(p_, first_block + col_block), zero = zero_at(p_, first_block + col_block),
                  offset = offset_at(p_, first_block + col_block);
      if (is_packed_4bit(Format) && c % 2) {
        from_float((decode_at(p_.format, codes, c) - zero) * scale + offset, out[c]);
        ++c;
      }
      const F scales = S::set1(scale), zeros = S::set1(zero), offsets = S::set1(offset);
      const auto number = [&](F code) __attribute__((always_inline)) {
        return S::add(S::mul(S::sub(code, zeros), scales), offsets);
      };
      for (; c + kLanes <= end; c += kLanes) S::store(out + c, number(decode(codes, c)));
      if (c < end) S::store(out + c, number(decode(codes, c, end - c)), end - c);
    }
  }

  QF_INLINE void rows_by_columns(int64_t begin, int64_t end) const {
    constexpr int64_t kPiece =
        1024;  // columns: 12 KB of scales, zero points and offsets, a third of an L1 cache
    alignas(64) float scales[kPiece] = {}, zeros[kPiece] = {}, offsets[kPiece] = {};
    for (int64_t r0 = begin; r0 < end;) {
      const int64_t band = r0 / p_.block.rows, band_end = (band + 1) * p_.block.rows,
                    r1 = band_end < end ? band_end : end;
      for (int64_t c0 = 0; c0 < p_.cols; c0 += kPiece) {
        const int64_t c1 = p_.cols - c0 < kPiece ? p_.cols : c0 + kPiece;
        for (int64_t c = c0; c < c1; ++c) {
          const int64_t block = band * p_.col_blocks() + col_block_at(p_, c);
          scales[c - c0] = scale_at(p_, block), zeros[c - c0] = zero_at(p_, block);
          offsets[c - c0] = offset_at(p_, block);
        }
        for (int64_t r = r0; r < r1; ++r) {
          for (int64_t c = c0; c < c1; c += kLanes) {
            const F centred = S::sub(decode(q(r), c, c1 - c), S::load(zeros + (c - c0)));
            const F scaled = S::mul(centred, S::load(scales + (c - c0)));
            S::store(x(r) + c, S::add(scaled, S::load(offsets + (c - c0))), c1 - c);
          }
        }
      }
      r0 = r1;
    }
  }

  const Problem& p_;
  typename S::Table16 table_;  // of FP4 and the codebooks
};

template <class S>
void dequantize_rows(const Problem& p) {
  choose_float(p.x.dtype, [&](auto type) {
    choose_value<QF_INT8, QF_INT4, QF_FP8_E4M3, QF_FP8_E5M2, QF_FP4_E2M1>(
        code_path(p.format),
        [&](auto format) { RowsDequantizer<S, typename decltype(type)::type, format.value>(p).run(); });
  });
}

}  // namespace quantfuse::dequantize
