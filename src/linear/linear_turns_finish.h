// SPDX-License-Identifier: Apache-2.0
//
// What linear_turns_sm90 has of a tile, and how it becomes y: straight from registers, to which other blocks'
// shares of k have been added before. C is the kernel's consumer.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/async_copy.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/flag.h"
#include "cuda/ptx/shared_memory.h"
#include "linear/finish_unit.h"
#include "linear/packed_strips.h"
#include "product/transposed_boxes.h"

namespace quantfuse::linear_turns_sm90 {
using linear::kUnit;
using linear::Problem;
using linear::StripLayout;

constexpr int kConsumers = 2, kConsumerThreads = 128 * kConsumers;  // warpgroups
constexpr int kThreads = kConsumerThreads + 128;
constexpr int kStrips = 4 * kConsumers, kRows = kStrips * StripLayout::kRows;  // of a tile of y
constexpr int kGroupRows = kRows / kConsumers;                                 // of a warpgroup
constexpr int kSteps = StripLayout::kCols / StripLayout::kStepCols;
constexpr int kBoxCols = 64;  // 128 bytes: what a swizzled row has
// Tokens whose x is a place of the ring, in two boxes; those whose sums are made at once.
constexpr int kSlotTokens = 128, kBoxBytes = kSlotTokens * kBoxCols * 2, kSlotBytes = 2 * kBoxBytes;
constexpr int kPartTokens = 64, kPartSums = kPartTokens / 2;  // sums of a thread
constexpr int kSlotParts = kSlotTokens / kPartTokens;
constexpr int kXSlots = 5, kMaxWeightSlots = 6;
constexpr int kStagedBytes = kPartTokens * kGroupRows * 2;  // of y, a warpgroup
constexpr int kMaxSplits = 4;
constexpr int kGroupBarrier = 1, kAllBarrier = 3;  // named barriers: the warpgroups', and of both

template <int kTokens_>
struct Shape {
  static constexpr int kTokens = kTokens_, kSlots = kTokens / kSlotTokens, kParts = kTokens / kPartTokens;
  // Of a tile. With more of them there are not enough registers for 256 tokens.
  static constexpr int kMaxGroups = kTokens > 128 ? 1 : 4;
  // Blocks of a cluster, which share a tile: half the tokens for half as many of them is as much work.
  static constexpr int kMaxSplits = kTokens > 128 ? 1 : linear_turns_sm90::kMaxSplits;
};

// How a call is laid out on the GPU.
struct Plan {
  int32_t row_blocks, token_blocks;  // tiles of y
  int32_t splits;                    // blocks of a cluster, which share a tile of y
  int32_t whole_tiles;               // which a block, or a cluster, has to itself
  int32_t shared_units;              // of the others: tiles of y by tiles of a strip
  int32_t weight_slots, weight_bytes;
  int32_t tile_pieces;  // of a tile of the weight, as its map has them
  int32_t grid;
  int32_t barriers, smem_bytes;   // where the barriers are; of all
  bool stores_boxes, adds_boxes;  // of y; of a residual too, which come through the ring of x
};

// ---- Shared memory: x | boxes of y | weight | barriers ----

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
  // A warpgroup's box of the residual, of a part of the tokens, in a place of x.
  __device__ uint32_t residual_at(uint32_t slot, int group, int part) const {
    return x + slot * kSlotBytes + (group * kSlotParts + part % kSlotParts) * kStagedBytes;
  }
};

// ---- The epilogue ----

// The parts [first_part, end_part) of the tokens of a tile of y, and of these what a warpgroup has. Thread
// 4 g + q has tokens 8 u + 2 q, + 1 of rows g and g + 8 of its strip in totals 4 u .. 4 u + 3 of a part; of a
// gated weight these are a gate and its up row.
template <class C>
struct Finisher {
  const Problem& p;
  const CUtensorMap& y_map;
  const Smem& smem;
  C& consumer;
  int64_t first_token, first_row;  // of the tile
  int first_part, end_part;

  static constexpr int kParts = C::kParts;
  __device__ bool has_part(int part) const { return part >= first_part && part < end_part; }
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

