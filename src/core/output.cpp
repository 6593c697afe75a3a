// SPDX-License-Identifier: Apache-2.0
#include "core/output.h"

#include "core/block.h"

namespace quantfuse {

namespace {

Output parse(Arguments& arg, const OutputArgs& a, Dim& m, Dim& n, const char* y_may_be,
             bool may_be_transposed) {
  Output out;
  out.format = a.format;
  if (a.format == QF_FORMAT_NONE) {
    out.y = arg.expect("y", a.y).shape(m, n).dtype(kFloats).matrix();
    arg.require(a.scale == nullptr, "out_scale is given, but out_format is none");
    arg.writes("y", y_may_be);
    return out;
  }
  check_format(arg, "out_format", a.format, {QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2});
  out.y = arg.expect("y", a.y).shape(m, n).codes(a.format).matrix();
  arg.require(a.mode == QF_SCALE_DYNAMIC || a.mode == QF_SCALE_STATIC,
              "out_mode is unknown, expected dynamic or static");
  out.is_static = a.mode == QF_SCALE_STATIC;
  arg.require(a.group >= 0, "out_group is negative, expected 0 (the whole row) or more");
  out.group = resolve_block(arg, "out_group", {1, a.group}, m, n).cols;
  if (out.is_static) {
    Dim one{"1", 1}, also_one{"1", 1};
    out.scale = arg.expect("out_scale", a.scale).shape_squeezed(one, also_one).dtype({DType::f32}).compact();
    check_scale_values(arg, "out_scale", out.scale);
  } else {
    const qf_block block = {1, out.group};
    out.scale = may_be_transposed ? expect_scale_or_transposed(arg, "out_scale", a.scale, block, m, n,
                                                               {DType::f32}, out.scale_col_stride)
                                  : expect_scale(arg, "out_scale", a.scale, block, m, n, {DType::f32});
    arg.writes("out_scale");
  }
  arg.writes("y", y_may_be);
  return out;
}

}  // namespace

Output parse_output(Arguments& arg, const OutputArgs& a, Dim& m, Dim& n, const char* y_may_be) {
  return parse(arg, a, m, n, y_may_be, /*may_be_transposed=*/false);
}

Output parse_rotated_output(Arguments& arg, const OutputArgs& a, int64_t hadamard, Dim& m, Dim& n) {
  Output out = parse(arg, a, m, n, nullptr, /*may_be_transposed=*/true);
  out.hadamard = check_hadamard(arg, "hadamard", hadamard, n);
  arg.require(hadamard == 0 || out.is_quantized(), "hadamard is given, but out_format is none");
  return out;
}

}  // namespace quantfuse
