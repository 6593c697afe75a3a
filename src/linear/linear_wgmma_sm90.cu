// SPDX-License-Identifier: Apache-2.0
//
// y[m,n] = epilogue( sum_k x[m,k] * ((q[n,k] - z[n,g]) * s[n,g] + o[n,g]) )             x: f16 | bf16
//
// The weight is the operand in registers, the tokens are the columns of wgmma:
//   gmem x --box copies--> smem, swizzled --------------------------------.
//   gmem q --box copies--> smem --lds--> regs --decode--> 16-bit numbers --wgmma--> sums of a group
//     --* s--> totals --> smem --> epilogue, 8 columns a thread --> y
// Codes less their zero points are exact in 16 bits and a group's sum is scaled in float32, so that nothing
// is rounded that the formula does not round. Offsets are added as o times the sum of the group's x. The byte
// scales of MXFP4 are part of the numbers, exactly, if these are bf16: the tensor cores add to the totals
// themselves.
//
// A block has a producer warp and two warpgroups of consumers, each 64 rows of the weight (a strip a warp; or
// 128, and two) by kTokens tokens; while one scales its sums, decodes or waits, the other keeps the tensor
// cores busy. Stages of the ring are a tile: 128 columns. With few tiles of y the blocks of a cluster split
// k; each sends its totals to the blocks that the tokens belong to, and they add them in the order of k:
//
//   cluster of 2:    | rank 0: tiles 0 .. 15 | rank 1: tiles 16 .. 31 |
//   tokens 0 .. 7    | totals -------------- + <---- totals           | --> y by rank 0
//   tokens 8 .. 15   | totals --------------------> + totals          | --> y by rank 1
//
// The kernel before may still be running (programmatic dependent launch): until it has ended only the weight
// is read.
#include <cuda.h>

#include <algorithm>
#include <utility>

#include "core/choose.h"
#include "cuda/cursor.h"
#include "cuda/ptx/async_copy.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/dependent_launch.h"
#include "cuda/ptx/shared_memory.h"
#include "cuda/ptx/wgmma.h"
#include "linear/strip_boxes.h"
#include "linear/strip_codes.h"
#include "linear/tile_sums.h"
#include "linear/x_sums.h"