  // y of 16 bits, a part of the tokens at a time. The residual has its places in the ring behind x.
  template <class E>
  __device__ __forceinline__ void store_boxes(E epilogue) const {
    constexpr int kCols = product::box_cols(E::kIsGated);
    const product::Activate<E::kAct> activate(p.activation);
    const product::BoxStore store = {
        y_map,         staged(),     kGroupBarrier + consumer.group, p.out.y.dtype == DType::bf16,
        consumer.warp, consumer.lane};
    float bias[2];
    load_bias(bias);
    uint32_t slot = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (!has_part(part)) continue;
      if (E::kHasResidual && (part % kSlotParts == 0 || part == first_part)) slot = consumer.take_x();
      store.template store<E, kPartTokens>(
          epilogue, activate, first_col(kCols), static_cast<int>(first_token) + part * kPartTokens,
          smem.residual_at(slot, consumer.group, part), [&](int unit, float(&v)[2][2]) {
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i / 2][i % 2] = consumer.totals[part][unit * 4 + i] + bias[i / 2];
          });
      if (E::kHasResidual && (part % kSlotParts == kSlotParts - 1 || part + 1 == end_part))
        consumer.give_back_x(slot);
    }
  }

  // Any y, half a part of the tokens at a time: totals as [token][64 rows], then 8 outputs a thread.
  __device__ __forceinline__ void finish_units(float* to_stage) const {
    constexpr int kChunkTokens = kPartTokens / 2, kChunkSums = kPartSums / 2;
    constexpr int kChunks = 2 * kParts;
    const int lane = consumer.lane, thread = consumer.warp * 32 + lane;
    const int unit_rows = p.is_gated() ? 2 * kUnit : kUnit, units = kGroupRows / unit_rows;  // of a token
#pragma unroll 1
    for (int chunk = 2 * first_part; chunk < 2 * end_part; ++chunk) {
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

  __device__ __forceinline__ void run(const Plan& plan, float* to_stage) const {
    if (!plan.stores_boxes) return finish_units(to_stage);
    product::with_box_epilogue(p.activation, p.is_gated(), plan.adds_boxes,
                               [&](auto epilogue) { store_boxes(epilogue); });
  }
};

// ---- Blocks that share a tile: their totals ----

// Of a part of the tokens, as the threads have them: vectors of four numbers, [warp][vector][lane].
constexpr int kVectors = kPartSums / 4, kWarpBytes = kVectors * 32 * 16,
              kPartBytes = kConsumers * 4 * kWarpBytes;

// Tiles that the blocks have no more of than all of them can have one: their units are dealt out evenly, so
// that a tile's end may be the beginning of the next block's share. That block sends what it has of it, once,
// through the workspace; the one that has the tile's beginning, and so comes to it last, adds in the order of
// k what the following blocks have of it. A block waits for none that started after it: the shares are dealt
// out from the last block to the first.
struct SharedTiles {
  // No sum has these bits, and a flag that was seen is cleared: a workspace need not be cleared before.
  static constexpr uint64_t kIsThere = 0x7fa5c3e17fb1d2f3;
  struct Flags {
    uint64_t of_group[kConsumers];
  };
  int units, tiles_k;  // to be dealt out; of a tile
  char* parts;         // [share] totals
  Flags* flags;        // [share]

  static __device__ int shares() { return static_cast<int>(gridDim.x); }
  static __device__ int own_share() { return shares() - 1 - static_cast<int>(blockIdx.x); }
  __device__ int first_unit(int share) const {
    return units / shares() * share + min(share, units % shares());
  }

  template <class C>
  __device__ float4* part_of(const C& consumer, int share, int part) const {
    return reinterpret_cast<float4*>(parts + (int64_t{share} * C::kParts + part) * kPartBytes +
                                     (consumer.group * 4 + consumer.warp) * kWarpBytes) +
           consumer.lane;
  }
  template <class C>
  __device__ __forceinline__ void send(const C& consumer) const {
    const int share = own_share();
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      float4* to = part_of(consumer, share, part);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const float* v = consumer.totals[part] + 4 * i;
        __stcg(to + i * 32, float4{v[0], v[1], v[2], v[3]});
      }
    }
    ptx::named_barrier_sync(kGroupBarrier + consumer.group, 128);
    if (consumer.warp == 0 && consumer.lane == 0)
      ptx::store_release(&flags[share].of_group[consumer.group], kIsThere);
  }
  // The `more` units of a tile that the next shares have.
  template <class C>
  __device__ __forceinline__ void receive(C& consumer, int more) const {
    const int next = own_share() + 1, end_unit = first_unit(next) + more;
#pragma unroll 1
    for (int share = next; first_unit(share) < end_unit; ++share) {
      if (consumer.warp == 0 && consumer.lane == 0) {
        uint64_t* flag = &flags[share].of_group[consumer.group];
        while (ptx::load_acquire(flag) != kIsThere) {
        }
        *flag = 0;
      }
      ptx::named_barrier_sync(kGroupBarrier + consumer.group, 128);
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) {
        const float4* from = part_of(consumer, share, part);
        float4 theirs[kVectors];
#pragma unroll
        for (int i = 0; i < kVectors; ++i) theirs[i] = __ldcg(from + i * 32);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          float* v = consumer.totals[part] + 4 * i;
          v[0] += theirs[i].x, v[1] += theirs[i].y, v[2] += theirs[i].z, v[3] += theirs[i].w;
        }
      }
    }
  }
};

