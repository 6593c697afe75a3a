// SPDX-License-Identifier: Apache-2.0
//
// y[m,n] = epilogue( sum_k x[m,k] * w[n,k], scales )        x, w: INT8 | E4M3
//
// Tokens are the rows of wgmma, rows of the weight its columns, both straight from shared memory:
//   gmem x, w --box copies--> smem, swizzled --wgmma--> sums
//     [--promoted--> totals] --> * scales, bias, activation, * up, + residual --stmatrix--> smem
//     --box copies--> y
//
// A block has three warps that copy and two warpgroups of consumers, each 64 tokens by kCols columns of y.
// The two blocks of a pair have the same columns and neighbouring tokens; each brings half of the weight's
// rows to both. Blocks stay and take tile after tile. A warpgroup that has finished its part of a tile writes
// it out while the other one still multiplies: the ring lets them be a few stages apart.
//
// Sums that are promoted (wgmma_numbers.h) are those of 256 products, added to totals in float32; where the
// operands are scaled by blocks, of 128, and scaled. In which tile a sum is makes no difference to its bits.
//
// Of a gated weight a tile has 8 gate rows and their 8 up rows in turn, so that a thread has both.
//
// Shared memory gives 128 bytes a cycle: at full speed m64n256k32 would read 80 of them, and the copies write
// 48. Tiles of 256 tokens by 128 rows, which read 96, were slower for INT8. Tiles of 192 columns, 3% slower
// than those of 256, are for where they leave fewer SMs idle and y is neither gated nor codes.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "core/element.h"
#include "cuda/cursor.h"
#include "cuda/ptx/async_copy.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/dependent_launch.h"
#include "cuda/ptx/matrix.h"
#include "cuda/ptx/shared_memory.h"
#include "formats/codes.h"
#include "formats/quantizer.h"
#include "product/activate.h"
#include "product/wgmma_numbers.h"

