// SPDX-License-Identifier: Apache-2.0
#include "linear_backward/linear_backward.h"

namespace quantfuse::linear_backward {

Problem Op::parse(const Args& a, Arguments& arg) {
  Problem p = {};
  p.weight = parse_weight(arg, a.weight, kWeightFormats);
  arg.require(static_cast<bool>(p.weight.codes),
              "weight.codes is missing, and the packed form serves only linear");
  Dim m{"m"}, n{"n", p.weight.n}, k{"k", p.weight.k};
  p.dy = arg.expect("dy", a.dy).shape(m, n).dtype(kFloats).matrix();
  p.dx = arg.expect("dx", a.dx).shape(m, k).dtype(kFloats).matrix();
  p.m = m, p.n = n, p.k = k;
  arg.writes("dx");
  if (arg.needs_data()) check_weight_values(arg, p.weight);
  return p;
}

}  // namespace quantfuse::linear_backward

using namespace quantfuse;
QF_DEFINE_OPERATION(qf_linear_backward, linear_backward::Op)
