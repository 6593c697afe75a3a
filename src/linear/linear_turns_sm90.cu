// SPDX-License-Identifier: Apache-2.0
//
// y[m,n] = epilogue( sum_k x[m,k] * ((q[n,k] - z[n,g]) * s[n,g] + o[n,g]) )    x: f16 | bf16; many tokens
//
// The weight is the operand in registers, the tokens are the columns of wgmma:
//   gmem x --box copies--> smem, swizzled --------------------------------.
//   gmem q --box copies--> smem --lds--> regs --decode--> 16-bit numbers --wgmma--> sums of a group
//     --* s--> totals --> bias, activation, * up --stmatrix--> smem --box copies--> y
// Codes less their zero points are exact in 16 bits and a group's sum is scaled in float32, so that nothing
// is rounded that the formula does not round. Offsets are added as o times the sum of the group's x. The byte
// scales of MXFP4 are part of the numbers, exactly, if these are bf16: the tensor cores add to the totals
// themselves.
//
// A block has a warp that copies and two warpgroups of consumers, each 64 rows of the weight (a strip a warp)
// by all tokens of the tile. While wgmma reads and writes its sums a scheduler has room for about one
// instruction in three cycles, whichever it is: what counts are the instructions beside wgmma. A decoded code
// therefore serves as many tokens as there are registers for totals, and the tokens are multiplied 64 at a
// time, into two sets of sums in turn: while one is scaled and added to the totals, the tensor cores make the
// other.
//
// Blocks stay and take tile after tile. The last of them are dealt out evenly along k, tile by tile:
//   4 blocks, 5 tiles of 4 tiles of k:   0000 0111 1122 2223 3333
// and who has a tile's beginning adds what the next block has of it. With few tiles of y the blocks of a
// cluster split k; each sends its totals to the blocks that the tokens belong to. Sums are always added in
// the order of k.
//
// The kernel before may still be running (programmatic dependent launch): until it has ended only the weight
// is read.
#include <cuda.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "core/choose.h"
#include "cuda/cursor.h"
#include "cuda/ptx/dependent_launch.h"
#include "cuda/ptx/wgmma.h"
#include "linear/linear_turns_finish.h"
#include "linear/strip_boxes.h"
#include "linear/strip_codes.h"
#include "linear/x_sums.h"

namespace quantfuse::linear_turns_sm90 {
namespace {

constexpr int kTokenGroup = 1024;  // tokens whose x stays in L2 while the weight goes by

// ---- The tiles of y ----

// A tile of y, and of it tiles [first_k, end_k) of the strips.
struct Segment {
  int row_block, token_block;
  int first_k, end_k;
  int more;      // tiles of the strips behind end_k, which the next blocks have
  bool is_sent;  // its totals are: other blocks end the tile
};

// What is this block's, segment after segment. Consumers keep it while they multiply: it has no more than it
// needs.
template <class S>
struct Share {
  const Plan& plan;
  const Exchange<S>& exchange;
  const SharedTiles& shared;
  int tile = static_cast<int>(blockIdx.x) / plan.splits;  // the next whole one
  int shared_tile, first_of_tile, units;  // the next of the others and where to begin in it; left of them

