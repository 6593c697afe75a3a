// SPDX-License-Identifier: Apache-2.0
//
// How the kernels of linear_mma.h lay a call out on a GPU.
//
// A block has 8 warps and a tile of y. row_warps of the warps have rows of their own, the others take other
// tiles of k. Tiles that do not fill the GPU once more are split in k, and a second kernel adds the parts:
//
//   row_warps = 2 of 4    | k tile 0 | k tile 1 |        5 tiles on 4 SMs    | 0 | 1 | 2 | 3 |
//   rows  0 .. 15         |  warp 0  |  warp 2  |                            | 4, a quarter  |
//   rows 16 .. 31         |  warp 1  |  warp 3  |                            | of k each     |
#pragma once

#include <algorithm>
#include <limits>

#include "core/device.h"
#include "linear/linear_canonical.h"
#include "linear/x_sums.h"

namespace quantfuse::linear_mma {
using linear::Problem;
using linear::StripLayout;

inline constexpr int kWarps = 8, kThreads = 32 * kWarps;
inline constexpr int kXRowBytes = StripLayout::kCols * 2;  // of a token in a tile of k

// What one kind of block has. kXUnits: most 16-byte units of x that a thread copies for a stage.
template <int kTokens_, int kStripsEach_, int kXUnits_>
struct Shape {
  static constexpr int kTokens = kTokens_, kStripsEach = kStripsEach_, kXUnits = kXUnits_;
  static constexpr int kColumns = kTokens / 8;  // of mma
  static constexpr int kXBytes = kTokens * kXRowBytes;
  static constexpr int kPassTokens = kThreads / 16;              // whose units all threads copy at once
  static constexpr int kPasses = kTokens / kPassTokens;          // for a tile of k
  static constexpr int kMaxKWarps = kXUnits / kPasses;           // tiles of k in a stage
  static constexpr int kBlocksPerSm = kStripsEach == 1 ? 2 : 1;  // by registers
};

struct Plan {
  int64_t row_blocks, token_blocks;
  int64_t whole_tiles;   // of y; the others are split
  int32_t tokens, rows;  // of a tile
  int32_t row_warps, k_warps, splits;
  int32_t stages, stage_bytes, smem_bytes;
  bool has_aligned_x;  // rows at multiples of 16 bytes

