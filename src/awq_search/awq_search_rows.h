// SPDX-License-Identifier: Apache-2.0
//
// awq_search over either vector type S. The inputs are transposed once. For each alpha, a tile of rows at a
// time:
//
//   w --scale, round, unscale--> d [24, k] --add_product with x^T [k, 512 of t]--> squares, summed
//
// Rows are divided among the threads, and each row's loss is summed in an order of its own, so that results
// are the same for every number of threads.
#pragma once

#include "awq_search/awq_search.h"
#include "core/element.h"
#include "cpu/product.h"
#include "cpu/threads.h"
#include "quantize/round_group.h"

namespace quantfuse::awq_search {

inline constexpr int64_t kTileRows = 24, kTileInputs = 512, kTileDepth = 256;
inline constexpr int64_t kBuffers = 32;  // tiles in work at a time, and hence threads; any does any row alike

template <class S>
struct Workspace {
  float* x;                // [k][x_stride]: x transposed, behind it zeros
  float* magnitudes;       // [k]
  float *scale, *inverse;  // [k]: s of the alpha at hand, and 1 / s
  double* losses;          // [n]
  float* buffers;          // each d [rows][k_stride] and outputs [rows][inputs]
  float* squares;          // [pieces][piece][piece_stride]: H of each piece of a group
  int64_t x_stride, k_stride, piece_stride, num_tiles;

  QF_INLINE explicit Workspace(const Problem& p)
      : x_stride(round_up(p.t, kProductCols<S>) + 16),
        k_stride(round_up(p.k, 16) + 16),
        piece_stride(round_up(p.piece(), S::kLanes)),
        num_tiles(ceil_div(p.n, kTileRows)) {}

  QF_INLINE static int64_t pieces_of_group(const Problem& p) { return ceil_div(p.group, p.piece()); }
  QF_INLINE int64_t buffer_floats() const { return kTileRows * (k_stride + kTileInputs); }

  QF_INLINE size_t place(const Problem& p, char* base) {
    size_t used = 0;
    auto take = [&](auto*& array, int64_t count) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(base + used);
      used += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(*array)), 64));
    };
    take(x, p.k * x_stride);
    take(magnitudes, p.k);
    take(scale, p.k);
    take(inverse, p.k);
    take(losses, p.n);
    take(buffers, kBuffers * buffer_floats());
    take(squares, p.clip ? p.groups * pieces_of_group(p) * p.piece() * piece_stride : 0);
    return used;
  }
};

template <class S>
class RowsAwq {
 public:
  QF_INLINE RowsAwq(const Problem& p, const Launch& launch) : p_(p), w_(p) {
    w_.place(p, static_cast<char*>(launch.workspace));
  }

  QF_INLINE void run() {
    find_magnitudes(p_, w_.magnitudes);
    parallel_ranges(p_.k, 64, [&](int64_t c0, int64_t c1) { transpose(c0, c1); });
    int32_t best = 0;
    double least = 0;
    for (int32_t i = 0; i <= p_.grid; ++i) {
      const double loss = loss_of(i);
      if (p_.loss) p_.loss.as<float>()[i] = static_cast<float>(loss);
      if (i == 0 || loss < least) best = i, least = loss;
    }
    set_scale(best);
    __builtin_memcpy(p_.channel_scale.data, w_.scale, static_cast<size_t>(p_.k) * sizeof(float));
    if (!p_.clip) return;
    parallel_ranges(p_.groups, 1, [&](int64_t g0, int64_t g1) { sum_squares(g0, g1); });
    each_tile([&](int64_t r0, int64_t r1, float* buffer) { clip_rows(r0, r1, buffer); });
  }

 private:
  QF_INLINE int64_t columns_of(int64_t g) const {
    const int64_t first = g * p_.group;
    return p_.k - first < p_.group ? p_.k - first : p_.group;
  }

  QF_INLINE void set_scale(int32_t i) {
    find_channel_scale(p_, w_.magnitudes, i, w_.scale);
    for (int64_t c = 0; c < p_.k; ++c) w_.inverse[c] = 1.0f / w_.scale[c];
  }

