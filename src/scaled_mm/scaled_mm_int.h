// SPDX-License-Identifier: Apache-2.0
//
// The product of integer codes by 8-bit dot products, 4 k at a time.
//
//   with u = b + offset (unsigned), and sums over a segment of k:
//   sum (a - za)(b - zb) = sum a u - (offset + zb) * sum a - za * (sum b - count * zb)
//
// One scale for all of k: int32 totals over all segments, exact modulo 2^32; the epilogue adds the terms and
// scales. Several scales: each segment's int32 sum is scaled and added to float32 totals.
//
// For any shape, order and scales. scaled_mm_int_dot.h is better for a few rows.
#pragma once

#include "scaled_mm/scaled_mm_block.h"

namespace quantfuse::scaled_mm {

// 2048 k of a tile's two panels are 128 KB (16 KB of one with AVX2), an eighth of an L2 cache, from which
// they come as fast as from L1; shorter segments load and store totals more often (7% of the time at 512).
// 2048 * (128 + 255)^2 is far below 2^31.
inline constexpr int64_t kIntSegment = 2048;
// By qf_order. Fewer rows than 96 do not pay for packing a panel.
constexpr Blocking kIntBlocking[] = {{4, kIntSegment, 2, 96, 192}, {4, 256, 8, 96, 96}};

// Zero points up to which sums of floating results are known not to overflow: those of codes from -128 to
// 255.
inline constexpr int32_t kMaxZero = 255;

// Whether int32 holds the sum over all of k: exact results are modulo 2^32 anyway; (128 + 255)^2 * 14639 and
// 128^2 * 131071 are the last below 2^31.
QF_INLINE bool has_int_totals(const Problem& p) {
  const int64_t longest = p.a_zero || p.b_zero ? 14639 : 131071;
  return p.is_exact() || (p.a_groups() == 1 && p.b_groups() == 1 && p.k <= longest);
}

QF_INLINE bool is_within(const Vector& zero, int32_t limit) {
  const auto* values = static_cast<const int32_t*>(zero.data);
  if (!values) return true;  // absent, or a query without data
  for (int64_t i = 0; i < zero.size; ++i) {
    if (values[i] < -limit || values[i] > limit) return false;
  }
  return true;
}

QF_INLINE Requirements accepts_int(const Problem& p) {
  Requirements r;
  r.require(p.is_integer_product(), "the codes are not integers");
  r.require(p.is_exact() || (is_within(p.a_zero, kMaxZero) && is_within(p.b_zero, kMaxZero)),
            "a zero point is beyond -255..255, and c is not i32");
  return r;
}

// ---- a ----

// Codes [k, k + count) of row r as signed bytes, zeros behind them up to a whole number of vectors. Returns
// their sum.
template <class S>
QF_INLINE int32_t load_row_bytes(const Problem& p, int64_t r, int64_t k, int64_t count, int8_t* out) {
  constexpr int64_t kVector = 4 * S::kLanes;
  const char* row = p.a.row_bytes_at(r);
  if (p.a_format == QF_INT8) {
    __builtin_memcpy(out, row + k, static_cast<size_t>(count));
  } else if (k % 2 == 0) {
    const auto eight = S::set1(8);
    for (int64_t i = 0; i < count; i += S::kLanes) {
      const auto nibble =
          count - i >= S::kLanes ? S::load_u4(row + (k + i) / 2) : S::load_u4(row + (k + i) / 2, count - i);
      S::store_u8(out + i, S::sub(S::xor_(nibble, eight), eight));
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      out[i] = static_cast<int8_t>(int4_at(reinterpret_cast<const uint8_t*>(row), k + i));
    }
  }
  const int64_t end = round_up(count, kVector);
  __builtin_memset(out + count, 0, static_cast<size_t>(end - count));
  auto sum = S::zero_i();
  for (int64_t i = 0; i < end; i += kVector) sum = S::dot4(sum, S::set1(0x01010101), S::load_i(out + i));
  return S::reduce_add(sum);
}

// Rows [row, row + rows) of a batch, at most kMaxTileRows. place(segment, words, stride) puts their words of
// a segment where they belong.
template <class S, class Place>
QF_INLINE void prepare_int_rows(const Batch& batch, int64_t row, int64_t rows, const Place& place) {
  const Problem& p = batch.p;
  alignas(64) int32_t words[kMaxTileRows][kIntSegment / 4];
  uint32_t totals[kMaxTileRows] = {};
  for (int64_t s = 0; s < batch.plan.num_segments; ++s) {
    const Segment& segment = batch.segments[s];
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t r = batch.first_row + row + i;
      const int32_t sum =
          load_row_bytes<S>(p, r, segment.begin, segment.count, reinterpret_cast<int8_t*>(words[i]));
      batch.sums_at(s)[row + i] = sum;
      totals[i] += static_cast<uint32_t>(sum);
      batch.scales_at(s)[row + i] = p.a_scale_at(r, segment.a_group);
    }
    place(segment, words[0], kIntSegment / 4);
  }
  for (int64_t i = 0; i < rows; ++i) batch.row_sums()[row + i] = static_cast<int32_t>(totals[i]);
}

