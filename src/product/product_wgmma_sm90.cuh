// SPDX-License-Identifier: Apache-2.0
//
// y[m,n] = epilogue( sum_k x[m,k] * w[n,k], scales )        x, w: INT8, or FP8 E4M3 / E5M2
//
// Tokens are the rows of wgmma, rows of the weight its columns, both straight from shared memory:
//   gmem x, w --box copies--> smem, swizzled --wgmma--> sums
//     [--promoted--> totals] --> * scales, bias, activation, * up, + residual --stmatrix--> smem
//     --box copies--> y
//
// A block has a producer warp and two warpgroups of consumers, each 64 tokens by kCols columns of y. The two
// blocks of a pair have the same columns and neighbouring tokens; each brings half of the weight's rows to both. Blocks stay and take tile after tile. A warpgroup that has finished
// its part of a tile writes it out while the other one still multiplies: the ring lets them be a few stages
// apart.
//
// The tensor cores add FP8 products with fewer bits than float32 has. So sums of 128 products are added to
// totals in float32, scaled where the operands are scaled by blocks.
//
// Of a gated weight a tile has 8 gate rows and their 8 up rows in turn, so that a thread has both.
//
// What limits it is shared memory: at full speed wgmma reads 80 of the 128 bytes that it gives in a cycle, and the
// copies write 48.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "core/element.h"
#include "cuda/cursor.h"
#include "cuda/ptx/async_copy.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/dependent_launch.h"
#include "cuda/ptx/matrix.h"
#include "cuda/ptx/shared_memory.h"
#include "cuda/ptx/wgmma_bytes.h"
#include "formats/codes.h"

namespace quantfuse::product {

constexpr int kGroupTokens = 64;             // of a warpgroup
constexpr int kBlockK = 128, kSteps = 4;     // 128 bytes: what a swizzled row has; of 32, what wgmma takes
constexpr int kConsumers = 2;                   // warpgroups
constexpr int kPair = 2;                        // blocks of a cluster
constexpr int kBoxCols = 64, kWarpTokens = 16;  // of y, as a warp stores it

enum class Scaling { whole, blocks };  // scales that are the same for all k, or one for each 128 of k

template <int kCols_>
struct Shape {
  static constexpr int kCols = kCols_;
  static constexpr int kTokens = kConsumers * kGroupTokens;
  static constexpr int kSums = kCols / 2;  // of a thread
  static constexpr int kXBytes = kTokens * kBlockK, kWeightBytes = kCols * kBlockK;
  static constexpr int kStageBytes = kXBytes + kWeightBytes;
  static constexpr int kBoxBytes = kWarpTokens * kBoxCols * 2;
  static constexpr int kStagedBytes = kConsumers * 4 * 2 * kBoxBytes;
  static constexpr int kFactorBytes = kConsumers * kCols * 8;
  static constexpr int kOtherBytes = kStagedBytes + kFactorBytes + 512;
  static constexpr int kFitting = (227 * 1024 - kOtherBytes) / kStageBytes;
  static constexpr int kStages = kFitting < 8 ? kFitting : 8;
  static constexpr int kThreads = 128 * (kConsumers + 1);
};

// What the kernel is given.
struct TileProblem {
  CUtensorMap x, w, y, residual;  // y and residual: where they are copied by boxes
  int64_t m, n_out;
  int32_t token_blocks, col_blocks, k_blocks;  // tiles; of pairs of blocks where they share the other one
  const float* x_scale;  // of token t and block b: x_scale[t * x_stride + b]; null: 1
  const float* w_scale;  // of row r and block b: w_scale[r / w_block_rows * w_stride + b]; null: 1
  int64_t x_stride, w_stride;
  int32_t w_block_rows;
  bool is_gated, has_residual;
  qf_activation activation;
  Vector bias;  // [n]
  Matrix out;   // i32, f32, f16 or bf16
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

// ---- Shared memory: ring | y | factors of columns | barriers ----

template <class S>
struct Smem {
  uint32_t ring, staged, factors, full, empty, residual;
  __device__ explicit Smem(const char* shared) {
    ring = ptx::shared_address(shared);
    staged = ring + S::kStages * S::kStageBytes;
    factors = staged + S::kStagedBytes;
    full = factors + S::kFactorBytes;
    empty = full + 8 * S::kStages;
    residual = empty + 8 * S::kStages;
  }
  __device__ uint32_t x_at(int stage) const { return ring + stage * S::kStageBytes; }
  __device__ uint32_t weight_at(int stage) const { return x_at(stage) + S::kXBytes; }
  static constexpr int kBytes =
      S::kStages * S::kStageBytes + S::kStagedBytes + S::kFactorBytes + 16 * S::kStages + 64;
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
    ptx::box_copy_to_pair(smem.weight_at(stage) + share.rank * kHalfCols * kBlockK, p.w, k * kBlockK, plain_row, 0,
                          gated_row, smem.full + 8 * stage);
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
    if (lane < kPair) ptx::barrier_arrive_remote(ptx::address_in_block(smem.empty + 8 * stage, lane));
  }
};

template <qf_format kX, qf_format kW>
struct Numbers {
  static constexpr bool kIsInteger = kW == QF_INT8;
  using Sum = std::conditional_t<kIsInteger, int32_t, float>;
  template <int kSums>
  __device__ static __forceinline__ void multiply(Sum (&d)[kSums], uint64_t x, uint64_t w, int adds) {
    if constexpr (kIsInteger) ptx::wgmma_int8(d, x, w, adds);
    else ptx::wgmma_fp8<kX, kW>(d, x, w, adds);
  }
  template <int kSums>
  __device__ static __forceinline__ void multiply(Sum (&d)[kSums], const uint32_t (&x)[4], uint64_t w, int adds) {
    if constexpr (kIsInteger) ptx::wgmma_int8(d, x, w, adds);
    else ptx::wgmma_fp8<kX, kW>(d, x, w, adds);
  }
};

// Scales of blocks for a thread's two tokens, which it asks for one block of k ahead.
template <class S>
struct BlockScales {
  static constexpr int kParts = S::kCols / 128;  // columns that share a scale; of a gated weight, gate and up each
  const float* x[2];
  const float* w[kParts];
  const float* up[kParts];
  float x_next[2], w_next[kParts], up_next[kParts];

