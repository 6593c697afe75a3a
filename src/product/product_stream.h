// SPDX-License-Identifier: Apache-2.0
//
// y[m,n] = epilogue( sum_k x[m,k] * w[n,k], scales )        x, w: INT8 | E4M3; few tokens
//                                                           x: INT8, w: INT4; any number of tokens
//
// With few tokens the weight is the traffic: all that matters is that enough of it is on its way at any time,
// on all SMs. Rows of the weight are the rows of wgmma and the tokens its columns, as few as hold them;
// product_wgmma.h has it the other way round. INT4 goes through registers to become bytes.
//   gmem w, x --box copies--> smem, swizzled [w --decoded--> regs] --wgmma--> sums [--promoted--> totals]
//     --> smem, of the block that finishes them --> * scales, epilogue, 8 columns a thread --> y
//
// A block has warps that copy and two warpgroups of consumers, and makes one tile of y, kRows rows of the
// weight by kTokens tokens. Where the tiles do not fill the GPU the blocks of a cluster divide k. Each then
// finishes some bands of the tile (16 rows, those of a warp), whose parts the others write into its shared
// memory; it adds them in the order of k:
//
//   cluster of 2:  | rank 0: blocks 0 .. 15 of k | rank 1: blocks 16 .. 31 |
//   bands 0 .. 3   | parts --------------------- + <---- parts             | --> y by rank 0
//   bands 4 .. 7   | parts ---------------------------> + parts            | --> y by rank 1
//
// Of a gated weight a band has 8 gate rows and their 8 up rows.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/cursor.h"
#include "cuda/ptx/async_copy.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/dependent_launch.h"
#include "cuda/ptx/matrix.h"
#include "cuda/ptx/shared_memory.h"
#include "product/stream_finish.h"
#include "product/wgmma_numbers.h"

