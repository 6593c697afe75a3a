// SPDX-License-Identifier: Apache-2.0
//
// Stores whole rows whose values are computed on demand, on either vector type S.
#pragma once

#include "core/kernel.h"
#include "cpu/hadamard.h"
#include "cpu/output.h"

namespace quantfuse {

// Values of a row that are held at a time: as much as half of the smallest L1 cache there is, or one group of
// up to 64 KB, which every L2 cache holds.
inline constexpr int64_t kRowStep = 4096;
inline constexpr int64_t kRowBuffer = 16384;

// The columns of a row that are produced at a time, in whole groups and whole rotated runs of columns; 0:
// that is more than the buffer holds.
QF_INLINE int64_t row_step(const Output& out, int64_t n) {
  const bool has_groups = out.is_quantized() && !out.is_static;
  int64_t whole = has_groups ? out.group : 1;
  while (out.hadamard > 0 && whole < n && whole % out.hadamard != 0) whole *= 2;  // powers of two at most
  if (whole > n) whole = n;
  return whole > kRowBuffer ? 0 : whole > kRowStep ? whole : kRowStep / whole * whole;
}

QF_INLINE Verdict accepts_row_output(const Output& out, int64_t n) {
  return Requirements().require(
      out.hadamard == 0 || row_step(out, n) > 0 || (out.group >= n && out.hadamard <= kRowBuffer),
      "a buffer does not hold whole groups of rotated columns");
}

// Fetches columns [col, col + count) of a row of y, which are written later: stores to lines that are not
// there yet would wait for one after the other.
QF_INLINE void fetch_output(const Output& out, int64_t row, int64_t col, int64_t count) {
  const int64_t bytes = dtype_bytes(out.y.dtype);
  const char* to = out.y.row_bytes_at(row) + col * bytes;
  for (int64_t at = 0; at < count * bytes; at += 64) __builtin_prefetch(to + at, 1, 3);
}

// `produce(col, count, values)` computes columns [col, col + count) of the row, count <= kRowBuffer. Where
// one dynamic scale covers more than the buffer, they are produced twice, for the largest magnitude and then
// for the codes: the inputs are still in a cache then, and no workspace is needed.
template <class S, class Produce>
QF_INLINE void store_row(const Output& out, int64_t row, int64_t n, const Produce& produce_plain) {
  alignas(64) float values[kRowBuffer];
  auto produce = [&](int64_t col, int64_t count, float* to) __attribute__((always_inline)) {
    produce_plain(col, count, to);
    if (out.hadamard > 0) rotate<S>(to, count, out.hadamard);
  };
  if (const int64_t step = row_step(out, n); step > 0) {
    for (int64_t col = 0; col < n; col += step) {
      const int64_t count = n - col < step ? n - col : step;
      produce(col, count, values);
      store_output<S>(out, row, col, values, count);
    }
    return;
  }
  const int64_t chunk = out.hadamard > kRowStep ? out.hadamard : kRowStep;
  for (int64_t begin = 0; begin < n; begin += out.group) {
    const int64_t end = n - begin < out.group ? n : begin + out.group;
    float amax = 0;
    for (int64_t col = begin; col < end; col += chunk) {
      const int64_t count = end - col < chunk ? end - col : chunk;
      produce(col, count, values);
      const float largest = row_amax<S>(values, count);
      amax = largest > amax ? largest : amax;
    }
    const float scale = scale_from_amax(amax, code_range(out.format).symmetric_max);
    out.scale_at(row, begin / out.group) = scale;
    uint8_t* codes = reinterpret_cast<uint8_t*>(out.y.row_bytes_at(row));
    for (int64_t col = begin; col < end; col += chunk) {
      const int64_t count = end - col < chunk ? end - col : chunk;
      produce(col, count, values);
      encode_floats<S>(out.format, values, count, 1.0f / scale, codes + col);
    }
  }
}

// A row of values that are cheap to compute: at(i) is a vector of them, at(i, n) one of which only the
// first n lanes count. Where a scale has to be known first they are computed twice, which costs less than
// to keep them: the inputs of a row fill a good part of the L1 cache.
template <class S, class At>
QF_INLINE void compute_row(const Output& out, int64_t row, int64_t n, const At& at) {
  uint8_t* codes = reinterpret_cast<uint8_t*>(out.y.row_bytes_at(row));
  if (!out.is_quantized()) {
    return choose_float(
        out.y.dtype, [&](auto type) __attribute__((always_inline)) {
          auto* y = out.y.row<typename decltype(type)::type>(row);
          int64_t i = 0;
          for (; i + S::kLanes <= n; i += S::kLanes) S::store(y + i, at(i));
          if (i < n) S::store(y + i, at(i, n - i), n - i);
        });
  }
  for (int64_t begin = 0; begin < n; begin += out.group) {
    const int64_t count = n - begin < out.group ? n - begin : out.group;
    const auto of_group = [&](int64_t i, auto... lanes) __attribute__((always_inline)) {
      return at(begin + i, lanes...);
    };
    const float largest = largest_magnitude<S>(count, of_group);
    out.scale_at(row, begin / out.group) =
        encode_block<S>(out.format, count, of_group, largest, codes + begin);
  }
}

}  // namespace quantfuse
