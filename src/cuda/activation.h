// SPDX-License-Identifier: Apache-2.0
//
// Activation functions of numbers in registers. The switch stands around the loop: all threads of a launch
// take the same way.
#pragma once

#include "formats/numbers.h"
#include "quantfuse/quantfuse.h"

namespace quantfuse {

template <int kCount>
__device__ __forceinline__ void activate(qf_activation kind, float (&x)[kCount]) {
  switch (kind) {
    case QF_RELU:
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = x[i] < 0 ? 0.0f : x[i];  // NaN stays
      return;
    case QF_GELU:
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = 0.5f * x[i] * erfcf(-0.70710678f * x[i]);  // 1 + erf cancels
      return;
    case QF_GELU_TANH:  // x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float u = 0.79788456f * fmaf(0.044715f * x[i] * x[i], x[i], x[i]);
        x[i] = __fdividef(x[i], 1.0f + __expf(-2.0f * u));
      }
      return;
    case QF_SILU:
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = __fdividef(x[i], 1.0f + __expf(-x[i]));
      return;
    default: return;
  }
}

}  // namespace quantfuse
