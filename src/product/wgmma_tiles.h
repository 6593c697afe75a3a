// SPDX-License-Identifier: Apache-2.0
//
// The host's side of product_wgmma.h, for every kind of numbers. The product is one of bytes: 16-bit numbers
// are two columns each.
#pragma once

#include <algorithm>

#include "core/device.h"
#include "cuda/launch.h"
#include "product/product_wgmma.h"
#include "product/wgmma_operands.h"

namespace quantfuse::product {

using WideTile = Shape<256>;
using NarrowTile = Shape<192>;

template <class Tile>
TileProblem make_tile_problem(const Product& p, float* staged) {
  TileProblem t = {};
  t.m = p.m, t.n_out = p.n_out, t.is_gated = p.has_gate;
  t.token_blocks = static_cast<int32_t>(ceil_div(ceil_div(p.m, Tile::kTokens), kPair));
  t.col_blocks = static_cast<int32_t>(ceil_div(p.n, Tile::kCols));
  t.k_blocks = static_cast<int32_t>(ceil_div(p.k, kBlockK));

  t.x = row_boxes(p.a.codes, Tile::kTokens);
  t.w = weight_boxes(p, Tile::kCols / kPair);

  t.x_scale = static_cast<const float*>(p.a.scale.data),
  t.w_scale = static_cast<const float*>(p.b.scale.data);
  t.x_stride = token_scale_stride(p);
  t.w_stride = p.b.scale ? p.b.scale.cols : 0;
  t.w_block_rows = static_cast<int32_t>(p.b.block.rows);

  t.bias = p.bias, t.activation = p.activation;
  if (staged) {
    t.out = {staged, p.m, p.n_out, p.n_out, DType::f32};
    return t;
  }
  t.out = p.out.y;
  t.out_format = p.out.format, t.has_dynamic_scale = !p.out.is_static;
  t.out_scale = static_cast<float*>(p.out.scale.data), t.out_groups = static_cast<int32_t>(p.out.scale.cols);
  t.out_scale_row_stride = p.out.scale.row_stride, t.out_scale_col_stride = p.out.scale_col_stride;
  if (dtype_bytes(t.out.dtype) < 4) t.y = row_boxes(t.out, kWarpTokens);
  t.residual = p.residual;
  return t;
}

// Whether it makes the codes of an output itself.
inline bool tiles_quantize(const Output& out) {
  return out.is_quantized() && out.format != QF_FP8_E5M2 && (out.is_static || out.group == 128) &&
         has_boxes(out.y);
}

// What the epilogue asks of y and the residual.
inline void require_tile_epilogue(const Product& p, Requirements& requirements) {
  const bool is_half = p.out.y.dtype == DType::f16 || p.out.y.dtype == DType::bf16;
  requirements
      .require(!p.out.is_quantized() || !p.out.is_static || tiles_quantize(p.out),
               "y's codes are E5M2, or do not begin at multiples of 16 bytes")
      .require(p.out.is_quantized() || !is_half || has_boxes(p.out.y),
               "rows of y do not begin at multiples of 16 bytes")
      .require(!p.residual || (is_half && !p.out.is_quantized() && p.residual.dtype == p.out.y.dtype &&
                               has_boxes(p.residual)),
               "the residual is not of y's type, or not at multiples of 16 bytes");
}

// Pairs of blocks that run at a time.
inline int64_t num_pairs(const Product& p) { return std::max(gpu_num_sms(p.device.id) / kPair, 1); }

// Whether narrow tiles end earlier: all pairs of SMs take one after the other, and in the last round some of
// them have none.
inline bool prefers_narrow_tiles(const Product& p, const float* staged) {
  if (p.has_gate || (p.out.is_quantized() && !staged)) return false;
  const auto columns_of_pair = [&]<class Tile>(Tile) {
    const int64_t tiles = ceil_div(p.m, kPair * Tile::kTokens) * ceil_div(p.n, Tile::kCols);
    return static_cast<double>(ceil_div(tiles, num_pairs(p)) * Tile::kCols);
  };
  return 1.04 * columns_of_pair(NarrowTile()) < columns_of_pair(WideTile());
}

template <class N, Scaling kScaling, class Tile = WideTile>
void launch_tiles(const char* name, const Product& p, float* staged, const Launch& launch) {
  const TileProblem problem = make_tile_problem<Tile>(p, staged);
  const int64_t tiles = static_cast<int64_t>(problem.token_blocks) * problem.col_blocks;
  const int64_t pairs = std::min(num_pairs(p), tiles);
  const LaunchShape shape = {dim3(static_cast<unsigned>(pairs * kPair)), dim3(Tile::kThreads),
                             static_cast<size_t>(Smem<Tile>::kBytes), /*overlap_previous=*/true};
  launch_kernel(name, wgmma_kernel<Tile, N, kScaling>, shape, launch, problem);
}

template <class N, Scaling kScaling>
void launch_best_tiles(const char* name, const Product& p, float* staged, const Launch& launch) {
  if (prefers_narrow_tiles(p, staged)) launch_tiles<N, kScaling, NarrowTile>(name, p, staged, launch);
  else launch_tiles<N, kScaling>(name, p, staged, launch);
}

}  // namespace quantfuse::product
