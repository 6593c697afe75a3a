// SPDX-License-Identifier: Apache-2.0
#include "gptq_quantize/gptq_quantize.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/block.h"
#include "quantize/integer_range.h"

namespace quantfuse::gptq_quantize {
namespace {

constexpr double kDefaultDamping = 0.01;

void check_diagonal(const Arguments& arg, const Problem& p) {
  if (arg.device().type != QF_CPU || !arg.needs_data()) return;
  for (int64_t i = 0; i < p.k; ++i) {
    const float value = p.hessian.row<const float>(i)[i];
    if (value < 0) {
      arg.fail("hessian has the value " + std::to_string(value) + " at (" + std::to_string(i) + ", " +
               std::to_string(i) + "), and a sum of squares is not negative");
    }
  }
}

}  // namespace

Problem Op::parse(const Args& a, Arguments& arg) {
  Problem p = {};
  Dim n{"n"}, k{"k"};
  p.weight = arg.expect("weight", a.weight).shape(n, k).dtype(kFloats).matrix();
  p.hessian = arg.expect("hessian", a.hessian).shape(k, k).dtype({DType::f32}).matrix();
  p.n = n, p.k = k;
  p.format = a.format;
  p.range = quantize::parse_integer_range(arg, a.format, a.bits);
  const qf_block block = resolve_block(arg, "group", {1, a.group}, p.n, p.k);
  p.group = block.cols, p.groups = ceil_div(p.k, p.group);
  arg.require(a.scale_mode == QF_SCALE_DYNAMIC || a.scale_mode == QF_SCALE_MSE,
              "scale_mode is neither dynamic nor MSE");
  p.is_mse = a.scale_mode == QF_SCALE_MSE;
  arg.require(a.act_order >= QF_ACT_ORDER_NONE && a.act_order <= QF_ACT_ORDER_STATIC,
              "act_order is none of the orders");
  p.act_order = a.act_order;
  arg.require(std::isfinite(a.damping) && a.damping >= 0, "damping is negative or not finite");
  p.damping = a.damping == 0 ? kDefaultDamping : a.damping;

  Dim code_cols{"code bytes", row_bytes(p.format, p.k)};
  p.q = arg.expect("q", a.q).shape(n, code_cols).codes(p.format).matrix();
  p.scale = expect_scale(arg, "scale", a.scale, block, p.n, p.k, {DType::f32});
  if (a.zero) p.zero = expect_scale(arg, "zero", a.zero, block, p.n, p.k, {DType::i8});
  arg.require((a.g_idx != nullptr) == (p.act_order == QF_ACT_ORDER_GROUP),
              "g_idx goes with act_order QF_ACT_ORDER_GROUP, and only with it");
  if (a.g_idx) p.g_idx = arg.expect("g_idx", a.g_idx).shape(k).dtype({DType::i32}).vector();
  if (a.loss) p.loss = arg.expect("loss", a.loss).shape(n).dtype({DType::f32}).vector();
  for (const char* output : {"q", "scale"}) arg.writes(output);
  if (a.zero) arg.writes("zero");
  if (a.g_idx) arg.writes("g_idx");
  if (a.loss) arg.writes("loss");

  quantize::check_finite(arg, "weight", p.weight);
  quantize::check_finite(arg, "hessian", p.hessian);
  check_diagonal(arg, p);
  return p;
}

Diagonal diagonal_of(const Problem& p) {
  double sum = 0;
  for (int64_t i = 0; i < p.k; ++i) sum += p.hessian.row<const float>(i)[i];
  const double mean = sum / static_cast<double>(p.k);
  return {p.damping * mean, mean > 0 ? mean : 1.0};
}

void find_order(const Problem& p, int32_t* order) {
  std::iota(order, order + p.k, 0);
  if (p.act_order == QF_ACT_ORDER_NONE) return;
  std::stable_sort(order, order + p.k, [&p](int32_t a, int32_t b) {
    return p.hessian.row<const float>(a)[a] > p.hessian.row<const float>(b)[b];
  });
}

void write_g_idx(const Problem& p, const int32_t* order) {
  if (!p.g_idx) return;
  for (int64_t i = 0; i < p.k; ++i) p.g_idx.as<int32_t>()[order[i]] = static_cast<int32_t>(i / p.group);
}

void fail_not_positive_definite(const Problem& p, int64_t column) {
  fail_argument("gptq_quantize: hessian is not positive definite at column " + std::to_string(column) +
                " with damping " + std::to_string(p.damping) +
                ": expected a sum of x^T x; where it is one, more inputs or more damping make it definite");
}

}  // namespace quantfuse::gptq_quantize

using namespace quantfuse;
QF_DEFINE_OPERATION(qf_gptq_quantize, gptq_quantize::Op)
