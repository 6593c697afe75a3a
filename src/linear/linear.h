// SPDX-License-Identifier: Apache-2.0
//
// y = quantize( act( sum_k x[m,k] * w[n,k] + bias[n] ) [* up] + residual ), w = (q - zero) * scale + offset
//
// Where act_format is given, x is first quantized per row or per row and group of columns, or comes so; where
// x_gain is, x is first x * x_gain / sqrt(sum_k x^2 / k + x_eps).
#pragma once

#include "core/kernel.h"
#include "core/operation.h"
#include "core/output.h"
#include "linear/packed.h"
#include "linear/packed_strips.h"
#include "linear/weight.h"

namespace quantfuse::linear {

struct Problem {
  int64_t m, n, k;       // n: rows of the weight
  int64_t n_out;         // columns of y: n, or n / 2 where the weight is gated
  Matrix x;              // [m, k] f32 | f16 | bf16, or codes
  Matrix x_scale;        // [m, ceil(k / act_group)] f32; present where x holds codes
  qf_format act_format;  // NONE: x as it is
  int64_t act_group;     // resolved; k for a whole row
  Vector x_gain;         // [k] floats; optional
  double x_eps;
  Weight weight;
  Vector bias;  // [n] floats; optional
  qf_activation activation;
  Matrix residual;  // [m, n_out] floats; optional
  Output out;
  PackedView packed;              // of weight.packed on the CPU, where it fits
  const char* not_packed_reason;  // why it does not
  StripView strips;               // of weight.packed on a CUDA device
  Matrix x_sums;                  // of groups of x, where a step before made them: linear_sums_first_sm75.cu
  qf_device device;
  bool batch_invariant;    // the bits of a row of y do not depend on m
  bool fast_accumulation;  // FP8 sums may stay in the tensor cores for all of k

  QF_HD bool has_act_quant() const { return act_format != QF_FORMAT_NONE; }
  QF_HD bool is_whole_row_act() const { return act_group >= k; }
  QF_HD bool is_gated() const { return weight.is_gated; }
  // y is the sums themselves.
  bool is_plain_sum() const { return !is_gated() && !bias && activation == QF_IDENTITY && !residual; }
};

struct Op {
  static constexpr const char* name = "linear";
  using Args = qf_linear_args;
  using Problem = linear::Problem;
  static Problem parse(const Args& args, Arguments& arg);
  static bool is_empty(const Problem& p) { return p.m == 0 || p.n_out == 0; }
  static std::span<const Kernel<Problem>* const> kernels();
};

}  // namespace quantfuse::linear
