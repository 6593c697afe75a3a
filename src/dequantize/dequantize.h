// SPDX-License-Identifier: Apache-2.0
//
// x[r,c] = (q[r,c] - zero[R,C]) * scale[R,C] + offset[R,C],   R = r / block.rows, C = c / block.cols or g_idx
//
// In float32: the difference is rounded (integer zero points: exact), then the product, the sum, and the
// result to x's type.
#pragma once

#include "core/expect.h"
#include "core/kernel.h"
#include "core/operation.h"
#include "formats/codes.h"

namespace quantfuse::dequantize {

struct Problem {
  Matrix q;       // [rows, cols or ceil(cols/2)] codes
  Matrix scale;   // [row blocks, col blocks] f32 | e8m0, compact
  Matrix zero;    // i8 | f32, like scale; absent: 0
  Matrix offset;  // f32, like scale; absent: none
  Vector g_idx;   // [cols] i32; absent: c / block.cols
  Matrix x;       // [rows, cols] f32 | f16 | bf16
  qf_format format;
  qf_block block;  // whole dimensions resolved: never 0
  int64_t rows, cols;

  QF_HD int64_t col_blocks() const { return scale.cols; }
};

// One number of the scale and zero tensors, `block` counting over both dimensions.
QF_HD float scale_at(const Problem& p, int64_t block) {
  return p.scale.dtype == DType::f32 ? static_cast<const float*>(p.scale.data)[block]
                                     : E8m0::decode(static_cast<const uint8_t*>(p.scale.data)[block]);
}
QF_HD float zero_at(const Problem& p, int64_t block) {
  if (!p.zero) return 0.0f;
  return p.zero.dtype == DType::f32 ? static_cast<const float*>(p.zero.data)[block]
                                    : static_cast<float>(static_cast<const int8_t*>(p.zero.data)[block]);
}
// Where there is none, -0: what can be added to any number and leaves its bits.
QF_HD float offset_at(const Problem& p, int64_t block) {
  return p.offset ? static_cast<const float*>(p.offset.data)[block] : -0.0f;
}
QF_HD int64_t col_block_at(const Problem& p, int64_t c) {
  return p.g_idx ? static_cast<const int32_t*>(p.g_idx.data)[c] : c / p.block.cols;
}

struct Op {
  static constexpr const char* name = "dequantize";
  using Args = qf_dequantize_args;
  using Problem = dequantize::Problem;
  static Problem parse(const Args& args, Arguments& arg);
  static bool is_empty(const Problem& p) { return p.rows == 0 || p.cols == 0; }
  static std::span<const Kernel<Problem>* const> kernels();
};

}  // namespace quantfuse::dequantize
