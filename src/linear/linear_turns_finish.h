// SPDX-License-Identifier: Apache-2.0
//
// What linear_turns_sm90 has of a tile, and how it becomes y: straight from registers, or after the blocks of
// a cluster that split k have added their parts. C is the kernel's consumer.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/async_copy.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/matrix.h"
#include "cuda/ptx/shared_memory.h"
#include "linear/finish_unit.h"
#include "linear/packed_strips.h"
#include "product/activate.h"

namespace quantfuse::linear_turns_sm90 {
using linear::kUnit;
using linear::Problem;
using linear::StripLayout;
using product::Act;
using product::Activate;

constexpr int kConsumers = 2, kConsumerThreads = 128 * kConsumers;  // warpgroups
constexpr int kThreads = kConsumerThreads + 128;
constexpr int kStrips = 4 * kConsumers, kRows = kStrips * StripLayout::kRows;  // of a tile of y
constexpr int kGroupRows = kRows / kConsumers;                                 // of a warpgroup
constexpr int kSteps = StripLayout::kCols / StripLayout::kStepCols;
constexpr int kBoxCols = 64;  // 128 bytes: what a swizzled row has
// Tokens whose x is a place of the ring, in two boxes; those whose sums are made at once.
constexpr int kSlotTokens = 128, kBoxBytes = kSlotTokens * kBoxCols * 2, kSlotBytes = 2 * kBoxBytes;
constexpr int kPartTokens = 64, kPartSums = kPartTokens / 2;  // sums of a thread
constexpr int kXSlots = 5, kMaxWeightSlots = 6;
constexpr int kStagedBytes = kPartTokens * kGroupRows * 2;  // of y, a warpgroup
constexpr int kMaxSplits = 4;
constexpr int kGroupBarrier = 1, kAllBarrier = 3;  // named barriers: the warpgroups', and of both

template <int kTokens_>
struct Shape {
  static constexpr int kTokens = kTokens_, kSlots = kTokens / kSlotTokens, kParts = kTokens / kPartTokens;
  // Of a tile. With more of them there are not enough registers for 256 tokens.
  static constexpr int kMaxGroups = kTokens > 128 ? 1 : 4;
};

// How a call is laid out on the GPU.
struct Plan {
  int32_t row_blocks, token_blocks;  // tiles of y
  int32_t splits;                    // blocks of a cluster, which share a tile of y
  int32_t weight_slots, weight_bytes;
  int32_t tile_pieces;  // of a tile of the weight, as its map has them
  int32_t grid;
  int32_t barriers, smem_bytes;  // where the barriers are; of all
  bool stores_boxes;             // y has 16 bits, and there is no residual
};

// ---- Shared memory: x | boxes of y | weight, or, where k is split, totals | inbox; then the barriers ----

struct Smem {
  uint32_t x, weight, staged, x_full, x_empty, weight_full, weight_empty, arrived;
  static constexpr int kBarrierBytes = (2 * kXSlots + 2 * kMaxWeightSlots + 1) * 8;
  __device__ Smem(const Plan& plan, const char* shared) {
    x = ptx::shared_address(shared);
    staged = x + kXSlots * kSlotBytes;
    weight = staged + kConsumers * kStagedBytes;
    x_full = x + plan.barriers;
    x_empty = x_full + 8 * kXSlots;
    weight_full = x_empty + 8 * kXSlots;
    weight_empty = weight_full + 8 * kMaxWeightSlots;
    arrived = weight_empty + 8 * kMaxWeightSlots;
  }
};

// ---- The epilogue ----

// A warpgroup's part of a tile of y. Thread 4 g + q has tokens 8 u + 2 q, + 1 of rows g and g + 8 of its
// strip in totals 4 u .. 4 u + 3 of a part; of a gated weight these are a gate and its up row.
template <class C>
struct Finisher {
  const Problem& p;
  const CUtensorMap& y_map;
  const Smem& smem;
  const C& consumer;
  int64_t first_token, first_row;  // of the tile

  __device__ void sync() const { ptx::named_barrier_sync(kGroupBarrier + consumer.group, 128); }
  __device__ uint32_t staged() const { return smem.staged + consumer.group * kStagedBytes; }
  __device__ int first_col(int cols) const {
    return static_cast<int>(first_row / kRows) * kConsumers * cols + consumer.group * cols;
  }

  // Of this thread's two rows.
  __device__ __forceinline__ void load_bias(float (&bias)[2]) const {
    bias[0] = bias[1] = 0.0f;
    if (!p.bias) return;
    const int64_t strip = first_row / StripLayout::kRows + consumer.group * 4 + consumer.warp;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = p.strips.layout.source_row(strip, consumer.lane / 4 + i * 8);
      if (row >= 0) bias[i] = float_at(p.bias, row);
    }
  }