template <class S>
__attribute__((noinline)) void prepare_int_tile(const Batch& batch, int64_t row) {
  const int64_t rows = batch.rows_of_tile(row);
  prepare_int_rows<S>(
      batch, row,
      rows, [&](const Segment& segment, const int32_t* words, int64_t stride) __attribute__((always_inline)) {
        interleave_rows<S>(words, stride, rows, segment.words, batch.tile_at(segment, row, segment.words));
      });
}

// ---- Products ----

// The columns of a panel with the sums of b that a zero point of a needs.
template <class S>
struct IntColumns : Columns<S> {
  static constexpr int64_t L = S::kLanes;
  alignas(64) int32_t sums[2 * L];  // sum b - count * zb, over the segments since clear()

  QF_INLINE void init(const Problem& p, int64_t panel) {
    Columns<S>::init(p, panel, code_offset(p.b_format));
    clear();
  }
  QF_INLINE void clear() {
    for (int64_t i = 0; i < 2 * L; ++i) sums[i] = 0;
  }
  // sum b - count * zb = sum u - offset * padding - count * (offset + zb): the last word is padded with the
  // code 0.
  QF_INLINE void add_sums(const int32_t* packed, int64_t count, int32_t offset) {
    const int64_t words = ceil_div(count, 4), padding = 4 * words - count;
    const auto ones = S::set1(0x01010101);
    for (int half = 0; half < 2; ++half) {
      auto sum = S::sub(S::load_i(sums + half * L), S::set1(static_cast<int32_t>(offset * padding)));
      for (int64_t w = 0; w < words; ++w) sum = S::dot4(sum, S::load_i(packed + (2 * w + half) * L), ones);
      const auto zero = S::load_i(this->zero + half * L);
      S::store_i(sums + half * L, S::sub(sum, S::mul(zero, S::set1(static_cast<int32_t>(count)))));
    }
  }
};

// sum a u -> sum (a - za)(b - zb), for one row and half a panel. Everything modulo 2^32.
template <class S>
QF_INLINE typename S::I subtract_zeros(const Problem& p, const IntColumns<S>& columns, int half,
                                       int32_t a_zero, int32_t a_sum, typename S::I sum) {
  constexpr int64_t L = S::kLanes;
  sum = S::sub(sum, S::mul(S::load_i(columns.zero + half * L), S::set1(a_sum)));
  if (p.a_zero) sum = S::sub(sum, S::mul(S::load_i(columns.sums + half * L), S::set1(a_zero)));
  return sum;
}

// The epilogue of one row where int32 totals cover all of k.
template <class S>
QF_INLINE void finish_int_row(const Problem& p, const IntColumns<S>& columns, int64_t r, int32_t a_sum,
                              float a_scale, const int32_t* totals) {
  constexpr int64_t L = S::kLanes;
  const int32_t a_zero = p.a_zero_at(r);
  const auto sum0 = subtract_zeros<S>(p, columns, 0, a_zero, a_sum, S::load_i(totals));
  const auto sum1 = subtract_zeros<S>(p, columns, 1, a_zero, a_sum, S::load_i(totals + L));
  if (p.is_exact()) {
    int32_t* out = p.c.row<int32_t>(r) + columns.col;
    S::store_i(out, sum0, columns.count);
    S::store_i(out + L, sum1, columns.count - L);
    return;
  }
  alignas(64) float values[2 * L];
  const auto scale = S::set1(a_scale);
  S::store(values, S::mul(S::mul(S::to_float(sum0), S::load(columns.scale)), scale));
  S::store(values + L, S::mul(S::mul(S::to_float(sum1), S::load(columns.scale + L)), scale));
  store_row<S>(p, columns, r, values);
}