  __attribute__((noinline)) void transpose(int64_t c0, int64_t c1) const {
    for (int64_t c = c0; c < c1; ++c) {
      float* row = w_.x + c * w_.x_stride;
      for (int64_t t = 0; t < w_.x_stride; ++t) row[t] = t < p_.t ? float_at(p_.x, t, c) : 0.0f;
    }
  }

  QF_INLINE double loss_of(int32_t i) {
    set_scale(i);
    each_tile([&](int64_t r0, int64_t r1, float* buffer) { tile_loss(r0, r1, buffer); });
    double sum = 0;
    for (int64_t r = 0; r < p_.n; ++r) sum += w_.losses[r];
    return sum;
  }

  // body(first row, last row, a buffer of its own) for each tile.
  template <class Body>
  QF_INLINE void each_tile(const Body& body) const {
    const int64_t buffers = w_.num_tiles < kBuffers ? w_.num_tiles : kBuffers;
    parallel_ranges(buffers, 1, [&](int64_t b0, int64_t b1) {
      for (int64_t b = b0; b < b1; ++b) {
        float* buffer = w_.buffers + b * w_.buffer_floats();
        for (int64_t t = w_.num_tiles * b / buffers; t < w_.num_tiles * (b + 1) / buffers; ++t) {
          const int64_t r0 = t * kTileRows, r1 = p_.n - r0 < kTileRows ? p_.n : r0 + kTileRows;
          body(r0, r1, buffer);
        }
      }
    });
  }

  // d of one row.
  QF_INLINE void row_errors(int64_t r, float* d) const {
    for (int64_t c = 0; c < p_.k; ++c) d[c] = float_at(p_.weight, r, c);
    for (int64_t g = 0; g < p_.groups; ++g) {
      const int64_t first = g * p_.group, count = columns_of(g);
      auto low = S::zero(), high = S::zero();
      for (int64_t c = first; c < first + count; c += S::kLanes) {
        const int64_t left = first + count - c;
        const auto v = S::mul(S::load(d + c, left), S::load(w_.scale + c, left));
        low = S::min(v, low), high = S::max(v, high);
      }
      const quantize::Rounding round(
          quantize::quantizer_from_range(p_.kind(), p_.range, S::reduce_min(low), S::reduce_max(high)),
          p_.range);
      for (int64_t c = first; c < first + count; c += S::kLanes) {
        const int64_t left = first + count - c;
        const auto v = S::load(d + c, left);
        const auto rounded = round.template rounded<S>(S::mul(v, S::load(w_.scale + c, left)));
        S::store(d + c, S::sub(S::mul(rounded, S::load(w_.inverse + c, left)), v), left);
      }
    }
  }

  __attribute__((noinline)) void tile_loss(int64_t r0, int64_t r1, float* d) const {
    const int64_t rows = r1 - r0;
    float* outputs = d + kTileRows * w_.k_stride;
    for (int64_t r = 0; r < rows; ++r) {
      row_errors(r0 + r, d + r * w_.k_stride);
      w_.losses[r0 + r] = 0;
    }
    const int64_t padded = round_up(p_.t, kProductCols<S>);
    for (int64_t t = 0; t < padded; t += kTileInputs) {
      const int64_t inputs = padded - t < kTileInputs ? padded - t : kTileInputs;
      __builtin_memset(outputs, 0, static_cast<size_t>(rows * kTileInputs) * sizeof(float));
      for (int64_t c = 0; c < p_.k; c += kTileDepth) {
        add_product<S>({d + c, w_.k_stride, w_.x + c * w_.x_stride + t, w_.x_stride, outputs, kTileInputs,
                        rows, inputs, p_.k - c < kTileDepth ? p_.k - c : kTileDepth});
      }
      for (int64_t r = 0; r < rows; ++r) {
        auto sum = S::zero();
        for (int64_t i = 0; i < inputs; i += S::kLanes) {
          const auto y = S::load(outputs + r * kTileInputs + i);
          sum = S::fma(y, y, sum);
        }
        w_.losses[r0 + r] += S::reduce_add(sum);
      }
    }
  }

  QF_INLINE float* squares_of(int64_t piece) const {
    return w_.squares + piece * p_.piece() * w_.piece_stride;
  }

