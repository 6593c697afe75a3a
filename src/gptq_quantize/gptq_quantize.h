// SPDX-License-Identifier: Apache-2.0
//
// GPTQ. For each row w of the weight, columns in the order they are quantized and H the damped hessian:
//
//   minimise (w - v) H (w - v)^T over the v that codes stand for. With H = R R^T, R upper triangular, that is
//
//     sum over i of  ( R[i,i] (w[i] - v[i]) + sum over j < i of R[j,i] e[j] )^2,     e[j] = w[j] - v[j]
//
// so that, going from the first column to the last, column i is rounded from
//
//     t[i] = w[i] + sum over j < i of G[j,i] e[j],     G[j,i] = R[j,i] / R[i,i]
//
// This is the algorithm of Frantar et al. (2023), which spreads each error over the columns to come by rows
// of the Cholesky factor of the inverse of H. Written this way nothing is inverted, errors are those against
// the weight as given, and the loss is the sum of (R[i,i] (t[i] - v[i]))^2.
//
// What the columns of a group would be changed to before the first of them is rounded, and hence the group's
// range, follows by letting v[j] = t[j] within the group: the errors there are then e[j] = w[j] - t[j].
#pragma once

#include "core/operation.h"
#include "formats/codes.h"
#include "formats/quantizer.h"

namespace quantfuse::gptq_quantize {

struct Problem {
  Matrix weight;   // [n, k] f32 | f16 | bf16
  Matrix hessian;  // [k, k] f32
  Matrix q;        // [n, k or ceil(k/2)] codes
  Matrix scale;    // [n, groups] f32, compact
  Matrix zero;     // i8, like scale; absent: symmetric
  Vector g_idx;    // [k] i32
  Vector loss;     // [n] f32
  qf_format format;
  CodeRange range;
  int64_t n, k, group, groups;
  qf_act_order act_order;
  bool is_mse;
  double damping;

  quantize::ScaleKind kind() const {
    return zero ? quantize::ScaleKind::asymmetric : quantize::ScaleKind::symmetric;
  }
  // Whether scales come from the weight before anything is rounded.
  bool has_static_groups() const { return act_order == QF_ACT_ORDER_STATIC || group > kWidestGroup; }
  // The group of the column that is quantized at `position`.
  int64_t group_of(int64_t position, const int32_t* order) const {
    return (act_order == QF_ACT_ORDER_STATIC ? order[position] : position) / group;
  }

  // A group is rounded within one block of columns, whose part of R is kept at hand; wider ones do not fit.
  static constexpr int64_t kWidestGroup = 256;
};

// A pivot of the factorisation smaller than this share of its diagonal is rounding noise.
inline constexpr double kSmallestPivot = 1e-11;

// The diagonal that is factored: hessian[i,i] and what damping adds; of columns that calibration has not
// seen, whose rows and columns of the hessian count as zero, the mean, which makes them independent of the
// others.
struct Diagonal {
  double added, unseen;
  bool is_unseen(const Problem& p, int64_t column) const {
    return p.hessian.row<const float>(column)[column] == 0;
  }
  double at(const Problem& p, int64_t column) const {
    return is_unseen(p, column) ? unseen : p.hessian.row<const float>(column)[column] + added;
  }
};
Diagonal diagonal_of(const Problem& p);
// The column at each position, and g_idx from it where that is asked for.
void find_order(const Problem& p, int32_t* order);
void write_g_idx(const Problem& p, const int32_t* order);
[[noreturn]] void fail_not_positive_definite(const Problem& p, int64_t column);

struct Op {
  static constexpr const char* name = "gptq_quantize";
  using Args = qf_gptq_quantize_args;
  using Problem = gptq_quantize::Problem;
  static Problem parse(const Args& args, Arguments& arg);
  static bool is_empty(const Problem& p) { return p.n == 0 && !p.g_idx; }
  static std::span<const Kernel<Problem>* const> kernels();
};

}  // namespace quantfuse::gptq_quantize
