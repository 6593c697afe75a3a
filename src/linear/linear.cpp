// SPDX-License-Identifier: Apache-2.0
#include "linear/linear.h"

#include "core/block.h"

namespace quantfuse::linear {

Problem Op::parse(const Args& a, Arguments& arg) {
  Problem p = {};
  p.weight = parse_weight(arg, a.weight);
  p.n = p.weight.n, p.k = p.weight.k, p.n_out = p.weight.n_out();

  // The input: numbers, to be quantized or not, or codes with their scales.
  Dim m{"m"}, k{"k", p.k}, n{"n", p.n}, n_out{p.weight.is_gated ? "n/2" : "n", p.n_out};
  check_format(arg, "act_format", a.act_format, {QF_FORMAT_NONE, QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2});
  p.act_format = a.act_format;
  arg.require(!p.has_act_quant() || !is_plain(p.weight.format),
              "act_format is given, and the weight is not quantized");
  arg.require(a.act_group >= 0, "act_group is negative, expected 0 (the whole row) or more");
  arg.require(p.has_act_quant() || a.act_group == 0, "act_group is given, but act_format is none");
  auto x = arg.expect("x", a.x);
  x.shape(m, k);
  p.m = m;
  p.act_group = resolve_block(arg, "act_group", {1, a.act_group}, p.m, p.k).cols;
  if (a.x_scale) {
    arg.require(p.has_act_quant(), "x_scale is given, but act_format is none");
    p.x = x.codes(p.act_format).matrix();
    p.x_scale = expect_scale(arg, "x_scale", a.x_scale, {1, p.act_group}, p.m, p.k, {DType::f32});
    check_scale_values(arg, "x_scale", p.x_scale);
  } else {
    p.x = x.dtype(kFloats).matrix();
  }

  if (a.x_gain) {
    arg.require(!p.has_act_quant(), "x_gain is given, and x is quantized or to be quantized");
    arg.require(a.x_eps >= 0, "x_eps is negative or NaN");
    const Vector gain = arg.expect("x_gain", a.x_gain).shape(k).dtype(kFloats).vector();
    if (p.k > 0) p.x_gain = gain, p.x_eps = a.x_eps;  // or there is nothing to normalize
  }
  if (a.bias) p.bias = arg.expect("bias", a.bias).shape(n).dtype(kFloats).vector();
  arg.require(a.activation >= QF_IDENTITY && a.activation <= QF_SILU, "activation is unknown");
  p.activation = a.activation;
  if (a.residual) p.residual = arg.expect("residual", a.residual).shape(m, n_out).dtype(kFloats).matrix();
  p.out = parse_output(arg, {a.y, a.out_format, a.out_mode, a.out_group, a.out_scale}, m, n_out, "residual");
  arg.require(!p.residual || p.residual.data != p.out.y.data || p.residual.data == nullptr ||
                  (p.residual.dtype == p.out.y.dtype && p.residual.row_stride == p.out.y.row_stride),
              "residual shares y's memory with another type or stride");

  p.batch_invariant = a.batch_invariant != 0;
  p.fast_accumulation = a.fast_accumulation != 0;
  p.device = arg.device();
  if (p.device.type == QF_CPU) {
    const PackedCheck check = view_packed(p.weight);
    p.packed = check.view;
    p.not_packed_reason = check.reason;
    if (p.weight.packed && check.reason) arg.fail(check.reason);
  } else {
    p.strips = view_strips(arg, p.weight);
  }
  return p;
}

}  // namespace quantfuse::linear

using namespace quantfuse;
QF_DEFINE_OPERATION(qf_linear, linear::Op)
