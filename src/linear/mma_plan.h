// SPDX-License-Identifier: Apache-2.0
//
// How the kernels of linear_mma.h lay a call out on a GPU.
//
// A block has 8 warps and kTokens tokens. row_warps of them have rows of their own, the others take other
// tiles of k; where that still leaves SMs idle, blocks split k and a second kernel adds their parts:
//
//   row_warps = 2 of 4    | k tile 0 | k tile 1 |        splits = 2    block 0: first half of k --> part 0
//   rows  0 .. 15         |  warp 0  |  warp 2  |                      block 1: second half     --> part 1
//   rows 16 .. 31         |  warp 1  |  warp 3  |                      reduce: part 0 + part 1  --> y
#pragma once

#include <algorithm>
#include <limits>

#include "core/device.h"
#include "linear/linear_canonical.h"

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
  static constexpr int kTileXUnits = kXBytes / 16 / kThreads;    // of a thread
  static constexpr int kMaxKWarps = kXUnits / kTileXUnits;       // tiles of k in a stage
  static constexpr int kBlocksPerSm = kStripsEach == 1 ? 2 : 1;  // by registers
};

struct Plan {
  int64_t row_blocks, token_blocks;
  int32_t row_warps, splits;
  int32_t stages, stage_bytes, smem_bytes;
  bool has_aligned_x;  // rows at multiples of 16 bytes

  QF_HD int k_warps() const { return kWarps / row_warps; }
  QF_HD int64_t blocks() const { return row_blocks * token_blocks * splits; }
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
  plan.row_warps = row_warps, plan.splits = 1;
  plan.row_blocks = ceil_div(w.strips, row_warps * S::kStripsEach);
  plan.token_blocks = ceil_div(p.m, S::kTokens);
  plan.has_aligned_x = reinterpret_cast<uint64_t>(p.x.data) % 16 == 0 && p.x.row_stride % 8 == 0;
  plan.stage_bytes = static_cast<int32_t>(
      round_up(plan.k_warps() * S::kXBytes + kWarps * S::kStripsEach * w.tile_bytes, kXRowBytes));
  // A share of the SM for each block if that is enough to have copies under way, else all of it.
  const int64_t share = limits.smem_bytes / S::kBlocksPerSm - 1024;
  const int64_t in_share = share / plan.stage_bytes;
  const bool is_enough = in_share >= std::max(limits.max_stages - 1, limits.min_stages);
  const int64_t stages = is_enough ? in_share : limits.smem_bytes / plan.stage_bytes;
  plan.stages = static_cast<int32_t>(std::min<int64_t>(stages, limits.max_stages));
  const int totals_stride = row_warps * S::kStripsEach * StripLayout::kRows + 4;
  plan.smem_bytes = std::max(plan.stages * plan.stage_bytes, plan.k_warps() * S::kTokens * totals_stride * 4);
  return plan;
}

// Parts of split k are [split][token][row of the strips], behind what launch_canonical() has.
inline int64_t part_numbers(const Problem& p) { return p.m * p.strips.layout.strips * StripLayout::kRows; }

// ---- The clocks that a plan takes ----

// Fitted to an H200's times of 32 plans for INT4 layers of 4096 x 4096 to 28672 x 4096 and 1 to 256 tokens,
// all but one of which they give within a tenth: a stage's instructions that wait for each other, which the
// blocks of an SM do side by side, and its products and copies, which they do in turn.
inline constexpr double kStageClocks = 600, kClocksPerMma = 2.55, kCopiedBytesPerClock = 45;
inline constexpr double kBlockClocks = 3500;   // to fill the ring, to write y
inline constexpr double kReduceClocks = 1000;  // a second kernel
inline constexpr double kPartBytesPerClock = 20;
inline constexpr int64_t kMaxSplits = 8;

// Of a number of blocks at once on each SM.
template <class S>
double clocks_of_wave(const Problem& p, const Plan& plan, int64_t blocks) {
  const int64_t stages = ceil_div(ceil_div(p.strips.layout.tiles, plan.splits), plan.k_warps());
  constexpr int kProducts =
      kWarps * S::kStripsEach * S::kColumns * StripLayout::kCols / StripLayout::kStepCols;
  const double each = kProducts * kClocksPerMma + plan.stage_bytes / kCopiedBytesPerClock;
  return static_cast<double>(stages) * (kStageClocks + static_cast<double>(blocks) * each) + kBlockClocks;
}

template <class S>
double clocks_of(const Problem& p, const Plan& plan, int64_t sms, int64_t resident) {
  const int64_t waves = plan.blocks() / (sms * resident), rest = plan.blocks() % (sms * resident);
  double clocks = static_cast<double>(waves) * clocks_of_wave<S>(p, plan, resident);
  if (rest > 0) clocks += clocks_of_wave<S>(p, plan, ceil_div(rest, sms));
  if (plan.splits > 1) {  // every part is written and read
    const auto bytes = static_cast<double>(2 * plan.splits * part_numbers(p) * 4);
    clocks += kReduceClocks + bytes / (static_cast<double>(sms) * kPartBytesPerClock);
  }
  return clocks;
}

// Whether a block of this shape has room for the stages of a pipeline.
template <class S>
bool fits(const Problem& p, const Limits& limits) {
  return lay_out<S>(p, limits, kWarps).stages >= limits.min_stages;
}

template <class S>
Plan make_plan(const Problem& p, const Limits& limits) {
  const int64_t sms = std::max(gpu_num_sms(p.device.id), 1);
  Plan best = {};
  double least = std::numeric_limits<double>::infinity();
  for (int row_warps = kWarps; row_warps * S::kMaxKWarps >= kWarps; row_warps /= 2) {
    Plan plan = lay_out<S>(p, limits, row_warps);
    if (plan.stages < limits.min_stages) continue;
    const int64_t resident =
        std::clamp<int64_t>(limits.smem_bytes / (plan.smem_bytes + 1024), 1, S::kBlocksPerSm);
    // As long as all blocks run at once, with two stages each at least.
    const int64_t most =
        std::min({sms * resident / plan.blocks(), p.strips.layout.tiles / (2 * plan.k_warps()), kMaxSplits});
    for (plan.splits = 1; plan.splits == 1 || plan.splits <= most; ++plan.splits) {
      const double clocks = clocks_of<S>(p, plan, sms, resident);
      if (clocks < least) least = clocks, best = plan;
    }
  }
  return best;
}

inline Requirements accepts_strips(const Problem& p) {
  return Requirements()
      .require(p.strips.is_there, "the weight is not packed (qf_weight_pack)")
      .require(!p.has_act_quant(), "the activations are quantized")
      .require(p.m < 1ll << 31 && ceil_div(p.m, int64_t{16}) * p.strips.layout.strips < 1ll << 31,
               "m, or m times n, is too large");
}

inline int64_t workspace_bytes_of(const Problem& p, const Plan& plan) {
  const int64_t parts = plan.splits > 1 ? plan.splits * part_numbers(p) * 4 : 0;
  return linear::plan_canonical(p).total_bytes + parts;
}

}  // namespace quantfuse::linear_mma
