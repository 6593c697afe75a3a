// SPDX-License-Identifier: Apache-2.0
//
// Stores whole rows whose values are computed on demand, on either vector type S.
#pragma once

#include "cpu/output.h"

namespace quantfuse {

// Values of a row that are held at a time: as much as half of the smallest L1 cache there is, or one group of
// up to 64 KB, which every L2 cache holds.
inline constexpr int64_t kRowStep = 4096;
inline constexpr int64_t kRowBuffer = 16384;

// `produce(col, count, values)` computes columns [col, col + count) of the row, count <= kRowBuffer. Where
// one dynamic scale covers more than the buffer, they are produced twice, for the largest magnitude and then
// for the codes: the inputs are still in a cache then, and no workspace is needed.
template <class S, class Produce>
QF_INLINE void store_row(const Output& out, int64_t row, int64_t n, const Produce& produce) {
  alignas(64) float values[kRowBuffer];
  const bool has_groups = out.is_quantized() && !out.is_static;
  if (!has_groups || out.group <= kRowBuffer) {
    int64_t step = kRowStep;
    if (has_groups) step = out.group > kRowStep ? out.group : kRowStep / out.group * out.group;
    for (int64_t col = 0; col < n; col += step) {
      const int64_t count = n - col < step ? n - col : step;
      produce(col, count, values);
      store_output<S>(out, row, col, values, count);
    }
    return;
  }
  for (int64_t begin = 0; begin < n; begin += out.group) {
    const int64_t end = n - begin < out.group ? n : begin + out.group;
    float amax = 0;
    for (int64_t col = begin; col < end; col += kRowStep) {
      const int64_t count = end - col < kRowStep ? end - col : kRowStep;
      produce(col, count, values);
      const float largest = row_amax<S>(values, count);
      amax = largest > amax ? largest : amax;
    }
    const float scale = scale_from_amax(amax, code_range(out.format).symmetric_max);
    out.scale.row<float>(row)[begin / out.group] = scale;
    uint8_t* codes = reinterpret_cast<uint8_t*>(out.y.row_bytes_at(row));
    for (int64_t col = begin; col < end; col += kRowStep) {
      const int64_t count = end - col < kRowStep ? end - col : kRowStep;
      produce(col, count, values);
      encode_floats<S>(out.format, values, count, 1.0f / scale, codes + col);
    }
  }
}

}  // namespace quantfuse