namespace quantfuse::linear_wgmma_sm90 {
using linear::Problem;
using linear::StripLayout;
namespace {

constexpr int kConsumerWarps = 8, kConsumerThreads = 32 * kConsumerWarps;  // two warpgroups
constexpr int kSteps = StripLayout::kCols / StripLayout::kStepCols;
constexpr int kBoxCols = 64;  // 128 bytes: what a swizzled row has
constexpr int kMaxStages = 12;
constexpr int64_t kMaxTokens = 64;

template <int kTokens_, int kStripsPerWarp_>
struct Shape {
  static constexpr int kTokens = kTokens_, kStripsPerWarp = kStripsPerWarp_;
  static constexpr int kStrips = kConsumerWarps * kStripsPerWarp, kRows = kStrips * StripLayout::kRows;
  static constexpr int kTotalsStride = kRows + 4;                   // floats from token to token: other banks
  static constexpr int kXBytes = kTokens * StripLayout::kCols * 2;  // of a stage
  static constexpr int kTotalsBytes = kTokens * kTotalsStride * 4;
  static constexpr int kBlocksPerSm = kTokens <= 32 ? 2 : 1;
  static constexpr int kBatch = kTokens == 32 ? 2 : 4;        // steps, as many as registers allow
  static constexpr int kSums = kTokens / 2 * kStripsPerWarp;  // of a thread
  // Many sums need more registers than all threads can have: whole warpgroups may trade theirs.
  static constexpr bool kTradesRegisters = kSums > 32;
  static constexpr int kThreads = kConsumerThreads + (kTradesRegisters ? 128 : 32);
  static constexpr int kMaxSplits = kSums <= 32 ? 6 : 1;  // with more sums there is no room for an inbox
  using Exchange = linear::Exchange<kTokens, kTotalsStride>;
  static constexpr int kInboxBytes = Exchange::inbox_bytes(kMaxSplits);
};

// How a call is laid out on the GPU.
struct Plan {
  int64_t row_blocks;
  int32_t splits;  // blocks of a cluster, which share a tile of y
  int32_t stages;  // of the ring
  int32_t stage_bytes;
  int32_t tile_pieces;  // of a tile of the weight, as its map has them
  int32_t grid;
  int32_t smem_bytes;
};

constexpr int kBarrierBytes = (2 * kMaxStages + 1) * 8;

// ---- Shared memory: ring | totals | inbox, where k is split | barriers ----

template <class S>
struct Smem {
  uint32_t ring, totals, inbox, full, empty, arrived;
  __device__ Smem(const Plan& plan, const char* shared) {
    ring = ptx::shared_address(shared);
    totals = ring + plan.stages * plan.stage_bytes;
    inbox = totals + S::kTotalsBytes;
    full = plan.splits > 1 ? inbox + S::kInboxBytes : inbox;
    empty = full + 8 * kMaxStages;
    arrived = empty + 8 * kMaxStages;
  }
};

// ---- The tiles of y: blocks of rows, and all tokens ----

struct Share {
  int64_t first_tile, tile_step, tiles;  // of y
  int first_k, end_k;                    // tiles of a strip
  int rank;
};
__device__ Share share_of(const Plan& plan, const StripLayout& w) {
  const int rank = plan.splits > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
  const int tiles = static_cast<int>(w.tiles);
  return {blockIdx.x / plan.splits,   gridDim.x / plan.splits,          plan.row_blocks,
          tiles * rank / plan.splits, tiles * (rank + 1) / plan.splits, rank};
}

// ---- The producer: one thread ----

template <class S>
struct Producer {
  const Problem& p;
  const Plan& plan;
  const CUtensorMap &x_map, &w_map;
  const Smem<S> smem;

  __device__ void copy_weight(int64_t tile, int k, int stage, uint64_t policy) const {
    const uint32_t full = smem.full + 8 * stage, to = smem.ring + stage * plan.stage_bytes + S::kXBytes;
    ptx::barrier_expect(full, S::kXBytes + S::kStrips * p.strips.layout.tile_bytes);
    ptx::box_copy(to, w_map, 0, k * plan.tile_pieces, static_cast<int>(tile) * S::kStrips, full, policy);
  }
  __device__ void copy_x(int k, int stage) const {
    const int column = k * StripLayout::kCols;
    const uint32_t to = smem.ring + stage * plan.stage_bytes, full = smem.full + 8 * stage;
    ptx::box_copy(to, x_map, column, 0, full);
    ptx::box_copy(to + S::kXBytes / 2, x_map, column + kBoxCols, 0, full);
  }
  __device__ void run(const Share& share) const {
    const uint64_t policy = ptx::evict_first_policy();
    // The weight's part of the first round does not wait for the kernel before.
    const int early = min(plan.stages, share.end_k - share.first_k);
    for (int i = 0; i < early; ++i) copy_weight(share.first_tile, share.first_k + i, i, policy);
    ptx::wait_for_previous_kernel();
    for (int i = 0; i < early; ++i) copy_x(share.first_k + i, i);

    Cursor cursor;
    int done = 0;
    for (int64_t tile = share.first_tile; tile < share.tiles; tile += share.tile_step) {
      for (int k = share.first_k; k < share.end_k; ++k, cursor.advance(plan.stages)) {
        if (done++ < early) continue;
        ptx::barrier_wait(smem.empty + 8 * cursor.at, cursor.parity ^ 1);
        copy_weight(tile, k, cursor.at, policy);
        copy_x(k, cursor.at);
      }
    }
  }
};

// ---- The consumers ----

// What a consumer sees of the ring.
struct Ring {
  uint32_t data, full, empty;
  int stages, stage_bytes;
  Cursor cursor;

