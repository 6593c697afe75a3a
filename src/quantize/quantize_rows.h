// SPDX-License-Identifier: Apache-2.0
//
// quantize over either vector type S: bit for bit what quantize_ref computes. For every block shape:
//
//   a block    is a rectangle of numbers. Its rows are read twice, for the range and for the codes; the
//              second time they come from a cache, unless the block is larger than one.
//   the work   is cut into bands of block.rows rows. Where there are few bands it is cut along the columns as
//              well, and where there are few blocks, big ones (per tensor), all threads share each of them.
//   columns    of one number each (a scale per column) lie across the lanes of a vector, which walks down.
//
// The MSE search adds up squared errors in units of the first candidate's scale, so that they neither
// overflow nor vanish: float32 in each lane over at most kRunVectors vectors, double beyond.
#pragma once

#include "core/choose.h"
#include "cpu/hadamard.h"
#include "cpu/rows.h"
#include "cpu/threads.h"
#include "quantize/quantize.h"

namespace quantfuse::quantize {

inline constexpr int kSlices = 16;                  // of a block that all threads share
inline constexpr int64_t kTaskElements = 1 << 15;   // worth another thread: about 10 us of work
inline constexpr int64_t kSliceElements = 1 << 16;  // blocks below this are not cut
inline constexpr int kBatch = 16;                   // small blocks whose scales are found before their codes
inline constexpr int64_t kBatchElements = 512;      // a batch of them still fits the L1 cache
inline constexpr int64_t kRunVectors = 64;

struct Range {
  float low = 0, high = 0;
  QF_INLINE void include(const Range& other) {
    low = other.low < low ? other.low : low;
    high = other.high > high ? other.high : high;
  }
};

// Slice i of `count`: some of the rows, or of a single row some of its columns. Cuts within a row are
// multiples of 64 columns, so that no two slices share a byte of 4-bit codes.
QF_INLINE Extent slice_of(const Extent& e, int i, int count) {
  const bool by_rows = e.r1 - e.r0 > 1;
  const int64_t begin = by_rows ? e.r0 : e.c0, end = by_rows ? e.r1 : e.c1, step = by_rows ? 1 : 64;
  const int64_t first = i == 0 ? begin : (begin + (end - begin) * i / count) / step * step;
  const int64_t last = i + 1 == count ? end : (begin + (end - begin) * (i + 1) / count) / step * step;
  return by_rows ? Extent{first, last, e.c0, e.c1} : Extent{e.r0, e.r1, first, last};
}

template <class S, class T, qf_format Format>
class RowsQuantizer {
  using F = typename S::F;
  using I = typename S::I;
  static constexpr int kLanes = S::kLanes;
  static constexpr CodeRange kCodes = code_range(Format);

 public:
  explicit RowsQuantizer(const Problem& problem) : p_(problem), kind_(problem.scale_kind()) {}

