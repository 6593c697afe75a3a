// SPDX-License-Identifier: Apache-2.0
//
// RMSNorm on either vector type S. For rows of any length; bound by memory from a few hundred columns on.
//
// A thread takes whole rows, and goes over each of them twice, three times where a dynamic scale is
// wanted; only the first time comes from memory:
//   x, residual --> h --> residual, sum of squares
//   h --> h * gain / root --> scale, y
// Meanwhile the lines of y, and then the next row of x, are on their way.
#pragma once

#include "cpu/row_output.h"
#include "cpu/threads.h"
#include "rms_norm/rms_norm.h"

namespace quantfuse::rms_norm {

// Squares are summed in float32 over this many columns, and these sums in double: a lane adds at most 16
// squares, so that the error of the whole stays below 16 * 2^-24 however long the row.
inline constexpr int64_t kSumBlock = 512;

template <class S, class T>
QF_INLINE void add_to_residual(const T* x, T* residual, int64_t n) {
  int64_t i = 0;
  for (; i + S::kLanes <= n; i += S::kLanes)
    S::store(residual + i, S::add(S::load(x + i), S::load(residual + i)));
  if (i < n) S::store(residual + i, S::add(S::load(x + i, n - i), S::load(residual + i, n - i)), n - i);
}

template <class S, class T>
QF_INLINE float sum_of_squares(const T* h, int64_t n) {
  auto square_added = [](typename S::F v, typename S::F sum) __attribute__((always_inline)) {
    return S::fma(v, v, sum);
  };
  auto a = S::zero(), b = S::zero(), c = S::zero(), d = S::zero();
  int64_t i = 0;
  for (; i + 4 * S::kLanes <= n; i += 4 * S::kLanes) {
    a = square_added(S::load(h + i), a);
    b = square_added(S::load(h + i + S::kLanes), b);
    c = square_added(S::load(h + i + 2 * S::kLanes), c);
    d = square_added(S::load(h + i + 3 * S::kLanes), d);
  }
  for (; i < n; i += S::kLanes) a = square_added(S::load(h + i, n - i), a);
  return S::reduce_add(S::add(S::add(a, b), S::add(c, d)));
}

// 1 / sqrt(mean(h^2) + eps).
template <class S, class T>
QF_INLINE float inverse_root(const T* h, int64_t n, double sum, double eps) {
  const auto count = static_cast<double>(n);
  // Squares of numbers beyond 2^64 overflow float32 and those of numbers below 2^-63 vanish in it. Where that
  // may have shaped the sum, it is taken again in double.
  const bool has_lost_squares = !(sum <= 0x1p127) || sum / count + eps < 0x1p-100;
  if (has_lost_squares) {
    sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(to_float(h[i])) * to_float(h[i]);
  }
  return static_cast<float>(1.0 / __builtin_sqrt(sum / count + eps));
}

// Rotated columns, and codes of a static scale, go through a buffer.
template <class S, class At>
QF_INLINE void write_row(const Output& out, int64_t row, int64_t n, const At& at) {
  if (out.hadamard == 0 && !out.is_static) return compute_row<S>(out, row, n, at);
  store_row<S>(out, row, n, [&](int64_t col, int64_t count, float* values) {
    const auto from_col = [&](int64_t i, auto... lanes) __attribute__((always_inline)) {
      return at(col + i, lanes...);
    };
    produce_floats<S>(count, values, from_col);
  });
}

template <class S, class T>
void norm_row(const Problem& p, int64_t row) {
  const T* h = p.residual ? p.residual.row<T>(row) : p.x.row<T>(row);
  double sum = 0;
  for (int64_t col = 0; col < p.n; col += kSumBlock) {
    const int64_t count = p.n - col < kSumBlock ? p.n - col : kSumBlock;
    fetch_output(p.out, row, col, count);
    if (p.residual) add_to_residual<S>(p.x.row<T>(row) + col, p.residual.row<T>(row) + col, count);
    sum += sum_of_squares<S>(h + col, count);
  }
  const auto factor = S::set1(inverse_root<S>(h, p.n, sum, p.eps));
  const T* next = p.x.row<T>(row + 1 < p.m ? row + 1 : row);
  const auto scaled = [&](int64_t i, auto... lanes) __attribute__((always_inline)) {
    __builtin_prefetch(next + i);
    return S::mul(S::load(h + i, lanes...), factor);
  };
  if (!p.gain) return write_row<S>(p.out, row, p.n, scaled);
  choose_float(
      p.gain.dtype, [&](auto type) __attribute__((always_inline)) {
        const auto* gain = p.gain.as<typename decltype(type)::type>();
        write_row<S>(
            p.out, row, p.n, [&](int64_t i, auto... lanes) __attribute__((always_inline)) {
              return S::mul(scaled(i, lanes...), S::load(gain + i, lanes...));
            });
      });
}

template <class S>
void launch_rows(const Problem& p, const Launch&) {
  // A range below some 16k numbers is done before another thread has woken up.
  const int64_t grain = p.n >= 16384 ? 1 : ceil_div(16384, p.n);
  choose_float(
      p.x.dtype, [&](auto type) __attribute__((always_inline)) {
        parallel_ranges(p.m, grain, [&](int64_t begin, int64_t end) {
          for (int64_t row = begin; row < end; ++row) norm_row<S, typename decltype(type)::type>(p, row);
        });
      });
}

}  // namespace quantfuse::rms_norm