namespace quantfuse::product {

constexpr int kGroupTokens = 64;                     // of a warpgroup
constexpr int kConsumers = 2;                        // warpgroups
constexpr int kTurn = 1;                             // first of their named barriers
constexpr int kPair = 2;                             // blocks of a cluster
constexpr int kWarpTokens = 16, kBoxRowBytes = 128;  // of a box of y, as a warp stores it

// Blocks of k whose sums are promoted at once. To add every single one to the totals costs 8% of the speed:
// the totals' registers are read and written as often as two wgmma do.
template <Scaling kScaling>
inline constexpr int kPromotedBlocks = kScaling == Scaling::blocks ? 1 : 2;

template <int kCols_>
struct Shape {
  static constexpr int kCols = kCols_;
  static constexpr bool kIsWide = kCols == 256;  // takes any epilogue
  // Columns whose sums are promoted at once: wide tiles have room for those of half beside the totals.
  static constexpr int kPartCols = kIsWide ? 128 : kCols;
  static constexpr int kScaleCols = kIsWide ? 128 : 64;  // of a tile, have one scale of blocks of 128
  static constexpr int kTokens = kConsumers * kGroupTokens;
  static constexpr int kSums = kCols / 2;  // of a thread
  static constexpr int kXBytes = kTokens * kBlockK, kWeightBytes = kCols * kBlockK;
  static constexpr int kStageBytes = kXBytes + kWeightBytes;
  static constexpr int kScaleBytes = kTokens * 4 + kCols / kScaleCols * 8;  // of a stage
  static constexpr int kBoxBytes = kWarpTokens * kBoxRowBytes;
  static constexpr int kStagedBytes = kConsumers * 4 * kBoxBytes;
  static constexpr int kFactorBytes = kCols * 8 + kTokens * 4;  // scale and bias of columns, scale of tokens
  static constexpr int kOtherBytes = kStagedBytes + 2 * kFactorBytes + 512;
  static constexpr int kFitting = (227 * 1024 - kOtherBytes) / (kStageBytes + kScaleBytes);
  static constexpr int kStages = kFitting < 8 ? kFitting : 8;
  static constexpr int kThreads = 128 * (kConsumers + 1);
};

// What the kernel is given.
struct TileProblem {
  CUtensorMap x, w, y;  // y: where it is copied by boxes
  int64_t m, n_out;
  int32_t token_blocks, col_blocks, k_blocks;  // tiles; of tokens, those of a pair of blocks
  const float* x_scale;                        // of token t and block b: x_scale[t * x_stride + b]; null: 1
  const float* w_scale;  // of row r and block b: w_scale[r / w_block_rows * w_stride + b]; null: 1
  int64_t x_stride, w_stride;
  int32_t w_block_rows;
  bool is_gated;
  qf_activation activation;
  Vector bias;      // [n]
  Matrix residual;  // of y's type, f16 or bf16
  Matrix out;       // i32, f32, f16 or bf16, or codes
  qf_format out_format;
  bool has_dynamic_scale;  // of codes: written for each token and 128 columns, or one that is read
  float* out_scale;
  int32_t out_groups;
  int64_t out_scale_row_stride, out_scale_col_stride;
};

// ---- The tiles ----

constexpr int kTokenGroup = 8;  // blocks of tokens whose x stays in L2 while the weight goes by

struct TilePlace {
  int token_block, col_block;
};
template <class S>
__device__ TilePlace tile_at(const TileProblem& p, int index, int rank) {
  const int per_group = kTokenGroup * p.col_blocks;
  const int first = index / per_group * kTokenGroup, in_group = index % per_group;
  const int tokens = min(p.token_blocks - first, kTokenGroup);
  const TilePlace pair = {first + in_group % tokens, in_group / tokens};
  return {pair.token_block * kPair + rank, pair.col_block};
}

// ---- Shared memory: ring | boxes of y | factors of two tiles | scales of stages | barriers ----

template <class S>
struct Smem {
  uint32_t ring, staged, factors, scales, full, empty, factors_full, factors_empty;
  __device__ explicit Smem(const char* shared) {
    ring = ptx::shared_address(shared);
    staged = ring + S::kStages * S::kStageBytes;
    factors = staged + S::kStagedBytes;
    scales = factors + 2 * S::kFactorBytes;
    full = scales + S::kStages * S::kScaleBytes;
    empty = full + 8 * S::kStages;
    factors_full = empty + 8 * S::kStages;
    factors_empty = factors_full + 16;
  }
  __device__ uint32_t x_at(int stage) const { return ring + stage * S::kStageBytes; }
  __device__ uint32_t weight_at(int stage) const { return x_at(stage) + S::kXBytes; }
  __device__ uint32_t scales_at(int stage) const { return scales + stage * S::kScaleBytes; }
  static constexpr int kBytes = S::kStages * (S::kStageBytes + S::kScaleBytes) + S::kStagedBytes +
                                2 * S::kFactorBytes + 16 * S::kStages + 32;
};

// Which of all tiles are this block's.
struct Share {
  int first, step, tiles, rank;
};

// ---- The producer: one thread ----

template <class S>
__device__ void produce(const TileProblem& p, const Smem<S>& smem, const Share& share) {
  constexpr int kHalfCols = S::kCols / kPair;
  const auto copy_x = [&](const TilePlace& tile, int k, int stage) {
    ptx::box_copy(smem.x_at(stage), p.x, k * kBlockK, tile.token_block * S::kTokens, smem.full + 8 * stage);
  };
  // This block's half of the columns, for both.
  const auto copy_weight = [&](const TilePlace& tile, int k, int stage) {
    const int row = tile.col_block * S::kCols + share.rank * kHalfCols;
    const int plain_row = p.is_gated ? 0 : row, gated_row = p.is_gated ? row / 16 : 0;
    ptx::box_copy_to_pair(smem.weight_at(stage) + share.rank * kHalfCols * kBlockK, p.w, k * kBlockK,
                          plain_row, 0, gated_row, smem.full + 8 * stage);
  };
  ptx::wait_for_previous_kernel();
  Cursor cursor;
  for (int index = share.first; index < share.tiles; index += share.step) {
    const TilePlace tile = tile_at<S>(p, index, share.rank);
    for (int k = 0; k < p.k_blocks; ++k, cursor.advance(S::kStages)) {
      ptx::barrier_wait_cluster(smem.empty + 8 * cursor.at, cursor.parity ^ 1);
      ptx::barrier_expect(smem.full + 8 * cursor.at, S::kStageBytes);
      copy_x(tile, k, cursor.at);
      copy_weight(tile, k, cursor.at);
    }
  }
}

// ---- Scales of blocks: one warp ----

// [token], then [kScaleCols columns][gate or up]: as they lie in memory, copied one by one, as far ahead as
// the ring.
template <class S>
__device__ void produce_scales(const TileProblem& p, const Smem<S>& smem, const Share& share, int lane) {
  ptx::wait_for_previous_kernel();
  Cursor cursor;
  for (int index = share.first; index < share.tiles; index += share.step) {
    const TilePlace tile = tile_at<S>(p, index, share.rank);
    const int64_t token = static_cast<int64_t>(tile.token_block) * S::kTokens + lane;
    int64_t col = static_cast<int64_t>(tile.col_block) * S::kCols + lane / 2 * S::kScaleCols;
    col = min(p.is_gated ? col / 2 : col, p.n_out - 1);
    const float* w = p.w_scale + (p.is_gated && lane % 2 ? p.n_out + col : col) / p.w_block_rows * p.w_stride;
    for (int k = 0; k < p.k_blocks; ++k, cursor.advance(S::kStages)) {
      const uint32_t to = smem.scales_at(cursor.at);
      ptx::barrier_wait_cluster(smem.empty + 8 * cursor.at, cursor.parity ^ 1);
#pragma unroll
      for (int i = 0; i < S::kTokens; i += 32) {
        ptx::copy4_async(to + (i + lane) * 4, p.x_scale + min(token + i, p.m - 1) * p.x_stride + k);
      }
      if (lane < S::kCols / S::kScaleCols * 2) ptx::copy4_async(to + (S::kTokens + lane) * 4, w + k);
      ptx::arrive_after_copies(smem.full + 8 * cursor.at);
    }
  }
}

// ---- The factors of a tile: one warp ----

// Scale and bias of a column of the tile, of a gated weight in the order of its rows.
template <class S, Scaling kScaling>
__device__ float2 column_factors(const TileProblem& p, const TilePlace& tile, int column) {
  float2 f = {1.0f, 0.0f};
  int64_t row = static_cast<int64_t>(tile.col_block) * S::kCols + column;
  if (p.is_gated) {
    const int64_t col = row / 16 * 8 + row % 8;
    if (col >= p.n_out) return f;
    row = col + row / 8 % 2 * p.n_out;
  } else if (row >= p.n_out) {
    return f;
  }
  if (kScaling == Scaling::whole && p.w_scale) f.x = p.w_scale[row / p.w_block_rows * p.w_stride];
  if (p.bias) f.y = float_at(p.bias, row);
  return f;
}

template <class S, Scaling kScaling>
__device__ void produce_factors(const TileProblem& p, const Smem<S>& smem, const Share& share, int lane) {
  ptx::wait_for_previous_kernel();
  Cursor buffer;
  for (int index = share.first; index < share.tiles; index += share.step, buffer.advance(2)) {
    const TilePlace tile = tile_at<S>(p, index, share.rank);
    const uint32_t to = smem.factors + buffer.at * S::kFactorBytes;
    ptx::barrier_wait(smem.factors_empty + 8 * buffer.at, buffer.parity ^ 1);
#pragma unroll 2
    for (int i = lane; i < S::kCols; i += 32)
      ptx::store_shared_float2(to + i * 8, column_factors<S, kScaling>(p, tile, i));
    if (kScaling == Scaling::whole) {
#pragma unroll 2
      for (int i = lane; i < S::kTokens; i += 32) {
        const int64_t token = min(static_cast<int64_t>(tile.token_block) * S::kTokens + i, p.m - 1);
        ptx::store_shared_float(to + S::kCols * 8 + i * 4, p.x_scale ? p.x_scale[token * p.x_stride] : 1.0f);
      }
    }
    ptx::barrier_arrive(smem.factors_full + 8 * buffer.at);
  }
}

// ---- The consumers ----

template <class S>
struct Ring {
  const Smem<S>& smem;
  Cursor cursor;

