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
constexpr int kMaxSplits = 4;
constexpr int kXSlots = 5, kMaxWeightSlots = 6;
constexpr int kStagedBytes = kPartTokens * kGroupRows * 2;  // of y, a warpgroup
// Named barriers: the warpgroups', of both, and for totals that have been written.
constexpr int kGroupBarrier = 1, kAllBarrier = 3, kWrittenBarrier = 4;

template <int kTokens_>
struct Shape {
  static constexpr int kTokens = kTokens_, kSlots = kTokens / kSlotTokens, kParts = kTokens / kPartTokens;
  // Of a tile. With more of them there are not enough registers for 256 tokens.
  static constexpr int kMaxGroups = kTokens > 128 ? 1 : 8;
  // Blocks of a cluster, which share a tile. What else they do leaves too few registers for 256 tokens.
  static constexpr int kMaxSplits = kTokens > 128 ? 1 : linear_turns_sm90::kMaxSplits;
};

// How a call is laid out on the GPU.
struct Plan {
  int32_t row_blocks, token_blocks;  // tiles of y
  int32_t splits, clusters;          // blocks of a cluster, which share a tile of y; clusters
  int32_t first_k[kMaxSplits + 1];   // where their shares begin, in tiles of a strip, and the last one ends
  int32_t whole_tiles;               // which a block, or a cluster, has to itself
  int32_t shared_units;              // of the others: tiles of y by tiles of a strip
  int32_t weight_slots, weight_bytes;
  int32_t tile_pieces;            // of a tile of the weight, as its map has them
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
static_assert(kPartBytes == kSlotBytes);

// Adds what a place of x has of a part.
template <class C>
__device__ __forceinline__ void add_vectors(const C& consumer, uint32_t place, float (&v)[kPartSums]) {
  const uint32_t from = place + (consumer.group * 4 + consumer.warp) * kWarpBytes + consumer.lane * 16;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint4 more = ptx::load_shared16(from + i * 512);
    v[4 * i] += __uint_as_float(more.x), v[4 * i + 1] += __uint_as_float(more.y);
    v[4 * i + 2] += __uint_as_float(more.z), v[4 * i + 3] += __uint_as_float(more.w);
  }
}

// Tiles of which there are fewer than two for every block: their units are dealt out evenly, so that a tile's
// end may be the beginning of the next block's share. That block writes what it has of it to the workspace;
// the one that has the tile's beginning, and so comes to it last, gets through the ring of x what the
// following ones have of it, and adds it in the order of k. A block waits for none that started after it: the
// shares are dealt out from the last block to the first.
struct SharedTiles {
  // A workspace need not be cleared before: two float32 of these bits are no sums (but NaNs that no
  // instruction makes), other contents have all 64 bits by a chance that does not count, and a flag that was
  // seen is cleared.
  static constexpr uint64_t kIsThere = 0x7fa5c3e17fb1d2f3;
  int units, tiles_k;  // to be dealt out; of a tile
  char* totals;        // [share][part]
  uint64_t* flags;     // [share]

  static __device__ int shares() { return static_cast<int>(gridDim.x); }
  static __device__ int own_share() { return shares() - 1 - static_cast<int>(blockIdx.x); }
  __device__ int first_unit(int share) const {
    return units / shares() * share + min(share, units % shares());
  }
  // body(share) for those that have the last `more` units of the tile in which this block's share ends.
  template <class Body>
  __device__ __forceinline__ void each_following(int more, const Body& body) const {
    const int next = own_share() + 1, end_unit = first_unit(next) + more;
#pragma unroll 1
    for (int share = next; first_unit(share) < end_unit; ++share) body(share);
  }

