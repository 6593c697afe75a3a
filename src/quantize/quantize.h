// SPDX-License-Identifier: Apache-2.0
//
// q[r,c] = saturate( round(x[r,c] * (1 / scale[R,C])) + zero[R,C] ),   R = r / block.rows, C = c / block.cols
#pragma once

#include "core/expect.h"
#include "core/kernel.h"
#include "core/operation.h"
#include "formats/codes.h"
#include "formats/quantizer.h"

namespace quantfuse::quantize {

struct Problem {
  Matrix x;         // [rows, cols] f32 | f16 | bf16
  Matrix q;         // [rows, cols or ceil(cols/2)] codes
  Matrix scale;     // [row blocks, col blocks] f32 | e8m0; see scale_index()
  Matrix zero;      // i8, like scale; absent: symmetric
  Matrix row_sums;  // [rows, col blocks] i32; absent: not wanted
  qf_format format;
  qf_scale_mode mode;
  int64_t scale_col_stride = 1;  // not 1: scale lies in memory as [col blocks, row blocks]
  int64_t hadamard;              // columns that are rotated together before they are quantized; 0: none
  qf_block block;                // whole dimensions resolved: never 0 where the matrix is not empty
  int64_t rows, cols;
  qf_device device;

  QF_HD bool is_static() const { return mode == QF_SCALE_STATIC; }
  QF_HD bool has_e8m0_scale() const { return scale.dtype != DType::f32; }
  QF_HD ScaleKind scale_kind() const {
    return has_e8m0_scale() ? ScaleKind::e8m0 : zero ? ScaleKind::asymmetric : ScaleKind::symmetric;
  }
  QF_HD int64_t scale_index(int64_t row_block, int64_t col_block) const {
    return row_block * scale.row_stride + col_block * scale_col_stride;
  }
  QF_HD int64_t row_blocks() const { return scale.rows; }
  QF_HD int64_t col_blocks() const { return scale.cols; }
};

// Rows [r0, r1) and columns [c0, c1).
struct Extent {
  int64_t r0, r1, c0, c1;
};

struct Op {
  static constexpr const char* name = "quantize";
  using Args = qf_quantize_args;
  using Problem = quantize::Problem;
  static Problem parse(const Args& args, Arguments& arg);
  static bool is_empty(const Problem& p) { return p.rows == 0 || p.cols == 0; }
  static std::span<const Kernel<Problem>* const> kernels();
};

}  // namespace quantfuse::quantize
