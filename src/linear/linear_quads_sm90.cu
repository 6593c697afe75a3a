// SPDX-License-Identifier: Apache-2.0
//
// y[m,n] = epilogue( sum_k x[m,k] * (q[n,k] - z[n,g]) * s[n,g] )                m <= 64, x: f16 | bf16
//
// For 17 to 32 tokens, for 33 to 64 of layers with few rows, and for 9 to 16 of those with few long rows: the
// weight is the operand in registers, the tokens are the columns of wgmma.
//   gmem x --box copies--> smem, swizzled --------------------------------.
//   gmem q --box copies--> smem --lds--> regs --decode--> 16-bit numbers --wgmma--> sums of a group
//     --* s--> totals --> smem --> epilogue, 8 columns a thread --> y
// Codes less their zero points are exact in 16 bits and a group's sum is scaled in float32, so that nothing
// is rounded that the formula does not round. The byte scales of MXFP4 are part of the numbers, exactly, if
// these are bf16: the tensor cores add to the totals themselves.
//
// A block has four warpgroups and no other warps, so that each thread may have 128 registers. A warpgroup
// decodes a tile of 64 rows (a strip a warp) by 128 columns, multiplies it, and scales the sums; meanwhile
// the others keep the tensor cores busy. They are side by side along the rows, or divide k, or both:
//
//   4 x 1: | rows   0 ..  63 |     2 x 2: | rows  0 ..  63, first half of k | second half |     1 x 4: ...
//          | rows  64 .. 127 |            | rows 64 .. 127, first half of k | second half |
//          | rows 128 .. 191 |
//          | rows 192 .. 255 |
//
// More rows read x from L2 less often, more ways of k give a weight of few rows more blocks. A way of k has a
// ring of its own, whose stages are a tile of each of its strips and the same columns of x; three of its
// warps start the copies. With few tiles of y the blocks of a cluster split k once more, and add their totals
// through each other's shared memory in the order of k: tile_sums.h.
//
// The kernel before may still be running (programmatic dependent launch): until it has ended only the weight
// is read.
#include <cuda.h>

#include <algorithm>
#include <utility>

#include "core/choose.h"
#include "cuda/cursor.h"
#include "cuda/occupancy.h"
#include "cuda/ptx/dependent_launch.h"
#include "cuda/ptx/shared_memory.h"
#include "cuda/ptx/wgmma.h"
#include "linear/strip_boxes.h"
#include "linear/strip_codes.h"
#include "linear/tile_sums.h"

namespace quantfuse::linear_quads_sm90 {
using linear::Problem;
using linear::StripLayout;
namespace {

constexpr int kMaxTokens = 64;
constexpr int kWarpgroups = 4, kThreads = 128 * kWarpgroups;
constexpr int kSteps = StripLayout::kCols / StripLayout::kStepCols;
constexpr int kBoxCols = 64;  // 128 bytes: what a swizzled row has
constexpr int kCopies = 3;    // of a stage: the weight's tiles, and two boxes of x
constexpr int kMaxStages = 12, kMaxSplits = 8;

// kRowWays warpgroups are side by side, and kKWays of such groups divide k.
template <int kTokens_, int kRowWays_>
struct Shape {
  static constexpr int kTokens = kTokens_, kRowWays = kRowWays_, kKWays = kWarpgroups / kRowWays;
  static constexpr int kWarps = 4 * kRowWays;  // of a way of k: each has a strip
  static constexpr int kRows = kWarps * StripLayout::kRows;
  static constexpr int kTotalsStride = kRows + 4;                   // floats from token to token: other banks
  static constexpr int kXBytes = kTokens * StripLayout::kCols * 2;  // of a stage
  static constexpr int kTotalsFloats = kTokens * kTotalsStride;     // of a way of k
  static constexpr int kSums = kTokens / 2;                         // of a thread
  using Exchange = linear::Exchange<kTokens, kTotalsStride>;
};

// How a call is laid out on the GPU.
struct Plan {
  int32_t row_blocks;
  int32_t splits;  // blocks of a cluster, which share a tile of y
  int32_t stages;  // of a ring
  int32_t ahead;   // of them that are filled before they are multiplied
  int32_t stage_bytes;
  int32_t tile_pieces;  // of a tile of the weight, as its map has them
  int32_t clusters;     // or blocks
  int32_t smem_bytes;
};

// What a thread that starts copies does next is in shared memory, because it is needed once a stage and
// registers are scarce: {stage, parity of the round, row block, tile of k}, {first tile of k, end of them}.
constexpr int kFillBytes = 32, kFillsBytes = kWarpgroups * kCopies * kFillBytes;
constexpr int kBarrierBytes = (2 * kMaxStages * kWarpgroups + 2) * 8;
constexpr int kFixedBytes = kFillsBytes + kBarrierBytes;

// ---- Shared memory: a ring for each way of k | totals of each | fills, barriers ----

// Where k is split over blocks each has one tile of y, and totals and inbox take the place of the rings.
template <class S>
struct Smem {
  uint32_t rings, totals, inbox, fills, barriers, arrived;
  __device__ Smem(const Plan& plan, const char* shared) {
    rings = ptx::shared_address(shared);
    totals = plan.splits > 1 ? rings : rings + S::kKWays * plan.stages * plan.stage_bytes;
    inbox = totals + S::kKWays * S::kTotalsFloats * 4;
    fills = rings + plan.smem_bytes - kFixedBytes;
    barriers = fills + kFillsBytes;
    arrived = barriers + kBarrierBytes - 16;
  }
};

// ---- The ring of a way of k ----

template <class S>
struct Ring {
  const Plan& plan;
  const CUtensorMap &x_map, &w_map;
  uint32_t data, full, empty;
  uint32_t fill;  // of a thread that starts copies, or 0
  int copy;       // which of a stage's