  QF_HD int64_t split_tiles() const { return row_blocks * token_blocks - whole_tiles; }
  int64_t blocks() const { return whole_tiles + split_tiles() * splits; }
  int64_t part_bytes() const { return split_tiles() * splits * tokens * rows * 4; }
};

// What differs between the pipelines.
struct Limits {
  int64_t smem_bytes;  // of a block
  int min_stages, max_stages;
};

template <class S>
Plan lay_out(const Problem& p, const Limits& limits, int row_warps) {
  const StripLayout& w = p.strips.layout;
  Plan plan = {};
  plan.row_warps = row_warps, plan.k_warps = kWarps / row_warps, plan.splits = 1;
  plan.tokens = S::kTokens, plan.rows = row_warps * S::kStripsEach * StripLayout::kRows;
  plan.row_blocks = ceil_div(w.strips, row_warps * S::kStripsEach);
  plan.token_blocks = ceil_div(p.m, S::kTokens);
  plan.whole_tiles = plan.row_blocks * plan.token_blocks;
  plan.has_aligned_x = reinterpret_cast<uint64_t>(p.x.data) % 16 == 0 && p.x.row_stride % 8 == 0;
  plan.stage_bytes = static_cast<int32_t>(
      round_up(plan.k_warps * S::kXBytes + kWarps * S::kStripsEach * w.tile_bytes, kXRowBytes));
  // A share of the SM for each block if that is enough, else all of it.
  const int64_t in_share = (limits.smem_bytes / S::kBlocksPerSm - 1024) / plan.stage_bytes;
  const int64_t stages = in_share >= limits.min_stages ? in_share : limits.smem_bytes / plan.stage_bytes;
  plan.stages = static_cast<int32_t>(std::min<int64_t>(stages, limits.max_stages));
  const int totals_bytes = plan.k_warps * plan.tokens * (plan.rows + 4) * 4;
  plan.smem_bytes = std::max(plan.stages * plan.stage_bytes, totals_bytes);
  return plan;
}

// ---- The clocks that a plan takes ----

// Fitted to an H200's times of another form of this kernel: a stage's instructions that wait for each other,
// which the blocks of an SM do side by side, and its products and copies, which they do in turn.
inline constexpr double kStageClocks = 600, kClocksPerMma = 2.55, kCopiedBytesPerClock = 45;
inline constexpr double kBlockClocks = 3500;   // to fill the ring, to write y
inline constexpr double kReduceClocks = 1000;  // a second kernel
inline constexpr double kPartBytesPerClock = 20;
inline constexpr int64_t kMaxSplits = 8;

// Of a number of blocks at once on each SM, each with so many tiles of k.
template <class S>
double clocks_of_wave(const Plan& plan, int64_t blocks, int64_t tiles) {
  const int64_t stages = ceil_div(tiles, plan.k_warps);
  constexpr int kProducts =
      kWarps * S::kStripsEach * S::kColumns * StripLayout::kCols / StripLayout::kStepCols;
  const double each = kProducts * kClocksPerMma + plan.stage_bytes / kCopiedBytesPerClock;
  return static_cast<double>(stages) * (kStageClocks + static_cast<double>(blocks) * each) + kBlockClocks;
}

template <class S>
Plan make_plan(const Problem& p, const Limits& limits) {
  // The one plan that every shape has, and so every m: a warp has all of k.
  if (p.batch_invariant) return lay_out<S>(p, limits, kWarps);
  const int64_t sms = std::max(gpu_num_sms(p.device.id), 1), k_tiles = p.strips.layout.tiles;
  Plan best = {};
  double least = std::numeric_limits<double>::infinity();
  for (int row_warps = kWarps; row_warps * S::kMaxKWarps >= kWarps; row_warps /= 2) {
    Plan plan = lay_out<S>(p, limits, row_warps);
    if (plan.stages < limits.min_stages) continue;
    const int64_t tiles = plan.whole_tiles;
    const int64_t resident =
        std::clamp<int64_t>(limits.smem_bytes / (plan.smem_bytes + 1024), 1, S::kBlocksPerSm);
    const int64_t rounds = tiles / (sms * resident), tail = tiles % (sms * resident);
    const double before = static_cast<double>(rounds) * clocks_of_wave<S>(plan, resident, k_tiles);
    // A split has two stages at least.
    const int64_t most =
        tail == 0 ? 1 : std::min({sms * resident / tail, k_tiles / (2 * plan.k_warps), kMaxSplits});
    for (int64_t splits = 1; splits == 1 || splits <= most; ++splits) {
      double clocks = before;
      if (tail > 0)
        clocks += clocks_of_wave<S>(plan, ceil_div(tail * splits, sms), ceil_div(k_tiles, splits));
      plan.splits = static_cast<int32_t>(splits);
      plan.whole_tiles = splits == 1 ? tiles : tiles - tail;
      if (splits > 1) {  // every part is written and read
        const auto bytes = static_cast<double>(2 * plan.part_bytes());
        clocks += kReduceClocks + bytes / (static_cast<double>(sms) * kPartBytesPerClock);
      }
      if (clocks < least) least = clocks, best = plan;
    }
  }
  return best;
}

// Whether a block of this shape has room for the stages of a pipeline.
template <class S>
bool fits(const Problem& p, const Limits& limits) {
  return lay_out<S>(p, limits, kWarps).stages >= limits.min_stages;
}

inline Requirements accepts_strips(const Problem& p) {
  return linear::require_sums(p)
      .require(p.strips.is_there, "the weight is not packed (qf_weight_pack)")
      .require(!p.has_act_quant(), "the activations are quantized")
      .require(p.m < 1ll << 31 && ceil_div(p.m, int64_t{16}) * p.strips.layout.strips < 1ll << 31,
               "m, or m times n, is too large");
}

// Parts of split tiles, [split][tile][token][row of the strips], are behind what launch_canonical() has.
inline size_t workspace_bytes_of(const Problem& p, const Plan& plan) {
  return static_cast<size_t>(linear::plan_canonical(p).total_bytes +
                             (plan.splits > 1 ? plan.part_bytes() : 0));
}

}  // namespace quantfuse::linear_mma
