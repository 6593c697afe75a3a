// SPDX-License-Identifier: Apache-2.0
//
// Vector functions over either vector type S: exponential, activation functions, encoding into 8-bit and
// 4-bit floats.
#pragma once

#include <utility>

#include "core/dtype.h"
#include "formats/codes.h"

#define QF_INLINE inline __attribute__((always_inline))

namespace quantfuse {

// Calls body(std::integral_constant<int, K>) for K = 0 .. N - 1. Not a loop: the compiler keeps an array of
// vectors in registers only if every index into it is a constant before it starts to unroll loops.
template <int N, class Body>
QF_INLINE void unrolled(const Body& body) {
  [&]<int... K>(std::integer_sequence<int, K...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, K>{}), ...);
  }
  (std::make_integer_sequence<int, N>{});
}

// e^x within 4 units in the last place: x = i ln 2 + r with |r| <= ln 2 / 2, e^r by the polynomial of degree
// 5 whose largest relative error there is least, 1.05e-7. Below -87.3 the result is 0 to within the smallest
// normal, above 88.8 infinity.
template <class S>
QF_INLINE typename S::F vector_exp(typename S::F x) {
  using F = typename S::F;
  x = S::min(S::max(x, S::set1(-87.3365f)), S::set1(89.0f));
  const F i = S::round(S::mul(x, S::set1(1.44269504f)));
  F r = S::fnma(i, S::set1(0.693359375f), x);  // ln 2 in two parts, the first exact in few bits
  r = S::fnma(i, S::set1(-2.12194440e-4f), r);
  F p = S::set1(8.312520571e-03f);
  p = S::fma(p, r, S::set1(4.189011827e-02f));
  p = S::fma(p, r, S::set1(1.666711420e-01f));
  p = S::fma(p, r, S::set1(4.999923110e-01f));
  p = S::fma(p, r, S::set1(1.0f));
  p = S::fma(p, r, S::set1(1.0f));
  return S::times_power_of_2(p, i);
}

// erf by Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7, a rounding error of float32 at 1.
template <class S>
QF_INLINE typename S::F vector_erf(typename S::F x) {
  using F = typename S::F;
  const F a = S::abs(x);
  const F t = S::div(S::set1(1.0f), S::fma(a, S::set1(0.3275911f), S::set1(1.0f)));
  F p = S::set1(1.061405429f);
  p = S::fma(p, t, S::set1(-1.453152027f));
  p = S::fma(p, t, S::set1(1.421413741f));
  p = S::fma(p, t, S::set1(-0.284496736f));
  p = S::fma(p, t, S::set1(0.254829592f));
  const F e = vector_exp<S>(S::sub(S::zero(), S::mul(a, a)));
  const F magnitude = S::fnma(S::mul(p, t), e, S::set1(1.0f));
  const auto sign = S::and_(S::bits(x), S::set1(static_cast<int32_t>(0x80000000u)));
  return S::from_bits(S::or_(S::bits(magnitude), sign));
}

// x * sigmoid(y) for the two activations that are a sigmoid: NaN stays NaN, and a huge negative x goes to 0,
// since e^-y is infinity there.
template <class S>
QF_INLINE typename S::F times_sigmoid(typename S::F x, typename S::F y) {
  return S::div(x, S::add(S::set1(1.0f), vector_exp<S>(S::sub(S::zero(), y))));
}

template <class S>
QF_INLINE typename S::F activate(qf_activation kind, typename S::F x) {
  switch (kind) {
    case QF_RELU: return S::max(S::zero(), x);  // NaN stays: max gives its second operand
    case QF_GELU: {
      const auto half = S::mul(x, S::set1(0.5f));
      return S::fma(half, vector_erf<S>(S::mul(x, S::set1(0.70710678f))), half);
    }
    case QF_GELU_TANH: {  // 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
      const auto x2 = S::mul(x, x);
      const auto inner = S::mul(x, S::fma(x2, S::set1(0.0713548163f), S::set1(1.5957691216f)));
      return times_sigmoid<S>(x, inner);
    }
    case QF_SILU: return times_sigmoid<S>(x, x);
    default: return x;
  }
}