  // Fills the next stage once all warps have given it back. Only the weight is read before the kernel before
  // has ended.
  __device__ __forceinline__ void start_copy(int weight_bytes) const {
    const uint4 next = ptx::load_shared16(fill), range = ptx::load_shared16(fill + 16);
    uint32_t stage = next.x, parity = next.y, row_block = next.z, k = next.w;
    if (row_block >= static_cast<uint32_t>(plan.row_blocks)) return;
    const uint32_t to = data + stage * plan.stage_bytes, barrier = full + 8 * stage;
    ptx::barrier_wait(empty + 8 * stage, parity ^ 1);
    if (copy == 0) {
      ptx::barrier_expect(barrier, weight_bytes);
      ptx::box_copy(to + S::kXBytes, w_map, 0, k * plan.tile_pieces, row_block * S::kWarps, barrier,
                    ptx::evict_first_policy());
    } else {
      const int half = copy - 1;
      ptx::barrier_expect(barrier, S::kXBytes / 2);
      ptx::box_copy(to + half * (S::kXBytes / 2), x_map, k * StripLayout::kCols + half * kBoxCols, 0,
                    barrier);
    }
    if (++stage == static_cast<uint32_t>(plan.stages)) stage = 0, parity ^= 1;
    if (++k == range.y) k = range.x, row_block += plan.clusters;
    ptx::store_shared16(fill, {stage, parity, row_block, k});
  }
};

// ---- The products ----

template <class S, qf_format Format, class T>
struct Consumer {
  using Codes = StripCodes<Format, T>;
  static constexpr bool kIsFolded = Codes::kFoldsByteScales;  // E2M1 is taken with byte scales alone
  const Ring<S>& ring;
  int warp, lane;  // of the way of k
  Cursor stage;    // to be multiplied next
  float totals[S::kSums];

