// SPDX-License-Identifier: Apache-2.0
#include "quantize/quantize.h"

#include "core/block.h"

namespace quantfuse::quantize {

Problem Op::parse(const Args& a, Arguments& arg) {
  Problem p = {};
  Dim rows{"rows"}, cols{"cols"};
  p.x = arg.expect("x", a.x).shape(rows, cols).dtype(kFloats).matrix();
  p.rows = rows, p.cols = cols;
  p.device = arg.device();

  check_format(arg, "format", a.format, {QF_INT8, QF_INT4, QF_FP8_E4M3, QF_FP8_E5M2, QF_FP4_E2M1, QF_NF4});
  p.format = a.format;
  arg.require(a.scale_mode >= QF_SCALE_DYNAMIC && a.scale_mode <= QF_SCALE_MSE,
              "scale_mode is unknown, expected dynamic, static or mse");
  p.mode = a.scale_mode;
  p.block = resolve_block(arg, "block", a.block, p.rows, p.cols);

  Dim code_cols{"code bytes", row_bytes(p.format, p.cols)};
  p.q = arg.expect("q", a.q).shape(rows, code_cols).codes(p.format).matrix();
  p.hadamard = check_hadamard(arg, "hadamard", a.hadamard, p.cols);
  p.scale_col_stride = 1;
  const auto scale_types = {DType::f32, DType::e8m0, DType::u8};
  if (p.is_static()) {
    p.scale = expect_scale(arg, "scale", a.scale, p.block, p.rows, p.cols, scale_types);
    check_scale_values(arg, "scale", p.scale);
  } else {
    p.scale = expect_scale_or_transposed(arg, "scale", a.scale, p.block, p.rows, p.cols, scale_types,
                                         p.scale_col_stride);
  }

  if (a.zero) {
    arg.require(is_integer(p.format), "zero is given, and floating formats have no zero points");
    arg.require(!p.has_e8m0_scale(), "zero is given with an e8m0 scale, expected an f32 scale");
    p.zero = expect_scale(arg, "zero", a.zero, p.block, p.rows, p.cols, {DType::i8});
  }
  if (a.row_sums) {
    arg.require(is_integer(p.format), "row_sums is given, and only integer codes are summed");
    Dim col_blocks{"column blocks", p.scale.cols};
    p.row_sums =
        arg.expect("row_sums", a.row_sums).shape_squeezed(rows, col_blocks).dtype({DType::i32}).compact();
    arg.writes("row_sums");
  }
  arg.writes("q");
  if (!p.is_static()) {
    arg.writes("scale");
    if (p.zero) arg.writes("zero");
  }
  return p;
}

}  // namespace quantfuse::quantize

using namespace quantfuse;
QF_DEFINE_OPERATION(qf_quantize, quantize::Op)
