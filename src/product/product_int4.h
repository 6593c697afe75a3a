// SPDX-License-Identifier: Apache-2.0
//
// y[m,n] = epilogue( sum_k x[m,k] * w[n,k], scales )        x: INT8, w: INT4; many tokens
//
// Rows of the weight are the rows of wgmma, decoded to registers; tokens are its columns, from shared memory:
//   gmem x --box copies--> smem, swizzled ---------------------------------------.
//   gmem w --box copies--> smem, swizzled --lds--> regs --decode--> bytes --wgmma--> sums of a group
//     --* scale--> totals --> * scale of the token, epilogue --> smem --> y
//
// A block has warps that copy and two warpgroups of consumers, each 64 rows by 256 tokens. The two blocks of
// a pair have neighbouring rows and the same tokens; each brings half of x to both. Blocks stay and take tile
// after tile.
//
// What an SM has to do for 64 rows, 128 tokens and 128 columns: the tensor cores take 256 cycles. Meanwhile
// they read and write the sums, which leaves a scheduler room for some 80 instructions of other warps (as
// measured; each further one costs about a cycle). To promote the 64 sums of a thread takes 128 of them, one
// to make a float of an integer and one to scale and add it: whatever adds to that is to be avoided. So a
// decoded code serves 256 tokens, for which it takes 64 instructions, and scales come as four groups at once
// (copies of 4 bytes for each group took 40 cycles). A warpgroup has room for 128 totals and two times the
// sums of 64 tokens: while it promotes the one, the tensor cores make the other.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "cuda/cursor.h"
#include "cuda/ptx/async_copy.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/dependent_launch.h"
#include "cuda/ptx/shared_memory.h"
#include "product/stream_finish.h"
#include "product/transposed_boxes.h"
#include "product/wgmma_numbers.h"

namespace quantfuse::product_int4 {
using namespace product;

constexpr int kConsumers = 2,
              kThreads = 128 * (kConsumers + 1);               // warpgroups; of consumers and of the others
constexpr int kPair = 2;                                       // blocks of a cluster
constexpr int kGroupRows = 64, kBandRows = 16;                 // of a warpgroup, of a warp
constexpr int kRows = kConsumers * kGroupRows, kTokens = 256;  // of a tile
constexpr int kHalfTokens = kTokens / 2;                       // what a block of the pair brings
constexpr int kParts = 4, kPartTokens = kTokens / kParts, kPartSums = kPartTokens / 2;  // sums of a thread
constexpr int kRowBytes = kBlockK / 2;                                                  // of codes, a stage
constexpr int kXBytes = kTokens * kBlockK, kStageBytes = kXBytes + kRows * kRowBytes;
constexpr int kStages = 4;
constexpr int kRunGroups = 4;  // whose scales come at once
constexpr int kScaleBytes = kRows * kRunGroups * 4;
// Groups may be as few as two to a tile: a third run is brought while the first may still be read.
constexpr int kScaleBuffers = 3;
constexpr int kStagedBytes = kHalfTokens * kGroupRows * 2;  // of y, a warpgroup
constexpr int kTokenGroup = 4;                              // blocks of tokens whose x stays in L2
constexpr int kInt4Factor = 16;                             // what decoded codes are too large by
constexpr int kGroupBarrier = 1;                            // first of the warpgroups' named barriers

using TileFactors = Factors<kRows, kTokens>;

struct Int4Problem {
  CUtensorMap x, w, y, residual;              // y, residual: where these come and go by boxes
  int32_t token_blocks, row_pairs, stages_k;  // tiles; stages of k, an even number
  bool has_scale_vectors;                     // runs of scales begin at multiples of 16 bytes
  bool stores_boxes, adds_boxes;              // of y; of a residual too, which are stages of their own
  Product product;                            // but for the bias
  Vector bias;
};

// ---- Shared memory: ring | boxes of y | runs of scales | factors of two tiles | barriers ----

struct Smem {
  static constexpr int kStaged = kStages * kStageBytes;
  static constexpr int kScales = kStaged + kConsumers * kStagedBytes;
  static constexpr int kFactors = kScales + kScaleBuffers * kScaleBytes;
  static constexpr int kFull = kFactors + 2 * TileFactors::kBytes;
  static constexpr int kBytes = kFull + (2 * kStages + 4) * 8;
  static_assert(kBytes <= 227 * 1024);