  // y of 16 bits, a part of the tokens at a time: [token][64 columns, or 32 of a gated weight], swizzled.
  template <Act kAct, bool kIsGated>
  __device__ __forceinline__ void store_boxes() const {
    constexpr int kUnits = kIsGated ? 4 : 2;  // of 8 tokens, in one instruction
    constexpr int kCols = kIsGated ? kGroupRows / 2 : kGroupRows;
    const Activate<kAct> activate(p.activation);
    const int lane = consumer.lane, in_unit = lane % 8;
    const bool is_bf16 = p.out.y.dtype == DType::bf16, is_first = consumer.warp == 0 && lane == 0;
    float bias[2];
    load_bias(bias);
#pragma unroll
    for (int part = 0; part < static_cast<int>(sizeof(consumer.totals) / sizeof(consumer.totals[0]));
         ++part) {
      if (is_first) ptx::wait_stores_read();
      sync();
#pragma unroll
      for (int unit = 0; unit < kPartTokens / 8; unit += kUnits) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
          float v[2][2];
#pragma unroll
          for (int j = 0; j < 4; ++j)
            v[j / 2][j % 2] = consumer.totals[part][(unit + i) * 4 + j] + bias[j / 2];
#pragma unroll
          for (int j = 0; j < 2; ++j) v[0][j] = activate(v[0][j]);
          if constexpr (kIsGated) {
            words[i] = ptx::pack_two(v[0][0] * v[1][0], v[0][1] * v[1][1], is_bf16);
          } else {
#pragma unroll
            for (int j = 0; j < 2; ++j) v[1][j] = activate(v[1][j]);
            words[2 * i] = ptx::pack_two(v[0][0], v[0][1], is_bf16);
            words[2 * i + 1] = ptx::pack_two(v[1][0], v[1][1], is_bf16);
          }
        }
        if constexpr (kIsGated) {
          const int token = (unit + lane / 8) * 8 + in_unit, piece = consumer.warp ^ (in_unit / 2);
          ptx::store_matrices_transposed(staged() + token * 64 + (piece << 4), words);
        } else {
          const int token = (unit + lane / 16) * 8 + in_unit;
          const int piece = (consumer.warp * 2 + lane / 8 % 2) ^ in_unit;
          ptx::store_matrices_transposed(staged() + token * 128 + (piece << 4), words);
        }
      }
      ptx::copy_fence();
      sync();
      if (is_first) {
        ptx::store_box(y_map, first_col(kCols), static_cast<int>(first_token) + part * kPartTokens, staged());
        ptx::end_store_group();
      }
    }
  }

  // Any y, half a part of the tokens at a time: totals as [token][64 rows], then 8 outputs a thread.
  __device__ __forceinline__ void finish_units(float* to_stage) const {
    constexpr int kChunkTokens = kPartTokens / 2, kChunkSums = kPartSums / 2;
    constexpr int kChunks = 2 * static_cast<int>(sizeof(consumer.totals) / sizeof(consumer.totals[0]));
    const int lane = consumer.lane, thread = consumer.warp * 32 + lane;
    const int unit_rows = p.is_gated() ? 2 * kUnit : kUnit, units = kGroupRows / unit_rows;  // of a token
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      sync();
#pragma unroll
      for (int from = 0; from < kChunks; ++from) {
        if (from != chunk) continue;
#pragma unroll
        for (int i = 0; i < kChunkSums; ++i) {
          const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
          const int row = consumer.warp * StripLayout::kRows + lane / 4 + i / 2 % 2 * 8;
          ptx::store_shared_float(unit_at(staged(), kGroupRows, token, row / kUnit) + row % kUnit * 4,
                                  consumer.totals[from / 2][from % 2 * kChunkSums + i]);
        }
      }
      sync();
#pragma unroll 1
      for (int i = thread; i < kChunkTokens * units; i += 128) {
        const int token = i / units, unit = i % units;
        const int64_t row = first_token + chunk * kChunkTokens + token;
        const int64_t col = first_col(units * kUnit) + unit * kUnit;
        if (row >= p.m || col >= p.n_out) continue;
        float v[kUnit], up[kUnit] = {};
        load_sums(unit_at(staged(), kGroupRows, token, unit * unit_rows / kUnit), v);
        if (p.is_gated()) load_sums(unit_at(staged(), kGroupRows, token, unit * 2 + 1), up);
        linear::finish_unit(p, to_stage, row, col, v, up);
      }
    }
  }

  // Where the sums of 8 rows of a token are, of [token][rows]: swapped by token for the sake of the banks.
  __device__ static uint32_t unit_at(uint32_t sums, int rows, int token, int unit) {
    return sums + token * rows * 4 + ((unit ^ token / 2 % 4) << 5);
  }
  __device__ static void load_sums(uint32_t from, float (&v)[kUnit]) {
    const uint4 low = ptx::load_shared16(from), high = ptx::load_shared16(from + 16);
    v[0] = __uint_as_float(low.x), v[1] = __uint_as_float(low.y), v[2] = __uint_as_float(low.z);
    v[3] = __uint_as_float(low.w), v[4] = __uint_as_float(high.x), v[5] = __uint_as_float(high.y);
    v[6] = __uint_as_float(high.z), v[7] = __uint_as_float(high.w);
  }

  __device__ __forceinline__ void run(bool stores_boxes, float* to_stage) const {
    if (!stores_boxes) return finish_units(to_stage);
    product::with_act(p.activation, [&](auto act) {
      if (p.is_gated()) store_boxes<act.value, true>();
      else store_boxes<act.value, false>();
    });
  }
};

