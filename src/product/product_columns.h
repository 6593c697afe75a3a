// SPDX-License-Identifier: Apache-2.0
//
// y[m,n] = epilogue( sum_k x[m,k] * w[n,k], scales )        x, w: INT8 | E4M3; m <= 64
//
// The product of product_stream.h the other way round: the tokens are the 64 rows of wgmma, of which the last
// are no token's, and rows of the weight its columns. There may be any multiple of 8 of these, so that every
// SM gets the same share of the weight, all of k, and no two blocks have to add their sums. But every block
// reads all of x: for few rows of the weight and many tokens that is more than what product_stream.h reads.
//   gmem w, x --box copies--> smem, swizzled --wgmma--> sums [--promoted--> totals] --> smem
//     --> + parts of other warpgroups, * scales, epilogue, 8 columns a thread --> y
//
// Units of 8 rows of the weight (of a gated one: 8 gate rows and their 8 up rows) are dealt to the blocks as
// evenly as they go. Row groups of warpgroups divide the rows of a block; depth groups take its stages in
// turn:
//
//   block of 2 x 2 warpgroups:            | stage 0 | stage 1 | stage 2 | stage 3 | ...
//     rows [0, kCols)                     | group 0 | group 2 | group 0 | group 2 |
//     rows [kCols, 2 kCols)               | group 1 | group 3 | group 1 | group 3 |
//
// What wgmma reads beyond the rows that the copies bring, of tokens or of the weight, is whatever lies there;
// it ends in sums that nobody reads.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "cuda/cursor.h"
#include "cuda/ptx/async_copy.h"
#include "cuda/ptx/dependent_launch.h"
#include "product/stream_finish.h"
#include "product/wgmma_numbers.h"

namespace quantfuse::product_columns {
using namespace product;

constexpr int kTokens = 64, kMaxStages = 32;
constexpr int kConsumersBarrier = 1, kFactorsBarrier = 2;  // named

// kRunBlocks: blocks of k in a stage. Of small stages their number is the limit, not their bytes: those of 4
// KB of the weight took 170 ns each.
template <int kCols_, int kRowGroups_, int kDepthGroups_, int kBlocksPerSm_, int kRunBlocks_>
struct Shape {
  static constexpr int kCols = kCols_, kRowGroups = kRowGroups_, kDepthGroups = kDepthGroups_;
  static constexpr int kBlocksPerSm = kBlocksPerSm_, kRunBlocks = kRunBlocks_;
  static constexpr int kConsumerThreads = 128 * kRowGroups * kDepthGroups;
  static constexpr int kThreads = kConsumerThreads + 128;  // a warp each for the weight, x, scales, factors
  static constexpr int kRows = kCols * kRowGroups, kSums = kCols / 2;
  static constexpr int kPartRow = kRows + 8;  // numbers from token to token in a part: other banks
  static constexpr int kBudget =
      228 * 1024 / kBlocksPerSm - 1024;  // a block takes 1 KB more than it asks for
};

// What the kernel is given. What it begins with is in one line of the cache of constants.
struct alignas(128) ColumnProblem {
  int32_t units, more;  // of the weight for each block, and the blocks that have one more
  int32_t k_stages;     // of all k
  // Of the rings; multiples of kDepthGroups, or a warpgroup could take what another has not yet read for its
  // own next stage.
  int32_t stages, x_stages;
  int32_t token_rows, w_rows;  // that a copy brings
  int32_t in_flight;           // stages of the weight under way at most
  bool has_gate, is_plain;
  bool is_weight_constant;  // it may be read before the kernel before has ended
  CUtensorMap x, w;
  Product product;
  int64_t x_stride;  // of the scales, from token to token
  Vector bias;       // in place of the product's
};

// The units of a block.
struct Share {
  int first, end;
  __device__ explicit Share(const ColumnProblem& p) {
    const int block = static_cast<int>(blockIdx.x);
    first = block * p.units + min(block, p.more);
    end = first + p.units + (block < p.more ? 1 : 0);
  }
};

// ---- Shared memory: factors | barriers | scales of stages | rings of x and of the weight; later parts ----

template <class S>
struct Smem {
  static constexpr int kBarriers = Factors<S::kRows, kTokens>::kBytes;
  static constexpr int kScales = kBarriers + 4 * kMaxStages * 8;
  static constexpr int kBlockScales = (kTokens + 32) * 4;  // of a block of k: tokens, then units of rows

