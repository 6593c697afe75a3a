// SPDX-License-Identifier: Apache-2.0
//
// y[m,n] = epilogue( sum_k x[m,k] * (q[n,k] - z[n,g]) * s[n,g] )                        x: f16 | bf16
//
// Products on the tensor cores of one warp (mma), from the packed weight; for linear_mma_sm80 and _sm75,
// which differ in how a stage comes into shared memory and in the product's size:
//   gmem x --> smem, swizzled --ldmatrix--> operand b ---------------------.
//   gmem q --> smem --lds--> regs --decode--> 16-bit numbers, operand a --mma--> sums of a group
//     --* s--> totals --> smem --> epilogue, 8 columns a thread --> y
// Codes less their zero points are exact in 16 bits and a group's sum is scaled in float32, so that nothing
// is rounded that the formula does not round. mma_plan.h has how the work is divided. Every warp has strips
// and tiles of k that no other warp of the block has, so that each code is decoded once a block.
//
// A stage in shared memory: | x of k_warps tiles of k, [token][128] each | the strips' tiles, by warp |
#pragma once

#include "cuda/ptx/mma.h"
#include "cuda/ptx/shared_memory.h"
#include "linear/finish_unit.h"
#include "linear/mma_plan.h"
#include "linear/strip_codes.h"

namespace quantfuse::linear_mma {
using linear::kUnit;
namespace {

// ---- What a block and its warps have to do ----

inline constexpr int kTokenGroup = 16;  // blocks of tokens whose x stays in L2 while the weight goes by

struct Share {
  int64_t row_block, token_block;
  int first_k, end_k;  // tiles of a strip
  int split;
};
__device__ inline Share share_of(const Plan& plan, const StripLayout& w) {
  const int64_t index = blockIdx.x / plan.splits;
  const int split = static_cast<int>(blockIdx.x % plan.splits);
  const int64_t per_group = kTokenGroup * plan.row_blocks;
  const int64_t first = index / per_group * kTokenGroup, in_group = index % per_group;
  const int64_t tokens = min(plan.token_blocks - first, int64_t{kTokenGroup});
  return {in_group / tokens, first + in_group % tokens, static_cast<int>(w.tiles * split / plan.splits),
          static_cast<int>(w.tiles * (split + 1) / plan.splits), split};
}

// A unit of x that is not 16 bytes at a multiple of 16: so many bytes, whole numbers, then zeros.
__device__ __forceinline__ void copy_numbers(uint32_t to, const char* from, int bytes) {
#pragma unroll 1
  for (int i = 0; i < 16; i += 2) {
    ptx::store_shared2(to + i, i < bytes ? *reinterpret_cast<const uint16_t*>(from + i) : uint16_t{0});
  }
}

// The 16-byte units that a thread copies for a stage: those of x by thread, those of its warp's tiles by
// lane.
template <class S, qf_format Format>
class Feed {
 public:
  static constexpr int kTileRounds = is_packed_4bit(Format) ? 3 : 5;  // of 32 units: 1344 or 2368 bytes
  static constexpr int kWeightUnits = S::kStripsEach * kTileRounds, kXUnits = S::kXUnits;
  static_assert(kTileRounds * 512 >=
                StripLayout::kRows * (StripLayout::kCols * (kTileRounds == 3 ? 1 : 2) / 2 + 4 * 5));

  __device__ Feed(const Problem& p, const Plan& plan, const Share& share)
      : k_(static_cast<int>(p.k)),
        tile_bytes_(p.strips.layout.tile_bytes),
        first_k_(share.first_k),
        end_k_(share.end_k),
        k_warps_(plan.k_warps()) {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
    const int64_t first_row = share.token_block * S::kTokens;
    token_ = thread / 16, column_ = thread % 16 * 8;
    tokens_ = static_cast<int>(min(p.m - first_row, int64_t{S::kTokens}));
    x_ = p.x.row_bytes_at(first_row + (token_ < tokens_ ? token_ : 0)) + column_ * 2;
    x_step_ = p.x.row_stride * 2 * (kThreads / 16);
    x_to_ = token_ * kXRowBytes + (thread % 16 ^ (token_ & 7)) * 16;
    const StripLayout& w = p.strips.layout;
    part_ = warp / plan.row_warps;
    const int64_t strip = (share.row_block * plan.row_warps + warp % plan.row_warps) * S::kStripsEach;
#pragma unroll
    for (int i = 0; i < S::kStripsEach; ++i) {  // beyond the last one, that one: its sums are not used
      w_[i] = reinterpret_cast<const char*>(p.strips.data) +
              (min(strip + i, w.strips - 1) * w.tiles + share.first_k + part_) * tile_bytes_ + lane() * 16;
    }
    w_to_ = k_warps_ * S::kXBytes + warp * S::kStripsEach * tile_bytes_ + lane() * 16;
  }
  __device__ int stages() const { return (end_k_ - first_k_ + k_warps_ - 1) / k_warps_; }
  __device__ int part() const { return part_; }
  // Whether this warp has a tile in a stage.
  __device__ bool has_tile(int stage) const { return first_k_ + stage * k_warps_ + part_ < end_k_; }