  // totals = the sum over the next `count` stages.
  template <int kGroups, bool kHasZeros>
  __device__ __forceinline__ void multiply(int count) {
    constexpr int kGroupSteps = kSteps / kGroups;
    constexpr int kSums = kIsFolded ? 1 : kGroups, kSumSteps = kSteps / kSums;
    constexpr int kScales = Codes::kTileVectors * 512, kZeros = kScales + kGroups * (kIsFolded ? 16 : 64);
    constexpr int kTileBytes = kZeros + (kHasZeros ? kGroups * 16 : 0);
    constexpr int kStageBytes = (S::kXBytes + S::kWarps * kTileBytes + 1023) / 1024 * 1024;
    // In a stage x comes first, then the strips.
    const uint32_t tile = ring.data + S::kXBytes + warp * kTileBytes;
    const uint32_t codes = tile + lane * 16, scales = tile + kScales + lane / 4 * 4,
                   zeros = tile + kZeros + lane / 4;
    const uint64_t x = ptx::swizzled_rows(ring.data, 0);
    uint4 vectors[Codes::kTileVectors];
    const uint32_t* words = reinterpret_cast<const uint32_t*>(vectors);
    ByteScales bytes = {};
    // Waits for the next stage and loads its codes.
    const auto take = [&] {
      ptx::barrier_wait(ring.full + 8 * stage.at, stage.parity);
      const uint32_t from = codes + stage.at * kStageBytes;
#pragma unroll
      for (int i = 0; i < Codes::kTileVectors; ++i) vectors[i] = ptx::load_shared16(from + i * 512);
      if constexpr (kIsFolded) bytes = ByteScales::load(tile + kScales + stage.at * kStageBytes, lane);
      const int taken = stage.at;
      stage.advance(ring.plan.stages);
      return taken;
    };
#pragma unroll
    for (float& total : totals) total = 0.0f;
    if (count == 0) return;

    int taken = take();
#pragma unroll 1
    for (int left = count; left > 0; --left) {
      const int now = taken, offset = now * kStageBytes;
      uint32_t a[kSteps][4];
      float sums[S::kSums];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        uint32_t terms[2] = {Codes::term(), Codes::term()};
        if constexpr (kIsFolded) {
          terms[0] = bytes.factor(0, group), terms[1] = bytes.factor(1, group);
        } else if constexpr (kHasZeros) {
          terms[0] = Codes::term(ptx::load_shared_s8(zeros + offset + group * 16));
          terms[1] = Codes::term(ptx::load_shared_s8(zeros + offset + group * 16 + 8));
        }
#pragma unroll
        for (int step = group * kGroupSteps; step < (group + 1) * kGroupSteps; ++step)
          Codes::decode(words + step * Codes::kStepWords, terms, a[step]);
      }
#pragma unroll
      for (int group = 0; group < kSums; ++group) {
        ptx::wgmma_fence();
#pragma unroll
        for (int step = group * kSumSteps; step < (group + 1) * kSumSteps; ++step) {
          const uint64_t rows = x + ((offset + step / 4 * (S::kXBytes / 2)) >> 4) + step % 4 * 2;
          if constexpr (kIsFolded) ptx::wgmma<T>(totals, a[step], rows, true);
          else ptx::wgmma<T>(sums, a[step], rows, step % kSumSteps > 0);
        }
        ptx::wgmma_commit();
        if (group == kSums - 1) {
          if (ring.fill) ring.start_copy(S::kWarps * kTileBytes);
          __syncwarp();
          if (left > 1) taken = take();
        }
        if constexpr (kIsFolded) {
          ptx::wgmma_wait<0>();
          continue;
        }
        const float scale[2] = {ptx::load_shared_float(scales + offset + group * 64),
                                ptx::load_shared_float(scales + offset + group * 64 + 32)};
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < S::kSums; ++i) totals[i] = fmaf(sums[i], scale[i / 2 % 2], totals[i]);
      }
      __syncwarp();  // all lanes have read
      if (lane == 0) ptx::barrier_arrive(ring.empty + 8 * now);
    }
  }

  __device__ void store_totals(float* to) const {
#pragma unroll
    for (int i = 0; i < S::kSums; ++i) {
      const int token = i / 4 * 8 + lane % 4 * 2 + i % 2, row = warp * 16 + lane / 4 + i / 2 % 2 * 8;
      to[token * S::kTotalsStride + row] = totals[i] * (kIsFolded ? linear::kByteScaleUnit : 1.0f);
    }
  }
};

// ---- The kernel ----

// The totals of all ways of k, in the place of the first's.
template <class S>
__device__ void add_ways(float* totals, int thread) {
  if constexpr (S::kKWays > 1) {
    for (int i = thread; i < S::kTotalsFloats; i += kThreads) {
      float sum = totals[i];
#pragma unroll
      for (int way = 1; way < S::kKWays; ++way) sum += totals[way * S::kTotalsFloats + i];
      totals[i] = sum;
    }
  }
}