  static QF_HD int rings_at(int x_stages, bool has_blocks) {
    return (kScales + (has_blocks ? x_stages * S::kRunBlocks * kBlockScales : 0) + 1023) / 1024 * 1024;
  }
  static int bytes(const ColumnProblem& p, bool has_blocks) {
    const int x = p.x_stages * S::kRunBlocks * p.token_rows * kBlockK;
    // wgmma reads 64 tokens and kRows rows, whatever the copies bring.
    const int w = ((p.stages * S::kRunBlocks - 1) * p.w_rows + S::kRows) * kBlockK;
    const int parts = S::kDepthGroups * p.token_rows * S::kPartRow * 4;
    return rings_at(p.x_stages, has_blocks) + std::max({x + w, x + kTokens * kBlockK, parts});
  }

  Factors<S::kRows, kTokens> factors;
  uint32_t full, empty, x_full, x_empty, scales, x_ring, ring;
  int x_bytes, w_bytes;
  __device__ Smem(const char* shared, const ColumnProblem& p, bool has_blocks) {
    const uint32_t base = ptx::shared_address(shared);
    factors = {base};
    full = base + kBarriers, empty = full + kMaxStages * 8;
    x_full = empty + kMaxStages * 8, x_empty = x_full + kMaxStages * 8;
    x_bytes = p.token_rows * kBlockK, w_bytes = p.w_rows * kBlockK;
    scales = base + kScales, x_ring = base + rings_at(p.x_stages, has_blocks);
    ring = x_ring + p.x_stages * S::kRunBlocks * x_bytes;
  }
  // Block `block` of a stage.
  __device__ uint32_t x_at(int stage, int block) const {
    return x_ring + (stage * S::kRunBlocks + block) * x_bytes;
  }
  __device__ uint32_t w_at(int stage, int block) const {
    return ring + (stage * S::kRunBlocks + block) * w_bytes;
  }
  __device__ uint32_t scales_at(int stage, int block) const {
    return scales + (stage * S::kRunBlocks + block) * kBlockScales;
  }
  __device__ uint32_t part_at(int part, int token, int token_rows) const {
    return x_ring + (part * token_rows + token) * S::kPartRow * 4;
  }
};

// ---- The copies: a thread each for the weight and for x, a warp for scales ----

// copy(k, stage) for all of k, once the stage is free of `stages` whose barriers these are.
template <class Copy>
__device__ void produce(const ColumnProblem& p, uint32_t empty, int stages, const Copy& copy) {
  Cursor cursor;
#pragma unroll 1
  for (int k = 0; k < p.k_stages; ++k, cursor.advance(stages)) {
    ptx::barrier_wait(empty + 8 * cursor.at, cursor.parity ^ 1);
    copy(k, cursor.at);
  }
}

template <class S>
__device__ void produce_weight(const ColumnProblem& p, const Smem<S>& smem, const Share& share) {
  const int plain_row = p.has_gate ? 0 : share.first * kUnit, gated_row = p.has_gate ? share.first : 0;
  const uint64_t policy = ptx::evict_first_policy();
  Cursor landed;
  produce(p, smem.empty, p.stages, [&](int k, int stage) {
    if (k >= p.in_flight) {
      ptx::barrier_wait(smem.full + 8 * landed.at, landed.parity);
      landed.advance(p.stages);
    }
    const uint32_t full = smem.full + 8 * stage;
    ptx::barrier_expect(full, S::kRunBlocks * smem.w_bytes);
#pragma unroll
    for (int i = 0; i < S::kRunBlocks; ++i)
      ptx::box_copy(smem.w_at(stage, i), p.w, (k * S::kRunBlocks + i) * kBlockK, plain_row, 0, gated_row,
                    full, policy);
  });
}

template <class S>
__device__ void produce_x(const ColumnProblem& p, const Smem<S>& smem) {
  produce(p, smem.x_empty, p.x_stages, [&](int k, int stage) {
    const uint32_t full = smem.x_full + 8 * stage;
    ptx::barrier_expect(full, S::kRunBlocks * smem.x_bytes);
#pragma unroll
    for (int i = 0; i < S::kRunBlocks; ++i)
      ptx::box_copy(smem.x_at(stage, i), p.x, (k * S::kRunBlocks + i) * kBlockK, 0, full);
  });
}

// A lane has two tokens and a unit of 8 rows.
template <class S>
__device__ void produce_scales(const ColumnProblem& p, const Smem<S>& smem, const Share& share, int lane) {
  const Product& q = p.product;
  const auto* x = static_cast<const float*>(q.a.scale.data);
  const auto* w = static_cast<const float*>(q.b.scale.data);
  const float* x_low = x + min(int64_t{lane}, q.m - 1) * p.x_stride;
  const float* x_high = x + min(int64_t{lane} + 32, q.m - 1) * p.x_stride;
  const int64_t first_row = int64_t{share.first} * (p.has_gate ? 2 : 1) * kUnit;
  w += weight_row(q, first_row + lane * kUnit) / q.b.block.rows * q.b.scale.cols;
  const int last = static_cast<int>(q.b.scale.cols) - 1;
  const bool has_high = p.token_rows > 32;
  produce(p, smem.x_empty, p.x_stages, [&](int k, int stage) {
#pragma unroll
    for (int i = 0; i < S::kRunBlocks; ++i) {
      const uint32_t to = smem.scales_at(stage, i) + lane * 4;
      const int block = min(k * S::kRunBlocks + i, last);
      ptx::copy4_async(to, x_low + block);
      if (has_high) ptx::copy4_async(to + 32 * 4, x_high + block);
      ptx::copy4_async(to + kTokens * 4, w + block);
    }
    ptx::arrive_after_copies(smem.x_full + 8 * stage);
  });
}

// ---- The consumers ----

// Of the rings.
struct Stage {
  int weight, x;
};

template <class S, class N, Scaling kScaling>
struct Consumer {
  static constexpr bool kHasTotals = kPromotes<N, kScaling>;
  using Total = std::conditional_t<kHasTotals, float, int32_t>;
  const ColumnProblem& p;
  const Smem<S>& smem;
  int row_group, depth_group, warp, lane;
  bool has_tokens;  // this warp
  Total totals[S::kSums];

