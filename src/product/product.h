// SPDX-License-Identifier: Apache-2.0
//
// y = epilogue( sum over k of (a[m,k] - a_zero) * a_scale * (b[n,k] - b_zero) * b_scale )
//
// What scaled_mm, and linear with quantized activations, become for the tensor-core kernels of 8- and 4-bit
// codes. The epilogue's fields have the names of linear::Problem, so that its functions serve both.
#pragma once

#include <algorithm>

#include "core/kernel.h"
#include "core/output.h"
#include "linear/linear.h"
#include "scaled_mm/scaled_mm.h"

namespace quantfuse::product {

// A matrix of codes [rows, k], of b in order KN [k, rows]. Scales and zero points belong to blocks of [rows,
// k] in either order.
struct Operand {
  Matrix codes;
  qf_format format;  // INT8, INT4, E4M3, E5M2, E2M1
  Matrix scale;      // [row blocks, groups] f32 | e8m0, compact; absent: 1
  qf_block block;    // resolved; the whole matrix where there is no scale
  Matrix zero;       // i8, like scale: linear's; absent: see zeros
  Vector zeros;      // i32, one or one for each row: scaled_mm's; absent: 0

  QF_HD bool has_zeros() const { return zero || zeros; }
  QF_HD int64_t groups() const { return scale ? scale.cols : 1; }  // along k
  // 64-bit divisions cost a hundred instructions, and the kernels take no sizes beyond 2^31.
  QF_HD static int64_t divide(int64_t i, int64_t by) {
    return by == 1 ? i : static_cast<uint32_t>(i) / static_cast<uint32_t>(by);
  }
  QF_HD int64_t group_of(int64_t k) const { return divide(k, block.cols); }
  QF_HD int64_t scale_index(int64_t row, int64_t group) const {
    return row / block.rows * scale.cols + group;
  }
  QF_HD float scale_at(int64_t row, int64_t group) const { return scale_value(scale_index(row, group)); }
  QF_HD int32_t zero_at(int64_t row, int64_t group) const {
    if (zeros) return zeros.as<const int32_t>()[zeros.size == 1 ? 0 : row];
    return zero_value(scale_index(row, group));
  }
  // By scale_index.
  QF_HD float scale_value(int64_t i) const {
    if (!scale) return 1.0f;
    return scale.dtype == DType::f32 ? static_cast<const float*>(scale.data)[i]
                                     : E8m0::decode(static_cast<const uint8_t*>(scale.data)[i]);
  }
  QF_HD int32_t zero_value(int64_t i) const { return zero ? static_cast<const int8_t*>(zero.data)[i] : 0; }
};

struct Product {
  int64_t m, n, k;
  int64_t n_out;  // columns of y: n, or n / 2 where b is gated
  Operand a;      // [m, k]
  Operand b;      // [n, k] or [k, n]
  qf_order b_order;
  bool has_gate;           // rows [0, n/2) of b are the gate, the others the up projection
  bool is_b_constant;      // b and its scales may be read before the kernels ahead on the stream have ended
  bool fast_accumulation;  // FP8 sums may stay in the tensor cores for all of k
  Vector bias;             // [n] floats; optional
  qf_activation activation;
  Matrix residual;  // [m, n_out] floats; optional
  Output out;       // y may be i32: then the sum itself modulo 2^32, and there are no scales and no epilogue
  qf_device device;

  QF_HD bool is_gated() const { return has_gate; }
  QF_HD bool is_exact() const { return out.y.dtype == DType::i32; }
  QF_HD bool has_wide_zeros() const { return a.zeros || b.zeros; }  // of 32 bits
  QF_HD bool is_integer() const { return quantfuse::is_integer(a.format) && quantfuse::is_integer(b.format); }
};

// Blocks no larger than their matrix, which changes nothing and keeps them within 32 bits.
inline qf_block clamp(qf_block block, int64_t rows, int64_t k) {
  return {std::clamp<int64_t>(rows, 1, block.rows), std::clamp<int64_t>(k, 1, block.cols)};
}

inline Product from(const scaled_mm::Problem& p) {
  Product product = {};
  product.m = p.m, product.n = p.n, product.k = p.k, product.n_out = p.n;
  product.a = {p.a, p.a_format, p.a_scale, clamp(p.a_block, p.m, p.k), {}, p.a_zero};
  product.b = {p.b, p.b_format, p.b_scale, clamp(p.b_block, p.n, p.k), {}, p.b_zero};
  product.b_order = p.b_order;
  product.is_b_constant = p.is_b_constant;
  product.fast_accumulation = p.fast_accumulation;
  product.bias = p.bias;
  product.activation = QF_IDENTITY;
  product.out.y = p.c;
  product.device = p.device;
  return product;
}

// Why a call of linear is no product; a condition that all its kernels of products begin with.
inline Requirements is_product(const linear::Problem& p) {
  const Weight& w = p.weight;
  return Requirements()
      .require(p.has_act_quant(), "the activations are not quantized")
      .require(static_cast<bool>(w.codes), "reads the canonical weight, and only the packed one is given")
      .require(!is_codebook(w.format), "the weight's codes are those of a codebook")
      .require(!w.g_idx, "the weight has g_idx")
      .require(!w.has_float_zeros(), "the weight has floating zero points or offsets");
}

// x may be codes, or numbers that are still to be quantized (linear::launch_canonical), which kernels choose
// by.
inline Product from(const linear::Problem& p) {
  Product product = {};
  product.m = p.m, product.n = p.n, product.k = p.k, product.n_out = p.n_out;
  product.a = {p.x, p.act_format, p.x_scale, clamp({1, p.act_group}, p.m, p.k), {}, {}};
  product.b = {
      p.weight.codes, p.weight.format, p.weight.scale, clamp(p.weight.block, p.n, p.k), p.weight.zero, {}};
  product.b_order = QF_NK;
  product.has_gate = p.weight.is_gated, product.is_b_constant = p.weight.is_constant;
  product.fast_accumulation = p.fast_accumulation;
  product.bias = p.bias;
  product.activation = p.activation;
  product.residual = p.residual;
  product.out = p.out;
  product.device = p.device;
  return product;
}

}  // namespace quantfuse::product