  // The next stage, once it is there.
  __device__ int take() {
    ptx::barrier_wait(full + 8 * cursor.at, cursor.parity);
    const int stage = cursor.at;
    cursor.advance(stages);
    return stage;
  }
  __device__ uint32_t address(int stage) const { return data + stage * stage_bytes; }
  // By every consumer warp, once all its lanes have read.
  __device__ void give_back(int stage, int lane) const {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(empty + 8 * stage);
  }
};

template <class S, qf_format Format, class T, bool kHasOffsets>
struct Consumer {
  using Codes = StripCodes<Format, T>;
  static constexpr int kSums = S::kTokens / 2;  // of a strip
  const StripLayout& w;
  int warp, lane;  // of the consumers
  const Matrix& x_sums;
  float totals[S::kStripsPerWarp][kSums];
  const Codes codes = Codes(w.format);

  // A warp's tile in a stage: x comes first, then the strips.
  __device__ const char* tile_in(uint32_t stage, int strip) const {
    return static_cast<const char*>(__cvta_shared_to_generic(stage + S::kXBytes)) +
           (strip * kConsumerWarps + warp) * w.tile_bytes;
  }

  // totals = the sum over the next `count` stages, of which the first is tile first_k of the strips.
  //
  // The steps go to the tensor cores in batches, and while one is there the next is decoded, from the next
  // stage if need be: two sets of registers take turns as operands. At the end of a group its sums are
  // scaled.
  template <int kScaleGroups, bool kHasByteScales = false>
  __device__ __forceinline__ void multiply(Ring& ring, int first_k, int count) {
    constexpr bool kIsFolded = kHasByteScales && Codes::kFoldsByteScales;
    constexpr int kGroups = kIsFolded ? 1 : kScaleGroups;  // of sums
    constexpr int kGroupSteps = kSteps / kGroups;
    constexpr int kBatch = kGroupSteps < S::kBatch ? kGroupSteps : S::kBatch;
    constexpr int kTileBatches = kSteps / kBatch, kBatches = S::kStripsPerWarp * kTileBatches;
    constexpr int kGroupBatches = kGroupSteps / kBatch;
    uint4 vectors[Codes::kTileVectors];
    const uint32_t* words = reinterpret_cast<const uint32_t*>(vectors);
    ByteScales bytes = {};  // of the tile that is decoded
    uint32_t a[2][kBatch][4];
#pragma unroll
    for (auto& of_strip : totals)
#pragma unroll
      for (float& total : of_strip) total = 0.0f;

    const auto load_codes = [&](const char* tile) {
#pragma unroll
      for (int i = 0; i < Codes::kTileVectors; ++i)
        vectors[i] = reinterpret_cast<const uint4*>(tile)[i * 32 + lane];
      if constexpr (kIsFolded)
        bytes = ByteScales::load(ptx::shared_address(tile) + Codes::kTileVectors * 512, lane);
    };
    const auto decode = [&]<int kIndex>(const char* tile, std::integral_constant<int, kIndex>) {
      const auto* zeros = reinterpret_cast<const int8_t*>(tile + w.zero_offset()) + lane / 4;
      constexpr int kFirst = kIndex % kTileBatches * kBatch, kGroup = kFirst / kGroupSteps;
      uint32_t terms[2] = {Codes::term(), Codes::term()};
      if (is_integer(Format) && w.has_zeros) {
        terms[0] = Codes::term(zeros[kGroup * 16]), terms[1] = Codes::term(zeros[kGroup * 16 + 8]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        constexpr int kScaleSteps = kSteps / kScaleGroups;
        if (kIsFolded && (kFirst + i) % kScaleSteps == 0) {
          terms[0] = bytes.factor(0, (kFirst + i) / kScaleSteps);
          terms[1] = bytes.factor(1, (kFirst + i) / kScaleSteps);
        }
        codes.decode(words + (kFirst + i) * Codes::kStepWords, terms, a[kIndex % 2][i]);
      }
      ptx::wgmma_fence();  // also keeps the compiler from doing this after the wait that follows
    };

    int stage = ring.take(), next = stage;
    load_codes(tile_in(ring.address(stage), 0));
    decode(tile_in(ring.address(stage), 0), std::integral_constant<int, 0>{});
#pragma unroll 1
    for (int left = count; left > 0; --left) {
      const uint32_t at = ring.address(stage);
      float sums[kSums];
      const auto run_batch = [&]<int kIndex>(std::integral_constant<int, kIndex>) {
        constexpr int kStrip = kIndex / kTileBatches, kFirst = kIndex % kTileBatches * kBatch;
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int step = kFirst + i;
          const uint64_t x = ptx::swizzled_rows(at + step / 4 * (S::kXBytes / 2), step % 4);
          if constexpr (kIsFolded) ptx::wgmma<T>(totals[kStrip], a[kIndex % 2][i], x, true);
          else ptx::wgmma<T>(sums, a[kIndex % 2][i], x, step % kGroupSteps > 0);
        }
        ptx::wgmma_commit();
        if constexpr (kIndex + 1 < kBatches) {
          ptx::wgmma_wait<1>();  // the batch before is done with its registers
          constexpr int kNext = (kIndex + 1) / kTileBatches;
          if constexpr (kNext != kStrip) load_codes(tile_in(at, kNext));
          decode(tile_in(at, kNext), std::integral_constant<int, kIndex + 1>{});
        } else {
          if (left > 1) {
            next = ring.take();
            load_codes(tile_in(ring.address(next), 0));
          }
          ptx::wgmma_wait<1>();
          decode(tile_in(ring.address(next), 0),
                 std::integral_constant<int, 0>{});  // the last time of no use
        }
        if constexpr (kIsFolded) {
          if constexpr (kIndex == kBatches - 1) ptx::wgmma_wait<0>();
        } else if constexpr (kIndex % kGroupBatches == kGroupBatches - 1) {
          constexpr int kGroup = kFirst / kGroupSteps;
          const char* at_scales = tile_in(at, kStrip) + w.scale_offset();
          float scale[2];
          if constexpr (kHasByteScales) {
            const ByteScales of_tile = ByteScales::load(ptx::shared_address(at_scales), lane);
            scale[0] = of_tile.scale(0, kGroup), scale[1] = of_tile.scale(1, kGroup);
          } else {
            const auto* scales = reinterpret_cast<const float*>(at_scales) + lane / 4;
            scale[0] = scales[kGroup * 16], scale[1] = scales[kGroup * 16 + 8];
          }
          [[maybe_unused]] float offset[2] = {};
          [[maybe_unused]] linear::XSums<S::kTokens> of_x;
          if constexpr (kHasOffsets) {
            const auto* offsets =
                reinterpret_cast<const float*>(tile_in(at, kStrip) + w.zero_offset()) + lane / 4;
            offset[0] = offsets[kGroup * 16], offset[1] = offsets[kGroup * 16 + 8];
            of_x.load(x_sums.row<const float>((first_k + count - left) * kGroups + kGroup), lane);
          }
          ptx::wgmma_wait<0>();
#pragma unroll
          for (int i = 0; i < kSums; ++i)
            totals[kStrip][i] = fmaf(sums[i], scale[i / 2 % 2], totals[kStrip][i]);
          if constexpr (kHasOffsets) of_x.add_to(totals[kStrip], offset);
        }
      };
      [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
        (run_batch(std::integral_constant<int, kIndex>{}), ...);
      }
      (std::make_integer_sequence<int, kBatches>{});
      ring.give_back(stage, lane);
      stage = next;
    }
    if constexpr (kIsFolded) {
#pragma unroll
      for (auto& of_strip : totals)
#pragma unroll
        for (float& total : of_strip) total *= linear::kByteScaleUnit;
    }
  }