namespace quantfuse::product_stream {
using namespace product;

constexpr int kBandRows = 16, kStripRows = 64;  // of a warp, of a warpgroup
constexpr int kTokenBytes = kBandRows * 4;      // of a band, in shared memory
constexpr int kInt4Factor = 16;                 // what decoded codes are too large by
constexpr int kFactorsBarrier = 2;              // named

// kGroups: of consumers; kStrips: of each. With many tokens and few rows x would be as much traffic as the
// weight.
// kRunBlocks: blocks of k in a stage, whose rows of the weight are 128 bytes: two of INT4.
template <int kTokens_, int kGroups_, int kStrips_, int kBlocksPerSm_, int kRunBlocks_ = 1>
struct Shape {
  // Warps that bring x to the order of INT4 codes, a row of 128 bytes a lane. With more tokens that takes
  // longer than it saves.
  static constexpr int kSorters = kRunBlocks_ == 2 && kTokens_ <= 32 ? kRunBlocks_ * kTokens_ / 32 : 0;
  static constexpr int kRunBlocks = kRunBlocks_;
  static constexpr int kTokens = kTokens_, kGroups = kGroups_, kStrips = kStrips_;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kConsumerThreads = 128 * kGroups;
  // A warp each for the weight, x, scales, factors, and the sorters.
  static constexpr int kThreads = kConsumerThreads + 128 + 32 * kSorters;
  static constexpr int kRows = kGroups * kStrips * kStripRows, kBands = kRows / kBandRows;
  static constexpr int kBandBits = kBands == 4 ? 2 : kBands == 8 ? 3 : 4;
  static constexpr int kSums = kTokens / 2;  // of a thread and strip
  // So many sums need more registers than all threads can have: whole warpgroups may trade theirs.
  static constexpr bool kTradesRegisters = kTokens == 128;
  static constexpr int kRowBytes = 128, kWeightBytes = kRows * kRowBytes;
  static constexpr int kXBytes = kTokens * kBlockK;  // of a block of k
  static constexpr int kXStageBytes = kRunBlocks * kXBytes;
  static constexpr int kRowScales =
      (kRows + 127) / 128 * 2;  // of a stage: of 128 rows, or of their gate and up rows
  // Scales of blocks come with x, those of INT4's rows and groups with the weight.
  static constexpr int kXScaleBytes = kRunBlocks == 1 ? kTokens * 4 + (kRowScales * 4 + 15) / 16 * 16 : 0;
  static constexpr int kWeightScaleBytes = kRunBlocks == 1 ? 0 : kRunBlocks * kRows * 4;
  static constexpr int kBandBytes = kTokens * kTokenBytes;
  // What the blocks of a cluster send each other has a place of its own, so that they need not agree on when
  // the ring is free; but of 128 tokens it is too much for that.
  static constexpr bool kHasOwnInbox = kTokens <= 64;
  // A power of two, and no more than have a band each to finish. Blocks of many rows need not divide k.
  static constexpr int kMaxSplits = kHasOwnInbox ? 16 / kBands : kRows < 256 ? 8 : 4;
  static constexpr int kInboxBytes = (kMaxSplits - 1) * (kBands / kMaxSplits) * kBandBytes;
  static constexpr int kBudget =
      228 * 1024 / kBlocksPerSm - 1024;  // a block takes 1 KB more than it asks for
  static constexpr int kForRings =
      kBudget - Factors<kRows, kTokens>::kBytes - (kHasOwnInbox ? kInboxBytes + 128 : 0) - 8;
  static constexpr int kXStageAll = kXStageBytes + kXScaleBytes + 3 * 8,
                       kWeightStageAll = kWeightBytes + kWeightScaleBytes + 2 * 8;
  // Of x as many stages as of the weight; but blocks that stand beside those of the kernel before have little
  // room, and while they wait for that one only the weight can fill it.
  static constexpr int kEven = kForRings / (kXStageAll + kWeightStageAll);
  static constexpr int kXStages = kBlocksPerSm == 1               ? kEven
                                  : kXStageBytes * 8 <= 32 * 1024 ? 8
                                                                  : 32 * 1024 / kXStageBytes;
  static constexpr int kStages = (kForRings - kXStages * kXStageAll) / kWeightStageAll;
};

// What the kernel is given. What it begins with is in one line of the cache of constants: to fetch another
// one delays the first copy.
struct alignas(128) StreamProblem {
  int32_t token_blocks, k_stages;
  int32_t split_bits;  // a cluster of 2^this blocks shares a tile of y
  int32_t in_flight;   // stages of the weight under way at most, of kStages
  bool has_gate, is_read_once;
  bool is_plain;
  bool is_weight_constant;  // it may be read before the kernel before has ended
  int32_t lead;  // stages of the weight from the end on which the next kernel is let in; 0: at once
  CUtensorMap x, w;
  Product product;
  int64_t x_stride;  // of the scales, from token to token
  Vector bias;       // in place of the product's
};

// Where y's tile is.
struct Tile {
  int row_block, token_block;
};

// ---- Shared memory: rings, scales of stages; later bands[, inbox] | [inbox] | factors | barriers ----

template <class S>
struct Smem {
  static constexpr int kXRing = S::kStages * S::kWeightBytes,
                       kXScales = kXRing + S::kXStages * S::kXStageBytes,
                       kWeightScales = kXScales + S::kXStages * S::kXScaleBytes,
                       kRingBytes = kWeightScales + S::kStages * S::kWeightScaleBytes;
  static constexpr int kBandBytes = S::kBands * S::kBandBytes + (S::kHasOwnInbox ? 0 : S::kInboxBytes);
  static constexpr int kAfterRing = kRingBytes > kBandBytes ? kRingBytes : kBandBytes;
  static constexpr int kInbox = S::kHasOwnInbox ? (kAfterRing + 127) / 128 * 128 : S::kBands * S::kBandBytes;
  static constexpr int kFactors = S::kHasOwnInbox ? kInbox + S::kInboxBytes : kAfterRing;
  static constexpr int kFull = kFactors + Factors<S::kRows, S::kTokens>::kBytes;
  static constexpr int kBytes = kFull + (2 * S::kStages + 3 * S::kXStages + 1) * 8;
  static_assert(kBytes <= S::kBudget);
  static_assert(S::kStages >= 2 && S::kXStages >= 2);