  void run() const {
    if (p_.block.cols == 1 && p_.block.rows > 1) return run_columns();
    // The columns of a band are one task where there are bands enough for any number of threads. A task never
    // ends within a byte of 4-bit codes.
    const int64_t bands = p_.row_blocks(), blocks = p_.col_blocks();
    const int64_t even = is_packed_4bit(Format) && p_.block.cols % 2 ? 2 : 1;
    const int64_t blocks_per_task = bands >= kSlices ? blocks : even;
    const int64_t tasks_per_band = ceil_div(blocks, blocks_per_task), tasks = bands * tasks_per_band;
    const int64_t block_elements = p_.block.rows * p_.block.cols;

    if (tasks < kSlices && block_elements >= kSliceElements) {
      for (int64_t band = 0; band < bands; ++band) run_blocks<1>(band, 0, blocks, kSlices);
      return;
    }
    const int64_t grain = ceil_div(kTaskElements, block_elements * blocks_per_task);
    parallel_ranges(tasks, grain, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task % tasks_per_band * blocks_per_task;
        const int64_t count = blocks - first < blocks_per_task ? blocks - first : blocks_per_task;
        if (block_elements <= kBatchElements) run_blocks<kBatch>(task / tasks_per_band, first, count, 1);
        else run_blocks<1>(task / tasks_per_band, first, count, 1);
      }
    });
  }

 private:
  const T* x(int64_t r) const { return p_.x.template row<T>(r); }
  uint8_t* q(int64_t r) const { return reinterpret_cast<uint8_t*>(p_.q.row_bytes_at(r)); }

  template <class Body>
  QF_INLINE static void each_slice(const Extent& e, int count, const Body& body) {
    if (count == 1) return body(0, e);
    parallel_ranges(count, 1, [&](int64_t begin, int64_t end) {
      for (auto i = static_cast<int>(begin); i < end; ++i) body(i, slice_of(e, i, count));
    });
  }

  // `count` blocks of a band from `first` on, Batch at a time: first the scales of them all, then their
  // codes, so that the latency of one block's scale hides behind the others.
  template <int Batch>
  QF_INLINE void run_blocks(int64_t band, int64_t first, int64_t count, int slices) const {
    for (int64_t begin = first; begin < first + count; begin += Batch) {
      const int64_t end = first + count - begin < Batch ? first + count : begin + Batch;
      Quantizer z[Batch];
      for (int64_t c = begin; c < end; ++c) {
        z[c - begin] = p_.is_static() ? given(band, c) : chosen(extent_of(band, c), slices);
        if (!p_.is_static()) store(band, c, z[c - begin]);
      }
      for (int64_t c = begin; c < end; ++c) encode_block(extent_of(band, c), c, z[c - begin], slices);
    }
  }

  QF_INLINE Extent extent_of(int64_t band, int64_t col_block) const {
    const int64_t r0 = band * p_.block.rows, c0 = col_block * p_.block.cols;
    return {r0, p_.rows - r0 < p_.block.rows ? p_.rows : r0 + p_.block.rows, c0,
            p_.cols - c0 < p_.block.cols ? p_.cols : c0 + p_.block.cols};
  }

  QF_INLINE void encode_block(const Extent& e, int64_t col_block, const Quantizer& z, int slices) const {
    const float inverse = 1.0f / z.scale;
    int32_t sums[kSlices];  // of the last row of each slice; slices along the columns have no other
    each_slice(e, slices, [&](int i, const Extent& s) {
      sums[i] = 0;
      for (int64_t r = s.r0; r < s.r1; ++r) {
        sums[i] = encode_row(r, s.c0, s.c1, inverse, z.zero);
        if (p_.row_sums) p_.row_sums.template row<int32_t>(r)[col_block] = sums[i];
      }
    });
    if (p_.row_sums && slices > 1 && e.r1 - e.r0 == 1) {
      int32_t sum = 0;
      for (int i = 0; i < slices; ++i) sum += sums[i];
      p_.row_sums.template row<int32_t>(e.r0)[col_block] = sum;
    }
  }

  QF_INLINE Quantizer given(int64_t band, int64_t col_block) const {
    const int64_t i = p_.scale_index(band, col_block);
    Quantizer z;
    z.scale = p_.has_e8m0_scale() ? E8m0::decode(static_cast<const uint8_t*>(p_.scale.data)[i])
                                  : static_cast<const float*>(p_.scale.data)[i];
    if (p_.zero) z.zero = p_.zero.template row<int8_t>(band)[col_block];
    return z;
  }

  QF_INLINE void store(int64_t band, int64_t col_block, const Quantizer& z) const {
    const int64_t i = p_.scale_index(band, col_block);
    if (kind_ == ScaleKind::e8m0) static_cast<uint8_t*>(p_.scale.data)[i] = z.e8m0;
    else static_cast<float*>(p_.scale.data)[i] = z.scale;
    if (p_.zero) p_.zero.template row<int8_t>(band)[col_block] = static_cast<int8_t>(z.zero);
  }

  QF_INLINE Quantizer chosen(const Extent& e, int slices) const {
    Range ranges[kSlices];
    each_slice(e, slices, [&](int i, const Extent& s) { ranges[i] = range_of(s); });
    for (int i = 1; i < slices; ++i) ranges[0].include(ranges[i]);
    const Quantizer widest = quantizer_from_range(kind_, kCodes, ranges[0].low, ranges[0].high);
    return p_.mode == QF_SCALE_MSE ? search(e, slices, ranges[0], widest) : widest;
  }

  QF_INLINE Range range_of(const Extent& e) const {
    if constexpr (sizeof(T) == 2) {
      if (kind_ != ScaleKind::asymmetric) {
        uint32_t amax = 0;
        for (int64_t r = e.r0; r < e.r1; ++r) {
          const uint32_t of_row = largest_magnitude_bits<S>(x(r) + e.c0, e.c1 - e.c0);
          amax = of_row > amax ? of_row : amax;
        }
        if (amax <= kInfinityBits<T>) return {0.0f, to_float(T{static_cast<uint16_t>(amax)})};
      }
    }
    F low = S::zero(), high = S::zero(), low2 = S::zero(), high2 = S::zero();
    for (int64_t r = e.r0; r < e.r1; ++r) {
      const T* row = x(r);
      int64_t c = e.c0;
      for (; c + 2 * kLanes <= e.c1; c += 2 * kLanes) {
        const F v = S::load(row + c), v2 = S::load(row + c + kLanes);
        low = S::min(v, low), high = S::max(v, high);  // NaN leaves them as they are
        low2 = S::min(v2, low2), high2 = S::max(v2, high2);
      }
      for (; c < e.c1; c += kLanes) {
        const F v = S::load(row + c, e.c1 - c);
        low = S::min(v, low), high = S::max(v, high);
      }
    }
    return {S::reduce_min(S::min(low, low2)), S::reduce_max(S::max(high, high2))};
  }

  // Not inlined: rare, and 41 passes over the block dwarf a call.
  __attribute__((noinline)) Quantizer search(const Extent& e, int slices, Range range, Quantizer best) const {
    const float unit = 1.0f / best.scale;
    auto squared_error = [&](const Quantizer& z) {
      double parts[kSlices];
      each_slice(e, slices, [&](int i, const Extent& s) { parts[i] = squared_error_of(s, z, unit); });
      double sum = 0;
      for (int i = 0; i < slices; ++i) sum += parts[i];
      return sum;
    };
    double best_error = squared_error(best);
    for (int step = 1; step < kSearchSteps; ++step) {
      const float shrink = shrink_factor(step);
      const Quantizer z = quantizer_from_range(kind_, kCodes, range.low * shrink, range.high * shrink);
      const double error = squared_error(z);
      if (error < best_error) best = z, best_error = error;
    }
    return best;
  }

  QF_INLINE double squared_error_of(const Extent& e, const Quantizer& z, float unit) const {
    const F inverse = S::set1(1.0f / z.scale), ratio = S::set1(z.scale * unit), units = S::set1(unit);
    const F zero = S::set1(static_cast<float>(z.zero)), infinity = S::from_bits(S::set1(0x7f800000));
    double sum = 0;
    for (int64_t r = e.r0; r < e.r1; ++r) {
      for (int64_t begin = e.c0; begin < e.c1; begin += kRunVectors * kLanes) {
        const int64_t end = e.c1 - begin < kRunVectors * kLanes ? e.c1 : begin + kRunVectors * kLanes;
        F run = S::zero();
        for (int64_t c = begin; c < end; c += kLanes) {
          const F v = S::load(x(r) + c, end - c);
          const I code = encode_vector<S, Format>(S::mul(v, inverse), z.zero);
          const F decoded = decode_vector<S, Format>(is_fp8(Format) ? S::and_(code, S::set1(255)) : code);
          const F error = S::sub(S::mul(S::sub(decoded, zero), ratio), S::mul(v, units));
          // Numbers that are not finite do not count, nor do the lanes beyond the end.
          const F counted = S::select(S::less(S::abs(v), infinity), error, S::zero());
          const F square = S::mul(counted, counted);
          run = S::add(run, end - c < kLanes ? S::select(S::first(end - c), square, S::zero()) : square);
        }
        sum += S::reduce_add(run);
      }
    }
    return sum;
  }

  // Codes [c, c + n) of a row, n at most the lanes of a vector; c is even where two codes share a byte.
  QF_INLINE static void store_codes(uint8_t* row, int64_t c, I code, int64_t n) {
    if constexpr (is_packed_4bit(Format)) S::store_u4(row + c / 2, code, n);
    else S::store_u8(row + c, code, n);
  }

  // Columns [c0, c1) of a row. Returns the sum of integer codes. While the codes are computed the row below
  // is fetched, which is what the range of the next block needs: memory never waits for arithmetic.
  QF_INLINE int32_t encode_row(int64_t r, int64_t c0, int64_t c1, float inverse, int zero) const {
    const T* row = x(r);
    uint8_t* codes = q(r);
    if constexpr (!is_packed_4bit(Format)) {
      const T* below = row + p_.x.row_stride;
      return row_encode<S, Format>(row + c0, c1 - c0, inverse, zero, codes + c0, below + c0);
    }
    int32_t first = 0;
    if (c0 % 2 && c0 < c1) {
      // The high nibble of a byte whose low one is there already.
      const uint8_t code = encode_value(Format, to_float(row[c0]) * inverse, zero);
      store_code(Format, codes, c0, code);
      first = (code ^ 8) - 8;
      ++c0;
    }
    const F inverses = S::set1(inverse);
    I sum = S::zero_i();
    for (; c0 + kLanes <= c1; c0 += kLanes) {
      __builtin_prefetch(row + p_.x.row_stride + c0);
      const I code = encode_vector<S, Format>(S::mul(S::load(row + c0), inverses), zero);
      S::store_u4(codes + c0 / 2, code);
      if constexpr (is_integer(Format)) sum = S::add(sum, code);
    }
    if (c0 < c1) {
      const I code = encode_vector<S, Format>(S::mul(S::load(row + c0, c1 - c0), inverses), zero);
      S::store_u4(codes + c0 / 2, code, c1 - c0);
      if constexpr (is_integer(Format)) sum = S::add(sum, S::select(S::first(c1 - c0), code, S::zero_i()));
    }
    return first + S::reduce_add(sum);
  }

  // ---- Blocks of one column ----

  // Columns side by side: long enough a piece of each row for memory to stream; 8 KB of ranges and scales.
  static constexpr int64_t kStrip = 512;
  static constexpr int64_t kRowsAhead = 4;  // a row's piece takes less time than a cache line from memory

  void run_columns() const {
    const int64_t strips = ceil_div(p_.cols, kStrip);
    const int64_t grain = ceil_div(kTaskElements, p_.block.rows * kStrip);
    parallel_ranges(p_.row_blocks() * strips, grain, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t r0 = task / strips * p_.block.rows, c0 = task % strips * kStrip;
        run_strip({r0, p_.rows - r0 < p_.block.rows ? p_.rows : r0 + p_.block.rows, c0,
                   p_.cols - c0 < kStrip ? p_.cols : c0 + kStrip});
      }
    });
  }

  void run_strip(const Extent& e) const {
    alignas(64) float low[kStrip] = {}, high[kStrip] = {}, inverse[kStrip] = {};
    alignas(64) int32_t zero[kStrip] = {};
    if (!p_.is_static()) strip_range(e, low, high);
    const int64_t band = e.r0 / p_.block.rows;
    for (int64_t c = e.c0; c < e.c1; ++c) {
      const Quantizer z = p_.is_static() ? given(band, c)
                                         : quantizer_from_range(kind_, kCodes, low[c - e.c0], high[c - e.c0]);
      if (!p_.is_static()) store(band, c, z);
      inverse[c - e.c0] = 1.0f / z.scale, zero[c - e.c0] = z.zero;
    }
    for (int64_t r = e.r0; r < e.r1; ++r) {
      for (int64_t c = e.c0; c < e.c1; c += kLanes) {
        const int64_t n = e.c1 - c, i = c - e.c0;
        __builtin_prefetch(x(r) + kRowsAhead * p_.x.row_stride + c);
        const F scaled = S::mul(S::load(x(r) + c, n), S::load(inverse + i));
        const I code = encode_vector<S, Format>(scaled, S::load_i(zero + i));
        store_codes(q(r), c, code, n);
        if (p_.row_sums) S::store_i(p_.row_sums.template row<int32_t>(r) + c, code, n);
      }
    }
  }

  QF_INLINE void strip_range(const Extent& e, float* low, float* high) const {
    for (int64_t r = e.r0; r < e.r1; ++r) {
      for (int64_t c = e.c0; c < e.c1; c += kLanes) {
        __builtin_prefetch(x(r) + kRowsAhead * p_.x.row_stride + c);
        const F v = S::load(x(r) + c, e.c1 - c);
        S::store(low + (c - e.c0), S::min(v, S::load(low + (c - e.c0))));
        S::store(high + (c - e.c0), S::max(v, S::load(high + (c - e.c0))));
      }
    }
  }

  const Problem& p_;
  const ScaleKind kind_;
};