  __device__ int take() {
    ptx::barrier_wait(smem.full + 8 * cursor.at, cursor.parity);
    const int stage = cursor.at;
    cursor.advance(S::kStages);
    return stage;
  }
  // By every consumer warp: the first two lanes tell the two blocks.
  __device__ void give_back(int stage, int lane) const {
    __syncwarp();
    if (lane < kPair) ptx::barrier_arrive_remote(ptx::address_in_block(smem.empty + 8 * stage, lane));
  }
};

// Scales of a block of k: of a thread's two tokens, and of kScaleCols columns, or of their gate and up rows.
template <class S>
struct BlockScales {
  float x[2], w[S::kCols / S::kScaleCols][2];
};

template <class S, class N, Scaling kScaling>
struct Consumer {
  using Total = std::conditional_t<kPromotes<N, kScaling>, float, typename N::Sum>;
  int group, warp, lane;  // the warpgroup, its warp, and the warp's lane
  Total totals[S::kSums];

  // Of the tile's tokens, the first that this thread has; the other one is 8 further on.
  __device__ int first_token() const { return group * kGroupTokens + warp * kWarpTokens + lane / 4; }

  __device__ __forceinline__ void multiply(Ring<S>& ring, int count) {
    if constexpr (kPromotes<N, kScaling>) multiply_promoting(ring, count);
    else multiply_exactly(ring, count);
  }