  uint32_t ring, inbox, full, empty, x_full, x_empty, unsorted, arrived;
  Factors<S::kRows, S::kTokens> factors;
  __device__ explicit Smem(const char* shared) {
    ring = ptx::shared_address(shared);
    inbox = ring + kInbox;
    factors = {ring + kFactors};
    full = ring + kFull;
    empty = full + 8 * S::kStages;
    x_full = empty + 8 * S::kStages;
    x_empty = x_full + 8 * S::kXStages;
    unsorted = x_empty + 8 * S::kXStages;
    arrived = unsorted + 8 * S::kXStages;
  }
  __device__ uint32_t weight_at(int stage) const { return ring + stage * S::kWeightBytes; }
  __device__ uint32_t x_at(int stage, int block = 0) const {
    return ring + kXRing + stage * S::kXStageBytes + block * S::kXBytes;
  }
  __device__ uint32_t x_scales_at(int stage) const { return ring + kXScales + stage * S::kXScaleBytes; }
  __device__ uint32_t weight_scales_at(int stage) const {
    return ring + kWeightScales + stage * S::kWeightScaleBytes;
  }
  __device__ uint32_t band(int index) const { return ring + index * S::kBandBytes; }
};

// The stages of k that this block multiplies, and the bands that it finishes.
template <class S>
struct Share {
  int bits, rank, first_k, end_k;
  __device__ explicit Share(const StreamProblem& p)
      : bits(p.split_bits),
        rank(bits > 0 ? static_cast<int>(ptx::cluster_rank()) : 0),
        first_k(p.k_stages * rank >> bits),
        end_k(p.k_stages * (rank + 1) >> bits) {}
  __device__ int splits() const { return 1 << bits; }
  __device__ int band_bits() const { return S::kBandBits - bits; }
  __device__ int bands() const { return 1 << band_bits(); }
  __device__ int first_band() const { return bands() * rank; }
};

// ---- The copies: a thread each for the weight and for x, a warp for scales ----

// copy(k, stage) for all blocks of k, once the stage is free of `stages` whose barriers these are.
template <class S, class Copy>
__device__ void produce(uint32_t empty, int stages, const Share<S>& share, const Copy& copy) {
  Cursor cursor;
  for (int k = share.first_k; k < share.end_k; ++k, cursor.advance(stages)) {
    ptx::barrier_wait(empty + 8 * cursor.at, cursor.parity ^ 1);
    copy(k, cursor.at);
  }
}

template <class S>
__device__ void produce_weight(const StreamProblem& p, const Smem<S>& smem, const Share<S>& share,
                               const Tile& tile) {
  const int row = tile.row_block * S::kRows;
  const int plain_row = p.has_gate ? 0 : row, gated_row = p.has_gate ? row / kBandRows : 0;
  const uint64_t policy = p.is_read_once ? ptx::evict_first_policy() : ptx::evict_normal_policy();
  Cursor landed;
  const int allow_at = p.lead == 0 ? -1 : max(share.end_k - p.lead, share.first_k);
  produce(smem.empty, S::kStages, share, [&](int k, int stage) {
    if (k - share.first_k >= p.in_flight) {
      ptx::barrier_wait(smem.full + 8 * landed.at, landed.parity);
      landed.advance(S::kStages);
    }
    const uint32_t full = smem.full + 8 * stage;
    ptx::barrier_expect(full, S::kWeightBytes);
    ptx::box_copy(smem.weight_at(stage), p.w, k * S::kRowBytes, plain_row, 0, gated_row, full, policy);
    if (k == allow_at) ptx::allow_next_kernel();
  });
}

template <class S>
__device__ void produce_x(const StreamProblem& p, const Smem<S>& smem, const Share<S>& share,
                          const Tile& tile) {
  produce(smem.x_empty, S::kXStages, share, [&](int k, int stage) {
    const uint32_t full = (S::kSorters > 0 ? smem.unsorted : smem.x_full) + 8 * stage;
    ptx::barrier_expect(full, S::kRunBlocks * S::kXBytes);
#pragma unroll
    for (int i = 0; i < S::kRunBlocks; ++i) {
      ptx::box_copy(smem.x_at(stage, i), p.x, (k * S::kRunBlocks + i) * kBlockK,
                    tile.token_block * S::kTokens, full);
    }
  });
}

// The order of x that lets a thread take its INT4 codes of a block of 128 as they lie: lane q of a row has 16
// bytes of them, columns 32 q .. 32 q + 31, a word for each step. Those of a word's low nibbles go to columns
// 4 q .. 4 q + 3 of wgmma's operand, those of the high ones to 16 + 4 q .. (wgmma_bytes.h):
//   column 32 step + 16 h + 4 q + i  <--  32 q + 8 step + 2 i + h
template <class S>
__device__ void sort_x(const Smem<S>& smem, const Share<S>& share, int warp, int lane) {
  const int row = warp * 32 + lane, token = row % S::kTokens, block = row / S::kTokens;
  Cursor cursor;
#pragma unroll 1
  for (int k = share.first_k; k < share.end_k; ++k, cursor.advance(S::kXStages)) {
    ptx::barrier_wait(smem.unsorted + 8 * cursor.at, cursor.parity);
    const uint32_t at = smem.x_at(cursor.at, block) + token * kBlockK;
    uint4 pieces[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) pieces[i] = ptx::load_shared16(at + ((i ^ token % 8) << 4));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t low[4], high[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const uint4& from = pieces[2 * q + step / 2];
        const uint32_t first = step % 2 ? from.z : from.x, second = step % 2 ? from.w : from.y;
        low[q] = __byte_perm(first, second, 0x6420), high[q] = __byte_perm(first, second, 0x7531);
      }
      ptx::store_shared16(at + ((2 * step ^ token % 8) << 4), {low[0], low[1], low[2], low[3]});
      ptx::store_shared16(at + (((2 * step + 1) ^ token % 8) << 4), {high[0], high[1], high[2], high[3]});
    }
    ptx::copy_fence();  // wgmma reads as the copies do
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(smem.x_full + 8 * cursor.at);
  }
}