QF_INLINE Verdict accepts_rows(const Problem& p) {
  const bool is_column = p.block.cols == 1 && p.block.rows > 1;
  return Requirements().require(!is_column || p.mode != QF_SCALE_MSE,
                                "the MSE search works on blocks of more than one column");
}

template <class S>
void quantize_plain_rows(const Problem& p) {
  choose_float(p.x.dtype, [&](auto type) {
    choose_value<QF_INT8, QF_INT4, QF_FP8_E4M3, QF_FP8_E5M2, QF_FP4_E2M1, QF_NF4>(p.format, [&](auto format) {
      RowsQuantizer<S, typename decltype(type)::type, format.value>(p).run();
    });
  });
}

// Rows that are rotated are held as float32, a slab of whole bands at a time: as many as a cache holds.
inline constexpr int64_t kSlabElements = 1 << 18;

QF_INLINE int64_t slab_rows(const Problem& p) {
  const int64_t bands = kSlabElements / (p.block.rows * p.cols);
  const int64_t rows = p.block.rows * (bands < 1 ? 1 : bands);
  return rows < p.rows ? rows : p.rows;
}
// Static, so that each kernel file has its own: a shared copy could be one compiled for AVX-512.
static size_t slab_bytes(const Problem& p) {
  return p.hadamard > 0 ? static_cast<size_t>(slab_rows(p) * p.cols) * sizeof(float) : 0;
}

