// SPDX-License-Identifier: Apache-2.0
//
// Stores rows of finished float32 values the way an Output asks for, on either vector type S.
#pragma once

#include "core/choose.h"
#include "core/output.h"
#include "cpu/rows.h"

namespace quantfuse {

template <class S>
QF_INLINE void store_floats(const Matrix& y, int64_t row, int64_t col, const float* v, int64_t n) {
  choose_float(
      y.dtype, [&](auto type) __attribute__((always_inline)) {
        using T = typename decltype(type)::type;
        T* out = y.row<T>(row) + col;
        int64_t i = 0;
        for (; i + S::kLanes <= n; i += S::kLanes) S::store(out + i, S::load(v + i));
        if (i < n) S::store(out + i, S::load(v + i, n - i), n - i);
      });
}

template <class S>
QF_INLINE void encode_floats(qf_format format, const float* v, int64_t n, float inverse_scale,
                             uint8_t* codes) {
  choose_value<QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2>(
      format, [&](auto f)
                  __attribute__((always_inline)) { row_encode<S, f.value>(v, n, inverse_scale, 0, codes); });
}

// v holds columns [col, col + n) of `row`. Where the output has dynamic scales, the range must be whole
// groups: col a multiple of the group, and n too unless the range ends the row.
template <class S>
QF_INLINE void store_output(const Output& out, int64_t row, int64_t col, const float* v, int64_t n) {
  if (!out.is_quantized()) return store_floats<S>(out.y, row, col, v, n);
  uint8_t* codes = reinterpret_cast<uint8_t*>(out.y.row_bytes_at(row)) + col;
  if (out.is_static) {
    return encode_floats<S>(out.format, v, n, 1.0f / *static_cast<const float*>(out.scale.data), codes);
  }
  for (int64_t i = 0; i < n; i += out.group) {
    const int64_t count = n - i < out.group ? n - i : out.group;
    const float scale = scale_from_amax(row_amax<S>(v + i, count), code_range(out.format).symmetric_max);
    out.scale_at(row, (col + i) / out.group) = scale;
    encode_floats<S>(out.format, v + i, count, 1.0f / scale, codes + i);
  }
}

}  // namespace quantfuse