  uint32_t ring, full, empty, factors_full, factors_empty;
  __device__ explicit Smem(const char* shared) {
    ring = ptx::shared_address(shared);
    full = ring + kFull;
    empty = full + 8 * kStages;
    factors_full = empty + 8 * kStages;
    factors_empty = factors_full + 16;
  }
  __device__ uint32_t x_at(int stage) const { return ring + stage * kStageBytes; }
  __device__ uint32_t weight_at(int stage) const { return x_at(stage) + kXBytes; }
  __device__ uint32_t residual_at(int stage, int group) const { return x_at(stage) + group * kStagedBytes; }
  __device__ uint32_t staged(int group) const { return ring + kStaged + group * kStagedBytes; }
  __device__ uint32_t scales_at(int buffer) const { return ring + kScales + buffer * kScaleBytes; }
  __device__ TileFactors factors(int buffer) const {
    return {ring + kFactors + buffer * TileFactors::kBytes};
  }
};

// ---- The tiles ----

struct Tile {
  int row_block, token_block;
  __device__ int64_t first_row() const { return int64_t{row_block} * kRows; }
  __device__ int64_t first_token() const { return int64_t{token_block} * kTokens; }
};

// Which of all tiles are this block's.
struct Share {
  int first, step, tiles, rank;

  template <class Body>
  __device__ __forceinline__ void each_tile(const Int4Problem& p, const Body& body) const {
    const int per_group = kTokenGroup * p.row_pairs;
    for (int index = first; index < tiles; index += step) {
      const int first_block = index / per_group * kTokenGroup, in_group = index % per_group;
      const int tokens = min(p.token_blocks - first_block, kTokenGroup);
      body(Tile{in_group / tokens * kPair + rank, first_block + in_group % tokens});
    }
  }
};

// ---- The copies: one thread; scales: one warp; factors of a tile: one warp ----

__device__ inline void produce(const Int4Problem& p, const Smem& smem, const Share& share) {
  const uint64_t policy = ptx::evict_normal_policy();
  Cursor cursor;
  share.each_tile(p, [&](const Tile& tile) {
    const int row = tile.row_block * kRows, token = tile.token_block * kTokens + share.rank * kHalfTokens;
    const int plain_row = p.product.has_gate ? 0 : row, gated_row = p.product.has_gate ? row / kBandRows : 0;
    for (int k = 0; k < p.stages_k; ++k, cursor.advance(kStages)) {
      const uint32_t full = smem.full + 8 * cursor.at;
      ptx::barrier_wait_cluster(smem.empty + 8 * cursor.at, cursor.parity ^ 1);
      ptx::barrier_expect(full, kStageBytes);
      ptx::box_copy_to_pair(smem.x_at(cursor.at) + share.rank * (kXBytes / kPair), p.x, k * kBlockK, token,
                            full);
      ptx::box_copy(smem.weight_at(cursor.at), p.w, k * kRowBytes, plain_row, 0, gated_row, full, policy);
    }
    if (!p.adds_boxes) return;
    // The residual, half of the tokens at a time: a box for each warpgroup.
    for (int half = 0; half < 2; ++half, cursor.advance(kStages)) {
      const uint32_t full = smem.full + 8 * cursor.at;
      ptx::barrier_wait_cluster(smem.empty + 8 * cursor.at, cursor.parity ^ 1);
      ptx::barrier_expect(full, kConsumers * kStagedBytes);
      for (int group = 0; group < kConsumers; ++group)
        ptx::box_copy(smem.residual_at(cursor.at, group), p.residual,
                      (tile.row_block * kConsumers + group) * kGroupRows,
                      tile.token_block * kTokens + half * kHalfTokens, full);
    }
  });
}

// [row][group of the run].
__device__ inline void produce_scales(const Int4Problem& p, const Smem& smem, const Share& share, int lane) {
  constexpr int kRowsOfLane = kRows / 32;
  const Matrix& scale = p.product.b.scale;
  Cursor cursor, buffer;
  share.each_tile(p, [&](const Tile& tile) {
    const float* from[kRowsOfLane];
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i)
      from[i] = scale.row<const float>(weight_row(p.product, tile.first_row() + i * 32 + lane));
    for (int k = 0; k < p.stages_k; ++k, cursor.advance(kStages)) {
      ptx::barrier_wait_cluster(smem.empty + 8 * cursor.at, cursor.parity ^ 1);
      if (k % kRunGroups == 0) {
        const uint32_t to = smem.scales_at(buffer.at) + lane * kRunGroups * 4;
#pragma unroll
        for (int i = 0; i < kRowsOfLane; ++i) {
          const uint32_t to_row = to + i * 32 * kRunGroups * 4;
          if (p.has_scale_vectors) {
            ptx::copy16_async(to_row, from[i] + k, 16);
          } else {
#pragma unroll
            for (int j = 0; j < kRunGroups; ++j)
              ptx::copy4_async(to_row + j * 4, from[i] + min(int64_t{k} + j, scale.cols - 1));
          }
        }
        buffer.advance(kScaleBuffers);
      }
      ptx::arrive_after_copies(smem.full + 8 * cursor.at);
    }
    for (int half = 0; p.adds_boxes && half < 2; ++half, cursor.advance(kStages)) {  // which have no scales
      ptx::barrier_wait_cluster(smem.empty + 8 * cursor.at, cursor.parity ^ 1);
      ptx::barrier_arrive(smem.full + 8 * cursor.at);
    }
  });
}

