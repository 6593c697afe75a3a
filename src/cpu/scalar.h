// SPDX-License-Identifier: Apache-2.0
//
// What the reference kernels share: activation functions, and the output of a row as written in the
// formula. Scalar and for baseline code only; the vector kernels have cpu/output.h.
#pragma once

#include <cmath>

#include "core/element.h"
#include "core/output.h"
#include "formats/codes.h"
#include "formats/hadamard.h"

namespace quantfuse {

inline double activate_scalar(qf_activation kind, double x) {
  constexpr double kSqrtHalf = 0.70710678118654752440, kSqrtTwoOverPi = 0.79788456080286535588;
  switch (kind) {
    case QF_RELU: return x < 0 ? 0 : x;                        // NaN stays
    case QF_GELU: return 0.5 * x * std::erfc(-x * kSqrtHalf);  // Phi(x) without the cancellation of 1 + erf
    case QF_GELU_TANH:  // 0.5 x (1 + tanh(u)) = x sigmoid(2u), again without the cancellation
      return x / (1 + std::exp(-2 * kSqrtTwoOverPi * (x + 0.044715 * x * x * x)));
    case QF_SILU: return x / (1 + std::exp(-x));
    default: return x;
  }
}

// `values` is the whole row, rotated in place where the output asks for it.
inline void store_output_scalar(const Output& out, int64_t row, float* values) {
  const int64_t n = out.y.cols;
  if (out.hadamard > 0) rotate_scalar(values, n, out.hadamard);
  if (!out.is_quantized()) {
    for (int64_t c = 0; c < n; ++c) set_float(out.y, row, c, values[c]);
    return;
  }
  for (int64_t begin = 0; begin < n; begin += out.group) {
    const int64_t end = n - begin < out.group ? n : begin + out.group;
    float scale = 0;
    if (out.is_static) {
      scale = *static_cast<const float*>(out.scale.data);
    } else {
      float amax = 0;
      for (int64_t c = begin; c < end; ++c) {
        const float magnitude = values[c] < 0 ? -values[c] : values[c];
        if (magnitude > amax) amax = magnitude;  // false for NaN
      }
      scale = scale_from_amax(amax, code_range(out.format).symmetric_max);
      out.scale_at(row, begin / out.group) = scale;
    }
    const float inverse = 1.0f / scale;
    for (int64_t c = begin; c < end; ++c) {
      store_code(out.format, out.y.row_bytes_at(row), c, encode_value(out.format, values[c] * inverse, 0));
    }
  }
}

}  // namespace quantfuse