  __device__ void store_totals(float* to) const {
#pragma unroll
    for (int strip = 0; strip < S::kStripsPerWarp; ++strip) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        const int row = (strip * kConsumerWarps + warp) * 16 + lane / 4 + i / 2 % 2 * 8;
        to[token * S::kTotalsStride + row] = totals[strip][i];
      }
    }
  }
};

// ---- The kernel ----

__device__ __forceinline__ void sync_consumers() { ptx::named_barrier_sync<1, kConsumerThreads>(); }

template <class S, qf_format Format, class T, bool kHasOffsets>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSm)
    kernel(const __grid_constant__ Problem p, const __grid_constant__ CUtensorMap x_map,
           const __grid_constant__ CUtensorMap w_map, const Plan plan, float* staged) {
  extern __shared__ __align__(1024) char shared[];
  const Smem<S> smem(plan, shared);
  const Share share = share_of(plan, p.strips.layout);
  const bool is_split = S::kMaxSplits > 1 && plan.splits > 1;
  const typename S::Exchange exchange = {smem.totals, smem.inbox, smem.arrived, plan.splits, share.rank};
  ptx::allow_next_kernel();
  if (threadIdx.x == 0) {
    ptx::prefetch_map(x_map), ptx::prefetch_map(w_map);
    for (int i = 0; i < plan.stages; ++i) {
      ptx::barrier_init(smem.full + 8 * i, 1);
      ptx::barrier_init(smem.empty + 8 * i, kConsumerWarps);
    }
    ptx::barrier_init(smem.arrived, 1);
    ptx::barrier_init_fence();
    if (is_split) exchange.expect();
  }
  __syncthreads();
  if (is_split) ptx::cluster_arrive_relaxed();

  const int thread = static_cast<int>(threadIdx.x);
  if (thread >= kConsumerThreads) {
    if constexpr (S::kTradesRegisters) ptx::release_registers<72>();
    if (thread == kConsumerThreads) Producer<S>{p, plan, x_map, w_map, smem}.run(share);
    __syncwarp();
    if (is_split) {
      ptx::cluster_wait();
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
    }
    return;
  }
  if constexpr (S::kTradesRegisters) ptx::claim_registers<216>();
  ptx::wait_for_previous_kernel();  // the epilogue touches what it wrote
  auto* totals = static_cast<float*>(__cvta_shared_to_generic(smem.totals));
  using Codes = StripCodes<Format, T>;
  Consumer<S, Format, T, kHasOffsets> consumer = {p.strips.layout, thread / 32, thread % 32, p.x_sums, {}};
  Ring ring = {smem.ring, smem.full, smem.empty, plan.stages, plan.stage_bytes, {}};
  const int groups = p.strips.layout.groups, count = share.end_k - share.first_k;
  for (int64_t tile = share.first_tile; tile < share.tiles; tile += share.tile_step) {
    if (Codes::kMayHaveByteScales && linear::has_byte_scales(p.strips.layout))
      consumer.template multiply<4, Codes::kMayHaveByteScales>(ring, share.first_k, count);
    else if (groups == 1) consumer.template multiply<1>(ring, share.first_k, count);
    else if (groups == 2) consumer.template multiply<2>(ring, share.first_k, count);
    else if (groups == 4) consumer.template multiply<4>(ring, share.first_k, count);
    else consumer.template multiply<8>(ring, share.first_k, count);
    sync_consumers();  // everyone is done with the totals of the tile before
    consumer.store_totals(totals);
    if (is_split) ptx::copy_fence();
    sync_consumers();
    linear::TileSums sums = {totals, 1, 0, S::kTokens};
    if (is_split) {
      ptx::cluster_wait();  // all have initialised their barriers
      sums = exchange.run(thread);
      ptx::cluster_arrive_relaxed();  // whoever sent to this block may leave
    }
    linear::finish_tile<S::kRows, S::kTotalsStride>(p, staged, 0, tile * S::kRows, sums, thread,
                                                    kConsumerThreads);
  }
  if (is_split) ptx::cluster_wait();
}