  // sums (+)= a block of a stage.
  template <class Sums>
  __device__ __forceinline__ void multiply_block(Sums& sums, const Stage& stage, int block, int adds) const {
    const uint32_t x = smem.x_at(stage.x, block);
    const uint32_t w = smem.w_at(stage.weight, block) + row_group * S::kCols * kBlockK;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      N::multiply(sums, ptx::swizzled_rows(x, step), ptx::swizzled_rows(w, step), step > 0 ? 1 : adds);
  }
  __device__ __forceinline__ void multiply_stage(const Stage& stage) {
    typename N::Sum sums[S::kSums];
    if constexpr (kScaling == Scaling::whole) {
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < S::kRunBlocks; ++i) multiply_block(sums, stage, i, i);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      if (!has_tokens) return;
#pragma unroll
      for (int i = 0; i < S::kSums; ++i) totals[i] += sums[i];
    } else {
#pragma unroll
      for (int i = 0; i < S::kRunBlocks; ++i) {
        ptx::wgmma_fence();
        multiply_block(sums, stage, i, 0);
        ptx::wgmma_commit();
        const uint32_t scales = smem.scales_at(stage.x, i), x = scales + (warp * 16 + lane / 4) * 4;
        const float of_tokens[2] = {ptx::load_shared_float(x), ptx::load_shared_float(x + 8 * 4)};
        ptx::wgmma_wait<0>();
        if (has_tokens) promote(sums, of_tokens, scales + (kTokens + row_group * S::kCols / kUnit) * 4);
      }
    }
  }
  // `w`: the scales of units of rows.
  __device__ __forceinline__ void promote(const typename N::Sum (&sums)[S::kSums],
                                          const float (&of_tokens)[2], uint32_t w) {
#pragma unroll
    for (int unit = 0; unit < S::kCols / kUnit; ++unit) {
      const float of_rows = ptx::load_shared_float(w + unit * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Total& total = totals[unit * 4 + i];
        total = fmaf(static_cast<float>(sums[unit * 4 + i]), of_tokens[i / 2] * of_rows, total);
      }
    }
  }
  __device__ __forceinline__ void multiply() {
    Cursor cursor, x_cursor;
    const auto advance = [&](int count) {
      for (int i = 0; i < count; ++i) cursor.advance(p.stages), x_cursor.advance(p.x_stages);
    };
    const auto give_back = [&](const Stage& stage) {
      __syncwarp();
      if (lane == 0) {
        ptx::barrier_arrive(smem.empty + 8 * stage.weight);
        ptx::barrier_arrive(smem.x_empty + 8 * stage.x);
      }
    };
    advance(depth_group);
    if constexpr (kHasTotals) {
#pragma unroll
      for (float& total : totals) total = 0.0f;
    }
    Stage before = {-1, -1};
#pragma unroll 1
    for (int k = depth_group; k < p.k_stages; k += S::kDepthGroups, advance(S::kDepthGroups)) {
      const Stage stage = {cursor.at, x_cursor.at};
      ptx::barrier_wait(smem.x_full + 8 * stage.x, x_cursor.parity);
      ptx::barrier_wait(smem.full + 8 * stage.weight, cursor.parity);
      if constexpr (kHasTotals) {
        multiply_stage(stage);
        give_back(stage);
      } else {
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < S::kRunBlocks; ++i)
          multiply_block(totals, stage, i, before.x < 0 && i == 0 ? 0 : 1);
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        if (before.x >= 0) give_back(before);
        before = stage;
      }
    }
    if constexpr (!kHasTotals) {
      ptx::wgmma_wait<0>();
      if (before.x >= 0) return;
#pragma unroll
      for (int& total : totals) total = 0;  // there were fewer stages than depth groups
    }
  }
  // To this depth group's part, [token][row].
  __device__ __forceinline__ void store() const {
    const int token = warp * 16 + lane / 4, q = lane % 4;  // and 8 further on; its columns are 8 u + 2 q, + 1
    const uint32_t to = smem.part_at(depth_group, token, p.token_rows) + (row_group * S::kCols + q * 2) * 4;
#pragma unroll
    for (int i = 0; i < S::kSums; i += 2) {
      const int more = i / 2 % 2 * 8;
      if (token + more >= p.token_rows) continue;
      ptx::store_shared_float2(to + (more * S::kPartRow + i / 4 * kUnit) * 4,
                               {as_float(totals[i]), as_float(totals[i + 1])});
    }
  }
  __device__ static float as_float(float v) { return v; }
  __device__ static float as_float(int v) { return __int_as_float(v); }
};