  __device__ void begin(const TileProblem& p, const TilePlace& tile, int token) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t of = static_cast<int64_t>(tile.token_block) * S::kTokens + token + 8 * i;
      x[i] = p.x_scale + min(of, p.m - 1) * p.x_stride;
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      int64_t col = static_cast<int64_t>(tile.col_block) * S::kCols + 128 * i;
      col = min(p.is_gated ? col / 2 : col, p.n_out - 1);
      w[i] = p.w_scale + col / p.w_block_rows * p.w_stride;
      up[i] = p.is_gated ? p.w_scale + (p.n_out + col) / p.w_block_rows * p.w_stride : w[i];
    }
  }
  __device__ void load(int k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) x_next[i] = x[i][k];
#pragma unroll
    for (int i = 0; i < kParts; ++i) w_next[i] = w[i][k], up_next[i] = up[i][k];
  }
};

template <class S, class N, Scaling kScaling>
struct Consumer {
  // Integer sums are exact for as long as they last; all else is promoted to totals.
  static constexpr bool kPromotes = !N::kIsInteger || kScaling == Scaling::blocks;
  using Total = std::conditional_t<kPromotes, float, int32_t>;
  int group, warp, lane;  // the warpgroup, its warp, and the warp's lane
  Total totals[S::kSums];

  // Of the tile's tokens, the first that this thread has; the other one is 8 further on.
  __device__ int first_token() const { return group * kGroupTokens + warp * kWarpTokens + lane / 4; }

  __device__ __forceinline__ void multiply(Ring<S>& ring, const TileProblem& p, const TilePlace& tile) {
    if constexpr (kPromotes) multiply_promoting(ring, p, tile);
    else multiply_exactly(ring, p.k_blocks);
  }