// [token], then [128 rows][gate or up]: as they lie in memory, copied one by one, as far ahead as the ring.
template <class S>
__device__ void produce_scales(const StreamProblem& p, const Smem<S>& smem, const Share<S>& share,
                               const Tile& tile, int lane) {
  const Product& q = p.product;
  const auto* x = static_cast<const float*>(q.a.scale.data);
  const auto* w = static_cast<const float*>(q.b.scale.data);
  const int64_t first_token = int64_t{tile.token_block} * S::kTokens;
  int64_t row = int64_t{tile.row_block} * S::kRows + lane / 2 * 128;
  if (q.has_gate) row = min(row / 2, q.n_out - 1) + lane % 2 * q.n_out;
  w += min(row, q.n - 1) / q.b.block.rows * q.b.scale.cols;
  produce(smem.x_empty, S::kXStages, share, [&](int k, int stage) {
    const uint32_t to = smem.x_scales_at(stage);
#pragma unroll
    for (int i = lane; i < S::kTokens; i += 32)
      ptx::copy4_async(to + i * 4, x + min(first_token + i, q.m - 1) * p.x_stride + k);
    if (lane < S::kRowScales) ptx::copy4_async(to + (S::kTokens + lane) * 4, w + k);
    ptx::arrive_after_copies(smem.x_full + 8 * stage);
  });
}

// The scales of rows and of the blocks of a stage, [block][row].
template <class S>
__device__ void produce_row_scales(const StreamProblem& p, const Smem<S>& smem, const Share<S>& share,
                                   const Tile& tile, int lane) {
  constexpr int kRowsOfLane = S::kRows / 32;
  const Matrix& scale = p.product.b.scale;
  const float* from[kRowsOfLane];
#pragma unroll
  for (int i = 0; i < kRowsOfLane; ++i)
    from[i] =
        scale.row<const float>(weight_row(p.product, int64_t{tile.row_block} * S::kRows + i * 32 + lane));
  produce(smem.empty, S::kStages, share, [&](int k, int stage) {
#pragma unroll
    for (int block = 0; block < S::kRunBlocks; ++block) {
      const int64_t group = min(int64_t{k} * S::kRunBlocks + block, scale.cols - 1);
#pragma unroll
      for (int i = 0; i < kRowsOfLane; ++i)
        ptx::copy4_async(smem.weight_scales_at(stage) + (block * S::kRows + i * 32 + lane) * 4,
                         from[i] + group);
    }
    ptx::arrive_after_copies(smem.full + 8 * stage);
  });
}