template <Scaling kScaling>
__device__ void produce_factors(const Int4Problem& p, const Smem& smem, const Share& share, int lane) {
  Cursor buffer;
  share.each_tile(p, [&](const Tile& tile) {
    ptx::barrier_wait(smem.factors_empty + 8 * buffer.at, buffer.parity ^ 1);
    smem.factors(buffer.at).load(p.product, p.bias, kScaling == Scaling::whole, /*has_token_scales=*/true,
                                 1.0f / kInt4Factor, tile.first_row(), tile.first_token(), lane);
    ptx::barrier_arrive(smem.factors_full + 8 * buffer.at);
    buffer.advance(2);
  });
}

// ---- The consumers ----

// Four INT4 codes as bytes, kInt4Factor times as large: a nibble is the high one of its byte.
__device__ __forceinline__ uint32_t int4_to_bytes(uint32_t codes) {
  return __byte_perm(codes, codes << 4, 0x1504) & 0xf0f0f0f0u;
}

template <Scaling kScaling>
struct Consumer {
  static constexpr bool kHasGroups = kScaling == Scaling::blocks;
  using Total = std::conditional_t<kHasGroups, float, int32_t>;
  using Codes = uint32_t[kSteps][4];
  const Smem& smem;
  int group, warp, lane;  // the warpgroup, its warp, and the warp's lane
  Cursor cursor;
  int scale_buffer;
  Total totals[2][kHalfTokens / 2];  // of half of the tokens

  // Of the tile's rows, the first that this thread has; the other one is 8 further on.
  __device__ int first_row() const { return group * kGroupRows + warp * kBandRows + lane / 4; }