  __device__ __forceinline__ void multiply_exactly(Ring<S>& ring, int count) {
    int before = 0;
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      const int stage = ring.take();
      const uint32_t x = ring.smem.x_at(stage) + group * kGroupTokens * kBlockK,
                     w = ring.smem.weight_at(stage);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        N::multiply(totals, ptx::swizzled_rows(x, step), ptx::swizzled_rows(w, step), step > 0 ? 1 : k);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (k > 0) ring.give_back(before, lane);
      before = stage;
    }
    ptx::wgmma_wait<0>();
    ring.give_back(before, lane);
  }

  __device__ __forceinline__ void multiply_promoting(Ring<S>& ring, int count) {
    constexpr int kRun = kPromotedBlocks<kScaling>;
#pragma unroll
    for (float& total : totals) total = 0.0f;
#pragma unroll 1
    for (int k = 0; k + kRun <= count; k += kRun) promote<kRun>(ring);
    if (kRun > 1 && count % kRun != 0) promote<1>(ring);
  }

  // Adds kRun stages to the totals. The two warpgroups take turns: one has the tensor cores for a part of the
  // columns while the other adds the sums of its last one.
  template <int kRun>
  __device__ __forceinline__ void promote(Ring<S>& ring) {
    constexpr int kParts = S::kCols / S::kPartCols, kPartSums = S::kPartCols / 2;
    int stages[kRun];
#pragma unroll
    for (int& stage : stages) stage = ring.take();
    BlockScales<S> scales = {};
    if constexpr (kScaling == Scaling::blocks) load_scales(ring.smem.scales_at(stages[0]), scales);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      typename N::Sum sums[kPartSums];
      ptx::named_barrier_sync(kTurn + group, 128 * kConsumers);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const uint32_t x = ring.smem.x_at(stages[i]) + group * kGroupTokens * kBlockK,
                       w = ring.smem.weight_at(stages[i]) + part * S::kPartCols * kBlockK;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          N::multiply(sums, ptx::swizzled_rows(x, step), ptx::swizzled_rows(w, step), i + step);
      }
      ptx::wgmma_commit();
      ptx::named_barrier_arrive(kTurn + (group ^ 1), 128 * kConsumers);
      ptx::wgmma_wait<0>();
      if (part == kParts - 1) {
#pragma unroll
        for (const int stage : stages) ring.give_back(stage, lane);
      }

