// SPDX-License-Identifier: Apache-2.0
//
// h[r,c] = x[r,c] + residual[r,c], rounded to the type of x and written back to residual
// y[r,c] = quantize( h[r,c] * gain[c] / sqrt(sum_c h[r,c]^2 / n + eps) )
#pragma once

#include "core/operation.h"
#include "core/output.h"

namespace quantfuse::rms_norm {

struct Problem {
  Matrix x;         // [m, n] f32 | f16 | bf16
  Matrix residual;  // [m, n], type of x, read and written; absent: h = x
  Vector gain;      // [n] f32 | f16 | bf16; absent: 1
  double eps;
  Output out;
  int64_t m, n;
  qf_device device;
};

struct Op {
  static constexpr const char* name = "rms_norm";
  using Args = qf_rms_norm_args;
  using Problem = rms_norm::Problem;
  static Problem parse(const Args& args, Arguments& arg);
  static bool is_empty(const Problem& p) { return p.m == 0 || p.n == 0; }
  static std::span<const Kernel<Problem>* const> kernels();
};

}  // namespace quantfuse::rms_norm