  __device__ Share(const Plan& p, const Exchange<S>& e, const SharedTiles& s)
      : plan(p), exchange(e), shared(s) {
    const int unit = shared.first_unit(SharedTiles::own_share());
    shared_tile = plan.whole_tiles + unit / shared.tiles_k, first_of_tile = unit % shared.tiles_k;
    units = shared.first_unit(SharedTiles::own_share() + 1) - unit;
  }
  __device__ bool next(Segment& segment) {
    const bool is_whole = tile < plan.whole_tiles;
    if (!is_whole && units == 0) return false;
    const int rank = static_cast<int>(ptx::cluster_rank());
    const int end = min(shared.tiles_k, first_of_tile + units);
    segment = at(is_whole ? tile : shared_tile);
    segment.first_k = is_whole ? plan.first_k[rank] : first_of_tile;
    segment.end_k = is_whole ? plan.first_k[rank + 1] : end;
    segment.is_sent = is_whole ? exchange.parts(rank) == 0 : first_of_tile > 0;
    segment.more = is_whole ? 0 : shared.tiles_k - end;
    if (is_whole) {
      tile += plan.clusters;
    } else {
      units -= end - first_of_tile;
      ++shared_tile, first_of_tile = 0;
    }
    return true;
  }
  // Before anything was taken: whether a tile's beginning is another block's.
  __device__ bool begins_within_tile() const { return units > 0 && first_of_tile > 0; }
  __device__ Segment at(int index) const {
    constexpr int kGroup = kTokenGroup / S::kTokens;
    const int per_group = kGroup * plan.row_blocks;
    const int first_block = index / per_group * kGroup, in_group = index % per_group;
    const int tokens = min(plan.token_blocks - first_block, kGroup);
    return {in_group / tokens, first_block + in_group % tokens, 0, 0, 0, false};
  }
};

// ---- The producer: one thread ----

template <class S>
struct Producer {
  const Problem& p;
  const Plan& plan;
  const CUtensorMap &x_map, &w_map, &residual_map;
  const Smem& smem;
  const Exchange<S>& exchange;
  const SharedTiles& shared_tiles;

  __device__ void copy_weight(const Segment& tile, int k, int slot, uint64_t policy) const {
    const uint32_t full = smem.weight_full + 8 * slot;
    ptx::barrier_expect(full, kStrips * p.strips.layout.tile_bytes);
    ptx::box_copy(smem.weight + slot * plan.weight_bytes, w_map, 0, k * plan.tile_pieces,
                  tile.row_block * kStrips, full, policy);
  }
  __device__ void copy_x(const Segment& tile, int k, int half, int slot) const {
    const int column = k * StripLayout::kCols, row = tile.token_block * S::kTokens + half * kSlotTokens;
    const uint32_t to = smem.x + slot * kSlotBytes, full = smem.x_full + 8 * slot;
    ptx::barrier_expect(full, kSlotBytes);
    ptx::box_copy(to, x_map, column, row, full);
    ptx::box_copy(to + kBoxBytes, x_map, column + kBoxCols, row, full);
  }
  // Behind the tile's last x: what another block has of a part.
  __device__ void copy_totals(int share, int part, int slot, uint64_t policy) const {
    const uint32_t full = smem.x_full + 8 * slot;
    ptx::barrier_expect(full, kPartBytes);
    ptx::bulk_copy(smem.x + slot * kSlotBytes,
                   shared_tiles.totals + (int64_t{share} * S::kParts + part) * kPartBytes, kPartBytes, full,
                   policy);
  }
  // And then the residual: in a place of x as much as y has of its tokens.
  __device__ void copy_residual(const Segment& tile, int half, int slot) const {
    const uint32_t full = smem.x_full + 8 * slot;
    ptx::barrier_expect(full, kSlotBytes);
    for (int group = 0; group < kConsumers; ++group) {
      for (int part = 0; part < kSlotParts; ++part)
        ptx::box_copy(smem.residual_at(slot, group, part), residual_map,
                      (tile.row_block * kConsumers + group) * kGroupRows,
                      tile.token_block * S::kTokens + half * kSlotTokens + part * kPartTokens, full);
    }
  }
  __device__ void run(Share<S> share) const {
    const uint64_t policy = plan.token_blocks == 1 ? ptx::evict_first_policy() : ptx::evict_normal_policy();
    int done = 0, early = 0;
    Cursor x, weight;
    for (Segment tile; share.next(tile);) {
      if (done == 0) {  // the weight's part of the first round does not wait for the kernel before
        early = min(plan.weight_slots, tile.end_k - tile.first_k);
        for (int i = 0; i < early; ++i) copy_weight(tile, tile.first_k + i, i, policy);
        ptx::wait_for_previous_kernel();
      }
      for (int k = tile.first_k; k < tile.end_k; ++k, weight.advance(plan.weight_slots)) {
        if (done++ >= early) {
          ptx::barrier_wait(smem.weight_empty + 8 * weight.at, weight.parity ^ 1);
          copy_weight(tile, k, weight.at, policy);
        }
#pragma unroll
        for (int half = 0; half < S::kSlots; ++half, x.advance(kXSlots)) {
          ptx::barrier_wait(smem.x_empty + 8 * x.at, x.parity ^ 1);
          copy_x(tile, k, half, x.at);
        }
      }
      if (tile.is_sent) continue;
      shared_tiles.each_following(tile.more, [&](int from) {
        shared_tiles.wait_for(from);
        for (int part = 0; part < S::kParts; ++part, x.advance(kXSlots)) {
          ptx::barrier_wait(smem.x_empty + 8 * x.at, x.parity ^ 1);
          copy_totals(from, part, x.at, policy);
        }
      });
      if (!plan.adds_boxes) continue;
      const int rank = static_cast<int>(ptx::cluster_rank()), end_part = exchange.first_part(rank + 1);
      for (int half = exchange.first_part(rank) / kSlotParts; half * kSlotParts < end_part;
           ++half, x.advance(kXSlots)) {
        ptx::barrier_wait(smem.x_empty + 8 * x.at, x.parity ^ 1);
        copy_residual(tile, half, x.at);
      }
    }
  }
};

// ---- The consumers ----

template <class S, qf_format Format, class T, bool kHasOffsets>
struct Consumer {
  using Codes = StripCodes<Format, T>;
  static constexpr int kParts = S::kParts;
  const StripLayout& w;
  const Smem& smem;
  const int weight_slots, weight_bytes;
  int group, warp, lane;  // the warpgroup, its warp, and the warp's lane
  Cursor x, weight;
  float totals[S::kParts][kPartSums];
  const Matrix& x_sums;
  const Codes codes = Codes(w.format);