      constexpr int kScaleSums = S::kScaleCols / 2;
#pragma unroll
      for (int first = 0; first < kPartSums; first += kScaleSums) {
        float scale[2][2];  // [columns, or gate and up][token]
#pragma unroll
        for (int i = 0; i < 4; ++i)
          scale[i / 2][i % 2] = scales.x[i % 2] * scales.w[(part * kPartSums + first) / kScaleSums][i / 2];
#pragma unroll
        for (int i = first; i < first + kScaleSums; ++i) {
          float& total = totals[part * kPartSums + i];
          const float sum = static_cast<float>(sums[i]);
          if constexpr (kScaling == Scaling::whole) total += sum;
          else total = fmaf(sum, scale[i / 4 % 2][i / 2 % 2], total);
        }
      }
    }
  }

  __device__ __forceinline__ void load_scales(uint32_t from, BlockScales<S>& scales) const {
    const uint32_t x = from + first_token() * 4, w = from + S::kTokens * 4;
    scales.x[0] = ptx::load_shared_float(x), scales.x[1] = ptx::load_shared_float(x + 32);
#pragma unroll
    for (int i = 0; i < S::kCols / S::kScaleCols; ++i) {
      const float2 of_part = ptx::load_shared_float2(w + i * 8);
      scales.w[i][0] = of_part.x, scales.w[i][1] = of_part.y;
    }
  }
};

// ---- The epilogue ----

// A warp's part of a tile of y: 16 tokens. First the sums become the numbers of y, in registers, then these
// go where they belong. Thread 4 g + q has columns 8 u + 2 q, + 1 of tokens g and g + 8 in v[4 u .. 4 u + 3].
template <class S, class N, Scaling kScaling>
struct Finisher {
  const TileProblem& p;
  const Smem<S>& smem;
  Consumer<S, N, kScaling>& consumer;
  const TilePlace tile;
  const uint32_t factors;  // the tile's, in shared memory
  using Values = float[S::kSums];
  static constexpr int kBoxCols = 64;          // of 16 bits
  using BoxWords = uint32_t[kBoxCols / 8][2];  // [unit][token]: a thread's two columns

  __device__ int out_cols() const { return p.is_gated ? S::kCols / 2 : S::kCols; }
  __device__ int first_token() const { return tile.token_block * S::kTokens + consumer.first_token(); }
  __device__ int first_col() const { return tile.col_block * out_cols(); }
  // A warp has a box of y in shared memory: 128 bytes of 16 tokens, in pieces of 16.
  __device__ uint32_t wait_for_box() const {
    if (consumer.lane == 0) ptx::wait_stores_read();
    __syncwarp();
    return smem.staged + (consumer.group * 4 + consumer.warp) * S::kBoxBytes;
  }
  __device__ static uint32_t piece(int token, int at) {
    return token * kBoxRowBytes + ((at ^ token % 8) << 4);
  }
  __device__ __forceinline__ void store_box(uint32_t from, int column) const {
    ptx::copy_fence();
    __syncwarp();
    if (consumer.lane == 0) {  // which has the first of the tokens
      ptx::store_box(p.y, column, first_token(), from);
      ptx::end_store_group();
    }
  }