  template <class C>
  __device__ __forceinline__ void write(const C& consumer) const {
    float4* to = reinterpret_cast<float4*>(totals + int64_t{own_share()} * C::kParts * kPartBytes +
                                           (consumer.group * 4 + consumer.warp) * kWarpBytes) +
                 consumer.lane;
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const float* v = consumer.totals[part] + 4 * i;
        __stcg(to + part * (kPartBytes / 16) + i * 32, float4{v[0], v[1], v[2], v[3]});
      }
    }
    ptx::global_copy_fence();
    ptx::named_barrier_arrive(kWrittenBarrier, kConsumerThreads + 32);
  }
  // By a warp that has nothing else to do: until what was written is there for others takes a while.
  __device__ void tell(int lane) const {
    ptx::named_barrier_sync(kWrittenBarrier, kConsumerThreads + 32);
    if (lane == 0) ptx::store_release(&flags[own_share()], kIsThere);
  }
  __device__ void wait_for(int share) const {
    while (ptx::load_acquire(&flags[share]) != kIsThere) {
    }
    flags[share] = 0;
    ptx::global_copy_fence();
  }
  template <class C>
  __device__ __forceinline__ void add(C& consumer, int more) const {
    each_following(more, [&](int) {
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) {
        const uint32_t slot = consumer.take_x();
        add_vectors(consumer, consumer.smem.x + slot * kSlotBytes, consumer.totals[part]);
        __syncwarp();
        consumer.give_back_x(slot);
      }
    });
  }
};

// The blocks of a cluster have the same tile, and a share of k each. A part of the tokens belongs to one of
// them; the others send it their totals, as their threads have them: the same threads there add them up, in
// the order of k. What is sent, and the inbox, are in the places of x but for the next one, which may have
// the residual. All ranks are done with x before anything is sent.
template <class S>
struct Exchange {
  static constexpr int kParts = S::kParts;
  const Plan& plan;
  const Smem& smem;

  // Parts [first_part(rank), first_part(rank + 1)) are a rank's: of more ranks than parts there may be none.
  __device__ int owner(int part) const { return part * plan.splits / kParts; }
  __device__ int first_part(int rank) const {
    int first = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) first += owner(part) < rank ? 1 : 0;
    return first;
  }
  __device__ int parts(int rank) const { return first_part(rank + 1) - first_part(rank); }

  __device__ uint32_t place(int rank, int i) const {
    const int used = (plan.first_k[rank + 1] - plan.first_k[rank]) * S::kSlots;
    return smem.x + (used + 1 + i) % kXSlots * kSlotBytes;
  }
  __device__ uint32_t inbox(int part, int from) const {
    const int of = owner(part);
    return place(of, (part - first_part(of)) * (plan.splits - 1) + from - (from > of ? 1 : 0));
  }
  // Behind the inbox, those that are not the rank's own.
  __device__ uint32_t outbox(int rank, int part) const {
    const int own = parts(rank);
    return place(rank, own * (plan.splits - 1) + (part < first_part(rank) ? part : part - own));
  }
  // By one thread, before any rank sends.
  __device__ void expect() const {
    const int own = parts(static_cast<int>(ptx::cluster_rank()));
    ptx::barrier_expect(smem.arrived, own * (plan.splits - 1) * kPartBytes);
  }

  template <class C>
  __device__ __forceinline__ void run(C& consumer) const {
    const int lane = consumer.lane, rank = static_cast<int>(ptx::cluster_rank());
    const uint32_t of_warp = (consumer.group * 4 + consumer.warp) * kWarpBytes;
    ptx::named_barrier_sync<kAllBarrier, kConsumerThreads>();  // both are done with x
    ptx::cluster_arrive();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (owner(part) == rank) continue;
      const uint32_t to = outbox(rank, part) + of_warp + lane * 16;
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
        if (owner(part) != rank)
          ptx::copy_to_block(inbox(part, rank) + of_warp, outbox(rank, part) + of_warp, kWarpBytes,
                             smem.arrived, owner(part));
      }
    }
    if (parts(rank) == 0) return;
    ptx::barrier_wait(smem.arrived, 0);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (owner(part) != rank) continue;
      float sums[kPartSums] = {};
#pragma unroll
      for (int from = 0; from < S::kMaxSplits; ++from) {
        if (from >= plan.splits) break;
        if (from != rank) {
          add_vectors(consumer, inbox(part, from), sums);
        } else {
#pragma unroll
          for (int i = 0; i < kPartSums; ++i) sums[i] += consumer.totals[part][i];
        }
      }
#pragma unroll
      for (int i = 0; i < kPartSums; ++i) consumer.totals[part][i] = sums[i];
    }
  }
};

}  // namespace quantfuse::linear_turns_sm90