  __device__ int take() {
    ptx::barrier_wait(smem.full + 8 * cursor.at, cursor.parity);
    const int stage = cursor.at;
    cursor.advance(kStages);
    return stage;
  }
  // By every consumer warp: the first two lanes tell the two blocks.
  __device__ void give_back(int stage) const {
    __syncwarp();
    if (lane < kPair) ptx::barrier_arrive_remote(ptx::address_in_block(smem.empty + 8 * stage, lane));
  }
  // Pieces of 16 bytes, the columns of a step, are where the copy swizzled them.
  __device__ __forceinline__ void decode(int stage, Codes& codes) const {
    const uint32_t row = smem.weight_at(stage) + first_row() * kRowBytes + (lane / 8 << 4) + lane % 4 * 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        codes[step][i] =
            int4_to_bytes(ptx::load_shared2((row ^ (step << 4)) + i % 2 * 8 * kRowBytes + i / 2 * 8));
    }
    ptx::wgmma_fence();  // also keeps the compiler from doing this after the wait that follows
  }
  // sums (+)= the stage's columns, times those of tokens first_token, ...
  template <int kSums>
  __device__ __forceinline__ void multiply_stage(int32_t (&sums)[kSums], const Codes& codes, int stage,
                                                 int first_token, int adds) const {
    const uint32_t x = smem.x_at(stage) + first_token * kBlockK;
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      ptx::wgmma_int8(sums, codes[step], ptx::swizzled_rows(x, step), step > 0 ? 1 : adds);
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void multiply(int count) {
    if constexpr (kHasGroups) multiply_promoting(count);
    else multiply_exactly(count);
  }

  // One sum over all of k.
  __device__ __forceinline__ void multiply_exactly(int count) {
    Codes codes[2];
    int stage = take(), before = stage;
    decode(stage, codes[0]);
#pragma unroll 1
    for (int k = 0; k < count; k += 2) {
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          multiply_stage(totals[half], codes[turn], stage, half * kHalfTokens, k + turn);
        ptx::wgmma_wait<2>();  // the stage before is done with its codes
        if (k + turn > 0) give_back(before);
        before = stage;
        if (k + turn + 1 < count) stage = take();
        decode(stage, codes[turn ^ 1]);  // the very last time what nobody needs
      }
    }
    ptx::wgmma_wait<0>();
    give_back(before);
  }

  __device__ __forceinline__ void multiply_promoting(int count) {
#pragma unroll
    for (auto& half : totals)
#pragma unroll
      for (float& total : half) total = 0.0f;
    Codes codes;
    int stage = take();
    decode(stage, codes);
#pragma unroll 1
    for (int k = 0; k < count; k += 2) {
      promote_two(stage, k, count, codes);
      if (k % kRunGroups == kRunGroups - 2) next_scales();
    }
    if (count % kRunGroups != 0) next_scales();
  }
  __device__ void next_scales() { scale_buffer = scale_buffer + 1 == kScaleBuffers ? 0 : scale_buffer + 1; }

  // Adds two stages to the totals, a part of the tokens after the other. While the sums of one are promoted,
  // those of the next are made; the compiler allows that within straight code only.
  __device__ __forceinline__ void promote_two(int& stage, int k, int count, Codes& codes) {
    int32_t sums[2][kPartSums];
    float scale[2][2];
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        multiply_stage(sums[part % 2], codes, stage, part * kPartTokens, 0);
        if (part == 0) load_scales(k + turn, scale[turn]);
        if (part > 0) ptx::wgmma_wait<1>();
        if (part > 0) promote(sums[(part + 1) % 2], part - 1, scale[turn]);
        else if (turn > 0) promote(sums[1], kParts - 1, scale[0]);
      }
      const bool is_last = k + turn + 1 >= count;
      const int next = is_last ? stage : take();
      ptx::wgmma_wait<0>();
      give_back(stage);
      stage = next;
      if (!is_last) decode(stage, codes);
    }
    promote(sums[1], kParts - 1, scale[1]);
  }
  __device__ __forceinline__ void load_scales(int k, float (&scale)[2]) const {
    const uint32_t from = smem.scales_at(scale_buffer) + first_row() * kRunGroups * 4 + k % kRunGroups * 4;
    scale[0] = ptx::load_shared_float(from), scale[1] = ptx::load_shared_float(from + 8 * kRunGroups * 4);
  }
  __device__ __forceinline__ void promote(const int32_t (&sums)[kPartSums], int part,
                                          const float (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < kPartSums; ++i) {
      float& total = totals[part / 2][part % 2 * kPartSums + i];
      total = fmaf(static_cast<float>(sums[i]), scale[i / 2 % 2], total);
    }
  }
};