  __device__ uint32_t take_x() {
    ptx::barrier_wait(smem.x_full + 8 * x.at, x.parity);
    const uint32_t slot = x.at;
    x.advance(kXSlots);
    return slot;
  }
  __device__ void give_back_x(uint32_t slot) const {
    if (lane == 0) ptx::barrier_arrive(smem.x_empty + 8 * slot);
  }
  __device__ uint32_t take_weight() {
    ptx::barrier_wait(smem.weight_full + 8 * weight.at, weight.parity);
    const uint32_t slot = weight.at;
    weight.advance(weight_slots);
    return slot;
  }
  __device__ void give_back_weight(uint32_t slot) const {
    __syncwarp();  // all lanes have read
    if (lane == 0) ptx::barrier_arrive(smem.weight_empty + 8 * slot);
  }
  // A warp's tile in a place of the ring.
  __device__ uint32_t tile_in(uint32_t slot) const {
    return smem.weight + slot * weight_bytes + (group * 4 + warp) * w.tile_bytes;
  }

  // Steps 4 kHalf .. 4 kHalf + 3 of a tile. kIsFolded: with their byte scales.
  template <int kGroups, bool kHasZeros, int kHalf, bool kIsFolded = false>
  __device__ __forceinline__ void decode(uint32_t tile, uint32_t (&a)[kSteps / 2][4]) const {
    constexpr int kVectors = Codes::kTileVectors / 2;
    uint4 vectors[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      vectors[i] = ptx::load_shared16(tile + ((kHalf * kVectors + i) * 32 + lane) * 16);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(vectors);
    uint32_t terms[2] = {Codes::term(), Codes::term()};
    ByteScales bytes = {};
    if constexpr (kIsFolded) bytes = ByteScales::load(tile + Codes::kTileVectors * 512, lane);
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
      const int step = kHalf * (kSteps / 2) + i;
      if (kIsFolded && step * kGroups % kSteps == 0) {
        terms[0] = bytes.factor(0, step * kGroups / kSteps);
        terms[1] = bytes.factor(1, step * kGroups / kSteps);
      }
      if (kHasZeros && (i == 0 || step * kGroups % kSteps == 0)) {
        const uint32_t zeros = tile + w.zero_offset() + step * kGroups / kSteps * 16 + lane / 4;
        terms[0] = Codes::term(ptx::load_shared_s8(zeros));
        terms[1] = Codes::term(ptx::load_shared_s8(zeros + 8));
      }
      codes.decode(words + i * Codes::kStepWords, terms, a[i]);
    }
  }

