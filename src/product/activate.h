// SPDX-License-Identifier: Apache-2.0
//
// The functions of cuda/activation.h one number at a time, for epilogues that keep a tile in registers: a
// switch in every unit would cut the epilogue into pieces too small to overlap.
#pragma once

#include <type_traits>

#include "cuda/activation.h"

namespace quantfuse::product {

enum class Act { identity, sigmoid, other };

template <Act kAct>
struct Activate {
  float linear, cubic;  // v / (1 + 2^(v (linear + cubic v^2))): SiLU, and GELU's tanh form
  bool is_relu;

  __device__ explicit Activate(qf_activation kind)
      : linear(kind == QF_SILU ? -kLog2E : kGeluTanhLinear),
        cubic(kind == QF_SILU ? 0.0f : kGeluTanhCubic),
        is_relu(kind == QF_RELU) {}
  __device__ __forceinline__ float operator()(float v) const {
    if constexpr (kAct == Act::identity) return v;
    else if constexpr (kAct == Act::sigmoid) return over_one_plus_exp2(v, v * fmaf(cubic, v * v, linear));
    else return is_relu ? (v < 0 ? 0.0f : v) : gelu(v);  // NaN stays
  }
};

// body(Act), known to the compiler.
template <class Body>
__device__ __forceinline__ void with_act(qf_activation kind, const Body& body) {
  if (kind == QF_IDENTITY) body(std::integral_constant<Act, Act::identity>{});
  else if (kind == QF_SILU || kind == QF_GELU_TANH) body(std::integral_constant<Act, Act::sigmoid>{});
  else body(std::integral_constant<Act, Act::other>{});
}

}  // namespace quantfuse::product