  // Of the sums 8 j .. 8 j + 7 of the tile's columns.
  __device__ __forceinline__ void scale(int j, const float (&token_scale)[2], float (&v)[4]) const {
    const uint4 f = ptx::load_shared16(factors + (8 * j + consumer.lane % 4 * 2) * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = static_cast<float>(consumer.totals[4 * j + i]);
      const float of_column = __uint_as_float(i % 2 ? f.z : f.x), bias = __uint_as_float(i % 2 ? f.w : f.y);
      if constexpr (kScaling == Scaling::whole) v[i] = fmaf(sum, token_scale[i / 2] * of_column, bias);
      else v[i] = sum + bias;
    }
  }
  __device__ __forceinline__ void load_token_scales(float (&token_scale)[2]) const {
    const uint32_t at = factors + S::kCols * 8 + consumer.first_token() * 4;
    token_scale[0] = ptx::load_shared_float(at), token_scale[1] = ptx::load_shared_float(at + 32);
  }
  // The numbers of a unit of 8 columns of y.
  template <Act kAct, bool kIsGated>
  __device__ __forceinline__ void finish_unit(int unit, const Activate<kAct>& activate,
                                              const float (&token_scale)[2], float (&v)[4]) const {
    scale(kIsGated ? 2 * unit : unit, token_scale, v);
#pragma unroll
    for (float& value : v) value = activate(value);
    if constexpr (kIsGated) {
      float up[4];
      scale(2 * unit + 1, token_scale, up);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] *= up[i];
    }
  }

  // y of 16 bits, 64 columns at a time. Everything is done before the warp waits for the box to be read: the
  // tensor cores have nothing to do meanwhile.
  template <Act kAct, bool kIsGated, bool kHasResidual>
  __device__ __forceinline__ void store_halves() const {
    constexpr int kOutCols = kIsGated ? S::kCols / 2 : S::kCols;
    const Activate<kAct> activate(p.activation);
    const bool is_bf16 = p.out.dtype == DType::bf16;
    const int lane = consumer.lane;
    float token_scale[2];
    load_token_scales(token_scale);
    BoxWords residual;
    if constexpr (kHasResidual) load_residual(0, residual);
#pragma unroll
    for (int first = 0; first < kOutCols; first += kBoxCols) {
      float v[kBoxCols / 8][4];
#pragma unroll
      for (int unit = 0; unit < kBoxCols / 8; ++unit)
        finish_unit<kAct, kIsGated>(first / 8 + unit, activate, token_scale, v[unit]);
      BoxWords words;
      if (is_bf16) pack<kHasResidual, true>(v, residual, words);
      else pack<kHasResidual, false>(v, residual, words);
      if (kHasResidual && first + kBoxCols < kOutCols) load_residual(first + kBoxCols, residual);
      const uint32_t to = wait_for_box();
#pragma unroll
      for (int unit = 0; unit < kBoxCols / 8; unit += 2) {
        const uint32_t of_units[4] = {words[unit][0], words[unit][1], words[unit + 1][0], words[unit + 1][1]};
        ptx::store_matrices(to + piece(lane % 16, unit + lane / 16), of_units);
      }
      store_box(to, first_col() + first);
    }
  }
  template <bool kHasResidual, bool kIsBf16>
  __device__ __forceinline__ static void pack(const float (&v)[kBoxCols / 8][4], const BoxWords& residual,
                                              BoxWords& words) {
#pragma unroll
    for (int i = 0; i < kBoxCols / 4; ++i) {
      const float* two = v[i / 2] + i % 2 * 2;
      float2 more = {};
      if constexpr (kHasResidual) more = ptx::unpack_two(residual[i / 2][i % 2], kIsBf16);
      words[i / 2][i % 2] = ptx::pack_two(two[0] + more.x, two[1] + more.y, kIsBf16);
    }
  }
  // By the threads that add it, a box ahead: copies to shared memory would have to wait for each other.
  __device__ __forceinline__ void load_residual(int first, BoxWords& words) const {
    const int64_t column = first_col() + first + consumer.lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kBoxCols / 4; ++i) {
      const int64_t token = first_token() + i % 2 * 8, col = column + i / 2 * 8;
      words[i / 2][i % 2] = 0;
      if (token >= p.m || col >= p.n_out) continue;
      const uint16_t* from = p.residual.row<uint16_t>(token) + col;
      words[i / 2][i % 2] =
          col + 1 < p.n_out ? __ldcg(reinterpret_cast<const uint32_t*>(from)) : uint32_t{__ldcg(from)};
    }
  }

  // y of codes, 128 columns at a time: with a static scale, or with one for each token and these columns.
  template <qf_format kFormat>
  __device__ __forceinline__ void store_codes(const Values& v) const {
    constexpr int kCodes = 128;  // of a box
    const int lane = consumer.lane;
#pragma unroll
    for (int first = 0; first < S::kCols; first += kCodes) {
      if (first >= out_cols()) break;
      const uint32_t to = wait_for_box();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* values = v + first / 2 + half * 2;
        const float inverse =
            1.0f / (p.has_dynamic_scale ? choose_scale<kFormat>(values, half, first) : *p.out_scale);
#pragma unroll
        for (int unit = 0; unit < kCodes / 8; ++unit) {
          const uint32_t at = to + piece(lane / 4 + half * 8, unit / 2) + unit % 2 * 8 + lane % 4 * 2;
          const float* two = values + unit * 4;
          ptx::store_shared2(at, ptx::pack_codes<kFormat>(two[0] * inverse, two[1] * inverse));
        }
      }
      store_box(to, first_col() + first);
    }
  }
  template <qf_format kFormat>
  __device__ __forceinline__ float choose_scale(const float* values, int half, int first) const {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) largest = fmaxf(largest, fabsf(values[i / 2 * 4 + i % 2]));  // skips NaN
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    using namespace quantize;
    const float scale =
        quantizer_from_range(ScaleKind::symmetric, code_range(kFormat), -largest, largest).scale;
    const int64_t token = int64_t{first_token()} + half * 8;
    const int group = (first_col() + first) / 128;
    if (consumer.lane % 4 == 0 && token < p.m && group < p.out_groups)
      p.out_scale[token * p.out_scale_row_stride + group * p.out_scale_col_stride] = scale;
    return scale;
  }

  // Numbers of float32.
  __device__ __forceinline__ void store_floats(const Values& v) const {
    each_row<float>([&](int i, float& to) { to = v[i]; });
  }
  // Sums of integers, as they are.
  __device__ __forceinline__ void store_sums() const {
    each_row<int32_t>([&](int i, int32_t& to) { to = consumer.totals[i]; });
  }
  template <class T, class Store>
  __device__ __forceinline__ void each_row(const Store& store) const {
    const int64_t token = first_token(), first = first_col() + consumer.lane % 4 * 2;
    const int cols = static_cast<int>(min(p.n_out - first, int64_t{out_cols()}));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (token + i * 8 >= p.m) continue;
      T* row = p.out.row<T>(token + i * 8) + first;
#pragma unroll
      for (int unit = 0; unit < S::kCols / 8; ++unit) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (unit * 8 + j < cols) store(4 * unit + 2 * i + j, row[unit * 8 + j]);
        }
      }
    }
  }

  template <Act kAct, bool kIsGated>
  __device__ __forceinline__ void finish_all(Values& v) const {
    const Activate<kAct> activate(p.activation);
    float token_scale[2];
    load_token_scales(token_scale);
#pragma unroll
    for (int unit = 0; unit < S::kCols / 8 / (kIsGated ? 2 : 1); ++unit) {
      finish_unit<kAct, kIsGated>(unit, activate, token_scale, *reinterpret_cast<float(*)[4]>(v + 4 * unit));
    }
  }
  // body(act, is_gated), both known to the compiler.
  template <class Body>
  __device__ __forceinline__ void with_kind(const Body& body) const {
    with_act(p.activation, [&](auto act) {
      if constexpr (S::kIsWide) {
        if (p.is_gated) return body(act, std::true_type{});
      }
      body(act, std::false_type{});
    });
  }
  __device__ __forceinline__ void run() const {
    if constexpr (std::is_same_v<typename Consumer<S, N, kScaling>::Total, int32_t>) {
      if (p.out.dtype == DType::i32) return store_sums();
    }
    if (p.out_format == QF_FORMAT_NONE && p.out.dtype != DType::f32) {
      return with_kind([&](auto act, auto is_gated) {
        if (p.residual) store_halves<act.value, is_gated.value, true>();
        else store_halves<act.value, is_gated.value, false>();
      });
    }
    Values v;
    with_kind([&](auto act, auto is_gated) { finish_all<act.value, is_gated.value>(v); });
    // The next tile ignores these, but the compiler would keep them beside v.
    for (auto& total : consumer.totals) total = 0;
    if (!S::kIsWide || p.out_format == QF_FORMAT_NONE) return store_floats(v);
    if constexpr (S::kIsWide) {
      if (p.out_format == QF_INT8) store_codes<QF_INT8>(v);
      else store_codes<QF_FP8_E4M3>(v);
    }
  }
};

