// SPDX-License-Identifier: Apache-2.0
//
// The host's side of what the kernels of products on wgmma share: which operands they take, and how.
#pragma once

#include "cuda/tensor_map.h"
#include "product/product.h"
#include "product/wgmma_numbers.h"

namespace quantfuse::product {

// Whether an operand has no scale, or scales that are the same for all of k.
inline bool is_whole(const Operand& o, int64_t k) { return !o.scale || o.block.cols >= k; }
inline bool is_whole(const Product& p) { return is_whole(p.a, p.k) && is_whole(p.b, p.k); }

// Scales of a token and 128 of k, and of 128 rows, several times as many or all, and 128 of k.
inline bool has_blocks(const Product& p) {
  return p.a.scale && p.b.scale && p.a.block.rows == 1 && p.a.block.cols == kBlockK &&
         p.b.block.cols == kBlockK && (p.b.block.rows % kBlockK == 0 || p.b.block.rows >= p.n);
}

inline bool has_e5m2(const Product& p) { return p.a.format == QF_FP8_E5M2 || p.b.format == QF_FP8_E5M2; }

// Of any format of 8 bits.
inline Requirements accepts_wgmma_operands(const Product& p) {
  const bool is_int8 = p.a.format == QF_INT8 && p.b.format == QF_INT8;
  return Requirements()
      .require(is_int8 || (is_fp8(p.a.format) && is_fp8(p.b.format)),
               "the codes are not both INT8 or both FP8")
      .require(p.b_order == QF_NK, "b is in order KN")
      .require(!p.a.has_zeros() && !p.b.has_zeros(), "there are zero points")
      .require(p.k > 0 && p.k % 16 == 0, "k is not a multiple of 16")
      .require(!is_int8 || p.is_exact() || !is_whole(p) || p.k < 1 << 17, "sums over k do not fit int32")
      .require(has_boxes(p.b.codes), "rows of b do not begin at multiples of 16 bytes")
      .require(!p.b.scale || p.b.scale.dtype == DType::f32, "the scales are not float32")
      .require(is_whole(p) || has_blocks(p), "the scales are neither whole along k nor of blocks of 128")
      .require(!p.has_gate || p.n_out % (is_whole(p) ? 8 : 64) == 0,
               "gate rows are not a multiple of 8, or 64");
}

// INT4 with a scale for each row, or for each row and 128 of k, and INT8 with a scale for each token.
inline Requirements accepts_int4(const Product& p) {
  const bool has_groups = p.b.scale && p.b.block.rows == 1 && p.b.block.cols == kBlockK;
  return Requirements()
      .require(p.a.format == QF_INT8, "the activations are not INT8")
      .require(!p.is_exact(), "c is int32")
      .require(p.b_order == QF_NK, "b is in order KN")
      .require(!p.a.has_zeros() && !p.b.has_zeros(), "there are zero points")
      .require(p.k > 0 && p.k % 32 == 0, "k is not a multiple of 32")
      .require(has_boxes(p.b.codes), "rows of b do not begin at multiples of 16 bytes")
      .require(!p.b.scale || p.b.scale.dtype == DType::f32, "the scales are not float32")
      .require(is_whole(p.a, p.k), "the activations are scaled by groups")
      .require(is_whole(p.b, p.k) || has_groups, "the weight's groups are neither all of k nor 128")
      .require(!p.has_gate || p.n_out % 8 == 0, "gate rows are not a multiple of 8");
}

constexpr int kBoxBytes = 128;  // of a row

// Boxes of `rows` rows of b, of a gated weight 8 gate rows and their 8 up rows in turn. Coordinates: byte,
// row, 0, 0; of a gated weight byte, 0, 0, row / 16.
inline CUtensorMap weight_boxes(const Product& p, int rows, int box_bytes = kBoxBytes) {
  const auto swizzle = box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
  const int64_t row = p.b.codes.row_stride, bytes = is_packed_4bit(p.b.format) ? p.k / 2 : p.k;
  if (!p.has_gate) {
    return tensor_map<4>(map_type(DType::u8), p.b.codes.data, {bytes, p.n, 1, 1}, {row, row, row},
                         {box_bytes, rows, 1, 1}, swizzle);
  }
  return tensor_map<4>(map_type(DType::u8), p.b.codes.data, {bytes, 8, 2, p.n_out / 8},
                       {row, row * p.n_out, row * 8}, {box_bytes, 8, 2, rows / 16}, swizzle);
}

// The scales of a token and a block of k lie at token * this + block.
inline int64_t token_scale_stride(const Product& p) {
  return is_whole(p.a, p.k) ? (p.a.block.rows == 1 ? 1 : 0) : p.a.scale.cols;
}

}  // namespace quantfuse::product