// ---- The epilogue ----

// A thread has a unit of 8 outputs of a token.
template <class S, class Total>
__device__ void finish(const ColumnProblem& p, float* staged, const Smem<S>& smem, const Share& share,
                       int thread) {
  constexpr int kUnits = S::kRows / kUnit;  // of a gated weight half as many
  const Product& q = p.product;
  const int step = p.has_gate ? 2 : 1, count = static_cast<int>(q.m) * (p.has_gate ? kUnits / 2 : kUnits);
#pragma unroll 1
  for (int i = thread; i < count; i += S::kConsumerThreads) {
    const int token = p.has_gate ? i / (kUnits / 2) : i / kUnits;
    const int unit = p.has_gate ? i % (kUnits / 2) : i % kUnits;
    if (share.first + unit >= share.end) continue;
    const int tile_row = unit * step * kUnit;
    finish_sums<Total>(q, p.is_plain, staged, smem.factors, tile_row, token, token,
                       int64_t{share.first + unit} * kUnit, [&](int second, Total(&sums)[kUnit]) {
#pragma unroll
                         for (Total& sum : sums) sum = 0;
#pragma unroll
                         for (int part = 0; part < S::kDepthGroups; ++part) {
                           const uint32_t from =
                               smem.part_at(part, token, p.token_rows) + (tile_row + second * kUnit) * 4;
                           add_bits(ptx::load_shared16(from), ptx::load_shared16(from + 16), sums);
                         }
                       });
  }
}