// ---- Blocks that split k ----

// What a block has of the tile, [token][128 rows], is where x was; behind it the inbox: what the other ranks
// have of this one's tokens. All ranks are done with x before anything is sent.
template <class S, class C>
struct Exchange {
  using F = Finisher<C>;
  static constexpr int kTokenBytes = kRows * 4;
  const Smem& smem;
  int splits, rank;

  __device__ int first_token(int of) const { return S::kTokens * of / splits; }
  __device__ int tokens(int of) const { return first_token(of + 1) - first_token(of); }
  __device__ uint32_t inbox(int of, int from) const {
    return smem.x + S::kTokens * kTokenBytes + (from - (from > of ? 1 : 0)) * tokens(of) * kTokenBytes;
  }
  // By one thread, before any rank sends.
  __device__ void expect() const {
    ptx::barrier_expect(smem.arrived, (splits - 1) * tokens(rank) * kTokenBytes);
  }

  __device__ __forceinline__ void run(const Problem& p, const C& consumer, int64_t first_token_of_tile,
                                      int64_t first_row, float* to_stage) const {
    const int lane = consumer.lane, thread = (consumer.group * 4 + consumer.warp) * 32 + lane;
    ptx::named_barrier_sync<kAllBarrier, kConsumerThreads>();  // both are done with x
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kPartSums; ++i) {
        const int token = part * kPartTokens + i / 4 * 8 + lane % 4 * 2 + i % 2;
        const int unit = (consumer.group * 4 + consumer.warp) * 2 + i / 2 % 2;
        ptx::store_shared_float(F::unit_at(smem.x, kRows, token, unit) + lane / 4 * 4,
                                consumer.totals[part][i]);
      }
    }
    ptx::copy_fence();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (thread < splits && thread != rank) {
      ptx::copy_to_block(inbox(thread, rank), smem.x + first_token(thread) * kTokenBytes,
                         tokens(thread) * kTokenBytes, smem.arrived, thread);
    }
    ptx::barrier_wait(smem.arrived, 0);

    // Units of a token are a power of two. Offsets are found once: dividing takes a hundred cycles.
    const int is_gated = p.is_gated() ? 1 : 0, shift = is_gated ? 3 : 4;
    const int64_t first_col = first_row >> is_gated;
    const int own = tokens(rank), first = first_token(rank);
    const uint32_t others = smem.x + S::kTokens * kTokenBytes, step = own * kTokenBytes;
#pragma unroll 1
    for (int i = thread; i < own << shift; i += kConsumerThreads) {
      const int in_share = i >> shift, unit = i & ((1 << shift) - 1), token = first + in_share;
      const int64_t row = first_token_of_tile + token, col = first_col + unit * kUnit;
      if (row >= p.m || col >= p.n_out) continue;
      const uint32_t mine = smem.x + token * kTokenBytes, theirs = others + in_share * kTokenBytes;
      float v[kUnit], up[kUnit] = {};
      add(mine, theirs, step, F::unit_at(0, 0, token, unit << is_gated), v);
      if (is_gated) add(mine, theirs, step, F::unit_at(0, 0, token, unit * 2 + 1), up);
      linear::finish_unit(p, to_stage, row, col, v, up);
    }
  }
  // In the order of k. A token's units are swapped as where they come from.
  __device__ __forceinline__ void add(uint32_t mine, uint32_t theirs, uint32_t step, uint32_t unit,
                                      float (&v)[kUnit]) const {
#pragma unroll
    for (float& value : v) value = 0.0f;
#pragma unroll
    for (int from = 0; from < kMaxSplits; ++from) {
      if (from >= splits) break;
      float more[kUnit];
      F::load_sums((from == rank ? mine : theirs) + unit, more);
      if (from != rank) theirs += step;
#pragma unroll
      for (int i = 0; i < kUnit; ++i) v[i] += more[i];
    }
  }
};

}  // namespace quantfuse::linear_turns_sm90