// ---- The host's side ----

Verdict accepts(const Problem& p) {
  return linear::require_sums(p)
      .require(p.strips.is_there, "the weight is not packed (qf_weight_pack)")
      .require(!p.has_act_quant(), "the activations are quantized")
      .require(p.x.dtype == DType::f16 || p.x.dtype == DType::bf16, "the activations are not FP16 or BF16")
      .require(reinterpret_cast<uint64_t>(p.x.data) % 16 == 0 && p.x.row_stride % 8 == 0,
               "rows of x do not begin at multiples of 16 bytes")
      .require(p.m <= kMaxTokens, "m is more than 64");
}

// run(Shape): as few tokens as hold all, and 256 rows where that still fills the GPU, because x is then
// copied half as often.
template <class Run>
void with_shape(const Problem& p, const Run& run) {
  const int64_t strips = p.strips.layout.strips, sms = gpu_num_sms(p.device.id);
  if (p.m <= 32) run(Shape<32, 1>{});
  else if (strips > 2 * kConsumerWarps * sms * 3 / 4) run(Shape<64, 2>{});
  else run(Shape<64, 1>{});
}

template <class S>
Plan make_plan(const Problem& p) {
  constexpr int kSmemOfSm = 227 * 1024, kReserved = 1024;  // a block takes 1 KB more than it asks for
  const StripLayout& w = p.strips.layout;
  Plan plan = {};
  plan.row_blocks = ceil_div(w.strips, S::kStrips);
  const int64_t places = static_cast<int64_t>(gpu_num_sms(p.device.id)) * S::kBlocksPerSm;
  // Pairs of blocks find a place on all SMs, larger clusters leave about a tenth of them over.
  const int64_t fitting =
      std::max(places * 9 / 10 / plan.row_blocks, std::min<int64_t>(places / plan.row_blocks, 2));
  plan.splits =
      static_cast<int32_t>(std::max<int64_t>(std::min({fitting, w.tiles / 2, int64_t{S::kMaxSplits}}), 1));
  plan.grid = static_cast<int32_t>(std::min(plan.row_blocks, places / plan.splits) * plan.splits);
  plan.tile_pieces = linear::tile_pieces(w);
  plan.stage_bytes = static_cast<int32_t>(round_up(S::kXBytes + S::kStrips * w.tile_bytes, 1024));
  const int others = S::kTotalsBytes + (plan.splits > 1 ? S::kInboxBytes : 0) + kBarrierBytes;
  const int budget = kSmemOfSm / S::kBlocksPerSm - kReserved - others;
  plan.stages = std::min(budget / plan.stage_bytes, kMaxStages);
  plan.smem_bytes = plan.stages * plan.stage_bytes + others;
  return plan;
}