// ---- The consumers ----

// INT4 codes as bytes are kInt4Factor times as large: a nibble is the high one of its byte.
constexpr uint32_t kHighNibbles = 0xf0f0f0f0u;

// Four of them.
__device__ __forceinline__ uint32_t int4_to_bytes(uint32_t codes) {
  return __byte_perm(codes, codes << 4, 0x1504) & kHighNibbles;
}

// Of the rings.
struct Stage {
  int weight, x;
};

template <class S, class N, Scaling kScaling>
struct Consumer {
  static constexpr bool kHasTotals = kPromotes<N, kScaling>;
  using Total = std::conditional_t<kHasTotals, float, int32_t>;
  // Strips whose sums there is room for beside the totals.
  static constexpr int kBatch = S::kTokens <= 64 ? S::kStrips : 1;
  const Smem<S>& smem;
  int group, warp, lane;  // the warpgroup, its warp, and the warp's lane
  Cursor cursor, x_cursor;
  Total totals[S::kStrips][S::kSums];

  __device__ Stage take() {
    ptx::barrier_wait(smem.x_full + 8 * x_cursor.at, x_cursor.parity);
    ptx::barrier_wait(smem.full + 8 * cursor.at, cursor.parity);
    const Stage stage = {cursor.at, x_cursor.at};
    cursor.advance(S::kStages), x_cursor.advance(S::kXStages);
    return stage;
  }
  __device__ void give_back(const Stage& stage) const {
    __syncwarp();
    if (lane == 0) {
      ptx::barrier_arrive(smem.empty + 8 * stage.weight);
      ptx::barrier_arrive(smem.x_empty + 8 * stage.x);
    }
  }
  // sums (+)= the stage's 128 columns of a strip, times x.
  template <class Sums>
  __device__ __forceinline__ void multiply_strip(Sums& sums, const Stage& stage, int strip, int adds) const {
    const uint32_t w = smem.weight_at(stage.weight) + (strip * S::kGroups + group) * kStripRows * kBlockK;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      N::multiply(sums, ptx::swizzled_rows(w, step), ptx::swizzled_rows(smem.x_at(stage.x), step),
                  step > 0 ? 1 : adds);
    }
  }

  __device__ __forceinline__ void multiply(int count) {
    if constexpr (N::kDecodes) multiply_decoding(count);
    else if constexpr (kHasTotals) multiply_promoting(count);
    else multiply_exactly(count);
  }
  __device__ __forceinline__ void multiply_exactly(int count) {
    Stage before = {};
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      const Stage stage = take();
      ptx::wgmma_fence();
#pragma unroll
      for (int strip = 0; strip < S::kStrips; ++strip) multiply_strip(totals[strip], stage, strip, k);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (k > 0) give_back(before);
      before = stage;
    }
    ptx::wgmma_wait<0>();
  }
  __device__ __forceinline__ void multiply_promoting(int count) {
    clear_totals();
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      const Stage stage = take();
#pragma unroll
      for (int first = 0; first < S::kStrips; first += kBatch) {
        typename N::Sum sums[kBatch][S::kSums];
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) multiply_strip(sums[i], stage, first + i, 0);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) promote(sums[i], stage, first + i);
      }
      give_back(stage);
    }
  }
  // While the tensor cores have the codes of a block and strip, those of the next are decoded: two sets of
  // registers take turns as operands.
  __device__ __forceinline__ void multiply_decoding(int count) {
    constexpr int kTurns = S::kRunBlocks * S::kStrips;
    static_assert(kTurns % 2 == 0);
    uint32_t codes[2][kSteps][4];
    clear_totals();
    Stage stage = take(), next = stage;
    decode(stage, 0, codes[0]);
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int block = turn / S::kStrips, strip = turn % S::kStrips;
        int32_t sums[S::kSums];
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          N::multiply(sums, codes[turn % 2][step], ptx::swizzled_rows(smem.x_at(stage.x, block), step), step);
        ptx::wgmma_commit();
        if (turn + 1 == kTurns && k + 1 < count) next = take();
        // The very last time this decodes what nobody needs.
        decode(turn + 1 < kTurns ? stage : next, (turn + 1) % kTurns, codes[(turn + 1) % 2]);
        float scale[2] = {1.0f, 1.0f};
        if constexpr (kScaling == Scaling::blocks) {
          const uint32_t from =
              smem.weight_scales_at(stage.weight) + (block * S::kRows + first_row(strip)) * 4;
          scale[0] = ptx::load_shared_float(from), scale[1] = ptx::load_shared_float(from + 32);
        }
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < S::kSums; ++i) {
          float& total = totals[strip][i];
          total = fmaf(static_cast<float>(sums[i]), scale[i / 2 % 2], total);
        }
      }
      give_back(stage);
      stage = next;
    }
  }
  // Of the tile's rows, the first that this thread has of a strip; the other one is 8 further on.
  __device__ int first_row(int strip) const {
    return (strip * S::kGroups + group) * kStripRows + warp * kBandRows + lane / 4;
  }
  __device__ __forceinline__ void decode(const Stage& stage, int turn, uint32_t (&codes)[kSteps][4]) const {
    const int block = turn / S::kStrips, strip = turn % S::kStrips;
    const uint32_t row = smem.weight_at(stage.weight) + first_row(strip) * S::kRowBytes;
    // Pieces of 16 bytes are where the copy swizzled them.
    const auto piece = [&](int i) { return row + (((block * kSteps + i) ^ (lane / 4)) << 4); };
    if constexpr (S::kSorters > 0) {
      const uint32_t from = piece(lane % 4);
      const uint4 rows[2] = {ptx::load_shared16(from), ptx::load_shared16(from + 8 * S::kRowBytes)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t words[kSteps] = {rows[i].x, rows[i].y, rows[i].z, rows[i].w};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          codes[step][i] = words[step] << 4 & kHighNibbles;
          codes[step][2 + i] = words[step] & kHighNibbles;
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint32_t from = piece(step) + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          codes[step][i] = int4_to_bytes(ptx::load_shared2(from + i % 2 * 8 * S::kRowBytes + i / 2 * 8));
      }
    }
    ptx::wgmma_fence();  // also keeps the compiler from doing this after the wait that follows
  }
  __device__ __forceinline__ void clear_totals() {
#pragma unroll
    for (auto& of_strip : totals)
#pragma unroll
      for (float& total : of_strip) total = 0.0f;
  }
  __device__ __forceinline__ void promote(const typename N::Sum (&sums)[S::kSums], const Stage& stage,
                                          int strip) {
    float(&to)[S::kSums] = totals[strip];
    if constexpr (kScaling == Scaling::whole) {
#pragma unroll
      for (int i = 0; i < S::kSums; ++i) to[i] += sums[i];
    } else {
      const uint32_t scales = smem.x_scales_at(stage.x), x = scales + lane % 4 * 8,
                     w = scales + S::kTokens * 4 + strip * S::kGroups / 2 * 8;
      const float2 of_rows = ptx::load_shared_float2(w);
#pragma unroll
      for (int i = 0; i < S::kSums; i += 4) {
        const float2 of_tokens = ptx::load_shared_float2(x + i * 8);
        const float scale[4] = {of_tokens.x * of_rows.x, of_tokens.y * of_rows.x, of_tokens.x * of_rows.y,
                                of_tokens.y * of_rows.y};
#pragma unroll
        for (int j = 0; j < 4; ++j) to[i + j] = fmaf(static_cast<float>(sums[i + j]), scale[j], to[i + j]);
      }
    }
  }

  // To the blocks that finish the bands, [token][16 rows]: pieces of 4 rows swapped by token, so that reading
  // them (Parts) finds all banks, and this half of them.
  __device__ __forceinline__ void store(const Share<S>& share) const {
    const int q = lane % 4;  // this lane's tokens are 8 u + 2 q and the next, its rows lane / 4 and 8 more
    const uint32_t place = q * 2 * kTokenBytes + (((lane / 16) ^ q) << 4) + lane / 4 % 4 * 4;
#pragma unroll
    for (int strip = 0; strip < S::kStrips; ++strip) {
      const int band = (strip * S::kGroups + group) * 4 + warp;
      const int owner = band >> share.band_bits(), in_owner = band & (share.bands() - 1);
      const auto store_all = [&](uint32_t at, const auto& store_one) {
        const uint32_t to[2] = {at + place, at + (place ^ 32)};
#pragma unroll
        for (int i = 0; i < S::kSums; ++i) {
          uint32_t bits;
          if constexpr (kHasTotals) bits = __float_as_uint(totals[strip][i]);
          else bits = static_cast<uint32_t>(totals[strip][i]);
          store_one(to[i / 2 % 2] + (i / 4 * 8 + i % 2) * kTokenBytes, bits);
        }
      };
      if (owner == share.rank) {
        store_all(smem.band(in_owner), [](uint32_t to, uint32_t bits) { ptx::store_shared4(to, bits); });
      } else {
        const int slot = share.rank - (share.rank > owner);
        const uint32_t inbox = smem.inbox + (slot * share.bands() + in_owner) * S::kBandBytes;
        const uint32_t arrived = ptx::address_in_block(smem.arrived, owner);
        store_all(ptx::address_in_block(inbox, owner),
                  [&](uint32_t to, uint32_t bits) { ptx::store_async(to, bits, arrived); });
      }
    }
  }
};

