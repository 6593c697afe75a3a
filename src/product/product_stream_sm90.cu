// SPDX-License-Identifier: Apache-2.0
//
// The host's side of product_stream.h.
#include <algorithm>

#include "core/choose.h"
#include "core/device.h"
#include "cuda/launch.h"
#include "product/kernels.h"
#include "product/product_stream.h"
#include "product/wgmma_operands.h"

namespace quantfuse::product_stream_sm90 {
using namespace product_stream;
namespace {

// run(Shape): as few tokens as hold all, and as few rows as leave no SM without a block. Otherwise more rows:
// larger boxes come faster, and x is fetched less often.
template <class Run>
void with_shape(const Product& p, const Run& run) {
  const int64_t rows_of_sm = ceil_div(p.n, int64_t{gpu_num_sms(p.device.id)});
  choose_bool(rows_of_sm <= (p.m <= 64 ? 32 : 64), [&](auto has_few_rows) {
    constexpr int kUnits = has_few_rows.value ? 1 : 2;
    if (p.b.format == QF_INT4) {
      // To decode takes registers, and a long ring serves half of the bytes better: one block to an SM.
      if (p.m <= 16) run(Shape<16, kUnits, 1, 1, 2>{});
      else if (p.m <= 32) run(Shape<32, kUnits, 1, 1, 2>{});
      else if (p.m <= 64) run(Shape<64, kUnits, 1, 1, 2>{});
      else run(Shape<128, 2, 1, 1, 2>{});
    } else {
      if (p.m <= 16) run(Shape<16, kUnits, 1, 2>{});
      else if (p.m <= 32) run(Shape<32, kUnits, 1, 2>{});
      else if (p.m <= 64) run(Shape<64, kUnits, 1, 2>{});
      else run(Shape<128, 2, kUnits, 1>{});
    }
  });
}

// A block for each SM keeps enough of the weight on its way; the more blocks share a tile, the longer it
// takes to bring their parts together. Clusters of more than two leave some SMs over.
template <class S>
int32_t choose_splits(const Product& p, int64_t tiles, int64_t k_stages) {
  const int64_t sms = gpu_num_sms(p.device.id);
  const int64_t wanted = std::max(std::min<int64_t>(sms / tiles, 2), sms * 3 / 4 / tiles);
  const int64_t most = std::min<int64_t>(S::kMaxSplits, std::max<int64_t>(k_stages / 2, 1));
  return static_cast<int32_t>(std::clamp<int64_t>(wanted, 1, most));
}

bool is_plain(const Product& p, bool is_staged) {
  const Matrix& y = p.out.y;
  return (y.dtype == DType::f16 || y.dtype == DType::bf16) && has_boxes(y) && p.n % kUnit == 0 &&
         !p.has_gate && p.activation == QF_IDENTITY && !p.residual && !p.out.is_quantized() && !is_staged;
}

template <class S>
void launch_shape(const Product& p, float* staged, const Launch& launch) {
  StreamProblem problem = {p, row_boxes(p.a.codes, S::kTokens), weight_boxes(p, S::kRows)};
  problem.token_blocks = static_cast<int32_t>(ceil_div(p.m, S::kTokens));
  problem.k_stages = static_cast<int32_t>(ceil_div(p.k, kBlockK * S::kRunBlocks));
  problem.x_stride = token_scale_stride(p);
  problem.bias = p.bias, problem.product.bias = {};
  problem.is_plain = is_plain(p, staged != nullptr);
  const int64_t tiles = ceil_div(p.n, S::kRows) * problem.token_blocks;
  problem.splits = choose_splits<S>(p, tiles, problem.k_stages);
  LaunchShape shape = {dim3(static_cast<unsigned>(tiles * problem.splits)), dim3(S::kThreads),
                       static_cast<size_t>(Smem<S>::kBytes), /*overlap_previous=*/true};
  shape.cluster = static_cast<unsigned>(problem.splits);
  choose_bool(is_whole(p), [&](auto is_whole_k) {
    constexpr Scaling kScaling = is_whole_k.value ? Scaling::whole : Scaling::blocks;
    const auto run = [&](auto format) {
      launch_kernel("product_stream_sm90", stream_kernel<S, Numbers<format.value>, kScaling>, shape, launch,
                    problem, staged);
    };
    if constexpr (S::kRunBlocks == 2) run(std::integral_constant<qf_format, QF_INT4>{});
    else choose_value<QF_INT8, QF_FP8_E4M3>(p.a.format, run);
  });
}

bool quantizes(const Output&) { return false; }

// Whether the tiles of product_wgmma.h would leave two SMs of three without work.
bool has_few_tiles(const Product& p) {
  return 2 * ceil_div(p.m, int64_t{256}) * ceil_div(p.n, int64_t{256}) * 3 <= gpu_num_sms(p.device.id);
}

// INT4 with a scale for each row, or for each row and 128 of k, and INT8 with a scale for each token.
Requirements accepts_int4(const Product& p) {
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

Requirements accepts(const Product& p) {
  if (p.b.format == QF_INT4) return accepts_int4(p);
  return accepts_wgmma_operands(p).require(p.m <= 128 || has_few_tiles(p),
                                           "m is more than 128, and large tiles of y fill the GPU");
}

void launch(const Product& p, float* staged, const Launch& launch) {
  with_shape(p, [&](auto shape) { launch_shape<decltype(shape)>(p, staged, launch); });
}

}  // namespace

extern const Choosy kernel = {accepts, quantizes, launch};

}  // namespace quantfuse::product_stream_sm90
