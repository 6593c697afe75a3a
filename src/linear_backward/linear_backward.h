// SPDX-License-Identifier: Apache-2.0
//
// dx[m,k] = sum_n dy[m,n] * w[n,k],   w = (codes - zero) * scale
//
// The gradient with respect to the input of a linear layer, from the canonical weight. Of a gated weight it
// is the gradient through the product alone: dy has the columns of the gate and of the up half.
#pragma once

#include "core/operation.h"
#include "linear/weight.h"

namespace quantfuse::linear_backward {

struct Problem {
  Matrix dy;  // [m, n] f32 | f16 | bf16
  Weight weight;
  Matrix dx;  // [m, k] f32 | f16 | bf16
  int64_t m, n, k;
};

struct Op {
  static constexpr const char* name = "linear_backward";
  using Args = qf_linear_backward_args;
  using Problem = linear_backward::Problem;
  static Problem parse(const Args& args, Arguments& arg);
  static bool is_empty(const Problem& p) { return p.m == 0 || p.k == 0; }
  static std::span<const Kernel<Problem>* const> kernels();
};

}  // namespace quantfuse::linear_backward
