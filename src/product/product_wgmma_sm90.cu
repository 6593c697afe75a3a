// SPDX-License-Identifier: Apache-2.0
//
// The host's side of product_wgmma.h.
#include <algorithm>

#include "core/choose.h"
#include "core/device.h"
#include "cuda/launch.h"
#include "product/kernels.h"
#include "product/product_wgmma.h"
#include "product/wgmma_operands.h"

namespace quantfuse::product_wgmma_sm90 {
using namespace product;
namespace {

using Tile = Shape<256>;

TileProblem make_problem(const Product& p, float* staged) {
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
  if (p.residual) t.residual = row_boxes(p.residual, kWarpTokens), t.has_residual = true;
  return t;
}

bool quantizes(const Output& out) {
  return out.is_quantized() && out.format != QF_FP8_E5M2 && (out.is_static || out.group == 128) &&
         has_boxes(out.y);
}

Requirements accepts(const Product& p) {
  const bool is_half = p.out.y.dtype == DType::f16 || p.out.y.dtype == DType::bf16;
  return accepts_wgmma_operands(p)
      .require(!p.out.is_quantized() || !p.out.is_static || quantizes(p.out),
               "y's codes are E5M2, or do not begin at multiples of 16 bytes")
      .require(p.out.is_quantized() || !is_half || has_boxes(p.out.y),
               "rows of y do not begin at multiples of 16 bytes")
      .require(!p.residual || (is_half && !p.out.is_quantized() && p.residual.dtype == p.out.y.dtype &&
                               has_boxes(p.residual)),
               "the residual is not of y's type, or not at multiples of 16 bytes");
}

void launch(const Product& p, float* staged, const Launch& launch) {
  const TileProblem problem = make_problem(p, staged);
  const int64_t tiles = static_cast<int64_t>(problem.token_blocks) * problem.col_blocks;
  const int64_t pairs = std::min<int64_t>(gpu_num_sms(p.device.id) / kPair, tiles);
  const LaunchShape shape = {dim3(static_cast<unsigned>(pairs * kPair)), dim3(Tile::kThreads),
                             static_cast<size_t>(Smem<Tile>::kBytes), /*overlap_previous=*/true};
  choose_bool(p.a.format == QF_INT8, [&](auto is_int8) {
    choose_bool(is_whole(p), [&](auto is_whole_k) {
      constexpr qf_format kFormat = is_int8.value ? QF_INT8 : QF_FP8_E4M3;
      constexpr Scaling kScaling = is_whole_k.value ? Scaling::whole : Scaling::blocks;
      launch_kernel("product_wgmma_sm90", wgmma_kernel<Tile, Numbers<kFormat>, kScaling>, shape, launch,
                    problem);
    });
  });
}

}  // namespace

extern const Choosy kernel = {accepts, quantizes, launch};

}  // namespace quantfuse::product_wgmma_sm90