QF_INLINE Matrix rows_from(const Matrix& a, int64_t first, int64_t count) {
  if (!a) return a;
  return {a.row_bytes_at(first), count, a.cols, a.row_stride, a.dtype};
}

template <class S>
void quantize_rows(const Problem& p, float* slab) {
  if (p.hadamard == 0) return quantize_plain_rows<S>(p);
  const int64_t most = slab_rows(p);
  for (int64_t first = 0; first < p.rows; first += most) {
    Problem part = p;
    part.hadamard = 0;
    part.rows = p.rows - first < most ? p.rows - first : most;
    const int64_t band = first / p.block.rows, bands = ceil_div(part.rows, p.block.rows);
    part.x = {slab, part.rows, p.cols, p.cols, DType::f32};
    part.q = rows_from(p.q, first, part.rows);
    // One scale serves the tensor or its rows where there is a single band; then it is the first.
    part.scale = rows_from(p.scale, band, bands), part.zero = rows_from(p.zero, band, bands);
    part.row_sums = rows_from(p.row_sums, first, part.rows);
    const int64_t grain = ceil_div(kTaskElements, p.cols);
    choose_float(p.x.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      parallel_ranges(part.rows, grain, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          const T* from = p.x.row<T>(first + r);
          float* to = slab + r * p.cols;
          for (int64_t c = 0; c < p.cols; c += S::kLanes) {
            S::store(to + c, S::load(from + c, p.cols - c), p.cols - c);
          }
          rotate<S>(to, p.cols, p.hadamard);
        }
      });
    });
    quantize_plain_rows<S>(part);
  }
}

}  // namespace quantfuse::quantize
