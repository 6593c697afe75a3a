// SPDX-License-Identifier: Apache-2.0
//
// The host's side of product_stream.h and product_columns.h.
#include <algorithm>

#include "core/choose.h"
#include "core/device.h"
#include "cuda/launch.h"
#include "product/kernels.h"
#include "product/product_columns.h"
#include "product/product_stream.h"
#include "product/wgmma_operands.h"

namespace quantfuse::product_stream_sm90 {
using namespace product_stream;
namespace {

int64_t num_sms(const Product& p) { return gpu_num_sms(p.device.id); }

// Whether sums are of whole rows of k, or of blocks: run(Scaling).
template <class Run>
void with_scaling(const Product& p, const Run& run) {
  choose_bool(is_whole(p), [&](auto is_whole_k) {
    constexpr Scaling kScaling = is_whole_k.value ? Scaling::whole : Scaling::blocks;
    run(std::integral_constant<Scaling, kScaling>{});
  });
}

// With too little of the weight under way the memory is not busy; with too much some SMs get more than their
// share, and all wait for the others: 4096 x 14336 of E4M3 took 20.4, 18.8, 17.6 and 20.2 us with 24, 32, 48
// and 88 KB to an SM.
int32_t choose_in_flight(int64_t bytes_of_sm, int64_t stage_bytes, int64_t stages) {
  return static_cast<int32_t>(std::min(std::max(bytes_of_sm / stage_bytes, int64_t{2}), stages));
}

// ---- product_stream.h ----

// run(Shape): as few tokens as hold all, and as few rows as leave no SM without a block (of 8 bits and up to
// 64 tokens there are at most 64 to an SM: takes_columns). Otherwise more rows: larger boxes come faster, and
// x is fetched less often. Two blocks to an SM where there is room for them: then those of the next kernel
// stand beside ours, and fill their rings with a constant weight.
template <class Run>
void with_shape(const Product& p, const Run& run) {
  const int64_t rows_of_sm = ceil_div(p.n, num_sms(p));
  if (p.b.format == QF_INT4) {
    // To decode takes registers.
    const bool has_pairs = p.is_b_constant && rows_of_sm <= 256;
    if (p.m > 64) run(Shape<128, 2, 1, 1, 2>{});
    else if (p.m > 32 && rows_of_sm <= 32) run(Shape<64, 1, 1, 1, 2>{});
    else if (p.m > 32) run(Shape<64, 2, 1, 1, 2>{});
    else if (p.m > 16 && rows_of_sm <= 32) run(Shape<32, 1, 1, 2, 2>{});
    else if (p.m > 16 && rows_of_sm <= 128) run(Shape<32, 2, 1, 1, 2>{});
    else if (p.m > 16) run(Shape<32, 2, 2, 1, 2>{});
    else if (rows_of_sm <= 32) run(Shape<16, 1, 1, 2, 2>{});
    else if (rows_of_sm <= 128) run(Shape<16, 2, 1, 1, 2>{});
    else if (has_pairs) run(Shape<16, 2, 1, 2, 2>{});
    else run(Shape<16, 2, 2, 1, 2>{});
  } else if (p.m <= 16) {
    run(Shape<16, 1, 1, 2>{});
  } else if (p.m <= 32) {
    run(Shape<32, 1, 1, 2>{});
  } else if (p.m <= 64) {
    if (rows_of_sm <= 32) run(Shape<64, 1, 1, 2>{});
    else run(Shape<64, 2, 1, 1>{});
  } else {
    choose_bool(rows_of_sm <= 64, [&](auto has_few_rows) {
      constexpr int kStrips = has_few_rows.value ? 1 : 2;
      run(Shape<128, 2, kStrips, 1>{});
    });
  }
}

// A block for each SM keeps enough of the weight on its way; the more blocks share a tile, the longer it
// takes to bring their parts together. Clusters of more than two leave some SMs over.
template <class S>
int32_t choose_split_bits(const Product& p, int64_t tiles, int64_t k_stages) {
  const int64_t sms = num_sms(p);
  const int64_t wanted = std::max(std::min<int64_t>(sms / tiles, 2), sms * 3 / 4 / tiles);
  const int64_t most = std::min<int64_t>({S::kMaxSplits, wanted, k_stages / 2});
  int32_t bits = 0;
  while (2 << bits <= most) ++bits;
  return bits;
}

// When the next kernel is let in. Its blocks take some 3 us until their rings are full: those that come
// earlier take the bandwidth from ours, and if some of ours have ended by then, one SM gets two of them and
// another none. With 8, 16, 24 and 32 stages 4096 x 14336 of E4M3 took 15.7, 15.0, 17.0 and 17.6 us (two
// blocks a tile), 8192 x 28672 77, 61, 57 and 58 (one).
template <class S>
int32_t choose_lead(const Product& p, bool is_split) {
  if (S::kBlocksPerSm == 1 || (!is_split && !p.is_b_constant)) return 0;
  if (!p.is_b_constant || S::kTokens > 32 || S::kRunBlocks == 2) return 8;
  return is_split ? 16 : 24;
}

template <class S>
void launch_shape(const Product& p, float* staged, const Launch& launch) {
  StreamProblem problem = {};
  problem.token_blocks = static_cast<int32_t>(ceil_div(p.m, S::kTokens));
  problem.k_stages = static_cast<int32_t>(ceil_div(p.k, kBlockK * S::kRunBlocks));
  const int64_t tiles = ceil_div(p.n, S::kRows) * problem.token_blocks;
  problem.split_bits = choose_split_bits<S>(p, tiles, problem.k_stages);
  const int64_t blocks = tiles << problem.split_bits;
  const int64_t bytes_of_all = num_sms(p) * (p.b.format == QF_INT4 ? 24 : 48) * 1024;
  const int64_t at_once = std::clamp(blocks, num_sms(p), num_sms(p) * S::kBlocksPerSm);
  problem.in_flight = S::kTokens > 64  // x is the most of it
                          ? S::kStages
                          : choose_in_flight(bytes_of_all / at_once, S::kWeightBytes, S::kStages);
  problem.has_gate = p.has_gate, problem.is_read_once = problem.token_blocks == 1;
  problem.is_plain = is_plain(p, staged != nullptr);
  problem.is_weight_constant = p.is_b_constant;
  problem.lead = choose_lead<S>(p, problem.split_bits > 0);
  problem.x = row_boxes(p.a.codes, S::kTokens), problem.w = weight_boxes(p, S::kRows);
  problem.product = p, problem.product.bias = {}, problem.bias = p.bias;
  problem.x_stride = token_scale_stride(p);
  LaunchShape shape = {dim3(static_cast<unsigned>(blocks)), dim3(S::kThreads),
                       static_cast<size_t>(Smem<S>::kBytes), /*overlap_previous=*/true};
  shape.cluster = 1u << problem.split_bits;
  with_scaling(p, [&](auto scaling) {
    const auto run = [&](auto format) {
      launch_kernel("product_stream_sm90", stream_kernel<S, Numbers<format.value>, scaling.value>, shape,
                    launch, problem, staged);
    };
    if constexpr (S::kRunBlocks == 2) run(std::integral_constant<qf_format, QF_INT4>{});
    else choose_value<QF_INT8, QF_FP8_E4M3>(p.a.format, run);
  });
}

// ---- product_columns.h ----

int64_t unit_rows(const Product& p) { return p.has_gate ? 2 * kUnit : kUnit; }

// Every block reads x: for few rows that would be too much. Where there are nearly 64 rows to an SM, and more
// than a few tokens or scales of blocks, product_stream.h is quicker.
bool takes_columns(const Product& p) {
  const int64_t rows_of_sm = ceil_div(p.n, num_sms(p));
  if (p.b.format == QF_INT4 || p.m > 64 || rows_of_sm <= 32) return false;
  return rows_of_sm <= 48 || rows_of_sm > 64 || (p.m <= 8 && is_whole(p));
}

// run(Shape): so many rows that each SM has one block, or as many as there can be.
template <class Run>
void with_column_shape(const Product& p, const Run& run) {
  using product_columns::Shape;
  const int64_t rows = ceil_div(ceil_div(p.n, unit_rows(p)), num_sms(p)) * unit_rows(p);
  if (rows > 128) run(Shape<128, 2, 1, 1, 1>{});
  else if (rows > 48) run(Shape<64, 2, 2, 1, 2>{});
  else if (p.m > 32) run(Shape<48, 1, 2, 2, 1>{});
  else run(Shape<48, 1, 2, 2, 2>{});
}

template <class S>
void launch_columns(const Product& p, float* staged, const Launch& launch) {
  using Smem = product_columns::Smem<S>;
  product_columns::ColumnProblem problem = {};
  const int64_t units = ceil_div(p.n, unit_rows(p));
  const int64_t rounds = ceil_div(units * unit_rows(p), num_sms(p) * S::kRows);
  const int64_t blocks = std::min(units, num_sms(p) * rounds);
  problem.units = static_cast<int32_t>(units / blocks), problem.more = static_cast<int32_t>(units % blocks);
  problem.w_rows = static_cast<int32_t>(ceil_div(units, blocks) * unit_rows(p));
  problem.token_rows = static_cast<int32_t>(ceil_div(p.m, 8) * 8);
  problem.k_stages = static_cast<int32_t>(ceil_div(p.k, kBlockK * S::kRunBlocks));
  const bool has_blocks = !is_whole(p);
  // Blocks that share an SM have little room: with many tokens x needs it, and a weight that comes early
  // would only be in its way.
  constexpr bool kIsAlone = S::kBlocksPerSm == 1;
  problem.is_weight_constant = p.is_b_constant && (kIsAlone || p.m <= 32);
  const int32_t x_stages = problem.is_weight_constant ? 4 : 6;
  for (problem.stages = product_columns::kMaxStages;; problem.stages -= S::kDepthGroups) {
    problem.x_stages = kIsAlone ? problem.stages : x_stages;
    if (Smem::bytes(problem, has_blocks) <= S::kBudget) break;
  }
  // One block after the other: what an SM has too much of, it has less of later.
  const int64_t bytes_of_sm = (rounds > 2 ? 96 : 48) * 1024;
  problem.in_flight = choose_in_flight(bytes_of_sm, S::kRunBlocks * problem.w_rows * kBlockK, problem.stages);
  problem.has_gate = p.has_gate, problem.is_plain = is_plain(p, staged != nullptr);
  problem.x = row_boxes(p.a.codes, problem.token_rows), problem.w = weight_boxes(p, problem.w_rows);
  problem.product = p, problem.product.bias = {}, problem.bias = p.bias;
  problem.x_stride = token_scale_stride(p);
  const LaunchShape shape = {dim3(static_cast<unsigned>(blocks)), dim3(S::kThreads),
                             static_cast<size_t>(Smem::bytes(problem, has_blocks)),
                             /*overlap_previous=*/true};
  with_scaling(p, [&](auto scaling) {
    choose_value<QF_INT8, QF_FP8_E4M3>(p.a.format, [&](auto format) {
      launch_kernel("product_columns_sm90",
                    product_columns::column_kernel<S, Numbers<format.value>, scaling.value>, shape, launch,
                    problem, staged);
    });
  });
}

bool quantizes(const Output&) { return false; }

// Whether the tiles of product_wgmma.h would leave two SMs of three without work.
bool has_few_tiles(const Product& p) {
  return 2 * ceil_div(p.m, int64_t{256}) * ceil_div(p.n, int64_t{256}) * 3 <= gpu_num_sms(p.device.id);
}

Requirements accepts(const Product& p) {
  if (p.b.format == QF_INT4) return accepts_int4(p);
  return accepts_wgmma_operands(p)
      .require(!has_e5m2(p), "codes are E5M2")
      .require(p.m <= 128 || has_few_tiles(p), "m is more than 128, and large tiles of y fill the GPU");
}

void launch(const Product& p, float* staged, const Launch& launch) {
  if (takes_columns(p)) {
    with_column_shape(p, [&](auto shape) { launch_columns<decltype(shape)>(p, staged, launch); });
  } else {
    with_shape(p, [&](auto shape) { launch_shape<decltype(shape)>(p, staged, launch); });
  }
}

}  // namespace

extern const Choosy kernel = {accepts, quantizes, launch};

}  // namespace quantfuse::product_stream_sm90