  // H of the pieces of groups [g0, g1); rows and columns past the piece's end are zero.
  __attribute__((noinline)) void sum_squares(int64_t g0, int64_t g1) const {
    const int64_t per_group = w_.pieces_of_group(p_);
    for (int64_t piece = g0 * per_group; piece < g1 * per_group; ++piece) {
      const int64_t begin = piece / per_group * p_.group, in_group = piece % per_group * p_.piece();
      const int64_t left = columns_of(piece / per_group) - in_group;
      const int64_t count = left < 0 ? 0 : left < p_.piece() ? left : p_.piece();
      float* squares = squares_of(piece);
      __builtin_memset(squares, 0, static_cast<size_t>(p_.piece() * w_.piece_stride) * sizeof(float));
      for (int64_t i = 0; i < count; ++i) {
        const int64_t a = begin + in_group + i;
        for (int64_t j = 0; j <= i; ++j) {
          const int64_t b = begin + in_group + j;
          auto sum = S::zero();
          for (int64_t t = 0; t < p_.t; t += S::kLanes)
            sum = S::fma(S::load(w_.x + a * w_.x_stride + t), S::load(w_.x + b * w_.x_stride + t), sum);
          const float value = S::reduce_add(sum) * w_.inverse[a] * w_.inverse[b];
          squares[i * w_.piece_stride + j] = squares[j * w_.piece_stride + i] = value;
        }
      }
    }
  }

  // e H e^T over one piece; e is zero behind its end.
  QF_INLINE float piece_error(const float* e, const float* squares) const {
    auto total = S::zero();
    for (int64_t j = 0; j < w_.piece_stride; j += S::kLanes) {
      auto sum = S::zero();
      for (int64_t i = 0; i < p_.piece(); ++i)
        sum = S::fma(S::set1(e[i]), S::load(squares + i * w_.piece_stride + j), sum);
      total = S::fma(sum, S::load(e + j), total);
    }
    return S::reduce_add(total);
  }

  // The error of a group's part of the outputs with its range at `factor` of itself.
  QF_INLINE float clipped_error(const float* v, int64_t g, quantize::Range range, float factor) const {
    const float limit = factor * (range.high < -range.low ? -range.low : range.high);
    const float low = range.low < -limit ? -limit : range.low, high = range.high > limit ? limit : range.high;
    const quantize::Rounding round(quantize::quantizer_from_range(p_.kind(), p_.range, low, high), p_.range);
    const int64_t count = columns_of(g), per_group = w_.pieces_of_group(p_);
    float error = 0;
    for (int64_t piece = 0; piece * p_.piece() < count; ++piece) {
      alignas(64) float e[Problem::kWidestPiece] = {};
      const int64_t begin = piece * p_.piece(), end = count - begin < p_.piece() ? count : begin + p_.piece();
      for (int64_t c = begin; c < end; c += S::kLanes) {
        const auto x = S::load(v + c, end - c);
        const auto limited = S::min(S::max(x, S::set1(low)), S::set1(high));
        S::store(e + (c - begin), S::sub(round.template rounded<S>(limited), x), end - c);
      }
      error += piece_error(e, squares_of(g * per_group + piece));
    }
    return error;
  }

  __attribute__((noinline)) void clip_rows(int64_t r0, int64_t r1, float* v) const {
    for (int64_t r = r0; r < r1; ++r) {
      for (int64_t g = 0; g < p_.groups; ++g) {
        const int64_t first = g * p_.group, count = columns_of(g);
        for (int64_t c = 0; c < count; ++c) v[c] = float_at(p_.weight, r, first + c) * w_.scale[first + c];
        const quantize::Range range = quantize::range_of<S>(v, count);
        float best = clip_factor(0), least = clipped_error(v, g, range, best);
        for (int step = 1; step < kClipSteps; ++step) {
          const float error = clipped_error(v, g, range, clip_factor(step));
          if (error < least) least = error, best = clip_factor(step);
        }
        p_.clip.row<float>(r)[g] = best * (range.high < -range.low ? -range.low : range.high);
      }
    }
  }

  const Problem& p_;
  Workspace<S> w_;
};

template <class S>
QF_INLINE size_t rows_workspace_bytes(const Problem& p) {
  return Workspace<S>(p).place(p, nullptr);
}

template <class S>
QF_INLINE void launch_rows(const Problem& p, const Launch& launch) {
  RowsAwq<S>(p, launch).run();
}

}  // namespace quantfuse::awq_search