// ---- The kernel ----

template <class S, class N, Scaling kScaling>
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(S::kThreads, 1)
    wgmma_kernel(const __grid_constant__ TileProblem p) {
  extern __shared__ __align__(1024) char shared[];
  const Smem<S> smem(shared);
  const int thread = static_cast<int>(threadIdx.x);
  const Share share = {static_cast<int>(blockIdx.x) / kPair, static_cast<int>(gridDim.x) / kPair,
                       p.token_blocks * p.col_blocks, static_cast<int>(ptx::cluster_rank())};
  ptx::allow_next_kernel();
  if (thread == 0) {
    ptx::prefetch_map(p.w), ptx::prefetch_map(p.x);
    for (int i = 0; i < S::kStages; ++i) {
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

  if (thread >= 128 * kConsumers) {
    ptx::release_registers<24>();
    const int warp = thread / 32 - 4 * kConsumers;
    if (warp == 0 && thread % 32 == 0) produce<S>(p, smem, share);
    if (warp == 1) produce_factors<S, kScaling>(p, smem, share, thread % 32);
    if (warp == 2 && kScaling == Scaling::blocks) produce_scales<S>(p, smem, share, thread % 32);
  } else {
    ptx::claim_registers<240>();
    ptx::wait_for_previous_kernel();  // the epilogue touches what it wrote
    Consumer<S, N, kScaling> consumer = {thread / 128, thread / 32 % 4, thread % 32, {}};
    Ring<S> ring = {smem, {}};
    if (kPromotes<N, kScaling> && consumer.group == 1) ptx::named_barrier_arrive(kTurn, 128 * kConsumers);
    Cursor factors;
    for (int index = share.first; index < share.tiles; index += share.step, factors.advance(2)) {
      const TilePlace tile = tile_at<S>(p, index, share.rank);
      consumer.multiply(ring, p.k_blocks);
      ptx::hide(consumer.lane);  // or addresses of the epilogue would be kept in registers meanwhile
      ptx::barrier_wait(smem.factors_full + 8 * factors.at, factors.parity);
      Finisher<S, N, kScaling>{p, smem, consumer, tile, smem.factors + factors.at * S::kFactorBytes}.run();
      __syncwarp();
      if (thread % 32 == 0) ptx::barrier_arrive(smem.factors_empty + 8 * factors.at);
    }
    if (thread % 32 == 0) ptx::wait_stores();
  }
  // No block leaves while the other may still write to it.
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
}

}  // namespace quantfuse::product