  // copy(index of the unit, where to in the stage, from, bytes) for x.
  template <class Copy>
  __device__ __forceinline__ void x_units(int stage, const Copy& copy) const {
#pragma unroll
    for (int i = 0; i < S::kXUnits; ++i) {
      constexpr int kEach = S::kTileXUnits;
      const int part = i / kEach, tile = first_k_ + stage * k_warps_ + part;
      if (part >= k_warps_ || tile >= end_k_) break;
      const int column = tile * StripLayout::kCols + column_;
      const bool exists = token_ + i % kEach * (kThreads / 16) < tokens_;
      const int bytes = exists ? 2 * max(min(k_ - column, 8), 0) : 0;
      const char* from = x_ + static_cast<int64_t>(tile) * kXRowBytes + i % kEach * x_step_;
      copy(i, x_to_ + part * S::kXBytes + i % kEach * (kThreads / 16) * kXRowBytes, bytes > 0 ? from : x_,
           bytes);
    }
  }
  // copy(index of the unit, where to in the stage, from) for the weight.
  template <class Copy>
  __device__ __forceinline__ void weight_units(int stage, const Copy& copy) const {
    if (!has_tile(stage)) return;
#pragma unroll
    for (int i = 0; i < kWeightUnits; ++i) {
      const int strip = i / kTileRounds, offset = i % kTileRounds * 512;
      if (offset + lane() * 16 < tile_bytes_) {
        copy(i, w_to_ + strip * tile_bytes_ + offset,
             w_[strip] + static_cast<int64_t>(stage * k_warps_) * tile_bytes_ + offset);
      }
    }
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  const char* x_;
  const char* w_[S::kStripsEach];
  int64_t x_step_;
  int k_, tile_bytes_, first_k_, end_k_, k_warps_, part_;
  int token_, column_, tokens_, x_to_, w_to_;
};

// ---- The product of a warp ----

template <class S, qf_format Format, class T, class Product>
struct Multiplier {
  using Codes = StripCodes<Format, T>;
  const StripLayout& w;
  int lane;
  float totals[S::kStripsEach][S::kColumns][4] = {};

