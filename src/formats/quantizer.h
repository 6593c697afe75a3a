// SPDX-License-Identifier: Apache-2.0
//
// How a block's range becomes its scale and zero point, and the candidates of the MSE search. Shared by every
// kernel and by the writers of checkpoints, so that all of them choose among the same scales.
#pragma once

#include "formats/codes.h"

namespace quantfuse::quantize {

struct Quantizer {
  float scale = 1.0f;
  int zero = 0;
  uint8_t e8m0 = 0;  // the scale's code, where it is stored so
};

enum class ScaleKind { symmetric, asymmetric, e8m0 };

// For values within [low, high], low <= 0 <= high. Infinite ends count as the largest finite number.
QF_HD Quantizer quantizer_from_range(ScaleKind kind, CodeRange range, float low, float high) {
  const float largest = float_from_bits(0x7f7fffffu), smallest = float_from_bits(0x00800000u);
  low = low < -largest ? -largest : low;
  high = high > largest ? largest : high;
  const float amax = high < -low ? -low : high;
  Quantizer z;
  if (kind == ScaleKind::e8m0) {
    z.e8m0 = e8m0_from_amax(amax, range.emax);
    z.scale = E8m0::decode(z.e8m0);
  } else if (kind == ScaleKind::symmetric) {
    z.scale = scale_from_amax(amax, range.symmetric_max);
  } else {
    // The halves are divided before they are added: high - low may overflow.
    const float steps = static_cast<float>(range.highest - range.lowest);
    const float scale = high / steps - low / steps;
    z.scale = scale < smallest ? smallest : scale;
    const int zero = round_saturate(-low * (1.0f / z.scale), -512, 512) + range.lowest;
    z.zero = zero > range.highest ? range.highest : zero;  // never below the lowest, as -low >= 0
  }
  return z;
}

// The range shrunk to 1.00, 0.99, ... 0.60 of itself. Normal data lose least near 0.85 at 4 bits and near 1
// at 8; below 0.6 the clipped tail always costs more than the finer step gains.
inline constexpr int kSearchSteps = 41;
QF_HD constexpr float shrink_factor(int step) { return 1.0f - 0.01f * static_cast<float>(step); }

}  // namespace quantfuse::quantize
