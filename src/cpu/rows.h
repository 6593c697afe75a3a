// SPDX-License-Identifier: Apache-2.0
//
// What a kernel does with one row of numbers: find its largest magnitude, encode it. T is float, f16 or bf16.
#pragma once

#include "cpu/vector_math.h"

namespace quantfuse {

// The largest of x's bits without the sign: those of 16-bit floats are ordered as their magnitudes are, with
// NaN above infinity. Twice the numbers in a vector, and no conversion.
template <class S, class T>
QF_INLINE uint32_t largest_magnitude_bits(const T* x, int64_t n) {
  static_assert(sizeof(T) == 2);
  constexpr int64_t kNumbers = 2 * S::kLanes;
  const auto magnitude = S::set1(0x7fff7fff);
  auto a = S::zero_i(), b = S::zero_i();
  int64_t i = 0;
  for (; i + 2 * kNumbers <= n; i += 2 * kNumbers) {
    a = S::max_u16(a, S::and_(S::load_i(x + i), magnitude));
    b = S::max_u16(b, S::and_(S::load_i(x + i + kNumbers), magnitude));
  }
  for (; i + kNumbers <= n; i += kNumbers) a = S::max_u16(a, S::and_(S::load_i(x + i), magnitude));
  uint32_t rest = 0;
  for (; i < n; ++i) rest = (x[i].bits & 0x7fffu) > rest ? x[i].bits & 0x7fffu : rest;
  a = S::max_u16(a, b);
  const auto low_half = S::and_(a, S::set1(0xffff)), high_half = S::template shr<16>(a);
  const auto in_lanes = static_cast<uint32_t>(S::reduce_max(S::to_float(S::max(low_half, high_half))));
  return in_lanes > rest ? in_lanes : rest;
}
template <class T>
inline constexpr uint32_t kInfinityBits = std::is_same_v<T, bf16> ? 0x7f80 : 0x7c00;

// max |x[i]|, NaN ignored; 0 for an empty row. The result does not depend on the vector length.
template <class S, class T>
QF_INLINE float row_amax(const T* x, int64_t n) {
  if constexpr (sizeof(T) == 2) {
    const uint32_t amax = largest_magnitude_bits<S>(x, n);
    if (amax <= kInfinityBits<T>) return to_float(T{static_cast<uint16_t>(amax)});
  }
  auto a = S::zero(), b = S::zero();
  int64_t i = 0;
  for (; i + 2 * S::kLanes <= n; i += 2 * S::kLanes) {
    a = S::max(S::abs(S::load(x + i)), a);
    b = S::max(S::abs(S::load(x + i + S::kLanes)), b);
  }
  for (; i < n; i += S::kLanes) a = S::max(S::abs(S::load(x + i, n - i)), a);
  return S::reduce_max(S::max(a, b));
}

// values[i] = at(i), a vector at a time; at(i, n) where only the first n of its lanes count.
template <class S, class At>
QF_INLINE void produce_floats(int64_t n, float* values, const At& at) {
  int64_t i = 0;
  for (; i + S::kLanes <= n; i += S::kLanes) S::store(values + i, at(i));
  if (i < n) S::store(values + i, at(i, n - i), n - i);
}

// The largest of |at(i)|, NaN ignored. Lanes that do not count are 0.
template <class S, class At>
QF_INLINE float largest_magnitude(int64_t n, const At& at) {
  auto a = S::zero(), b = S::zero();
  int64_t i = 0;
  for (; i + 2 * S::kLanes <= n; i += 2 * S::kLanes) {
    a = S::max(S::abs(at(i)), a);
    b = S::max(S::abs(at(i + S::kLanes)), b);
  }
  for (; i < n; i += S::kLanes) a = S::max(S::abs(at(i, n - i)), a);
  return S::reduce_max(S::max(a, b));
}

// codes[i] = encode_value(Format, x[i] * inverse_scale, zero), one code per byte. Returns the sum of integer
// codes. Meanwhile as many numbers are fetched from `ahead` on, wherever that is.
template <class S, qf_format Format, class T>
QF_INLINE int32_t row_encode(const T* x, int64_t n, float inverse_scale, int zero, uint8_t* codes,
                             const T* ahead = nullptr) {
  const auto inverse = S::set1(inverse_scale);
  auto sum = S::zero_i();
  int64_t i = 0;
  if constexpr (std::is_same_v<T, bf16>) {
    // Two numbers to a lane: either half becomes a float by one instruction, and two codes are stored by one.
    for (; i + 2 * S::kLanes <= n; i += 2 * S::kLanes) {
      if (ahead) __builtin_prefetch(ahead + i);
      const auto pairs = S::load_i(x + i);
      const auto even = S::from_bits(S::template shl<16>(pairs));
      const auto odd = S::from_bits(S::and_(pairs, S::set1(static_cast<int32_t>(0xffff0000u))));
      const auto first = encode_vector<S, Format>(S::mul(even, inverse), zero);
      const auto second = encode_vector<S, Format>(S::mul(odd, inverse), zero);
      S::store_u16(codes + i, S::merge_bits(S::set1(0xff), first, S::template shl<8>(second)));
      if constexpr (is_integer(Format)) sum = S::add(sum, S::add(first, second));
    }
  }
  for (; i + S::kLanes <= n; i += S::kLanes) {
    if (ahead) __builtin_prefetch(ahead + i);
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