  // totals += a tile of each strip times x. x: shared address of the warp's tile of k.
  //
  // Groups of 64 are taken as two of 32 with the same scale.
  template <bool kHasSmallGroups>
  __device__ __forceinline__ void add(const char* tiles, uint32_t x) {
    constexpr int kSteps = StripLayout::kCols / StripLayout::kStepCols;
    constexpr int kGroupSteps = kHasSmallGroups ? 2 : kSteps;
    const int row = lane / 4;
    // Unit u of token t is at u ^ t % 8. This is lane l's row in step 0, which a step changes by an xor.
    const uint32_t x_row = x + (lane / 16 * 8 + lane % 8) * kXRowBytes + ((lane / 8 % 2) ^ (lane % 8)) * 16;
    uint4 vectors[S::kStripsEach][Codes::kTileVectors];
    uint32_t offsets[S::kStripsEach][2];
    float sums[S::kStripsEach][S::kColumns][4];
#pragma unroll
    for (int s = 0; s < S::kStripsEach; ++s) {
#pragma unroll
      for (int i = 0; i < Codes::kTileVectors; ++i)
        vectors[s][i] = reinterpret_cast<const uint4*>(tiles + s * w.tile_bytes)[i * 32 + lane];
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int group = kHasSmallGroups ? step / 2 * w.groups / 4 : 0;
      if (step % kGroupSteps == 0) {
#pragma unroll
        for (int s = 0; s < S::kStripsEach; ++s) {
          offsets[s][0] = offsets[s][1] = Codes::offset(0);
          if (is_integer(Format) && w.has_zeros) {
            const char* zeros = tiles + s * w.tile_bytes + w.zero_offset() + group * 16 + row;
            offsets[s][0] = Codes::offset(static_cast<int8_t>(zeros[0]));
            offsets[s][1] = Codes::offset(static_cast<int8_t>(zeros[8]));
          }
        }
      }
      uint32_t a[S::kStripsEach][4];
#pragma unroll
      for (int s = 0; s < S::kStripsEach; ++s) {
        Codes::decode(reinterpret_cast<const uint32_t*>(vectors[s]) + step * Codes::kStepWords, offsets[s],
                      a[s]);
      }
#pragma unroll
      for (int c = 0; c < S::kColumns; c += 2) {
        uint32_t b[4];
        ptx::load_matrices(b, (x_row ^ (step * 32)) + c * 8 * kXRowBytes);
#pragma unroll
        for (int s = 0; s < S::kStripsEach; ++s) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            constexpr float kZero[4] = {};
            auto& sum = sums[s][c + i];
            if (step % kGroupSteps == 0) Product::multiply(sum, a[s], b[2 * i], b[2 * i + 1], kZero);
            else Product::multiply(sum, a[s], b[2 * i], b[2 * i + 1], sum);
          }
        }
      }
      if (step % kGroupSteps != kGroupSteps - 1) continue;
#pragma unroll
      for (int s = 0; s < S::kStripsEach; ++s) {
        const auto* scales =
            reinterpret_cast<const float*>(tiles + s * w.tile_bytes + w.scale_offset()) + group * 16 + row;
        const float scale[2] = {scales[0], scales[8]};
#pragma unroll
        for (int c = 0; c < S::kColumns; ++c) {
#pragma unroll
          for (int i = 0; i < 4; ++i) totals[s][c][i] = fmaf(sums[s][c][i], scale[i / 2], totals[s][c][i]);
        }
      }
    }
  }

  // To [token][stride], at the warp's first row.
  __device__ void store(float* to, int stride) const {
#pragma unroll
    for (int s = 0; s < S::kStripsEach; ++s) {
#pragma unroll
      for (int c = 0; c < S::kColumns; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          to[(c * 8 + lane % 4 * 2 + i % 2) * stride + s * 16 + lane / 4 + i / 2 * 8] = totals[s][c][i];
      }
    }
  }
};

// ---- The epilogue ----

// Eight sums, from so many parts, added in the order of k. Parts begin at multiples of 16 bytes.
__device__ __forceinline__ void add_parts(const float* part, int parts, int64_t step, float (&v)[kUnit]) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) v[i] = 0.0f;
#pragma unroll 2
  for (int n = 0; n < parts; ++n, part += step) {
    const float4 low = reinterpret_cast<const float4*>(part)[0],
                 high = reinterpret_cast<const float4*>(part)[1];
    v[0] += low.x, v[1] += low.y, v[2] += low.z, v[3] += low.w;
    v[4] += high.x, v[5] += high.y, v[6] += high.z, v[7] += high.w;
  }
}

// Rows of the strips for 8 outputs: where the weight is gated, 8 of the gate and 8 of the up projection.
__device__ inline int rows_of_unit(const Problem& p) { return p.weight.is_gated ? 2 * kUnit : kUnit; }

__device__ __forceinline__ void finish_parts(const Problem& p, float* staged, int64_t row, int64_t unit,
                                             const float* part, int parts, int64_t step) {
  float v[kUnit], up[kUnit] = {};
  add_parts(part, parts, step, v);
  if (p.weight.is_gated) add_parts(part + kUnit, parts, step, up);
  linear::finish_unit(p, staged, row, unit * kUnit, v, up);
}