// The blocks of a cluster have the same tile, of 128 tokens, and a share of k each. A part of the tokens
// belongs to one of them; the others send it their totals, as their threads have them: the same threads there
// add them to their own, in the order of k. What is sent, and the inbox, are in the places of x but for the
// next one, which may have the residual. All ranks are done with x before anything is sent.
struct Exchange {
  static constexpr int kParts = kSlotParts;
  static_assert(kPartBytes == kSlotBytes && kMaxSplits + 1 <= kXSlots);
  const Smem& smem;
  int splits, rank;
  int tiles;  // of a strip

  __device__ int first_k(int of) const { return tiles * of / splits; }
  __device__ int owner(int part) const { return part * splits / kParts; }
  // The part that is this block's, or kParts.
  __device__ int own_part() const {
    int own = kParts;
#pragma unroll
    for (int part = 0; part < kParts; ++part) own = owner(part) == rank ? part : own;
    return own;
  }
  __device__ uint32_t place(int of, int i) const {
    return smem.x + (first_k(of + 1) - first_k(of) + 1 + i) % kXSlots * kSlotBytes;
  }
  __device__ uint32_t inbox(int of, int from) const { return place(of, from - (from > of ? 1 : 0)); }
  // By one thread, before any rank sends.
  __device__ void expect() const { ptx::barrier_expect(smem.arrived, (splits - 1) * kPartBytes); }

  template <class C>
  __device__ __forceinline__ void run(C& consumer) const {
    const int own = own_part(), lane = consumer.lane;
    const uint32_t of_warp = (consumer.group * 4 + consumer.warp) * kWarpBytes;
    ptx::named_barrier_sync<kAllBarrier, kConsumerThreads>();  // both are done with x
    ptx::cluster_arrive();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part == own) continue;
      const uint32_t to = outbox(own, part) + of_warp + lane * 16;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const float* v = consumer.totals[part] + 4 * i;
        ptx::store_shared16(to + i * 512, {__float_as_uint(v[0]), __float_as_uint(v[1]),
                                           __float_as_uint(v[2]), __float_as_uint(v[3])});
      }
    }
    ptx::copy_fence();
    __syncwarp();
    ptx::cluster_wait();
    if (lane == 0) {
      for (int part = 0; part < kParts; ++part) {
        if (part == own) continue;
        const int to = owner(part);
        ptx::copy_to_block(inbox(to, rank) + of_warp, outbox(own, part) + of_warp, kWarpBytes, smem.arrived,
                           to);
      }
    }
    if (own == kParts) return;
    ptx::barrier_wait(smem.arrived, 0);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part != own) continue;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float sum[4] = {};
#pragma unroll
        for (int from = 0; from < kMaxSplits; ++from) {
          if (from >= splits) break;
          float* mine = consumer.totals[part] + 4 * i;
          float more[4] = {mine[0], mine[1], mine[2], mine[3]};
          if (from != rank) {
            const uint4 bits = ptx::load_shared16(inbox(rank, from) + of_warp + i * 512 + lane * 16);
            more[0] = __uint_as_float(bits.x), more[1] = __uint_as_float(bits.y);
            more[2] = __uint_as_float(bits.z), more[3] = __uint_as_float(bits.w);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[j] += more[j];
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) consumer.totals[part][4 * i + j] = sum[j];
      }
    }
  }
  // Behind the inbox, if there is one.
  __device__ uint32_t outbox(int own, int part) const {
    return place(rank, own == kParts ? part : splits - 1);
  }
};

}  // namespace quantfuse::linear_turns_sm90