// The rows of b, where it is [n, k], that NP panels from `col` on have in a segment.
template <class S, int NP>
using BAhead = RowsAhead<NP * 2 * S::kLanes>;

template <class S, int NP>
QF_INLINE BAhead<S, NP> b_ahead(const Batch& batch, int64_t s, int64_t col) {
  const Problem& p = batch.p;
  if (s == batch.plan.num_segments || p.b_order != QF_NK || col + NP * 2 * S::kLanes > p.n) return {};
  const Segment& segment = batch.segments[s];
  const char* row = p.b.row_bytes_at(col);
  const int64_t bits = code_bits(p.b_format), lines = ceil_div(segment.count * bits, 8 * 64);
  return {row + segment.begin * bits / 8, p.b.row_bytes_at(col + 1) - row, 0, lines * NP * 2 * S::kLanes};
}

// totals += the product of a tile and a packed segment; of the first segment, whatever they were.
template <class S, int MT, int NP>
__attribute__((noinline)) void add_int_tile(bool is_first, const int32_t* a, const int32_t* b, int64_t words,
                                            int32_t* totals, int64_t panel_totals, BAhead<S, NP> ahead) {
  constexpr int64_t L = S::kLanes;
  Tile<ByteDot<S>, MT, NP> tile;
  if (is_first) {
    tile.clear();
  } else {
    tile.each([&](auto& sum, auto m, auto v) __attribute__((always_inline)) {
      sum = S::sums(S::load_i(totals + v / 2 * panel_totals + (m * 2 + v % 2) * L));
    });
  }
  const auto last = tile.add(a, b, words * 2 * L, words, ahead);
  tile.finish(
      last, [&](auto& sum, auto m, auto v) __attribute__((always_inline)) {
        S::store_i(totals + v / 2 * panel_totals + (m * 2 + v % 2) * L, S::ints(sum));
      });
}

// The same without zero points and scaled. `row`: the tile's first in c; a_sums, a_scales: of its rows.
template <class S, int MT, int NP>
__attribute__((noinline)) void add_scaled_int_tile(const Problem& p, const IntColumns<S>* columns,
                                                   int64_t row, const int32_t* a, const int32_t* b,
                                                   int64_t words, const int32_t* a_sums,
                                                   const float* a_scales, float* totals, int64_t panel_totals,
                                                   BAhead<S, NP> ahead) {
  constexpr int64_t L = S::kLanes;
  Tile<ByteDot<S>, MT, NP> tile;
  tile.clear();
  const auto last = tile.add(a, b, words * 2 * L, words, ahead);
  tile.finish(
      last, [&](auto& acc, auto m, auto v) __attribute__((always_inline)) {
        const IntColumns<S>& panel = columns[v / 2];
        float* total = totals + v / 2 * panel_totals + (m * 2 + v % 2) * L;
        const auto sum = subtract_zeros<S>(p, panel, v % 2, p.a_zero_at(row + m), a_sums[m], S::ints(acc));
        const auto scale = S::mul(S::load(panel.scale + v % 2 * L), S::set1(a_scales[m]));
        S::store(total, S::fma(S::to_float(sum), scale, S::load(total)));
      });
}

// Totals of a group of panels for a chunk of rows, [panel][rows, whole tiles of kTileRows][2][lanes], and
// their epilogue. How they come about is the work of what is derived from it.
template <class S, int64_t kTileRows>
class IntTotals {
 public:
  QF_INLINE IntTotals(const Batch& batch, const Block& block)
      : batch_(batch), p_(batch.p), is_int_(has_int_totals(batch.p)), panels_(block.panels) {
    for (int64_t i = 0; i < panels_; ++i) columns_[i].init(p_, block.panel + i);
  }

  QF_INLINE void begin(Chunk chunk) {
    chunk_ = chunk, panel_rows_ = round_up(chunk.row1 - chunk.row0, kTileRows);
    if (!is_int_ || batch_.plan.num_segments == 0) {
      __builtin_memset(&totals_, 0, static_cast<size_t>(at(panels_, chunk.row0) * 4));
    }
    for (int64_t i = 0; i < panels_; ++i) columns_[i].clear();
  }

  QF_INLINE void finish() {
    for (int64_t i = 0; i < panels_; ++i) {
      if (is_int_) columns_[i].load_scales(p_, 0);
      for (int64_t row = chunk_.row0; row < chunk_.row1; ++row) {
        const int64_t r = batch_.first_row + row;
        if (is_int_) {
          finish_int_row<S>(p_, columns_[i], r, batch_.row_sums()[row], p_.a_scale_at(r, 0),
                            totals_.ints + at(i, row));
        } else {
          store_row<S>(p_, columns_[i], r, totals_.floats + at(i, row));
        }
      }
    }
  }

