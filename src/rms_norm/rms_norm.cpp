// SPDX-License-Identifier: Apache-2.0
#include "rms_norm/rms_norm.h"

#include <cmath>

namespace quantfuse::rms_norm {

Problem Op::parse(const Args& a, Arguments& arg) {
  Problem p = {};
  Dim m{"m"}, n{"n"};
  p.x = arg.expect("x", a.x).shape(m, n).dtype(kFloats).matrix();
  p.m = m, p.n = n;
  if (a.residual) p.residual = arg.expect("residual", a.residual).shape(m, n).dtype({p.x.dtype}).matrix();
  if (a.gain) p.gain = arg.expect("gain", a.gain).shape(n).dtype(kFloats).vector();
  if (!std::isfinite(a.eps) || a.eps < 0) {
    arg.fail("eps is " + std::to_string(a.eps) + ", expected a finite number of 0 or more");
  }
  p.eps = a.eps;
  p.out =
      parse_rotated_output(arg, {a.y, a.out_format, a.out_mode, a.out_group, a.out_scale}, a.hadamard, m, n);
  p.device = arg.device();
  if (p.residual) arg.writes("residual");
  return p;
}

}  // namespace quantfuse::rms_norm

using namespace quantfuse;
QF_DEFINE_OPERATION(qf_rms_norm, rms_norm::Op)
