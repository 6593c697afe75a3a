// SPDX-License-Identifier: Apache-2.0
//
// Activation functions of numbers in registers. The switch stands around the loop: all threads of a launch
// take the same way.
#pragma once

#include "cuda/ptx/math.h"
#include "formats/numbers.h"
#include "quantfuse/quantfuse.h"

namespace quantfuse {

// x sigmoid(u) is x / (1 + 2^y): of SiLU y = -log2(e) x; of GELU's tanh form y = x (linear + cubic x^2), with
// u = 2 sqrt(2/pi) (x + 0.044715 x^3).
inline constexpr float kLog2E = 1.44269504f, kGeluTanhLinear = -2.3022082f, kGeluTanhCubic = -0.10294324f;

// x / (1 + 2^y); 0 where 2^y overflows.
__device__ __forceinline__ float over_one_plus_exp2(float x, float y) {
  return x * ptx::reciprocal_approx(1.0f + ptx::exp2_approx(y));
}

// x Phi(x) by Abramowitz and Stegun 7.1.26 for erfc, absolute error below 1.5e-7: with q = erfc(|x| / sqrt 2)
// / 2 it is x q for negative x and x (1 - q) for others, so that nothing cancels.
__device__ __forceinline__ float gelu(float x) {
  const float z = 0.70710678f * fabsf(x);
  const float t = ptx::reciprocal_approx(fmaf(0.3275911f, z, 1.0f));
  float p = fmaf(1.061405429f, t, -1.453152027f);
  p = fmaf(p, t, 1.421413741f);
  p = fmaf(p, t, -0.284496736f);
  p = fmaf(p, t, 0.254829592f);
  const float q = 0.5f * p * t * ptx::exp2_approx(-kLog2E * z * z);
  return x * (x < 0 ? q : 1.0f - q);
}

template <int kCount>
__device__ __forceinline__ void activate(qf_activation kind, float (&x)[kCount]) {
  switch (kind) {
    case QF_RELU:
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = x[i] < 0 ? 0.0f : x[i];  // NaN stays
      return;
    case QF_GELU:
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = gelu(x[i]);
      return;
    case QF_GELU_TANH:
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        x[i] = over_one_plus_exp2(x[i], x[i] * fmaf(kGeluTanhCubic, x[i] * x[i], kGeluTanhLinear));
      }
      return;
    case QF_SILU:
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = over_one_plus_exp2(x[i], -kLog2E * x[i]);
      return;
    default: return;
  }
}

}  // namespace quantfuse