  // totals = the sum over the next `count` tiles of the strips.
  //
  // A unit is a group of columns by a part of the tokens: its sums are made while those of the unit before
  // are scaled. At the end of a tile nothing is under way: its codes' registers are free then, and the
  // compiler allows for no less at the end of a loop. The next one's first products begin when half of it is
  // decoded.
  template <int kGroups, bool kHasZeros, bool kHasByteScales = false>
  __device__ __forceinline__ void multiply(int count, [[maybe_unused]] const float* first_sums) {
    constexpr int kGroupSteps = kSteps / kGroups, kUnits = S::kParts * kGroups, kHalf = kSteps / 2;
    uint32_t a[2][kHalf][4];
    float sums[2][kPartSums], scale[2][2] = {}, offset[2][2] = {};
#pragma unroll
    for (auto& part : totals)
#pragma unroll
      for (float& total : part) total = 0.0f;
#pragma unroll
    for (float& sum : sums[1]) sum = 0.0f;

    // Adds the steps [first, end) of a unit. x_rows: where the slot is; the rest is constants.
    const auto make_sums = [&](int unit, uint64_t x_rows, int first, int end) {
      ptx::wgmma_fence();
#pragma unroll
      for (int i = first; i < end; ++i) {
        const int step = unit % kGroups * kGroupSteps + i;
        const int offset = unit / kGroups % 2 * (kPartTokens * 128) + step / 4 * kBoxBytes;
        ptx::wgmma<T>(sums[unit % 2], a[step / kHalf][step % kHalf], x_rows + (offset + 32 * (step % 4)) / 16,
                      i > 0);
      }
    };
    const auto load_scale = [&](int unit, uint32_t tile) {
      if constexpr (kHasByteScales) {
        const ByteScales bytes = ByteScales::load(tile + w.scale_offset(), lane);
        scale[unit % 2][0] = bytes.scale(0, unit % kGroups);
        scale[unit % 2][1] = bytes.scale(1, unit % kGroups);
        return;
      }
      const uint32_t from = tile + w.scale_offset() + (unit % kGroups * 16 + lane / 4) * 4;
      scale[unit % 2][0] = ptx::load_shared_float(from);
      scale[unit % 2][1] = ptx::load_shared_float(from + 32);
      if constexpr (kHasOffsets) {
        const uint32_t offsets = from + kGroups * 64;
        offset[unit % 2][0] = ptx::load_shared_float(offsets);
        offset[unit % 2][1] = ptx::load_shared_float(offsets + 32);
      }
    };
    // Of tile k of these.
    [[maybe_unused]] linear::XSums<kPartTokens> of_x;
    const auto load_sums = [&]([[maybe_unused]] int unit, [[maybe_unused]] int k) {
      if constexpr (kHasOffsets)
        of_x.load(
            first_sums + (k * kGroups + unit % kGroups) * x_sums.row_stride + unit / kGroups * kPartTokens,
            lane);
    };
    const auto copy_scale = [&](int unit) {
#pragma unroll
      for (int i = 0; i < 2; ++i) scale[unit % 2][i] = scale[0][i], offset[unit % 2][i] = offset[0][i];
    };
    const auto promote = [&](int unit) {
#pragma unroll
      for (int i = 0; i < kPartSums; ++i) {
        float& total = totals[unit / kGroups][i];
        total = fmaf(sums[unit % 2][i], scale[unit % 2][i / 2 % 2], total);
      }
      if constexpr (kHasOffsets) of_x.add_to(totals[unit / kGroups], offset[unit % 2]);
    };
    of_x.clear();

#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      const uint32_t weight_slot = take_weight(), tile = tile_in(weight_slot);
      decode<kGroups, kHasZeros, 0>(tile, a[0]);
      load_scale(0, tile);
      uint32_t slot = take_x();
      uint64_t x_rows = ptx::swizzled_rows(smem.x + slot * kSlotBytes, 0);
      make_sums(0, x_rows, 0, min(kHalf, kGroupSteps));
      decode<kGroups, kHasZeros, 1>(tile, a[1]);
      if constexpr (kGroups == 1) make_sums(0, x_rows, kHalf, kSteps);
      ptx::wgmma_commit();
      promote(kUnits - 1);  // of the tile before
      load_sums(0, k);
#pragma unroll
      for (int unit = 1; unit < kUnits; ++unit) {
        const uint32_t before = slot;
        const bool is_first_of_slot = unit % (2 * kGroups) == 0;
        if (is_first_of_slot) slot = take_x(), x_rows = ptx::swizzled_rows(smem.x + slot * kSlotBytes, 0);
        if (kGroups > 1) load_scale(unit, tile);
        else copy_scale(unit);
        make_sums(unit, x_rows, 0, kGroupSteps);
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        promote(unit - 1);
        load_sums(unit, k);
        if (is_first_of_slot) give_back_x(before);
      }
      give_back_weight(weight_slot);
      ptx::wgmma_wait<0>();
      give_back_x(slot);
    }
    promote(kUnits - 1);
  }