template <class S, qf_format Format, class T>
__global__ void __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ Problem p, const __grid_constant__ CUtensorMap x_map,
           const __grid_constant__ CUtensorMap w_map, const __grid_constant__ Plan plan, float* staged) {
  extern __shared__ __align__(1024) char shared[];
  const Smem<S> smem(plan, shared);
  const StripLayout& w = p.strips.layout;
  const bool is_split = plan.splits > 1;
  // What the threads of a warp have in common comes from one of them: the compiler then knows that it is so,
  // and has it in uniform registers.
  const int rank = __shfl_sync(~0u, is_split ? static_cast<int>(ptx::cluster_rank()) : 0, 0);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int block_warp = __shfl_sync(~0u, thread / 32, 0);
  const int way = S::kKWays == 1 ? 0 : block_warp / S::kWarps, warp = block_warp % S::kWarps;
  const typename S::Exchange exchange = {smem.totals, smem.inbox, smem.arrived, plan.splits, rank};
  ptx::allow_next_kernel();
  if (thread < S::kKWays * plan.stages) {
    const uint32_t full = smem.barriers + (thread / plan.stages * 2 * plan.stages + thread % plan.stages) * 8;
    ptx::barrier_init(full, kCopies);
    ptx::barrier_init(full + 8 * plan.stages, S::kWarps);
    ptx::barrier_init_fence();
  }
  if (thread == kThreads - 1) {
    ptx::prefetch_map(x_map), ptx::prefetch_map(w_map);
    ptx::barrier_init(smem.arrived, 1);
    ptx::barrier_init_fence();
    if (is_split) exchange.expect();
  }
  __syncthreads();

  const int ways = plan.splits * S::kKWays, index = rank * S::kKWays + way, tiles = static_cast<int>(w.tiles);
  const int first_k = static_cast<int>(int64_t{tiles} * index / ways),
            count = static_cast<int>(int64_t{tiles} * (index + 1) / ways) - first_k;
  const int first_block = static_cast<int>(blockIdx.x) / plan.splits;
  const uint32_t full = smem.barriers + way * plan.stages * 16;
  // The copies of a stage are started by three warps, of different warpgroups if there are.
  const int copy = warp % 4;
  const bool copies = copy < kCopies && warp / 4 == copy % S::kRowWays && lane == 0;
  const uint32_t fill = smem.fills + (way * kCopies + copy) * kFillBytes;
  const Ring<S> ring = {plan,
                        x_map,
                        w_map,
                        smem.rings + way * plan.stages * plan.stage_bytes,
                        full,
                        full + 8 * plan.stages,
                        copies ? fill : 0,
                        copy};
  if (copies) {
    const auto word = [](int v) { return static_cast<uint32_t>(v); };
    ptx::store_shared16(fill, {0, 0, word(count > 0 ? first_block : plan.row_blocks), word(first_k)});
    ptx::store_shared16(fill + 16, {word(first_k), word(first_k + count), 0, 0});
    if (copy > 0) ptx::wait_for_previous_kernel();
    for (int i = 0; i < plan.ahead; ++i) ring.start_copy(S::kWarps * w.tile_bytes);
  }
  __syncwarp();
  ptx::wait_for_previous_kernel();  // the epilogue touches what it wrote
  auto* totals = static_cast<float*>(__cvta_shared_to_generic(smem.totals));
  Consumer<S, Format, T> consumer = {ring, warp, lane, {}, {}};
  for (int block = first_block; block < plan.row_blocks; block += plan.clusters) {
    const auto multiply = [&]<int kGroups>(std::integral_constant<int, kGroups>) {
      if (!w.has_zeros) consumer.template multiply<kGroups, false>(count);
      else if constexpr (is_integer(Format)) consumer.template multiply<kGroups, true>(count);
    };
    if constexpr (Consumer<S, Format, T>::kIsFolded) multiply(std::integral_constant<int, 4>{});
    else if (w.groups == 1) multiply(std::integral_constant<int, 1>{});
    else if (w.groups == 2) multiply(std::integral_constant<int, 2>{});
    else multiply(std::integral_constant<int, 4>{});
    __syncthreads();  // everyone is done with the totals of the tile before, or with the rings
    if (is_split) ptx::cluster_arrive();
    consumer.store_totals(totals + way * S::kTotalsFloats);
    __syncthreads();
    linear::TileSums sums = {totals, S::kKWays, 0, S::kTokens};
    if (is_split) {
      add_ways<S>(totals, thread);
      ptx::copy_fence();
      __syncthreads();
      ptx::cluster_wait();  // all have initialised their barriers and are done with their rings
      sums = exchange.run(thread);
      ptx::cluster_arrive_relaxed();  // whoever sent to this block may leave
    }
    linear::finish_tile<S::kRows, S::kTotalsStride>(p, staged, 0, int64_t{block} * S::kRows, sums, thread,
                                                    kThreads);
  }
  if (is_split) ptx::cluster_wait();
}