// ---- The epilogue ----

template <class S>
__device__ __forceinline__ void sync_consumers() {
  ptx::named_barrier_sync<1, S::kConsumerThreads>();
}

// The sums of a token and of half of a band's rows: those of the blocks of the cluster, in the order of k.
template <class S, class Total>
struct Parts {
  const Smem<S>& smem;
  const Share<S>& share;

  __device__ __forceinline__ void load(int in_own, int token, int half, Total (&v)[kUnit]) const {
    const uint32_t place = token * kTokenBytes + (((half * 2) ^ (token / 2 % 4)) << 4);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] = 0;
#pragma unroll 1
    for (int part = 0; part < share.splits(); ++part) {
      const int slot = part - (part > share.rank);
      const uint32_t inbox = smem.inbox + (slot * share.bands() + in_own) * S::kBandBytes;
      const uint32_t from = place + (part == share.rank ? smem.band(in_own) : inbox);
      add_bits(ptx::load_shared16(from), ptx::load_shared16(from ^ 16), v);
    }
  }
};

// A warp has a unit of 8 outputs of 16 tokens of a band, and the other one; of a gated band the one of 32.
template <class S, class Total>
__device__ void finish(const StreamProblem& p, float* staged, const Smem<S>& smem, const Share<S>& share,
                       const Tile& tile, int warp, int lane) {
  const Product& q = p.product;
  const Parts<S, Total> parts = {smem, share};
  const int64_t first_token = int64_t{tile.token_block} * S::kTokens;
  const int tokens = static_cast<int>(min(q.m - first_token, int64_t{S::kTokens}));
  const int halves = p.has_gate ? 1 : 2, at_once = p.has_gate ? 32 : 16, half = p.has_gate ? 0 : lane / 16;
  // The warps take the bands in turn, and of each the next tokens.
#pragma unroll 1
  for (int turn = warp;; turn += S::kGroups * 4) {
    const int in_own = turn & (share.bands() - 1), first = (turn >> share.band_bits()) * at_once;
    if (first >= tokens) return;
    const int token = first + lane % at_once, band = share.first_band() + in_own;
    const int64_t row = first_token + token;
    const int64_t col = ((int64_t{tile.row_block} * S::kBands + band) * halves + half) * kUnit;
    if (token >= tokens || col >= q.n_out) continue;
    finish_sums<Total>(
        q, p.is_plain, staged, smem.factors, band * kBandRows + half * kUnit, token, row, col,
        [&](int second, Total(&sums)[kUnit]) { parts.load(in_own, token, half + second, sums); });
  }
}