  // The same where the scales are part of the numbers. The products of a tile begin with the half that was
  // decoded beside those of the tile before.
  __device__ __forceinline__ void multiply_folded(int count) {
    constexpr int kGroups = 4, kHalf = kSteps / 2;
    uint32_t a[2][kHalf][4], next[kHalf][4];
#pragma unroll
    for (auto& part : totals)
#pragma unroll
      for (float& total : part) total = 0.0f;
    const auto add_half = [&](int part, uint64_t x_rows, int half) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const int offset = part % 2 * (kPartTokens * 128) + half * kBoxBytes;
        ptx::wgmma<T>(totals[part], a[half][i], x_rows + (offset + 32 * i) / 16, true);
      }
    };

    uint32_t weight_slot = take_weight(), tile = tile_in(weight_slot);
    decode<kGroups, false, 0, true>(tile, next);
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
#pragma unroll
      for (int i = 0; i < 4 * kHalf; ++i) a[0][i / 4][i % 4] = next[i / 4][i % 4];
      uint32_t slot = take_x();
      uint64_t x_rows = ptx::swizzled_rows(smem.x + slot * kSlotBytes, 0);
      ptx::wgmma_fence();
      add_half(0, x_rows, 0);
      ptx::wgmma_commit();
      decode<kGroups, false, 1, true>(tile, a[1]);
      give_back_weight(weight_slot);
      ptx::wgmma_fence();
      add_half(0, x_rows, 1);
      add_half(1, x_rows, 0), add_half(1, x_rows, 1);
      ptx::wgmma_commit();
      if constexpr (S::kSlots > 1) {
        const uint32_t before = slot;
        slot = take_x(), x_rows = ptx::swizzled_rows(smem.x + slot * kSlotBytes, 0);
        ptx::wgmma_fence();
        add_half(2, x_rows, 0), add_half(2, x_rows, 1);
        add_half(3, x_rows, 0), add_half(3, x_rows, 1);
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        give_back_x(before);
      }
      if (k + 1 < count) {
        weight_slot = take_weight(), tile = tile_in(weight_slot);
        decode<kGroups, false, 0, true>(tile, next);
      }
      ptx::wgmma_wait<0>();
      give_back_x(slot);
      // Used until here: or the compiler, for which the products end where they begin, has `next` in the same
      // registers.
#pragma unroll
      for (int i = 0; i < 4 * kHalf; ++i) ptx::hide(reinterpret_cast<int&>(a[0][i / 4][i % 4]));
    }
#pragma unroll
    for (auto& part : totals)
#pragma unroll
      for (float& total : part) total *= linear::kByteScaleUnit;
  }
  // Of tiles [first_k, end_k) of the strips, and the tokens from first_token on.
  __device__ __forceinline__ void multiply(int first_k, int end_k, int64_t first_token) {
    const int count = end_k - first_k;
    if constexpr (kHasOffsets)
      return multiply_groups<false>(count,
                                    x_sums.row<const float>(int64_t{first_k} * w.groups) + first_token);
    if constexpr (Codes::kFoldsByteScales) {
      if (linear::has_byte_scales(w)) return multiply_folded(count);
    } else if constexpr (Codes::kMayHaveByteScales && S::kMaxGroups >= 4) {
      if (linear::has_byte_scales(w)) return multiply<4, false, true>(count, nullptr);
    }
    if (w.has_zeros && Codes::kHasZeroPoints) multiply_groups<Codes::kHasZeroPoints>(count, nullptr);
    else multiply_groups<false>(count, nullptr);
  }
  template <bool kHasZeros>
  __device__ __forceinline__ void multiply_groups(int count, const float* first_sums) {
    if constexpr (S::kMaxGroups > 1) {
      if (w.groups == 2) return multiply<2, kHasZeros>(count, first_sums);
      if (w.groups == 4) return multiply<4, kHasZeros>(count, first_sums);
      if (w.groups == 8) return multiply<8, kHasZeros>(count, first_sums);
    }
    multiply<1, kHasZeros>(count, first_sums);
  }
};