  __device__ __forceinline__ void multiply_exactly(Ring<S>& ring, int count) {
    int before = 0;
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      const int stage = ring.take();
      const uint32_t x = ring.smem.x_at(stage) + group * kGroupTokens * kBlockK, w = ring.smem.weight_at(stage);
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

  // The tokens' codes go through registers, so that shared memory is read for them once, although the columns
  // are multiplied part by part: two parts' sums are all that there is room for beside the totals. While one is
  // added to them the next is multiplied.
  __device__ __forceinline__ void multiply_promoting(Ring<S>& ring, const TileProblem& p, const TilePlace& tile) {
    constexpr int kPartCols = 64, kParts = S::kCols / kPartCols, kPartSums = kPartCols / 2;
    typename N::Sum sums[2][kPartSums];
    uint32_t x[kSteps][4];
    BlockScales<S> scales;
    float scale[2][2];  // of a part: [columns, or gate and up][token]
    if constexpr (kScaling == Scaling::blocks) scales.begin(p, tile, first_token()), scales.load(0);
#pragma unroll
    for (float& total : totals) total = 0.0f;
#pragma unroll 1
    for (int k = 0; k < p.k_blocks; ++k) {
      const int stage = ring.take();
      load_x(ring.smem.x_at(stage), x);
      const uint32_t w = ring.smem.weight_at(stage);
      float x_scale[2], w_scale[BlockScales<S>::kParts], up_scale[BlockScales<S>::kParts];
      if constexpr (kScaling == Scaling::blocks) {
#pragma unroll
        for (int i = 0; i < 2; ++i) x_scale[i] = scales.x_next[i];
#pragma unroll
        for (int i = 0; i < BlockScales<S>::kParts; ++i)
          w_scale[i] = scales.w_next[i], up_scale[i] = scales.up_next[i];
        scales.load(min(k + 1, p.k_blocks - 1));
      }
      const auto promote = [&](int part) {
        if constexpr (kScaling == Scaling::blocks) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            scale[0][i] = x_scale[i] * w_scale[part / 2], scale[1][i] = x_scale[i] * up_scale[part / 2];
          }
        }
#pragma unroll
        for (int i = 0; i < kPartSums; ++i) {
          float& total = totals[part * kPartSums + i];
          const float sum = static_cast<float>(sums[part % 2][i]);
          if constexpr (kScaling == Scaling::whole) total += sum;
          else total = fmaf(sum, scale[i / 4 % 2][i / 2 % 2], total);
        }
      };
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          N::multiply(sums[part % 2], x[step], ptx::swizzled_rows(w + part * kPartCols * kBlockK, step), step);
        }
        ptx::wgmma_commit();
        if (part > 0) {
          ptx::wgmma_wait<1>();
          promote(part - 1);
        }
      }
      ptx::wgmma_wait<0>();
      ring.give_back(stage, lane);
      promote(kParts - 1);
    }
  }

  // 16 tokens of the warp by 128 codes, as wgmma wants them in registers.
  __device__ __forceinline__ void load_x(uint32_t from, uint32_t (&x)[kSteps][4]) const {
    const int row = group * kGroupTokens + warp * kWarpTokens + lane % 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::load_matrices(from + row * kBlockK + (((step * 2 + lane / 16) ^ row % 8) * 16), x[step]);
    }
  }
};

// ---- The epilogue ----

// For results of 16 bits. GELU's erfc(z), z > 0, is exp(-z^2) times a polynomial in 1 / (1 + 0.33 z)
// (Abramowitz and Stegun, 7.1.26).
enum class Act { identity, relu, sigmoid, gelu };

template <Act kAct>
struct Activate {
  float linear = 0, cubic = 0;  // v sigmoid(v (linear + cubic v^2)): SiLU, and GELU's tanh form

