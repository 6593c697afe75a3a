// SPDX-License-Identifier: Apache-2.0
//
// y[m,n] = epilogue( sum_k x[m,k] * (q[n,k] - z[n,g]) * s[n,g] )                        x: f16 | bf16
//
// The weight is the operand in registers, the tokens are the columns of wgmma:
//   gmem x --box copies--> smem, swizzled --------------------------------.
//   gmem q --bulk copies--> smem --lds--> regs --decode--> 16-bit numbers --wgmma--> sums of a group
//     --* s--> totals --> smem --> epilogue, 8 columns a thread --> y
// Codes less their zero points are exact in 16 bits and a group's sum is scaled in float32, so that nothing is
// rounded that the formula does not round.
//
// A block has a producer warp and two warpgroups of consumers, each 64 rows of the weight (a strip a warp) by
// kTokens tokens; while one scales its sums, decodes or waits, the other keeps the tensor cores busy. Stages of
// the ring are a tile: 128 columns. With few tiles of y the blocks of a cluster split k, and each adds the
// others' totals of its share of the tokens, in the order of k, from their shared memory:
//
//   cluster of 2:    | rank 0: tiles 0 .. 15 | rank 1: tiles 16 .. 31 |
//   tokens 0 .. 7    | totals ------------- + ---- totals             | --> y by rank 0
//   tokens 8 .. 15   | totals ------------- + ---- totals             | --> y by rank 1
//
// The kernel before may still be running (programmatic dependent launch): until it has ended only the weight
// is read.
#include <cuda.h>

#include <algorithm>

#include "core/choose.h"
#include "cuda/ptx/async_copy.h"
#include "cuda/ptx/dependent_launch.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tensor_map.h"
#include "linear/finish_unit.h"
#include "linear/strip_codes.h"

namespace quantfuse::linear_wgmma_sm90 {
using linear::Problem;
using linear::StripLayout;
namespace {

constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kConsumers = 2, kThreads = kGroupThreads * (kConsumers + 1);
constexpr int kStrips = 4 * kConsumers, kRows = kStrips * StripLayout::kRows;  // of a block
constexpr int kSteps = StripLayout::kCols / StripLayout::kStepCols;
constexpr int kBoxCols = 64;              // 128 bytes: what a swizzled row has
constexpr int kTotalsStride = kRows + 4;  // floats from token to token: other banks
constexpr int kMaxStages = 12;
constexpr int kTokenGroup = 8;  // blocks of tokens whose x stays in L2 while the weight goes by

template <int kTokens_>
struct Shape {
  static constexpr int kTokens = kTokens_;
  static constexpr int kXBytes = kTokens * StripLayout::kCols * 2;  // of a stage
  static constexpr int kTotalsBytes = kTokens * kTotalsStride * 4;
  static constexpr int kBlocksPerSm = kTokens <= 32 ? 2 : 1;
};

// How a call is laid out on the GPU.
struct Plan {
  int64_t row_blocks, token_blocks;
  int32_t splits;  // blocks of a cluster, which share a tile of y
  int32_t stages;  // of the ring
  int32_t stage_bytes;
  int32_t grid;
  int32_t smem_bytes;
};

constexpr int kBarrierBytes = 2 * kMaxStages * 8;

// ---- Shared memory: ring | totals | barriers ----

template <class S>
struct Smem {
  uint32_t ring, totals, full, empty;
  __device__ Smem(const Plan& plan, const char* shared) {
    ring = ptx::shared_address(shared);
    totals = ring + plan.stages * plan.stage_bytes;
    full = totals + S::kTotalsBytes;
    empty = full + 8 * kMaxStages;
  }
};

// A position in the ring, and the parity of the round.
struct Cursor {
  int at = 0;
  uint32_t parity = 0;
  __device__ void advance(int size) {
    if (++at == size) at = 0, parity ^= 1;
  }
};

// ---- The tiles of y ----

struct Tile {
  int64_t row_block, token_block;
};
__device__ Tile tile_at(const Plan& plan, int64_t index) {
  const int64_t per_group = kTokenGroup * plan.row_blocks;
  const int64_t first = index / per_group * kTokenGroup, in_group = index % per_group;
  const int64_t tokens = min(plan.token_blocks - first, int64_t{kTokenGroup});
  return {in_group / tokens, first + in_group % tokens};
}

struct Share {
  int64_t first_tile, tile_step, tiles;  // of y
  int first_k, end_k;                    // tiles of a strip
  int rank;
};
__device__ Share share_of(const Plan& plan, const StripLayout& w) {
  const int rank = plan.splits > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
  const int tiles = static_cast<int>(w.tiles);
  return {blockIdx.x / plan.splits,   gridDim.x / plan.splits,          plan.row_blocks * plan.token_blocks,
          tiles * rank / plan.splits, tiles * (rank + 1) / plan.splits, rank};
}

// ---- The producer: one thread ----

template <class S>
struct Producer {
  const Problem& p;
  const Plan& plan;
  const CUtensorMap& x_map;
  const Smem<S> smem;