// ---- The epilogue ----

// A warpgroup's part of a tile of y. Thread 4 g + q has tokens 8 u + 2 q, + 1 of rows g and g + 8 of its band
// in totals 4 u .. 4 u + 3; of a gated weight these are a gate and its up row.
template <Scaling kScaling>
struct Finisher {
  const Int4Problem& p;
  const Smem& smem;
  Consumer<kScaling>& consumer;
  const Tile tile;
  const TileFactors factors;
  using Total = typename Consumer<kScaling>::Total;

  __device__ void sync() const { ptx::named_barrier_sync(kGroupBarrier + consumer.group, 128); }
  __device__ uint32_t staged() const { return smem.staged(consumer.group); }

  // Scale and bias of this thread's two rows.
  struct OfRows {
    float scale[2], bias[2];
  };
  __device__ OfRows load_rows() const {
    OfRows rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 f = ptx::load_shared_float2(factors.row(consumer.first_row() + i * 8));
      rows.scale[i] = f.x, rows.bias[i] = f.y;
    }
    return rows;
  }
  // The numbers of 8 tokens of a half: [row][token of this thread].
  __device__ __forceinline__ void scale(const OfRows& rows, int half, int unit, float (&v)[2][2]) const {
    const int token = half * kHalfTokens + unit * 8 + consumer.lane % 4 * 2;
    const float2 of_tokens = ptx::load_shared_float2(factors.token(token));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = static_cast<float>(consumer.totals[half][unit * 4 + i]);
      v[i / 2][i % 2] = fmaf(sum, (i % 2 ? of_tokens.y : of_tokens.x) * rows.scale[i / 2], rows.bias[i / 2]);
    }
  }

  // y of 16 bits, half of the tokens at a time.
  template <class E>
  __device__ __forceinline__ void store_boxes(E epilogue) const {
    constexpr int kCols = box_cols(E::kIsGated);
    const Activate<E::kAct> activate(p.product.activation);
    const OfRows rows = load_rows();
    const BoxStore store = {
        p.y,           staged(),     kGroupBarrier + consumer.group, p.product.out.y.dtype == DType::bf16,
        consumer.warp, consumer.lane};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int stage = E::kHasResidual ? consumer.take() : 0;
      store.template store<E, kHalfTokens>(
          epilogue, activate, (tile.row_block * kConsumers + consumer.group) * kCols,
          tile.token_block * kTokens + half * kHalfTokens, smem.residual_at(stage, consumer.group),
          [&](int unit, float(&v)[2][2]) { scale(rows, half, unit, v); });
      if (E::kHasResidual) consumer.give_back(stage);
    }
  }

  // Any y, a part of the tokens at a time: totals as [token][64 rows], in which pieces of 4 rows are swapped
  // by token for the sake of the banks, then 8 outputs a thread.
  __device__ __forceinline__ void finish_units(float* to_stage) const {
    const Product& q = p.product;
    const int lane = consumer.lane, thread = consumer.warp * 32 + lane;
    const int unit_rows = q.has_gate ? 2 * kUnit : kUnit, units = kGroupRows / unit_rows;  // of a token
    const auto piece = [&](int token, int row) {
      return staged() + token * kGroupRows * 4 + (((row / 4) ^ (token / 2 % 4 * 2)) << 4);
    };
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      sync();
#pragma unroll
      for (int from = 0; from < kParts; ++from) {
        if (from != part) continue;
#pragma unroll
        for (int i = 0; i < kPartSums; ++i) {
          const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
          const int row = consumer.warp * kBandRows + lane / 4 + i / 2 % 2 * 8;
          const Total total = consumer.totals[from / 2][from % 2 * kPartSums + i];
          uint32_t bits;
          if constexpr (std::is_same_v<Total, float>) bits = __float_as_uint(total);
          else bits = static_cast<uint32_t>(total);
          ptx::store_shared4(piece(token, row) + row % 4 * 4, bits);
        }
      }
      sync();
#pragma unroll 1
      for (int i = thread; i < kPartTokens * units; i += 128) {
        const int token = i / units, unit = i % units, tile_token = part * kPartTokens + token;
        const int64_t row = tile.first_token() + tile_token;
        const int64_t col =
            (int64_t{tile.row_block} * kConsumers + consumer.group) * units * kUnit + unit * kUnit;
        if (row >= q.m || col >= q.n_out) continue;
        finish_sums<Total>(q, /*is_plain=*/false, to_stage, factors,
                           consumer.group * kGroupRows + unit * unit_rows, tile_token, row, col,
                           [&](int second, Total(&sums)[kUnit]) {
                             const int first = unit * unit_rows + second * kUnit;
#pragma unroll
                             for (Total& sum : sums) sum = 0;
                             add_bits(ptx::load_shared16(piece(token, first)),
                                      ptx::load_shared16(piece(token, first + 4)), sums);
                           });
      }
    }
  }

  __device__ __forceinline__ void run(float* to_stage) const {
    if (!p.stores_boxes) return finish_units(to_stage);
    with_box_epilogue(p.product.activation, p.product.has_gate, p.adds_boxes,
                      [&](auto epilogue) { store_boxes(epilogue); });
  }
};