 protected:
  static constexpr int64_t L = S::kLanes;

  // The columns of panels [i, i + count) for segment s, whose packed b is at `b`.
  QF_INLINE void begin_segment(const Segment& segment, int64_t i, int64_t count, const int32_t* b) {
    for (int64_t q = 0; q < count; ++q) {
      IntColumns<S>& columns = columns_[i + q];
      if (!is_int_) columns.clear(), columns.load_scales(p_, segment.b_group);
      if (p_.a_zero) columns.add_sums(b + q * segment.words * 2 * L, segment.count, code_offset(p_.b_format));
    }
  }
  // What a tile will write of c, fetched while it is multiplied: rows are far apart, and stores would wait
  // for one line after the other.
  QF_INLINE void fetch_c(int64_t row, int64_t first_col, int64_t last_col) const {
    const int64_t bytes = dtype_bytes(p_.c.dtype);
    for (int64_t r = 0; r < batch_.rows_of_tile(row); ++r) {
      const char* c = p_.c.row_bytes_at(batch_.first_row + row + r);
      for (int64_t at = first_col * bytes; at < (last_col + 2 * L) * bytes; at += 64) {
        __builtin_prefetch(c + at, 1, 3);
      }
    }
  }
  QF_INLINE int64_t at(int64_t panel, int64_t row) const {
    return (panel * panel_rows_ + row - chunk_.row0) * 2 * L;
  }

  const Batch& batch_;
  const Problem& p_;
  const bool is_int_;
  const int64_t panels_;
  Chunk chunk_ = {};
  int64_t panel_rows_ = 0;
  IntColumns<S> columns_[kMaxGroup];
  alignas(64) union {
    int32_t ints[kMaxTotalRows * 2 * L];
    float floats[kMaxTotalRows * 2 * L];
  } totals_;
};

template <class S>
class IntPanels : public IntTotals<S, 1> {
 public:
  using IntTotals<S, 1>::IntTotals;

  template <int NP>
  QF_INLINE void add(int64_t s, int64_t i, const int32_t* b) {
    const Batch& batch = this->batch_;
    const Problem& p = this->p_;
    const Chunk chunk = this->chunk_;
    const Segment& segment = batch.segments[s];
    const IntColumns<S>* columns = this->columns_ + i;
    this->begin_segment(segment, i, NP, b);
    auto ahead = b_ahead<S, NP>(batch, s + 1, columns->col);
    for (int64_t row = chunk.row0; row < chunk.row1; row += batch.tile_rows) {
      const int32_t* a = batch.tile_at(segment, row, segment.words);
      if (s + 1 == batch.plan.num_segments) this->fetch_c(row, columns->col, columns[NP - 1].col);
      choose_rows<kMaxTileRows>(
          batch.rows_of_tile(row), [&](auto mt) __attribute__((always_inline)) {
            const int64_t to = this->at(i, row), panel_totals = this->at(1, chunk.row0);
            if (this->is_int_) {
              add_int_tile<S, mt.value, NP>(s == 0, a, b, segment.words, this->totals_.ints + to,
                                            panel_totals, ahead);
            } else {
              add_scaled_int_tile<S, mt.value, NP>(p, columns, batch.first_row + row, a, b, segment.words,
                                                   batch.sums_at(s) + row, batch.scales_at(s) + row,
                                                   this->totals_.floats + to, panel_totals, ahead);
            }
          });
      ahead.line += segment.words / 2;
    }
  }
};

template <class S>
__attribute__((noinline)) void multiply_int(const Batch& batch, const Block& block) {
  choose_value<QF_INT8, QF_INT4>(
      batch.p.b_format, [&](auto format) __attribute__((always_inline)) {
        multiply_segments<S, IntPanels<S>, format.value>(batch, block);
      });
}

// ---- The call ----

template <class S>
QF_INLINE size_t int_workspace_bytes(const Problem& p) {
  return static_cast<size_t>(make_plan<S>(p, kIntBlocking[p.b_order]).total_bytes);
}

template <class S>
QF_INLINE void launch_int(const Problem& p, const Launch& launch) {
  run_batches<S>(p, kIntBlocking[p.b_order], launch, prepare_int_tile<S>, multiply_int<S>);
}

}  // namespace quantfuse::scaled_mm