  __device__ explicit Activate(qf_activation kind) {
    if constexpr (kAct == Act::sigmoid) {
      linear = kind == QF_SILU ? 1.0f : 2.0f * 0.79788456f;
      cubic = kind == QF_SILU ? 0.0f : 2.0f * 0.79788456f * 0.044715f;
    }
  }
  __device__ __forceinline__ float operator()(float v) const {
    if constexpr (kAct == Act::relu) {
      return v < 0 ? 0.0f : v;  // NaN stays
    } else if constexpr (kAct == Act::sigmoid) {
      return __fdividef(v, 1.0f + __expf(-v * fmaf(cubic * v, v, linear)));
    } else if constexpr (kAct == Act::gelu) {
      const float z = 0.70710678f * fabsf(v), t = __fdividef(1.0f, fmaf(0.3275911f, z, 1.0f));
      float series = fmaf(1.061405429f, t, -1.453152027f);
      series = fmaf(series, t, 1.421413741f);
      series = fmaf(series, t, -0.284496736f);
      series = fmaf(series, t, 0.254829592f);
      const float tail = 0.5f * series * t * __expf(-z * z);
      return v * (v < 0 ? tail : 1.0f - tail);
    } else {
      return v;
    }
  }
};

// A warp's part of a tile of y: 16 tokens.
template <class S, class N, Scaling kScaling>
struct Finisher {
  const TileProblem& p;
  const Smem<S>& smem;
  const Consumer<S, N, kScaling>& consumer;
  const TilePlace tile;

  __device__ uint32_t factors() const { return smem.factors + consumer.group * S::kCols * 8; }
  __device__ uint32_t box(int index) const {
    return smem.staged + ((consumer.group * 4 + consumer.warp) * 2 + index % 2) * S::kBoxBytes;
  }
  // Scale and bias of columns c and c + 1 of the tile.
  __device__ float4 factors_at(int column) const {
    const uint4 bits = ptx::load_shared16(factors() + column * 8);
    return {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
  }
  // Columns 8 j + 2 q, + 1 of the two tokens, scaled and with bias.
  __device__ __forceinline__ void scaled(int j, const float (&token_scale)[2], float (&v)[4]) const {
    const float4 f = factors_at(8 * j + consumer.lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = static_cast<float>(consumer.totals[4 * j + i]), bias = i % 2 ? f.w : f.y;
      if constexpr (kScaling == Scaling::whole) v[i] = fmaf(sum, token_scale[i / 2] * (i % 2 ? f.z : f.x), bias);
      else v[i] = sum + bias;
    }
  }
  __device__ void load_token_scales(float (&scale)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t token = static_cast<int64_t>(tile.token_block) * S::kTokens + consumer.first_token() + i * 8;
      scale[i] = kScaling == Scaling::whole && p.x_scale ? p.x_scale[min(token, p.m - 1) * p.x_stride] : 1.0f;
    }
  }