// ---- The kernel ----

template <Scaling kScaling>
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, 1)
    int4_kernel(const __grid_constant__ Int4Problem p, float* to_stage) {
  extern __shared__ __align__(1024) char shared[];
  const Smem smem(shared);
  const int thread = static_cast<int>(threadIdx.x);
  const Share share = {static_cast<int>(blockIdx.x) / kPair, static_cast<int>(gridDim.x) / kPair,
                       p.token_blocks * p.row_pairs, static_cast<int>(ptx::cluster_rank())};
  ptx::allow_next_kernel();
  if (thread == 0) {
    ptx::prefetch_map(p.w), ptx::prefetch_map(p.x);
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(smem.full + 8 * i, kScaling == Scaling::blocks ? 33 : 1);
      ptx::barrier_init(smem.empty + 8 * i, kPair * kConsumers * 4);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::barrier_init(smem.factors_full + 8 * i, 32);
      ptx::barrier_init(smem.factors_empty + 8 * i, kConsumers * 4);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
  ptx::wait_for_previous_kernel();  // which may have written any of what follows

  if (thread >= 128 * kConsumers) {
    ptx::release_registers<24>();
    const int warp = thread / 32 - 4 * kConsumers, lane = thread % 32;
    if (warp == 0 && lane == 0) produce(p, smem, share);
    if (warp == 1) produce_factors<kScaling>(p, smem, share, lane);
    if (warp == 2 && kScaling == Scaling::blocks) produce_scales(p, smem, share, lane);
  } else {
    ptx::claim_registers<240>();
    Consumer<kScaling> consumer = {smem, thread / 128, thread / 32 % 4, thread % 32, {}, 0, {}};
    Cursor buffer;
    share.each_tile(p, [&](const Tile& tile) {
      consumer.multiply(p.stages_k);
      ptx::hide(consumer.lane);  // or addresses of the epilogue would be kept in registers meanwhile
      ptx::barrier_wait(smem.factors_full + 8 * buffer.at, buffer.parity);
      Finisher<kScaling>{p, smem, consumer, tile, smem.factors(buffer.at)}.run(to_stage);
      __syncwarp();
      if (thread % 32 == 0) ptx::barrier_arrive(smem.factors_empty + 8 * buffer.at);
      buffer.advance(2);
    });
    if (thread % 128 == 0) ptx::wait_stores();
  }
  // No block leaves while the other may still write to it.
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
}

}  // namespace quantfuse::product_int4
