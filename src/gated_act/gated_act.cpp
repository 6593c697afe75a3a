// SPDX-License-Identifier: Apache-2.0
#include "gated_act/gated_act.h"

namespace quantfuse::gated_act {

Problem Op::parse(const Args& a, Arguments& arg) {
  Problem p = {};
  Dim m{"m"}, both{"2n"};
  p.x = arg.expect("x", a.x).shape(m, both).dtype(kFloats).matrix();
  if (both % 2 != 0) {
    arg.fail("x has " + std::to_string(both) +
             " columns, expected an even number: n of the gate and n of the up half");
  }
  Dim n{"n", both / 2};
  p.m = m, p.n = n;
  arg.require(a.activation >= QF_IDENTITY && a.activation <= QF_SILU,
              "activation is unknown, expected identity, relu, gelu, gelu_tanh or silu");
  p.activation = a.activation;
  p.out = parse_output(arg, {a.y, a.out_format, a.out_mode, a.out_group, a.out_scale}, m, n);
  return p;
}

}  // namespace quantfuse::gated_act

using namespace quantfuse;
QF_DEFINE_OPERATION(qf_gated_act, gated_act::Op)
