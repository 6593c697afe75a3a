// SPDX-License-Identifier: Apache-2.0
#include "gated_act/gated_act.h"

namespace quantfuse::gated_act {

Problem Op::parse(const Args& a, Arguments& arg) {
  Problem p = {};
  p.is_gated = a.is_ungated == 0;
  Dim m{"m"}, columns{p.is_gated ? "2n" : "n"};
  p.x = arg.expect("x", a.x).shape(m, columns).dtype(kFloats).matrix();
  if (p.is_gated && columns % 2 != 0) {
    arg.fail("x has " + std::to_string(columns) +
             " columns, expected an even number: n of the gate and n of the up half");
  }
  Dim n{"n", p.is_gated ? columns / 2 : columns};
  p.m = m, p.n = n;
  arg.require(a.activation >= QF_IDENTITY && a.activation <= QF_SILU,
              "activation is unknown, expected identity, relu, gelu, gelu_tanh or silu");
  p.activation = a.activation;
  p.out =
      parse_rotated_output(arg, {a.y, a.out_format, a.out_mode, a.out_group, a.out_scale}, a.hadamard, m, n);
  p.device = arg.device();
  return p;
}

}  // namespace quantfuse::gated_act

using namespace quantfuse;
QF_DEFINE_OPERATION(qf_gated_act, gated_act::Op)
