// SPDX-License-Identifier: Apache-2.0
//
// A group of numbers, rounded to integer codes and back without leaving the registers: what searches for
// scales try many times before anything is stored. Over either vector type S; arrays are padded to whole
// vectors.
#pragma once

#include "cpu/vector_math.h"
#include "formats/quantizer.h"

namespace quantfuse::quantize {

// Codes as floats: lowest - zero .. highest - zero, times scale.
struct Rounding {
  float scale = 1.0f, inverse = 1.0f, zero = 0.0f, lowest = 0.0f, highest = 0.0f;

  QF_INLINE Rounding() {}
  QF_INLINE Rounding(const Quantizer& z, CodeRange range)
      : scale(z.scale),
        inverse(1.0f / z.scale),
        zero(static_cast<float>(z.zero)),
        lowest(static_cast<float>(range.lowest - z.zero)),
        highest(static_cast<float>(range.highest - z.zero)) {}

  // code - zero, as a whole number.
  QF_INLINE float steps(float x) const {
    const float v = x * inverse;
    const float near = v > -4194304.0f && v < 4194304.0f ? v + 12582912.0f - 12582912.0f : v;  // ties to even
    return near < lowest ? lowest : near > highest ? highest : near;
  }
  template <class S>
  QF_INLINE typename S::F rounded(typename S::F x) const {
    const auto steps = S::round(S::mul(x, S::set1(inverse)));
    return S::mul(S::min(S::max(steps, S::set1(lowest)), S::set1(highest)), S::set1(scale));
  }
};

struct Range {
  float low = 0.0f, high = 0.0f;  // low <= 0 <= high
};

template <class S>
QF_INLINE Range range_of(const float* x, int64_t count) {
  auto low = S::zero(), high = S::zero();
  for (int64_t i = 0; i < count; i += S::kLanes) {
    const auto v = S::load(x + i, count - i);
    low = S::min(v, low), high = S::max(v, high);
  }
  return {S::reduce_min(low), S::reduce_max(high)};
}

template <class S>
QF_INLINE float squared_error(const float* x, int64_t count, const Rounding& rounding) {
  auto sum = S::zero();
  for (int64_t i = 0; i < count; i += S::kLanes) {
    const auto v = S::load(x + i, count - i);
    const auto d = S::sub(rounding.template rounded<S>(v), v);
    sum = S::fma(d, d, sum);
  }
  return S::reduce_add(sum);
}

// The scale and zero point of a group, as qf_quantize finds them: from its range, or with the range shrunk to
// what makes the squared error least.
template <class S>
QF_INLINE Quantizer group_quantizer(const float* x, int64_t count, ScaleKind kind, CodeRange codes,
                                    bool is_mse) {
  const Range range = range_of<S>(x, count);
  Quantizer best = quantizer_from_range(kind, codes, range.low, range.high);
  if (!is_mse) return best;
  float least = squared_error<S>(x, count, Rounding(best, codes));
  for (int step = 1; step < kSearchSteps; ++step) {
    const float shrink = shrink_factor(step);
    const Quantizer z = quantizer_from_range(kind, codes, shrink * range.low, shrink * range.high);
    const float error = squared_error<S>(x, count, Rounding(z, codes));
    if (error < least) least = error, best = z;
  }
  return best;
}

}  // namespace quantfuse::quantize
