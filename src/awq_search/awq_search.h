// SPDX-License-Identifier: Apache-2.0
//
// AWQ (Lin et al., 2023). With Q(v) the numbers that v becomes when it is quantized group by group:
//
//   loss(s) = sum over t, r of ( sum over c of x[t,c] d[r,c] )^2,     d[r,c] = Q(w[r,:] s)[c] / s[c] - w[r,c]
//
// of s = m^alpha, m the mean magnitudes of the channels: alpha = 0 is rounding to nearest, alpha = 1 gives
// all channels equal inputs. The least loss over the grid of alphas wins.
//
// Then, if clip is asked for, each group of w s on its own: its range is shrunk by the factor that makes
// least, over the steps of clip_factor, the squared error of the group's part of the outputs,
//
//     e H e^T,   e[c] = Q(v limited to the range)[c] - v[c],   v = w s,   H = sum over t of (x/s)^T (x/s)
//
// (of groups wider than 128 columns, the sum of that over pieces of 128).
#pragma once

#include "core/operation.h"
#include "formats/codes.h"
#include "formats/quantizer.h"

namespace quantfuse::awq_search {

struct Problem {
  Matrix weight;         // [n, k] f32 | f16 | bf16
  Matrix x;              // [t, k] f32 | f16 | bf16
  Vector act_scale;      // [k] f32; absent: mean |x|
  Vector channel_scale;  // [k] f32
  Matrix clip;           // [n, groups] f32, compact; absent: no search
  Vector loss;           // [grid + 1] f32
  CodeRange range;
  int64_t n, k, t, group, groups;
  int32_t grid;
  bool is_asymmetric;

  quantize::ScaleKind kind() const {
    return is_asymmetric ? quantize::ScaleKind::asymmetric : quantize::ScaleKind::symmetric;
  }
  int64_t piece() const { return group < kWidestPiece ? group : kWidestPiece; }
  static constexpr int64_t kWidestPiece = 128;
};

inline constexpr int kClipSteps = 11;
QF_HD constexpr float clip_factor(int step) { return 1.0f - 0.05f * static_cast<float>(step); }

// Mean magnitudes of the channels, given or those of x; all at least 1e-4 of the largest, so that no channel
// is scaled away.
void find_magnitudes(const Problem& p, float* magnitudes);
// s of alpha = i / grid.
void find_channel_scale(const Problem& p, const float* magnitudes, int32_t i, float* scale);

struct Op {
  static constexpr const char* name = "awq_search";
  using Args = qf_awq_search_args;
  using Problem = awq_search::Problem;
  static Problem parse(const Args& args, Arguments& arg);
  static bool is_empty(const Problem& p) { return p.k == 0 && !p.loss; }
  static std::span<const Kernel<Problem>* const> kernels();
};

}  // namespace quantfuse::awq_search
