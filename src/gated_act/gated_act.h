// SPDX-License-Identifier: Apache-2.0
//
// y[r,c] = quantize( act(x[r,c]) * x[r,n+c] ), or quantize( act(x[r,c]) )
#pragma once

#include "core/operation.h"
#include "core/output.h"

namespace quantfuse::gated_act {

struct Problem {
  Matrix x;  // [m, 2n] f32 | f16 | bf16: the gate, then what it gates; [m, n] where nothing is gated
  bool is_gated;
  qf_activation activation;
  Output out;
  int64_t m, n;
  qf_device device;
};

struct Op {
  static constexpr const char* name = "gated_act";
  using Args = qf_gated_act_args;
  using Problem = gated_act::Problem;
  static Problem parse(const Args& args, Arguments& arg);
  static bool is_empty(const Problem& p) { return p.m == 0 || p.n == 0; }
  static std::span<const Kernel<Problem>* const> kernels();
};

}  // namespace quantfuse::gated_act