// ---- The host's side ----

template <class S>
Plan make_plan(const Problem& p, int splits) {
  const StripLayout& w = p.strips.layout;
  const auto smem = static_cast<int>(gpu_max_smem_bytes(p.device.id));
  Plan plan = {};
  plan.row_blocks = static_cast<int>(ceil_div(w.strips, S::kWarps));
  plan.splits = splits;
  plan.tile_pieces = linear::tile_pieces(w);
  plan.clusters = std::min(plan.row_blocks, gpu_num_sms(p.device.id) / splits);
  plan.stage_bytes = static_cast<int>(round_up(S::kXBytes + S::kWarps * w.tile_bytes, 1024));
  const int totals = S::kKWays * S::kTotalsFloats * 4, inbox = S::Exchange::inbox_bytes(splits);
  const int budget = smem - kFixedBytes - (splits > 1 ? 0 : totals);
  plan.stages = std::min(budget / (plan.stage_bytes * S::kKWays), kMaxStages);
  // A stage is filled again when all warps are done with it: with the stage before the one that a warp is at
  // they surely are not yet. But two at least are to be under way.
  plan.ahead = std::max(plan.stages - 2, std::min(plan.stages - 1, 2));
  const int rings = plan.stages * S::kKWays * plan.stage_bytes;
  plan.smem_bytes =
      static_cast<int>(round_up(splits > 1 ? std::max(rings, totals + inbox) : rings + totals, 16)) +
      kFixedBytes;
  return plan;
}

template <class S, qf_format Format, class T>
void launch_shape(const Problem& p, float* staged, int splits, const Launch& launch) {
  const Plan plan = make_plan<S>(p, splits);
  const CUtensorMap x_map = row_boxes(p.x, S::kTokens), w_map = linear::strip_boxes(p.strips, S::kWarps);
  LaunchShape shape = {dim3(static_cast<unsigned>(plan.clusters * plan.splits)), dim3(kThreads),
                       static_cast<size_t>(plan.smem_bytes), /*overlap_previous=*/true};
  shape.cluster = static_cast<unsigned>(plan.splits);
  launch_kernel("linear_quads_sm90", kernel<S, Format, T>, shape, launch, p, x_map, w_map, plan, staged);
}

// ---- The division of a call ----

// Nanoseconds, from measurements on an H200: a stage of all four warpgroups, which is longer the more of x
// the ways of k read; and the exchange of a tile's totals.
int64_t estimate(const Problem& p, int tokens, int row_ways, int splits) {
  const StripLayout& w = p.strips.layout;
  const int k_ways = kWarpgroups / row_ways;
  const int64_t blocks = ceil_div(w.strips, 4 * row_ways);
  const int64_t waves = splits > 1 ? 1 : ceil_div(blocks, gpu_num_sms(p.device.id));
  const int64_t stage = 650 + 3 * tokens + 7 * k_ways * tokens / 4;
  return waves * ceil_div(w.tiles, k_ways * splits) * stage + (splits - 1) * row_ways * tokens * 8;
}