  __device__ void copy_weight(const Tile& tile, int k, int stage, uint64_t policy) const {
    const StripLayout& w = p.strips.layout;
    const int64_t strip = tile.row_block * kStrips;
    const int strips = static_cast<int>(min(w.strips - strip, int64_t{kStrips}));
    const uint32_t full = smem.full + 8 * stage, to = smem.ring + stage * plan.stage_bytes + S::kXBytes;
    ptx::barrier_expect(full, strips * w.tile_bytes + S::kXBytes);
    const uint8_t* from = p.strips.data + (strip * w.tiles + k) * w.tile_bytes;
    for (int i = 0; i < strips; ++i) {
      ptx::bulk_copy(to + i * w.tile_bytes, from + i * w.tiles * w.tile_bytes, w.tile_bytes, full, policy);
    }
  }
  __device__ void copy_x(const Tile& tile, int k, int stage) const {
    const uint32_t to = smem.ring + stage * plan.stage_bytes, full = smem.full + 8 * stage;
    const int column = k * StripLayout::kCols, row = static_cast<int>(tile.token_block) * S::kTokens;
    ptx::box_copy(to, x_map, column, row, full);
    ptx::box_copy(to + S::kXBytes / 2, x_map, column + kBoxCols, row, full);
  }
  __device__ void run(const Share& share) const {
    const uint64_t policy = plan.token_blocks == 1 ? ptx::evict_first_policy() : ptx::evict_last_policy();
    // The weight's part of the first round does not wait for the kernel before.
    const Tile first = tile_at(plan, share.first_tile);
    const int early = min(plan.stages, share.end_k - share.first_k);
    for (int i = 0; i < early; ++i) copy_weight(first, share.first_k + i, i, policy);
    ptx::wait_for_previous_kernel();
    for (int i = 0; i < early; ++i) copy_x(first, share.first_k + i, i);

    Cursor cursor;
    int done = 0;
    for (int64_t index = share.first_tile; index < share.tiles; index += share.tile_step) {
      const Tile tile = tile_at(plan, index);
      for (int k = share.first_k; k < share.end_k; ++k, cursor.advance(plan.stages)) {
        if (done++ < early) continue;
        ptx::barrier_wait(smem.empty + 8 * cursor.at, cursor.parity ^ 1);
        copy_weight(tile, k, cursor.at, policy);
        copy_x(tile, k, cursor.at);
      }
    }
  }
};

// ---- The consumers ----

template <class S, qf_format Format, class T>
struct Consumer {
  using Codes = StripCodes<Format, T>;
  static constexpr int kSums = S::kTokens / 2;
  const StripLayout& w;
  int warp, lane;  // of the consumers
  float totals[kSums];

  // totals += a tile's sums * scales. `stage`: x, then the strips.
  __device__ void add_tile(uint32_t stage) {
    const char* tile =
        static_cast<const char*>(__cvta_shared_to_generic(stage + S::kXBytes)) + warp * w.tile_bytes;
    uint4 vectors[Codes::kTileVectors];
#pragma unroll
    for (int i = 0; i < Codes::kTileVectors; ++i)
      vectors[i] = reinterpret_cast<const uint4*>(tile)[i * 32 + lane];
    const uint64_t x[2] = {ptx::swizzled_rows(stage), ptx::swizzled_rows(stage + S::kXBytes / 2)};
    const auto* scales = reinterpret_cast<const float*>(tile + w.scale_offset()) + lane / 4;
    const auto* zeros = reinterpret_cast<const int8_t*>(tile + w.zero_offset()) + lane / 4;
    if (w.groups == 1) add_groups<1>(vectors, x, scales, zeros);
    else if (w.groups == 2) add_groups<2>(vectors, x, scales, zeros);
    else add_groups<4>(vectors, x, scales, zeros);
  }

