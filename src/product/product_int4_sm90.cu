// SPDX-License-Identifier: Apache-2.0
//
// The host's side of product_int4.h.
#include "product/product_int4.h"

#include <algorithm>

#include "core/choose.h"
#include "core/device.h"
#include "cuda/launch.h"
#include "product/kernels.h"
#include "product/wgmma_operands.h"

namespace quantfuse::product_int4_sm90 {
using namespace product_int4;
namespace {

int64_t num_pairs(const Product& p) { return std::max(gpu_num_sms(p.device.id) / kPair, 1); }
int64_t row_pairs(const Product& p) { return ceil_div(p.n, int64_t{kPair * kRows}); }
int64_t token_blocks(const Product& p) { return ceil_div(p.m, int64_t{kTokens}); }

// Whether the tiles keep the SMs busy for more than half of the time that they take: the streaming kernel,
// which divides k where it has few tiles, is about half as fast as this one with all SMs.
bool has_many_tiles(const Product& p) {
  const int64_t tiles = row_pairs(p) * token_blocks(p), waves = ceil_div(tiles, num_pairs(p));
  return tiles * 20 >= waves * num_pairs(p) * 11;
}

Requirements accepts(const Product& p) {
  if (p.b.format != QF_INT4) return Requirements().require(false, "the weight is not INT4");
  return accepts_int4(p)
      .require(!is_whole(p.b, p.k) || p.k < 1 << 17, "sums over k do not fit int32")
      .require(p.m > kTokens / 2, "half and more of a tile's tokens would be none")
      .require(has_many_tiles(p), "tiles of 256 x 256 of y leave about half of the GPU without work");
}

bool quantizes(const Output&) { return false; }

void launch(const Product& p, float* staged, const Launch& launch) {
  Int4Problem problem = {};
  problem.token_blocks = static_cast<int32_t>(token_blocks(p));
  problem.row_pairs = static_cast<int32_t>(row_pairs(p));
  problem.stages_k = static_cast<int32_t>(round_up(ceil_div(p.k, int64_t{kBlockK}), 2));
  problem.x = row_boxes(p.a.codes, kHalfTokens), problem.w = weight_boxes(p, kRows, kRowBytes);
  problem.stores_boxes = !staged && has_transposed_boxes(p.out, p.residual, p.has_gate);
  problem.adds_boxes = problem.stores_boxes && p.residual;
  if (problem.stores_boxes) problem.y = transposed_boxes(p.out.y, p.has_gate, kHalfTokens);
  if (problem.adds_boxes) problem.residual = transposed_boxes(p.residual, /*is_gated=*/false, kHalfTokens);
  const Matrix& scale = p.b.scale;
  problem.has_scale_vectors =
      scale && scale.cols % kRunGroups == 0 && reinterpret_cast<uint64_t>(scale.data) % 16 == 0;
  problem.product = p, problem.product.bias = {}, problem.bias = p.bias;
  const int64_t pairs = std::min(num_pairs(p), row_pairs(p) * token_blocks(p));
  const LaunchShape shape = {dim3(static_cast<unsigned>(pairs * kPair)), dim3(kThreads),
                             static_cast<size_t>(Smem::kBytes), /*overlap_previous=*/true};
  choose_bool(is_whole(p.b, p.k), [&](auto is_whole_k) {
    launch_kernel("product_int4_sm90", int4_kernel < is_whole_k.value ? Scaling::whole : Scaling::blocks >,
                  shape, launch, problem, staged);
  });
}

}  // namespace

extern const Choosy kernel = {accepts, quantizes, launch};

}  // namespace quantfuse::product_int4_sm90
