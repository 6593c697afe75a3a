// SPDX-License-Identifier: Apache-2.0
#include "dequantize/dequantize.h"

#include "core/block.h"

namespace quantfuse::dequantize {
Problem Op::parse(const Args& a, Arguments& arg) {
  Problem p = {};
  Dim rows{"rows"}, cols{"cols"};
  p.x = arg.expect("x", a.x).shape(rows, cols).dtype(kFloats).matrix();
  p.rows = rows, p.cols = cols;

  check_format(arg, "format", a.format, kWeightFormats);
  p.format = a.format;
  p.block = resolve_block(arg, "block", a.block, p.rows, p.cols);
  Dim code_cols{"code bytes", row_bytes(p.format, p.cols)};
  p.q = arg.expect("q", a.q).shape(rows, code_cols).codes(p.format).matrix();

  const auto scale_types = {DType::f32, DType::e8m0, DType::u8};
  p.scale = expect_scale(arg, "scale", a.scale, p.block, p.rows, p.cols, scale_types);
  check_scales_of(arg, "scale", p.format, p.scale);
  if (a.zero) {
    arg.require(is_integer(p.format), "zero is given, and floating formats have no zero points");
    p.zero = expect_scale(arg, "zero", a.zero, p.block, p.rows, p.cols, {DType::i8, DType::f32});
  }
  if (a.offset) {
    arg.require(is_integer(p.format), "offset is given, and floating formats have no offsets");
    p.offset = expect_scale(arg, "offset", a.offset, p.block, p.rows, p.cols, {DType::f32});
  }
  if (a.g_idx) {
    p.g_idx = arg.expect("g_idx", a.g_idx).shape(cols).dtype({DType::i32}).vector();
    check_groups(arg, "g_idx", p.g_idx, p.col_blocks());
  }
  arg.writes("x");
  return p;
}

}  // namespace quantfuse::dequantize

using namespace quantfuse;
QF_DEFINE_OPERATION(qf_dequantize, dequantize::Op)