template <class S, qf_format Format, class T>
void launch_shape(const Problem& p, float* staged, const Launch& launch) {
  const Plan plan = make_plan<S>(p);
  const CUtensorMap x_map = row_boxes(p.x, S::kTokens), w_map = linear::strip_boxes(p.strips, S::kStrips);
  LaunchShape shape = {dim3(static_cast<unsigned>(plan.grid)), dim3(S::kThreads),
                       static_cast<size_t>(plan.smem_bytes), /*overlap_previous=*/true};
  shape.cluster = static_cast<unsigned>(plan.splits);
  choose_bool(p.strips.layout.has_offsets, [&](auto has_offsets) {
    constexpr bool kHasOffsets = has_offsets.value && is_integer(Format);
    launch_kernel("linear_wgmma_sm90", kernel<S, Format, T, kHasOffsets>, shape, launch, p, x_map, w_map,
                  plan, staged);
  });
}

void launch(const Problem& problem, const Launch& launch) {
  linear::launch_canonical(problem, launch, [&](const Problem& p, float* staged) {
    choose_strip_format(p.weight.format, [&](auto format) {
      choose_bool(p.x.dtype == DType::bf16, [&](auto is_bf16) {
        using T = std::conditional_t<is_bf16.value, bf16, f16>;
        with_shape(p, [&](auto shape) { launch_shape<decltype(shape), format.value, T>(p, staged, launch); });
      });
    });
  });
}

}  // namespace

extern const Kernel<Problem> entry = {"linear_wgmma_sm90", Target::sm90, accepts,
                                      linear::canonical_workspace_bytes, launch};

}  // namespace quantfuse::linear_wgmma_sm90