// SmallFloat::encode on vectors; the code is in each lane's low bits. One rounding serves normal and
// subnormal results: next to `magic`, which is 2^23 steps of the format at this magnitude, the sum's last
// place is one step.
template <class S, int E, int M, int Bias, uint32_t Largest, bool HasNan>
QF_INLINE typename S::I encode_small(typename S::F x) {
  using I = typename S::I;
  constexpr int kDropped = 23 - M, kSmallestNormal = (128 - Bias) << 23;
  const auto largest =
      S::set1(float_from_bits((Largest << kDropped) + (static_cast<uint32_t>(127 - Bias) << 23)));
  const auto a = S::min(S::abs(x), largest);
  const I exponent = S::max(S::and_(S::bits(a), S::set1(0x7f800000)), S::set1(kSmallestNormal));
  const I magic = S::add(exponent, S::set1(kDropped << 23));
  const I steps = S::sub(S::bits(S::add(a, S::from_bits(magic))), magic);  // up to 2^(M+1)
  const I magnitude = S::add(steps, S::template shr<kDropped>(S::sub(exponent, S::set1(kSmallestNormal))));
  const I sign = S::and_(S::template shr<31 - E - M>(S::bits(x)), S::set1(1 << (E + M)));
  const I code = S::or_(sign, magnitude);
  return S::select(S::is_nan(x), HasNan ? S::set1((1 << (E + M)) - 1) : S::zero_i(), code);
}

template <class S>
QF_INLINE typename S::I encode_int(typename S::F x, typename S::I zero, int lowest, int highest) {
  // Clamped before the conversion, which knows no larger numbers; NaN gives 0.
  const auto low = S::to_float(S::sub(S::set1(lowest), zero)),
             high = S::to_float(S::sub(S::set1(highest), zero));
  const auto q = S::add(S::to_int(S::min(S::max(x, low), high)), zero);
  return S::select(S::is_nan(x), S::zero_i(), q);
}

template <class S>
QF_INLINE typename S::I encode_nf4(typename S::F x) {
  auto code = S::select(S::is_nan(x), S::set1(static_cast<int>(kNf4Zero)), S::zero_i());
  for (int i = 0; i < 15; ++i) {
    code = S::add(code, S::select(S::less(S::set1(nf4_midpoint(i)), x), S::set1(1), S::zero_i()));
  }
  return code;
}

// encode_value of formats/codes.h on vectors, with a zero point for each lane or one for all.
template <class S, qf_format Format>
QF_INLINE typename S::I encode_vector(typename S::F x, typename S::I zero) {
  if constexpr (Format == QF_INT8) return encode_int<S>(x, zero, -128, 127);
  if constexpr (Format == QF_INT4) return encode_int<S>(x, zero, -8, 7);
  if constexpr (Format == QF_FP8_E4M3) return encode_small<S, 4, 3, 7, 0x7e, true>(x);
  if constexpr (Format == QF_FP8_E5M2) return encode_small<S, 5, 2, 15, 0x7b, true>(x);
  if constexpr (Format == QF_FP4_E2M1) return encode_small<S, 2, 1, 1, 0x7, false>(x);
  if constexpr (Format == QF_NF4) return encode_nf4<S>(x);
}
template <class S, qf_format Format>
QF_INLINE typename S::I encode_vector(typename S::F x, int zero) {
  return encode_vector<S, Format>(x, S::set1(zero));
}

// The values of FP8 codes, one per 32-bit lane. Their bits, moved to an f16's place, are the value times 2^-8
// (e4m3) or itself (e5m2); the conversion treats subnormals exactly.
template <class S, qf_format Format>
QF_INLINE typename S::F decode_fp8(typename S::I code) {
  if constexpr (Format == QF_FP8_E5M2) return S::f16_lanes_to_float(S::template shl<8>(code));
  const auto magnitude = S::and_(code, S::set1(0x7f));
  const auto sign = S::template shl<8>(S::and_(code, S::set1(0x80)));
  const auto value =
      S::mul(S::f16_lanes_to_float(S::or_(sign, S::template shl<7>(magnitude))), S::set1(256.0f));
  const auto nan = S::from_bits(S::or_(S::bits(value), S::set1(0x7fc00000)));
  return S::select(S::equal(magnitude, S::set1(0x7f)), nan, value);
}

// decode_at of formats/codes.h on vectors: one code per lane, INT8 sign-extended, of the 4-bit formats the
// low 4 bits.
template <class S, qf_format Format>
QF_INLINE typename S::F decode_vector(typename S::I code) {
  if constexpr (Format == QF_INT8) return S::to_float(code);
  if constexpr (Format == QF_INT4) {
    return S::to_float(S::sub(S::xor_(S::and_(code, S::set1(15)), S::set1(8)), S::set1(8)));
  }
  if constexpr (is_fp8(Format)) return decode_fp8<S, Format>(code);
  if constexpr (Format == QF_FP4_E2M1 || Format == QF_NF4) {
    return S::lookup(S::table16(kValuesOf<Format>.values), code);
  }
}

}  // namespace quantfuse
