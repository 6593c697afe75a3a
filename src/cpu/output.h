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

// The codes of a block of n numbers, whose largest magnitude is `amax`. A vector of them is at(i), or
// at(i, n) where only the first n lanes count. Returns its scale.
template <class S, class At>
QF_INLINE float encode_block(qf_format format, int64_t n, const At& at, float amax, uint8_t* codes) {
  const float scale = scale_from_amax(amax, code_range(format).symmetric_max);
  const auto inverse = S::set1(1.0f / scale);
  const auto encode = [&](const auto& code_of) __attribute__((always_inline)) {
    int64_t i = 0;
    for (; i + S::kLanes <= n; i += S::kLanes) S::store_u8(codes + i, code_of(S::mul(at(i), inverse)));
    if (i < n) S::store_u8(codes + i, code_of(S::mul(at(i, n - i), inverse)), n - i);
  };
  const bool has_infinity = float_bits(amax) == 0x7f800000;
  choose_value<QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2>(
      format, [&](auto f) __attribute__((always_inline)) {
        constexpr qf_format kFormat = decltype(f)::value;
        if (has_infinity) {
          encode([](auto x) __attribute__((always_inline)) { return encode_vector<S, kFormat>(x, 0); });
        } else {
          encode([](auto x) __attribute__((always_inline)) { return encode_fitting<S, kFormat>(x); });
        }
      });
  return scale;
}

// Numbers at v, for the above.
template <class S>
QF_INLINE auto vectors_at(const float* v) {
  return [v](int64_t i, auto... n) __attribute__((always_inline)) { return S::load(v + i, n...); };
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
    out.scale_at(row, (col + i) / out.group) =
        encode_block<S>(out.format, count, vectors_at<S>(v + i), row_amax<S>(v + i, count), codes + i);
  }
}

}  // namespace quantfuse