// From the totals of the warps in shared memory, [k warp][token][stride], to y, or to this split's part.
struct BlockTotals {
  const float* data;
  int rows, stride, k_warps;
};
template <class S>
__device__ void finish_block(const Problem& p, float* staged, float* parts, const Share& share,
                             const BlockTotals& totals) {
  const int64_t first_row = share.token_block * S::kTokens, step = S::kTokens * totals.stride;
  const int rows = parts ? kUnit : rows_of_unit(p), units = totals.rows / rows;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < S::kTokens * units; i += kThreads) {
    const int token = i / units;
    const int64_t row = first_row + token, unit = share.row_block * units + i % units;
    const float* part = totals.data + token * totals.stride + i % units * rows;
    if (row >= p.m) return;
    if (!parts) {
      if (unit * kUnit < p.n_out) finish_parts(p, staged, row, unit, part, totals.k_warps, step);
    } else if (unit < p.strips.layout.strips * (StripLayout::kRows / kUnit)) {
      float v[kUnit];
      add_parts(part, totals.k_warps, step, v);
      const int64_t padded = p.strips.layout.strips * StripLayout::kRows;
      auto* to = reinterpret_cast<float4*>(parts + (share.split * p.m + row) * padded + unit * kUnit);
      to[0] = {v[0], v[1], v[2], v[3]}, to[1] = {v[4], v[5], v[6], v[7]};
    }
  }
}

// y from the parts of split k: a thread for 8 outputs.
__global__ void __launch_bounds__(kThreads)
    reduce(const __grid_constant__ Problem p, const float* parts, int splits, float* staged) {
  const int64_t units = (p.n_out + kUnit - 1) / kUnit;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = index / units, unit = index % units;
  if (row >= p.m) return;
  const int64_t padded = p.strips.layout.strips * StripLayout::kRows;
  finish_parts(p, staged, row, unit, parts + row * padded + unit * rows_of_unit(p), splits, p.m * padded);
}

// ---- The kernel ----

template <class Pipeline, class S, qf_format Format, class T>
__global__ void __launch_bounds__(kThreads, S::kBlocksPerSm)
    kernel(const __grid_constant__ Problem p, const __grid_constant__ Plan plan, float* parts,
           float* staged) {
  extern __shared__ __align__(kXRowBytes) char shared[];
  const StripLayout& w = p.strips.layout;
  const Share share = share_of(plan, w);
  const Feed<S, Format> feed(p, plan, share);
  const int warp = static_cast<int>(threadIdx.x / 32), row_warp = warp % plan.row_warps;
  Multiplier<S, Format, T, typename Pipeline::template Product<T>> multiplier = {
      w, static_cast<int>(threadIdx.x % 32)};
  const int x_at = feed.part() * S::kXBytes;
  const int tiles_at = plan.k_warps() * S::kXBytes + warp * S::kStripsEach * w.tile_bytes;
  const bool has_small_groups = w.groups > 1;
  Pipeline::run(feed, plan, shared, [&](int stage, const char* at) {
    if (!feed.has_tile(stage)) return;
    const uint32_t x = ptx::shared_address(at) + x_at;
    if (has_small_groups) multiplier.template add<true>(at + tiles_at, x);
    else multiplier.template add<false>(at + tiles_at, x);
  });

  auto* totals = reinterpret_cast<float*>(shared);  // the ring's memory, which all are done with
  const int rows = plan.row_warps * S::kStripsEach * StripLayout::kRows, stride = rows + 4;
  multiplier.store(
      totals + feed.part() * S::kTokens * stride + row_warp * S::kStripsEach * StripLayout::kRows, stride);
  __syncthreads();
  finish_block<S>(p, staged, plan.splits > 1 ? parts : nullptr, share,
                  {totals, rows, stride, plan.k_warps()});
}

template <class Pipeline, class S, qf_format Format, class T>
void launch_shape(const char* name, const Problem& p, float* staged, const Launch& launch) {
  const Plan plan = make_plan<S>(p, Pipeline::limits(p));
  auto* parts =
      reinterpret_cast<float*>(static_cast<char*>(launch.workspace) + linear::plan_canonical(p).total_bytes);
  const LaunchShape shape = {dim3(static_cast<unsigned>(plan.blocks())), dim3(kThreads),
                             static_cast<size_t>(plan.smem_bytes)};
  launch_kernel(name, kernel<Pipeline, S, Format, T>, shape, launch, p, plan, parts, staged);
  if (plan.splits == 1) return;
  const int64_t threads = p.m * ceil_div(p.n_out, int64_t{kUnit});
  const LaunchShape second = {dim3(static_cast<unsigned>(ceil_div(threads, int64_t{kThreads}))),
                              dim3(kThreads)};
  launch_kernel(name, reduce, second, launch, p, parts, plan.splits, staged);
}

}  // namespace
}  // namespace quantfuse::linear_mma