// ---- The kernel ----

template <class S, qf_format Format, class T, bool kHasOffsets>
__global__ void __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ Problem p, const __grid_constant__ CUtensorMap x_map,
           const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap y_map,
           const __grid_constant__ CUtensorMap residual_map, const __grid_constant__ Plan plan, float* staged,
           char* totals) {
  using C = Consumer<S, Format, T, kHasOffsets>;
  extern __shared__ __align__(1024) char shared[];
  const Smem smem(plan, shared);
  const Exchange<S> exchange = {plan, smem};
  const SharedTiles shared_tiles = {
      plan.shared_units, static_cast<int>(p.strips.layout.tiles), totals,
      reinterpret_cast<uint64_t*>(totals + int64_t{gridDim.x} * S::kParts * kPartBytes)};
  Share<S> share(plan, exchange, shared_tiles);
  const bool is_split = plan.splits > 1;
  const int thread = static_cast<int>(threadIdx.x);
  ptx::allow_next_kernel();
  if (thread == 0) {
    ptx::prefetch_map(x_map), ptx::prefetch_map(w_map);
    for (int i = 0; i < kXSlots; ++i) {
      ptx::barrier_init(smem.x_full + 8 * i, 1);
      ptx::barrier_init(smem.x_empty + 8 * i, kConsumers * 4);
    }
    for (int i = 0; i < plan.weight_slots; ++i) {
      ptx::barrier_init(smem.weight_full + 8 * i, 1);
      ptx::barrier_init(smem.weight_empty + 8 * i, kConsumers * 4);
    }
    ptx::barrier_init(smem.arrived, 1);
    ptx::barrier_init_fence();
    if (is_split) exchange.expect();
  }
  __syncthreads();

  if (thread >= kConsumerThreads) {
    ptx::release_registers<24>();
    if (thread == kConsumerThreads)
      Producer<S>{p, plan, x_map, w_map, residual_map, smem, exchange, shared_tiles}.run(share);
    if (thread / 32 == kConsumerThreads / 32 + 1 && share.begins_within_tile())
      shared_tiles.tell(thread % 32);
    __syncwarp();
    if (is_split) {
      ptx::cluster_arrive();
      ptx::cluster_wait();
    }
  } else {
    ptx::claim_registers<240>();
    C consumer = {p.strips.layout,
                  smem,
                  plan.weight_slots,
                  plan.weight_bytes,
                  thread / 128,
                  thread / 32 % 4,
                  thread % 32,
                  {},
                  {},
                  {},
                  p.x_sums};
    ptx::wait_for_previous_kernel();  // the epilogue touches what it wrote
    for (Segment tile; share.next(tile);) {
      consumer.multiply(tile.first_k, tile.end_k, int64_t{tile.token_block} * S::kTokens);
      ptx::hide(consumer.lane);  // or addresses of the epilogue would be kept in registers meanwhile
      if constexpr (S::kMaxSplits > 1) {
        if (is_split) exchange.run(consumer);
      }
      if (!is_split && tile.is_sent) {
        shared_tiles.write(consumer);
      } else {
        shared_tiles.add(consumer, tile.more);
        const int rank = static_cast<int>(ptx::cluster_rank());
        Finisher<C>{p,
                    y_map,
                    smem,
                    consumer,
                    int64_t{tile.token_block} * S::kTokens,
                    int64_t{tile.row_block} * kRows,
                    exchange.first_part(rank),
                    exchange.first_part(rank + 1)}
            .run(plan, staged);
      }
    }
    if (thread % 128 == 0) ptx::wait_stores();
  }
  // No block leaves while another may still read or write what it has.
  if (is_split) {
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
}

// ---- The host's side ----

constexpr int64_t kMinTokens = 65;

Verdict accepts(const Problem& p) {
  return linear::require_sums(p)
      .require(p.strips.is_there, "the weight is not packed (qf_weight_pack)")
      .require(!p.has_act_quant(), "the activations are quantized")
      .require(p.x.dtype == DType::f16 || p.x.dtype == DType::bf16, "the activations are not FP16 or BF16")
      .require(p.m >= kMinTokens, "m is at most 64")
      .require(reinterpret_cast<uint64_t>(p.x.data) % 16 == 0 && p.x.row_stride % 8 == 0,
               "rows of x do not begin at multiples of 16 bytes")
      .require(p.m < 1ll << 31, "m is 2^31 or more");
}

// How a call is divided: by an estimate of the cycles after which the last block ends. What a tile of the
// strips and the end of a tile of y take are measured; 256 tokens draw less power, by which the clock is
// higher. Blocks that share tiles are not at the same columns of x at the same time, and find less of it in
// L2: that takes 6% longer, as measured, and has to be worth it.
struct Division {
  int tokens, splits;
  int64_t whole_tiles;  // the others are shared
  double cycles;
};
int64_t tiles_of(const Problem& p, int tokens) {
  return ceil_div(p.strips.layout.strips, kStrips) * ceil_div(p.m, tokens);
}
Division divide(const Problem& p) {
  const StripLayout& w = p.strips.layout;
  const int64_t sms = gpu_num_sms(p.device.id);
  Division best = {};
  const auto consider = [&](const Division& division) {
    if (best.tokens == 0 || division.cycles < best.cycles) best = division;
  };
  for (const int tokens : {128, 256}) {
    const bool is_folded = linear::has_byte_scales(w) && p.x.dtype == DType::bf16;
    if (tokens == 256 && (w.has_offsets || (w.groups > Shape<256>::kMaxGroups && !is_folded))) continue;
    const int max_splits = tokens == 256 ? Shape<256>::kMaxSplits : Shape<128>::kMaxSplits;
    const int64_t tiles = tiles_of(p, tokens);
    const double stage = tokens == 256 ? 2380 : 1215, end = 400 + 14 * tokens;
    const auto k_tiles = static_cast<double>(w.tiles);
    for (int splits = 1; splits <= max_splits; ++splits) {
      // Pairs of blocks find a place on all SMs, larger clusters leave about a tenth of them over.
      const int64_t places = splits <= 2 ? sms / splits : sms * 9 / 10 / splits;
      if (splits > 1 && (tiles > places || w.tiles < 2 * splits)) break;
      const auto waves = static_cast<double>(ceil_div(tiles, places));
      const double stages = static_cast<double>(ceil_div(w.tiles, splits)) * stage;
      consider({tokens, splits, tiles, waves * (stages + (splits > 1 ? 3000 + 10 * tokens : end))});
    }
    // All but the last one or two rounds are of whole tiles. Who ends a tile waits for what others sent.
    const int64_t rounds = std::max<int64_t>(tiles / sms - 1, 0), shared = tiles - rounds * sms;
    const int64_t units = ceil_div(shared * w.tiles, sms);
    if (tiles % sms == 0 || shared * w.tiles >= 1 << 30 || units < 4) continue;
    const double exchanges = 1 + static_cast<double>(ceil_div(w.tiles, units));
    const double cycles = static_cast<double>(rounds) * (k_tiles * stage + end) +
                          static_cast<double>(units) * 1.06 * stage +
                          static_cast<double>(ceil_div(shared, sms)) * end + exchanges * (400 + 6 * tokens);
    consider({tokens, 1, rounds * sms, 1.02 * cycles});
  }
  return best;
}

template <class S>
Plan make_plan(const Problem& p, const Division& division) {
  constexpr int kSmemOfBlock = 227 * 1024;
  const StripLayout& w = p.strips.layout;
  Plan plan = {};
  plan.row_blocks = static_cast<int32_t>(ceil_div(w.strips, kStrips));
  plan.token_blocks = static_cast<int32_t>(ceil_div(p.m, S::kTokens));
  plan.splits = division.splits;
  plan.whole_tiles = static_cast<int32_t>(division.whole_tiles);
  const int64_t tiles = int64_t{plan.row_blocks} * plan.token_blocks, shared = tiles - division.whole_tiles;
  plan.shared_units = static_cast<int32_t>(shared * w.tiles);
  const int64_t places = gpu_num_sms(p.device.id) / plan.splits;
  plan.clusters = static_cast<int32_t>(shared > 0 ? places : std::min(tiles, places));
  for (int i = 0; i <= plan.splits; ++i) plan.first_k[i] = static_cast<int32_t>(w.tiles * i / plan.splits);
  plan.tile_pieces = linear::tile_pieces(w);
  plan.weight_bytes = static_cast<int32_t>(round_up(kStrips * w.tile_bytes, 128));
  constexpr int kOthers = kXSlots * kSlotBytes + kConsumers * kStagedBytes;
  const int room = kSmemOfBlock - kOthers - Smem::kBarrierBytes;
  plan.weight_slots = std::min(room / plan.weight_bytes, kMaxWeightSlots);
  plan.barriers = kOthers + plan.weight_slots * plan.weight_bytes;
  plan.smem_bytes = plan.barriers + Smem::kBarrierBytes;
  plan.stores_boxes = product::has_transposed_boxes(p.out, p.residual, p.is_gated());
  plan.adds_boxes = plan.stores_boxes && p.residual;
  return plan;
}

size_t workspace_bytes(const Problem& p) {
  const size_t others = linear::canonical_workspace_bytes(p);
  const Division division = divide(p);
  if (division.whole_tiles == tiles_of(p, division.tokens)) return others;
  const int parts = division.tokens / kPartTokens;
  return others + static_cast<size_t>(gpu_num_sms(p.device.id)) *
                      (static_cast<size_t>(parts) * kPartBytes + sizeof(uint64_t));
}

template <class S, qf_format Format, class T>
void launch_shape(const Problem& p, float* staged, const Division& division, const Launch& launch) {
  const Plan plan = make_plan<S>(p, division);
  const CUtensorMap x_map = row_boxes(p.x, kSlotTokens), w_map = linear::strip_boxes(p.strips, kStrips);
  CUtensorMap y_map = {}, residual_map = {};
  if (plan.stores_boxes) y_map = product::transposed_boxes(p.out.y, p.is_gated(), kPartTokens);
  if (plan.adds_boxes) residual_map = product::transposed_boxes(p.residual, /*is_gated=*/false, kPartTokens);
  LaunchShape shape = {dim3(static_cast<unsigned>(plan.clusters * plan.splits)), dim3(kThreads),
                       static_cast<size_t>(plan.smem_bytes), /*overlap_previous=*/true};
  shape.cluster = static_cast<unsigned>(plan.splits);
  char* totals = static_cast<char*>(launch.workspace) + linear::plan_canonical(p).total_bytes;
  choose_bool(p.strips.layout.has_offsets, [&](auto has_offsets) {
    constexpr bool kHasOffsets = has_offsets.value && is_integer(Format) && S::kTokens == 128;
    launch_kernel("linear_turns_sm90", kernel<S, Format, T, kHasOffsets>, shape, launch, p, x_map, w_map,
                  y_map, residual_map, plan, staged, totals);
  });
}

void launch(const Problem& problem, const Launch& launch) {
  linear::launch_canonical(problem, launch, [&](const Problem& p, float* staged) {
    choose_strip_format(p.weight.format, [&](auto format) {
      choose_bool(p.x.dtype == DType::bf16, [&](auto is_bf16) {
        using T = std::conditional_t<is_bf16.value, bf16, f16>;
        const Division division = divide(p);
        choose_value<128, 256>(division.tokens, [&](auto tokens) {
          launch_shape<Shape<tokens.value>, format.value, T>(p, staged, division, launch);
        });
      });
    });
  });
}

}  // namespace

extern const Kernel<Problem> entry = {"linear_turns_sm90", Target::sm90, accepts, workspace_bytes, launch};

}  // namespace quantfuse::linear_turns_sm90
