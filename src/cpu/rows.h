// SPDX-License-Identifier: Apache-2.0
//
// What a kernel does with one row of numbers: find its largest magnitude, encode it. T is float, f16 or bf16.
#pragma once

#include "cpu/vector_math.h"

namespace quantfuse {

// max |x[i]|, NaN ignored; 0 for an empty row. The result does not depend on the vector length.
template <class S, class T>
QF_INLINE float row_amax(const T* x, int64_t n) {
  auto a = S::zero(), b = S::zero();
  int64_t i = 0;
  for (; i + 2 * S::kLanes <= n; i += 2 * S::kLanes) {
    a = S::max(S::abs(S::load(x + i)), a);
    b = S::max(S::abs(S::load(x + i + S::kLanes)), b);
  }
  for (; i < n; i += S::kLanes) a = S::max(S::abs(S::load(x + i, n - i)), a);
  return S::reduce_max(S::max(a, b));
}

// codes[i] = encode_value(Format, x[i] * inverse_scale, zero), one code per byte. Returns the sum of integer
// codes.
template <class S, qf_format Format, class T>
QF_INLINE int32_t row_encode(const T* x, int64_t n, float inverse_scale, int zero, uint8_t* codes) {
  const auto inverse = S::set1(inverse_scale);
  auto sum = S::zero_i();
  int64_t i = 0;
  for (; i + S::kLanes <= n; i += S::kLanes) {
    const auto code = encode_vector<S, Format>(S::mul(S::load(x + i), inverse), zero);
    S::store_u8(codes + i, code);
    if constexpr (is_integer(Format)) sum = S::add(sum, code);
  }
  if (i < n) {
    const auto code = encode_vector<S, Format>(S::mul(S::load(x + i, n - i), inverse), zero);
    S::store_u8(codes + i, code, n - i);
    if constexpr (is_integer(Format)) {
      sum = S::add(sum, S::select(S::first(n - i), code, S::zero_i()));
    }
  }
  return S::reduce_add(sum);
}

}  // namespace quantfuse