  // y of 16 bits, 64 columns at a time: [token][64] in shared memory, swizzled, then a box copy.
  template <Act kAct, bool kIsGated>
  __device__ __forceinline__ void store_boxes() const {
    constexpr int kPerUnit = kIsGated ? 2 : 1;  // groups of 8 sums for 8 columns of y
    constexpr int kBoxes = S::kCols / kPerUnit / kBoxCols;
    const Activate<kAct> activate(p.activation);
    const bool is_bf16 = p.out.dtype == DType::bf16;
    const int lane = consumer.lane;
    float token_scale[2];
    load_token_scales(token_scale);
#pragma unroll
    for (int index = 0; index < kBoxes; ++index) {
      if (lane == 0) ptx::wait_stores_read<1>();  // there are two boxes
      __syncwarp();
#pragma unroll
      for (int unit = 0; unit < kBoxCols / 8; unit += 2) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int j = (index * kBoxCols / 8 + unit + i) * kPerUnit;
          float v[4];
          scaled(j, token_scale, v);
#pragma unroll
          for (float& one : v) one = activate(one);
          if constexpr (kIsGated) {
            float up[4];
            scaled(j + 1, token_scale, up);
#pragma unroll
            for (int e = 0; e < 4; ++e) v[e] *= up[e];
          }
          words[2 * i] = ptx::pack_two(v[0], v[1], is_bf16);
          words[2 * i + 1] = ptx::pack_two(v[2], v[3], is_bf16);
        }
        ptx::store_matrices(box(index) + lane % 16 * 128 + (((unit + lane / 16) ^ lane % 8) * 16), words);
      }
      ptx::copy_fence();
      __syncwarp();
      if (lane == 0) {
        ptx::store_box(p.y, tile.col_block * (S::kCols / kPerUnit) + index * kBoxCols,
                       tile.token_block * S::kTokens + consumer.first_token(), box(index));
        ptx::end_store_group();
      }
    }
  }

  // Sums as they are, or scaled, to a matrix of i32 or f32.
  template <class T>
  __device__ __forceinline__ void store_numbers() const {
    float token_scale[2];
    load_token_scales(token_scale);
    const int64_t first_token = static_cast<int64_t>(tile.token_block) * S::kTokens + consumer.first_token();
    const int64_t first_col = static_cast<int64_t>(tile.col_block) * S::kCols + consumer.lane % 4 * 2;
    T* rows[2] = {p.out.row<T>(first_token) + first_col, p.out.row<T>(first_token + 8) + first_col};
    const int cols = static_cast<int>(min(p.n_out - first_col, int64_t{S::kCols}));
#pragma unroll
    for (int j = 0; j < S::kCols / 8; ++j) {
      T values[4];
      if constexpr (__is_same(T, int32_t)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = consumer.totals[4 * j + i];
      } else {
        scaled(j, token_scale, values);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first_token + i / 2 * 8 < p.m && j * 8 + i % 2 < cols) rows[i / 2][j * 8 + i % 2] = values[i];
      }
    }
  }

  template <Act kAct>
  __device__ __forceinline__ void store_boxes() const {
    if (p.is_gated) store_boxes<kAct, true>();
    else store_boxes<kAct, false>();
  }
  __device__ __forceinline__ void run() const {
    if (p.out.dtype == DType::i32) {
      if constexpr (!Consumer<S, N, kScaling>::kPromotes) store_numbers<int32_t>();
    } else if (p.out.dtype == DType::f32) {
      store_numbers<float>();
    } else if (p.activation == QF_IDENTITY) {
      store_boxes<Act::identity>();
    } else if (p.activation == QF_RELU) {
      store_boxes<Act::relu>();
    } else if (p.activation == QF_GELU) {
      store_boxes<Act::gelu>();
    } else {
      store_boxes<Act::sigmoid>();
    }
  }
};

// Scale and bias of one column of a tile, of a gated weight in the order of its rows.
template <class S, Scaling kScaling>
__device__ float2 load_factors(const TileProblem& p, const TilePlace& tile, int column) {
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
      ptx::barrier_init(smem.full + 8 * i, 1);
      ptx::barrier_init(smem.empty + 8 * i, kPair * kConsumers * 4);
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
  } else {
    ptx::claim_registers<240>();
    ptx::wait_for_previous_kernel();  // the epilogue touches what it wrote
    Consumer<S, N, kScaling> consumer = {thread / 128, thread / 32 % 4, thread % 32, {}};
    Ring<S> ring = {smem, {}};
    for (int index = share.first; index < share.tiles; index += share.step) {
      const TilePlace tile = tile_at<S>(p, index, share.rank);
      const Finisher<S, N, kScaling> finisher = {p, smem, consumer, tile};
      float2 factors[S::kCols / 128];
#pragma unroll
      for (int i = 0; i < S::kCols / 128; ++i)
        factors[i] = load_factors<S, kScaling>(p, tile, thread % 128 + 128 * i);
      consumer.multiply(ring, p, tile);
      ptx::named_barrier_sync(1 + consumer.group, 128);  // all are done with the factors of the tile before
#pragma unroll
      for (int i = 0; i < S::kCols / 128; ++i)
        ptx::store_shared_float2(finisher.factors() + (thread % 128 + 128 * i) * 8, factors[i]);
      ptx::named_barrier_sync(1 + consumer.group, 128);
      finisher.run();
    }
    if (thread % 32 == 0) ptx::wait_stores();
  }
  // No block leaves while the other may still write to it.
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
}

}  // namespace quantfuse::product
