// SPDX-License-Identifier: Apache-2.0
//
// c[m,n] = sum over k of (a[m,k] - a_zero[m]) * a_scale[m,k] * (b[n,k] - b_zero[n]) * b_scale[n,k] + bias[n]
//
// Codes of a and b are both integers (INT8, INT4) or both FP8. With c of type i32 there are no scales and no
// bias, and the sum is exact modulo 2^32.
#pragma once

#include "core/expect.h"
#include "core/kernel.h"
#include "core/operation.h"
#include "formats/codes.h"

namespace quantfuse::scaled_mm {

struct Problem {
  int64_t m, n, k;
  Matrix a;  // [m, k] codes, or [m, ceil(k/2)] bytes of 4-bit ones
  Matrix b;  // [n, k] or [k, n] codes, or the last dimension halved
  Matrix c;  // [m, n] i32 | f32 | f16 | bf16
  qf_format a_format, b_format;
  qf_order b_order;
  bool is_b_constant;         // b and b_scale may be read before the work ahead on the stream has ended
  Matrix a_scale, b_scale;    // f32, compact; absent: 1
  qf_block a_block, b_block;  // resolved; the whole matrix where there is no scale
  Vector a_zero, b_zero;      // i32: one, or one for each row of a and column of c; absent: 0
  Vector bias;                // [n] floats; absent: 0
  bool fast_accumulation;     // FP8 sums may stay in the tensor cores for all of k
  qf_device device;

  QF_HD bool is_integer_product() const { return a_format == QF_INT8 || a_format == QF_INT4; }
  QF_HD bool is_exact() const { return c.dtype == DType::i32; }
  QF_HD int64_t a_groups() const { return a_scale ? a_scale.cols : 1; }  // scales along k
  QF_HD int64_t b_groups() const { return b_scale ? b_scale.cols : 1; }

  // Group g is along k: k / block.cols.
  QF_HD float a_scale_at(int64_t row, int64_t g) const {
    return a_scale ? static_cast<const float*>(a_scale.data)[row / a_block.rows * a_scale.cols + g] : 1.0f;
  }
  QF_HD float b_scale_at(int64_t col, int64_t g) const {
    return b_scale ? static_cast<const float*>(b_scale.data)[col / b_block.rows * b_scale.cols + g] : 1.0f;
  }
  QF_HD int32_t a_zero_at(int64_t row) const { return zero_at(a_zero, row); }
  QF_HD int32_t b_zero_at(int64_t col) const { return zero_at(b_zero, col); }

 private:
  QF_HD static int32_t zero_at(const Vector& zero, int64_t i) {
    return zero ? static_cast<const int32_t*>(zero.data)[zero.size == 1 ? 0 : i] : 0;
  }
};

struct Op {
  static constexpr const char* name = "scaled_mm";
  using Args = qf_scaled_mm_args;
  using Problem = scaled_mm::Problem;
  static Problem parse(const Args& args, Arguments& arg);
  static bool is_empty(const Problem& p) { return p.m == 0 || p.n == 0; }
  static std::span<const Kernel<Problem>* const> kernels();
};

}  // namespace quantfuse::scaled_mm