// ---- The kernel ----

template <class S, class N, Scaling kScaling>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSm)
    column_kernel(const __grid_constant__ ColumnProblem p, float* staged) {
  extern __shared__ __align__(1024) char shared[];
  constexpr bool kHasBlocks = kScaling == Scaling::blocks;
  const Smem<S> smem(shared, p, kHasBlocks);
  const Share share(p);
  const int thread = static_cast<int>(threadIdx.x);
  ptx::allow_next_kernel();
  if (thread == 32) ptx::prefetch_map(p.w), ptx::prefetch_map(p.x);
  // A thread of each warp: lanes would do this one after the other.
  if (thread % 32 == 0) {
    for (int i = thread / 32; i < p.stages; i += S::kThreads / 32) {
      ptx::barrier_init(smem.full + 8 * i, 1);
      ptx::barrier_init(smem.empty + 8 * i, S::kRowGroups * 4);
    }
    for (int i = thread / 32; i < p.x_stages; i += S::kThreads / 32) {
      ptx::barrier_init(smem.x_full + 8 * i, kHasBlocks ? 33 : 1);
      ptx::barrier_init(smem.x_empty + 8 * i, S::kRowGroups * 4);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();

  if (thread >= S::kConsumerThreads) {
    const int warp = (thread - S::kConsumerThreads) / 32, lane = thread % 32;
    // A constant weight need not wait; but no thread ends before the kernel before does.
    const bool waits_later = warp == 0 && p.is_weight_constant;
    if (!waits_later) ptx::wait_for_previous_kernel();
    if (warp == 0 && lane == 0) produce_weight(p, smem, share);
    if (warp == 1 && lane == 0) produce_x(p, smem);
    if (warp == 2 && kHasBlocks) produce_scales(p, smem, share, lane);
    if (warp == 3) {
      const bool has_scales = !kHasBlocks && !p.product.is_exact();
      smem.factors.load(p.product, p.bias, has_scales, has_scales, 1.0f,
                        int64_t{share.first} * (p.has_gate ? 2 : 1) * kUnit, 0, lane);
      ptx::named_barrier_arrive(kFactorsBarrier, S::kConsumerThreads + 32);
    }
    if (waits_later) {
      __syncwarp();
      ptx::wait_for_previous_kernel();
    }
    return;
  }
  ptx::wait_for_previous_kernel();  // the epilogue touches what it wrote
  const int group = thread / 128, warp = thread / 32 % 4;
  Consumer<S, N, kScaling> consumer = {p,    smem,        group % S::kRowGroups,    group / S::kRowGroups,
                                       warp, thread % 32, warp * 16 < p.token_rows, {}};
  consumer.multiply();
  ptx::named_barrier_sync(kFactorsBarrier, S::kConsumerThreads + 32);  // also of the consumers, with the ring
  if (consumer.has_tokens) consumer.store();
  ptx::named_barrier_sync<kConsumersBarrier, S::kConsumerThreads>();
  finish<S, typename decltype(consumer)::Total>(p, staged, smem, share, thread);
}

}  // namespace quantfuse::product_columns