  template <int kGroups>
  __device__ __forceinline__ void add_groups(const uint4 (&vectors)[Codes::kTileVectors],
                                             const uint64_t (&x)[2], const float* scales,
                                             const int8_t* zeros) {
    constexpr int kGroupSteps = kSteps / kGroups;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(vectors);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float sums[kSums];
      const float scale[2] = {scales[group * 16], scales[group * 16 + 8]};
      uint32_t offsets[2] = {Codes::offset(0), Codes::offset(0)};
      if (is_integer(Format) && w.has_zeros) {
        offsets[0] = Codes::offset(zeros[group * 16]), offsets[1] = Codes::offset(zeros[group * 16 + 8]);
      }
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < kGroupSteps; ++i) {
        const int step = group * kGroupSteps + i;
        if (i >= 2) ptx::wgmma_wait<1>();  // the registers of two steps ago are free
        Codes::decode(words + step * Codes::kStepWords, offsets, a[i % 2]);
        ptx::wgmma_fence();
        ptx::wgmma<T>(sums, a[i % 2], x[step / 4] + step % 4 * 2, i > 0);
        ptx::wgmma_commit();
      }
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kSums; ++i) totals[i] = fmaf(sums[i], scale[i / 2 % 2], totals[i]);
    }
  }

  __device__ void store_totals(float* to) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int token = i / 4 * 8 + lane % 4 * 2 + i % 2, row = warp * 16 + lane / 4 + i / 2 % 2 * 8;
      to[token * kTotalsStride + row] = totals[i];
    }
  }
};

// ---- The epilogue ----

using linear::kUnit;

// v = the totals of 8 rows, of all ranks.
__device__ __forceinline__ void add_ranks(const Plan& plan, uint32_t totals, int offset, float (&v)[kUnit]) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) v[i] = 0.0f;
  for (int rank = 0; rank < plan.splits; ++rank) {
#pragma unroll
    for (int i = 0; i < kUnit; i += 4) {
      const float4 part = ptx::load_from_block(totals + (offset + i) * 4, rank);
      v[i] += part.x, v[i + 1] += part.y, v[i + 2] += part.z, v[i + 3] += part.w;
    }
  }
}

// The outputs of a tile's tokens [first, end), by the consumers together.
template <class S>
__device__ void finish_tile(const Problem& p, const Plan& plan, float* staged, const Tile& tile,
                            uint32_t totals, int first, int end, int thread) {
  const bool is_gated = p.weight.is_gated;
  const int units = kRows / kUnit / (is_gated ? 2 : 1);  // of a token
  const int64_t token0 = tile.token_block * S::kTokens;
  for (int i = first * units + thread; i < end * units; i += kConsumers * kGroupThreads) {
    const int token = i / units, unit = i % units;
    const int64_t row = token0 + token, col = (tile.row_block * units + unit) * kUnit;
    if (row >= p.m || col >= p.n_out) continue;
    const int offset = token * kTotalsStride + unit * kUnit * (is_gated ? 2 : 1);
    float v[kUnit], up[kUnit] = {};
    add_ranks(plan, totals, offset, v);
    if (is_gated) add_ranks(plan, totals, offset + kUnit, up);
    linear::finish_unit(p, staged, row, col, v, up);
  }
}

// ---- The kernel ----

