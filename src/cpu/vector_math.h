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

// 2^x: the nearest whole number i, and 2^r of the rest, |r| <= 1/2, by the polynomial of degree 5 whose
// largest relative error there is least, 1.05e-7. Below -126 the result is 0 to within the smallest normal,
// above 128.1 infinity.
template <class S>
QF_INLINE typename S::F vector_exp2(typename S::F x) {
  using F = typename S::F;
  x = S::min(S::max(x, S::set1(-126.0f)), S::set1(128.5f));
  const F i = S::round(x), r = S::sub(x, i);
  F p = S::set1(1.3300257e-03f);
  p = S::fma(p, r, S::set1(9.6697096e-03f));
  p = S::fma(p, r, S::set1(5.5505599e-02f));
  p = S::fma(p, r, S::set1(2.4022281e-01f));
  p = S::fma(p, r, S::set1(6.9314718e-01f));
  p = S::fma(p, r, S::set1(1.0f));
  return S::times_power_of_2(p, i);
}

inline constexpr float kLog2e = 1.44269504f;

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
  const F e = vector_exp2<S>(S::mul(S::mul(a, S::set1(-kLog2e)), a));
  const F magnitude = S::fnma(S::mul(p, t), e, S::set1(1.0f));
  const auto sign = S::and_(S::bits(x), S::set1(static_cast<int32_t>(0x80000000u)));
  return S::from_bits(S::or_(S::bits(magnitude), sign));
}

// x * sigmoid(y), y given as -y log2(e), for the two activations that are a sigmoid: NaN stays NaN, and a
// huge negative x goes to 0, since e^-y is infinity there.
template <class S>
QF_INLINE typename S::F times_sigmoid(typename S::F x, typename S::F minus_y_log2e) {
  return S::div(x, S::add(S::set1(1.0f), vector_exp2<S>(minus_y_log2e)));
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
      constexpr float kLinear = -1.5957691216f * kLog2e, kCubic = -0.0713548163f * kLog2e;
      return times_sigmoid<S>(x, S::mul(x, S::fma(x2, S::set1(kCubic), S::set1(kLinear))));
    }
    case QF_SILU: return times_sigmoid<S>(x, S::mul(x, S::set1(-kLog2e)));
    default: return x;
  }
}

// SmallFloat::encode on vectors; the code is each lane's lowest 8 bits, those above it are anything. One
// rounding serves normal and subnormal results: next to `magic`, which is 2^23 steps of the format at this
// magnitude, the sum's last place is one step. A few steps more, an even number so that ties stay ties to
// even, take off where the exponents of normal numbers begin.
// kFits: no finite x is beyond the largest by more than rounding.
template <class S, int E, int M, int Bias, uint32_t Largest, bool HasNan, bool kFits = false>
QF_INLINE typename S::I encode_small(typename S::F x) {
  using I = typename S::I;
  constexpr int kDropped = 23 - M, kSmallestNormal = (128 - Bias) << 23;
  constexpr int kFirstExponent = 256 - (kSmallestNormal >> kDropped) % 256;
  static_assert(kFirstExponent % 2 == 0);
  const auto largest =
      S::set1(float_from_bits((Largest << kDropped) + (static_cast<uint32_t>(127 - Bias) << 23)));
  const auto a = kFits ? S::abs(x) : S::min(S::abs(x), largest);
  const I exponent = S::max(S::and_(S::bits(a), S::set1(0x7f800000)), S::set1(kSmallestNormal));
  const I magic = S::add(exponent, S::set1((kDropped << 23) + kFirstExponent));
  const I steps = S::bits(S::add(a, S::from_bits(magic)));  // up to 2^(M+1)
  const I magnitude = S::add(steps, S::template shr<kDropped>(exponent));
  const I code = S::merge_bits(S::set1(1 << (E + M)), S::template shr<31 - E - M>(S::bits(x)), magnitude);
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

// The same for numbers of a block that are divided by its dynamic scale, which all fit, or are NaN; of
// infinities this knows nothing. The code is each lane's lowest 8 bits: those of what NaN is converted to are
// 0, the code that NaN has.
template <class S, qf_format Format>
QF_INLINE typename S::I encode_fitting(typename S::F x) {
  if constexpr (Format == QF_INT8) return S::to_int(x);
  if constexpr (Format == QF_FP8_E4M3) return encode_small<S, 4, 3, 7, 0x7e, true, true>(x);
  if constexpr (Format == QF_FP8_E5M2) return encode_small<S, 5, 2, 15, 0x7b, true, true>(x);
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