// run(Shape, splits): the quickest by estimate() of those whose blocks all find a place.
template <int kTokens, class Run>
void with_tokens(const Problem& p, const Run& run) {
  const StripLayout& w = p.strips.layout;
  int row_ways = 0, splits = 1;
  int64_t best = 0;
  for (int ways : {4, 2, 1}) {
    if (kTokens == 64 && ways == 1) continue;
    if (kTokens == 16 && ways > 1) continue;
    for (int s = 1; s <= kMaxSplits && (s == 1 || s * kWarpgroups / ways <= w.tiles); ++s) {
      const int places = resident_clusters(kernel<Shape<16, 1>, QF_INT4, bf16>, p.device.id, s, kThreads);
      if (s > 1 && places < ceil_div(w.strips, 4 * ways)) continue;
      const int64_t time = estimate(p, kTokens, ways, s);
      if (row_ways == 0 || time < best) row_ways = ways, splits = s, best = time;
    }
  }
  if constexpr (kTokens > 16) {
    if (row_ways == 4) return run(Shape<kTokens, 4>{}, splits);
    if (row_ways == 2) return run(Shape<kTokens, 2>{}, splits);
  }
  if constexpr (kTokens < 64) run(Shape<kTokens, 1>{}, splits);
}

template <class Run>
void with_shape(const Problem& p, const Run& run) {
  if (p.m <= 16) with_tokens<16>(p, run);
  else if (p.m <= 32) with_tokens<32>(p, run);
  else with_tokens<64>(p, run);
}

// Up to 16 tokens linear_batch_sm90 is quicker, unless x takes the shared memory of more than two of its
// blocks; from 33 on linear_wgmma_sm90 is, for E4M3 always. Both unless there are no more strips than warps
// here.
bool is_for_others(const Problem& p) {
  constexpr int64_t kXOfTwoBlocks = 300 * 1024;
  const int64_t warps = int64_t{gpu_num_sms(p.device.id)} * kThreads / 32;
  const bool has_few_rows = p.strips.layout.strips * 4 <= warps;
  if (p.m <= 16) return p.m * p.k * 2 <= kXOfTwoBlocks || !has_few_rows;
  return p.m > 32 && (!has_few_rows || p.weight.format == QF_FP8_E4M3);
}

Verdict accepts(const Problem& p) {
  const qf_format format = p.weight.format;
  return Requirements()
      .require(p.strips.is_there, "the weight is not packed (qf_weight_pack)")
      .require(!p.strips.layout.has_offsets, "the weight has offsets or floating zero points")
      .require(p.strips.layout.groups <= 4, "groups are no multiples of 32 columns")
      .require(format == QF_INT4 || format == QF_INT8 || format == QF_FP8_E4M3 ||
                   (linear::has_byte_scales(p.strips.layout) && p.x.dtype == DType::bf16),
               "the weight is not int4, int8, e4m3 or, with x in bf16, mxfp4")
      .require(!p.has_act_quant(), "the activations are quantized")
      .require(p.x.dtype == DType::f16 || p.x.dtype == DType::bf16, "the activations are not FP16 or BF16")
      .require(has_boxes(p.x), "rows of x do not begin at multiples of 16 bytes")
      .require(p.m > 8 && p.m <= kMaxTokens, "m is not 9 to 64")
      .require(!is_for_others(p), p.m <= 16
                                      ? "x fits the shared memory of two blocks, or the weight has many rows"
                                      : "the weight has many rows, or is e4m3");
}

void launch(const Problem& problem, const Launch& launch) {
  linear::launch_canonical(problem, launch, [&](const Problem& p, float* staged) {
    with_shape(p, [&](auto shape, int splits) {
      if (p.weight.format == QF_FP4_E2M1)
        return launch_shape<decltype(shape), QF_FP4_E2M1, bf16>(p, staged, splits, launch);
      choose_value<QF_INT4, QF_INT8, QF_FP8_E4M3>(p.weight.format, [&](auto format) {
        choose_bool(p.x.dtype == DType::bf16, [&](auto is_bf16) {
          using T = std::conditional_t<is_bf16.value, bf16, f16>;
          launch_shape<decltype(shape), format.value, T>(p, staged, splits, launch);
        });
      });
    });
  });
}

}  // namespace

extern const Kernel<Problem> entry = {"linear_quads_sm90", Target::sm90, accepts,
                                      linear::canonical_workspace_bytes, launch};

}  // namespace quantfuse::linear_quads_sm90