template <class S, qf_format Format, class T>
__global__ void __launch_bounds__(kThreads, S::kBlocksPerSm)
    kernel(const __grid_constant__ Problem p, const __grid_constant__ CUtensorMap x_map, const Plan plan,
           float* staged) {
  extern __shared__ __align__(1024) char shared[];
  const Smem<S> smem(plan, shared);
  const Share share = share_of(plan, p.strips.layout);
  ptx::allow_next_kernel();
  if (threadIdx.x == 0) {
    for (int i = 0; i < plan.stages; ++i) {
      ptx::barrier_init(smem.full + 8 * i, 1);
      ptx::barrier_init(smem.empty + 8 * i, kConsumers * 4);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();

  if (threadIdx.x < kGroupThreads) {
    if constexpr (S::kBlocksPerSm == 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    if (threadIdx.x == 0) Producer<S>{p, plan, x_map, smem}.run(share);
    if (plan.splits > 1) {
      __syncwarp();
      ptx::cluster_sync();
      ptx::cluster_sync();
    }
    return;
  }
  if constexpr (S::kBlocksPerSm == 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
  ptx::wait_for_previous_kernel();  // the epilogue touches what it wrote
  const int thread = threadIdx.x - kGroupThreads;
  const auto sync_consumers = [] {
    asm volatile("bar.sync 1, %0;" ::"n"(kConsumers * kGroupThreads) : "memory");
  };
  Consumer<S, Format, T> consumer = {p.strips.layout, thread / 32, thread % 32, {}};
  Cursor cursor;
  for (int64_t index = share.first_tile; index < share.tiles; index += share.tile_step) {
#pragma unroll
    for (float& total : consumer.totals) total = 0.0f;
    for (int k = share.first_k; k < share.end_k; ++k, cursor.advance(plan.stages)) {
      ptx::barrier_wait(smem.full + 8 * cursor.at, cursor.parity);
      consumer.add_tile(smem.ring + cursor.at * plan.stage_bytes);
      if (consumer.lane == 0) ptx::barrier_arrive(smem.empty + 8 * cursor.at);
    }
    sync_consumers();  // everyone is done with the totals of the tile before
    consumer.store_totals(static_cast<float*>(__cvta_shared_to_generic(smem.totals)));
    if (plan.splits > 1) ptx::cluster_sync();
    else sync_consumers();
    finish_tile<S>(p, plan, staged, tile_at(plan, index), smem.totals, S::kTokens * share.rank / plan.splits,
                   S::kTokens * (share.rank + 1) / plan.splits, thread);
    if (plan.splits > 1) ptx::cluster_sync();  // nobody leaves while others read its totals; one tile a block
  }
}

// ---- The host's side ----

Verdict accepts(const Problem& p) {
  return Requirements()
      .require(p.strips.is_there, "the weight is not packed (qf_weight_pack)")
      .require(!p.has_act_quant(), "the activations are quantized")
      .require(p.x.dtype == DType::f16 || p.x.dtype == DType::bf16, "the activations are not FP16 or BF16")
      .require(reinterpret_cast<uint64_t>(p.x.data) % 16 == 0 && p.x.row_stride % 8 == 0,
               "rows of x do not begin at multiples of 16 bytes")
      .require(p.m < 1ll << 31, "m is 2^31 or more");
}

template <class S>
Plan make_plan(const Problem& p) {
  constexpr int kSmemOfSm = 227 * 1024, kReserved = 1024;  // a block takes 1 KB more than it asks for
  const StripLayout& w = p.strips.layout;
  Plan plan = {};
  plan.row_blocks = ceil_div(w.strips, kStrips);
  plan.token_blocks = ceil_div(p.m, S::kTokens);
  const int64_t tiles = plan.row_blocks * plan.token_blocks;
  const int64_t places = static_cast<int64_t>(gpu_num_sms(p.device.id)) * S::kBlocksPerSm;
  plan.splits = 1;
  while (plan.splits < 8 && tiles * plan.splits * 2 <= places && w.tiles >= 4 * plan.splits) plan.splits *= 2;
  plan.grid = static_cast<int32_t>(plan.splits > 1 ? tiles * plan.splits : std::min(tiles, places));
  plan.stage_bytes = static_cast<int32_t>(round_up(S::kXBytes + kStrips * w.tile_bytes, 1024));
  const int budget = kSmemOfSm / S::kBlocksPerSm - kReserved - S::kTotalsBytes - kBarrierBytes;
  plan.stages = std::min({budget / plan.stage_bytes, kMaxStages});
  plan.smem_bytes = plan.stages * plan.stage_bytes + S::kTotalsBytes + kBarrierBytes;
  return plan;
}

template <class S, qf_format Format, class T>
void launch_shape(const Problem& p, float* staged, const Launch& launch) {
  const Plan plan = make_plan<S>(p);
  const CUtensorMap x_map = row_boxes(p.x, S::kTokens);
  LaunchShape shape = {dim3(static_cast<unsigned>(plan.grid)), dim3(kThreads),
                       static_cast<size_t>(plan.smem_bytes), /*overlap_previous=*/true};
  shape.cluster = static_cast<unsigned>(plan.splits);
  launch_kernel("linear_wgmma_sm90", kernel<S, Format, T>, shape, launch, p, x_map, plan, staged);
}

void launch(const Problem& problem, const Launch& launch) {
  linear::launch_canonical(problem, launch, [&](const Problem& p, float* staged) {
    choose_value<QF_INT4, QF_FP4_E2M1, QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2>(p.weight.format, [&](auto format) {
      choose_bool(p.x.dtype == DType::bf16, [&](auto is_bf16) {
        using T = std::conditional_t<is_bf16.value, bf16, f16>;
        if (p.m <= 16) launch_shape<Shape<16>, format.value, T>(p, staged, launch);
        else if (p.m <= 32) launch_shape<Shape<32>, format.value, T>(p, staged, launch);
        else if (p.m <= 64) launch_shape<Shape<64>, format.value, T>(p, staged, launch);
        else launch_shape<Shape<128>, format.value, T>(p, staged, launch);
      });
    });
  });
}

}  // namespace

extern const Kernel<Problem> entry = {"linear_wgmma_sm90", Target::sm90, accepts,
                                      linear::canonical_workspace_bytes, launch};

}  // namespace quantfuse::linear_wgmma_sm90