// ---- The kernel ----

template <class S, class N, Scaling kScaling>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSm)
    stream_kernel(const __grid_constant__ StreamProblem p, float* staged) {
  extern __shared__ __align__(1024) char shared[];
  const Smem<S> smem(shared);
  const int index = static_cast<int>(blockIdx.x) >> p.split_bits;
  const Tile tile = {index / p.token_blocks, index % p.token_blocks};
  const Share<S> share(p);
  const int thread = static_cast<int>(threadIdx.x);
  const bool is_split = p.split_bits > 0;
  if (p.lead == 0) ptx::allow_next_kernel();
  if (thread == 32) ptx::prefetch_map(p.w), ptx::prefetch_map(p.x);
  // A thread of each warp: lanes would do this one after the other.
  if (thread % 32 == 0) {
    constexpr int kOfBlocks = kScaling == Scaling::blocks ? 32 : 0;  // lanes that copy scales
    for (int i = thread / 32; i < S::kStages; i += S::kThreads / 32) {
      ptx::barrier_init(smem.full + 8 * i, 1 + (N::kDecodes ? kOfBlocks : 0));
      ptx::barrier_init(smem.empty + 8 * i, S::kGroups * 4);
    }
    for (int i = thread / 32; i < S::kXStages; i += S::kThreads / 32) {
      ptx::barrier_init(smem.unsorted + 8 * i, 1);
      ptx::barrier_init(smem.x_full + 8 * i,
                        (S::kSorters > 0 ? S::kSorters : 1) + (N::kDecodes ? 0 : kOfBlocks));
      ptx::barrier_init(smem.x_empty + 8 * i, S::kGroups * 4);
    }
    if (thread == 0) ptx::barrier_init(smem.arrived, 1);
    ptx::barrier_init_fence();
    if (thread == 0) ptx::barrier_expect(smem.arrived, (share.splits() - 1) * share.bands() * S::kBandBytes);
  }
  __syncthreads();
  if (is_split && S::kHasOwnInbox) ptx::cluster_arrive_relaxed();

  if (thread >= S::kConsumerThreads) {
    if constexpr (S::kTradesRegisters) ptx::release_registers<72>();
    const int warp = (thread - S::kConsumerThreads) / 32, lane = thread % 32;
    // What a constant weight brings need not wait; but no thread ends before the kernel before does.
    const bool is_of_weight = warp == 0 || (warp == 2 && N::kDecodes);
    const bool waits_later = is_of_weight && p.is_weight_constant;
    if (!waits_later) ptx::wait_for_previous_kernel();
    if (warp == 0 && lane == 0) produce_weight(p, smem, share, tile);
    if (warp == 1 && lane == 0) produce_x(p, smem, share, tile);
    if (warp == 2 && kScaling == Scaling::blocks) {
      if constexpr (N::kDecodes) produce_row_scales(p, smem, share, tile, lane);
      else produce_scales(p, smem, share, tile, lane);
    }
    if (warp == 3) {
      const bool has_row_scales = kScaling == Scaling::whole && !p.product.is_exact();
      smem.factors.load(p.product, p.bias, has_row_scales, has_row_scales || N::kDecodes,
                        N::kDecodes ? 1.0f / kInt4Factor : 1.0f, int64_t{tile.row_block} * S::kRows,
                        int64_t{tile.token_block} * S::kTokens, lane);
      ptx::named_barrier_arrive(kFactorsBarrier, S::kConsumerThreads + 32);
    }
    if (warp >= 4) sort_x(smem, share, warp - 4, lane);
    if (waits_later) {
      __syncwarp();
      ptx::wait_for_previous_kernel();
    }
    return;
  }
  ptx::wait_for_previous_kernel();  // the epilogue touches what it wrote
  if constexpr (S::kTradesRegisters) ptx::claim_registers<216>();
  Consumer<S, N, kScaling> consumer = {smem, thread / 128, thread / 32 % 4, thread % 32, {}, {}, {}};
  consumer.multiply(share.end_k - share.first_k);
  ptx::named_barrier_sync(kFactorsBarrier, S::kConsumerThreads + 32);  // also of the consumers, with the ring
  if (is_split) {
    if (!S::kHasOwnInbox) ptx::cluster_arrive();
    ptx::cluster_wait();  // all inboxes may be written
  }
  consumer.store(share);
  sync_consumers<S>();
  if (is_split) ptx::barrier_wait_cluster(smem.arrived, 0);
  finish<S, typename decltype(consumer)::Total>(p, staged, smem, share, tile, thread / 32, thread % 32);
}

}  // namespace quantfuse::product_stream
