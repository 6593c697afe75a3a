// SPDX-License-Identifier: Apache-2.0
//
// y[m,n] = epilogue( sum_k x[m,k] * ((q[n,k] - z[n,g]) * s[n,g] + o[n,g]) )             x: f16 | bf16
//
// Products on the tensor cores of one warp (mma), from the packed weight; for linear_mma_sm80 and _sm75,
// which differ in how a stage comes into shared memory and in the product's size:
//   gmem x --> smem, swizzled --ldmatrix--> operand b ---------------------.
//   gmem q --> smem --lds--> regs --decode--> 16-bit numbers, operand a --mma--> sums of a group
//     --* s--> totals --> smem --> epilogue, 8 columns a thread --> y
// Codes less their zero points are exact in 16 bits and a group's sum is scaled in float32, so that nothing
// is rounded that the formula does not round. Offsets are added as o times the sum of the group's x. Byte
// scales (MXFP4) are part of the numbers if these are bf16, exactly, and then no sum is scaled. mma_plan.h
// has how the work is divided. Every warp has strips and tiles of k that no other warp of the block has, so
// that each code is decoded once a block.
//
// A stage in shared memory: | x of k_warps tiles of k, [token][128] each | the strips' tiles, by warp |
#pragma once

#include "core/choose.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/shared_memory.h"
#include "linear/finish_unit.h"
#include "linear/mma_plan.h"
#include "linear/strip_codes.h"

namespace quantfuse::linear_mma {
using linear::kUnit;
namespace {

// ---- What a block and its warps have to do ----

inline constexpr uint32_t kTokenGroup = 16;  // blocks of tokens whose x stays in L2 while the weight goes by

// A tile of y. 32 bits: accepts() sees to it, and a division of 64 takes ten times as long.
struct Tile {
  int row_block, token_block;
};
__device__ inline Tile tile_at(const Plan& plan, uint32_t index) {
  const uint32_t per_group = kTokenGroup * static_cast<uint32_t>(plan.row_blocks);
  const uint32_t first = index / per_group * kTokenGroup, in_group = index % per_group;
  const uint32_t tokens = min(static_cast<uint32_t>(plan.token_blocks) - first, kTokenGroup);
  return {static_cast<int>(in_group / tokens), static_cast<int>(first + in_group % tokens)};
}

struct Share {
  Tile tile;
  int first_k, end_k;  // tiles of a strip
  int64_t part;        // the number of its part, or -1 where the tile is whole
};
__device__ inline Share share_of(const Plan& plan, const StripLayout& w) {
  const auto whole = static_cast<uint32_t>(plan.whole_tiles), k_tiles = static_cast<uint32_t>(w.tiles);
  if (blockIdx.x < whole) return {tile_at(plan, blockIdx.x), 0, static_cast<int>(k_tiles), -1};
  const auto splits = static_cast<uint32_t>(plan.splits);
  const uint32_t index = (blockIdx.x - whole) / splits, split = (blockIdx.x - whole) % splits;
  return {tile_at(plan, whole + index), static_cast<int>(k_tiles * split / splits),
          static_cast<int>(k_tiles * (split + 1) / splits), split * plan.split_tiles() + index};
}

// The 16-byte units that a thread copies for a stage: those of x by thread, those of its warp's tiles by
// lane. Tokens beyond the last are left as they are, because their sums are not used.
template <class S, qf_format Format>
class Feed {
 public:
  static constexpr int kXUnits = S::kXUnits;
  // Of 32 lanes: up to 1536 or 2560 bytes, with zeros or offsets 2048 or 3072.
  static constexpr int kTileUnits = (is_packed_4bit(Format) ? 3 : 5) + (is_integer(Format) ? 1 : 0);
  static constexpr int kWeightUnits = S::kStripsEach * kTileUnits;

  __device__ Feed(const Problem& p, const Plan& plan, const Share& share)
      : k_(static_cast<int>(p.k)),
        tile_bytes_(p.strips.layout.tile_bytes),
        tiles_(share.end_k - share.first_k),
        k_warps_(plan.k_warps) {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, token = thread / 16;
    const int64_t first_row = static_cast<int64_t>(share.tile.token_block) * S::kTokens;
    tokens_ = static_cast<int>(min(p.m - first_row, int64_t{S::kTokens})) - token;
    column_ = share.first_k * StripLayout::kCols + thread % 16 * 8;
    x_ = p.x.row_bytes_at(first_row + token) + static_cast<int64_t>(column_) * 2;
    x_step_ = p.x.row_stride * 2 * S::kPassTokens;
    x_to_ = token * kXRowBytes + (thread % 16 ^ (token & 7)) * 16;
    const StripLayout& w = p.strips.layout;
    part_ = warp / plan.row_warps;
    // Beyond the last strip, that one: its sums are not used.
    const int64_t strip =
        (static_cast<int64_t>(share.tile.row_block) * plan.row_warps + warp % plan.row_warps) *
        S::kStripsEach;
    const int64_t strip_bytes = w.tiles * tile_bytes_;
    w_ = reinterpret_cast<const char*>(p.strips.data) + min(strip, w.strips - 1) * strip_bytes +
         static_cast<int64_t>(share.first_k + part_) * tile_bytes_ + lane() * 16;
    w_step_ = strip + 1 < w.strips ? strip_bytes : 0;
    w_to_ = k_warps_ * S::kXBytes + warp * S::kStripsEach * tile_bytes_ + lane() * 16;
    const int whole_tiles = min(tiles_, k_ / StripLayout::kCols - share.first_k);
    whole_stages_ = plan.has_aligned_x ? whole_tiles / k_warps_ : 0;
  }
  __device__ int stages() const { return (tiles_ + k_warps_ - 1) / k_warps_; }
  __device__ int part() const { return part_; }
  // Whether this warp has a tile in a stage.
  __device__ bool has_tile(int stage) const { return stage * k_warps_ + part_ < tiles_; }
  // Whether all its tiles are there, and all their columns, and x is aligned.
  __device__ bool is_whole(int stage) const { return stage < whole_stages_; }

  // copy(index of the unit, where to in the stage, from) for the weight and for x of a whole stage.
  template <class Copy>
  __device__ __forceinline__ void weight_units(int stage, const Copy& copy) const {
    const char* from = w_ + static_cast<int64_t>(stage * k_warps_) * tile_bytes_;
#pragma unroll
    for (int i = 0; i < kWeightUnits; ++i) {
      constexpr int kCodeBytes = StripLayout::kRows * StripLayout::kCols / (is_packed_4bit(Format) ? 2 : 1);
      const int strip = i / kTileUnits, at = i % kTileUnits * 512;
      if (at + 512 <= kCodeBytes || at + lane() * 16 < tile_bytes_)
        copy(i, w_to_ + strip * tile_bytes_ + at, from + strip * w_step_ + at);
    }
  }
  template <class Copy>
  __device__ __forceinline__ void x_units(int stage, const Copy& copy) const {
    const char* from = x_ + static_cast<int64_t>(stage * k_warps_) * kXRowBytes;
#pragma unroll
    for (int part = 0; part < S::kMaxKWarps; ++part) {
      if (part == k_warps_) break;
#pragma unroll
      for (int pass = 0; pass < S::kPasses; ++pass) {
        if (pass * S::kPassTokens < tokens_) {
          copy(part * S::kPasses + pass, x_to_ + part * S::kXBytes + pass * S::kPassTokens * kXRowBytes,
               from + pass * x_step_ + part * kXRowBytes);
        }
      }
    }
  }

  // Any stage, number by number in x.
  __device__ __forceinline__ void copy_carefully(int stage, uint32_t to) const {
    if (has_tile(stage)) {
      weight_units(stage, [&](int, int at, const char* from) {
        ptx::store_shared16(to + at, *reinterpret_cast<const uint4*>(from));
      });
    }
#pragma unroll 1
    for (int i = 0; i < S::kXUnits; ++i) {
      const int part = i / S::kPasses, pass = i % S::kPasses, tile = stage * k_warps_ + part;
      if (part >= k_warps_ || tile >= tiles_) break;
      if (pass * S::kPassTokens >= tokens_) continue;
      const auto* from =
          reinterpret_cast<const uint16_t*>(x_ + static_cast<int64_t>(tile) * kXRowBytes + pass * x_step_);
      const int left = k_ - column_ - tile * StripLayout::kCols;
      uint16_t v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = j < left ? from[j] : uint16_t{0};
#pragma unroll
      for (int j = 0; j < 8; ++j)
        ptx::store_shared2(to + x_to_ + part * S::kXBytes + pass * S::kPassTokens * kXRowBytes + 2 * j, v[j]);
    }
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  const char* x_;
  const char* w_;
  int64_t x_step_, w_step_;
  int k_, tile_bytes_, tiles_, k_warps_, whole_stages_, part_;
  int tokens_;  // from this thread's first to the last of the block
  int column_, x_to_, w_to_;
};

// ---- The product of a warp ----

template <class S, qf_format Format, class T, class Product, bool kHasOffsets>
struct Multiplier {
  using Codes = StripCodes<Format, T>;
  const StripLayout& w;
  int lane;
  const Matrix& x_sums;  // where there are offsets
  int64_t first_token;
  float totals[S::kStripsEach][S::kColumns][4] = {};
  const Codes codes = Codes(w.format);

  // totals += a tile of each strip times x. k_tile: the warp's tile of k; x: its shared address. midway() is
  // called with half of the products under way.
  //
  // kGroups: 1, 4 or 8 of a tile. Groups of 64 are taken as two of 32 with the same scale.
  template <int kGroups, bool kHasByteScales, class Midway>
  __device__ __forceinline__ void add(const char* tiles, int k_tile, uint32_t x, const Midway& midway) {
    constexpr bool kIsFolded = kHasByteScales && Codes::kFoldsByteScales;
    constexpr int kSteps = StripLayout::kCols / StripLayout::kStepCols;
    constexpr int kGroupSteps = kSteps / kGroups;
    const int row = lane / 4;
    // Unit u of token t is at u ^ t % 8. This is lane l's row in step 0, which a step changes by an xor.
    const uint32_t x_row = x + (lane / 16 * 8 + lane % 8) * kXRowBytes + ((lane / 8 % 2) ^ (lane % 8)) * 16;
    uint4 vectors[S::kStripsEach][Codes::kTileVectors];
    uint32_t terms[S::kStripsEach][2];
    ByteScales bytes[S::kStripsEach];
    float sums[S::kStripsEach][S::kColumns][4];
#pragma unroll
    for (int s = 0; s < S::kStripsEach; ++s) {
#pragma unroll
      for (int i = 0; i < Codes::kTileVectors; ++i)
        vectors[s][i] = reinterpret_cast<const uint4*>(tiles + s * w.tile_bytes)[i * 32 + lane];
      if constexpr (kHasByteScales)
        bytes[s] = ByteScales::load(ptx::shared_address(tiles + s * w.tile_bytes + w.scale_offset()), lane);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int group = kGroups == 4 && !kHasByteScales ? step / 2 * w.groups / 4 : step / kGroupSteps;
      uint32_t a[S::kStripsEach][4];
#pragma unroll
      for (int s = 0; s < S::kStripsEach; ++s) {
        if (step % kGroupSteps == 0) {
          terms[s][0] = terms[s][1] = Codes::term();
          if constexpr (kIsFolded)
            terms[s][0] = bytes[s].factor(0, group), terms[s][1] = bytes[s].factor(1, group);
          if (is_integer(Format) && w.has_zeros) {
            const auto* zeros = reinterpret_cast<const int8_t*>(tiles + s * w.tile_bytes + w.zero_offset()) +
                                group * 16 + row;
            terms[s][0] = Codes::term(zeros[0]), terms[s][1] = Codes::term(zeros[8]);
          }
        }
        codes.decode(reinterpret_cast<const uint32_t*>(vectors[s]) + step * Codes::kStepWords, terms[s],
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
            auto& total = totals[s][c + i];
            if constexpr (kIsFolded) Product::multiply(total, a[s], b[2 * i], b[2 * i + 1], total);
            else if (step % kGroupSteps == 0) Product::multiply(sum, a[s], b[2 * i], b[2 * i + 1], kZero);
            else Product::multiply(sum, a[s], b[2 * i], b[2 * i + 1], sum);
          }
        }
      }
      if (step == kSteps / 2) midway();
      if constexpr (!kIsFolded) {
        if (step % kGroupSteps == kGroupSteps - 1) {
          scale_sums<kHasByteScales>(tiles, bytes, group, sums);
          if (kHasOffsets && (w.groups == kGroups || step % 4 == 3))
            add_offsets(tiles, group, k_tile * w.groups + group);
        }
      }
    }
  }

  // totals += the sums of a group times its scales.
  template <bool kHasByteScales>
  __device__ __forceinline__ void scale_sums(const char* tiles, const ByteScales (&bytes)[S::kStripsEach],
                                             int group, const float (&sums)[S::kStripsEach][S::kColumns][4]) {
#pragma unroll
    for (int s = 0; s < S::kStripsEach; ++s) {
      float scale[2];
      if constexpr (kHasByteScales) {
        scale[0] = bytes[s].scale(0, group), scale[1] = bytes[s].scale(1, group);
      } else {
        const char* of_tile = tiles + s * w.tile_bytes + w.scale_offset();
        const float* scales = reinterpret_cast<const float*>(of_tile) + group * 16 + lane / 4;
        scale[0] = scales[0], scale[1] = scales[8];
      }
#pragma unroll
      for (int c = 0; c < S::kColumns; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) totals[s][c][i] = fmaf(sums[s][c][i], scale[i / 2], totals[s][c][i]);
      }
    }
  }

  // totals += the offsets of a group times the sums of its x.
  __device__ __forceinline__ void add_offsets(const char* tiles, int group, int sum_row) {
    linear::XSums<S::kTokens> sums;
    sums.load(x_sums.row<const float>(sum_row) + first_token, lane);
#pragma unroll
    for (int s = 0; s < S::kStripsEach; ++s) {
      const char* of_tile = tiles + s * w.tile_bytes + w.zero_offset();
      const float* offsets = reinterpret_cast<const float*>(of_tile) + group * 16 + lane / 4;
      sums.add_to(totals[s][0], {offsets[0], offsets[8]});
    }
  }

  // To [token][stride], at the warp's first row.
  __device__ void store(float* to, int stride) const {
    const float unit = Codes::kFoldsByteScales && linear::has_byte_scales(w) ? linear::kByteScaleUnit : 1.0f;
#pragma unroll
    for (int s = 0; s < S::kStripsEach; ++s) {
#pragma unroll
      for (int c = 0; c < S::kColumns; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          to[(c * 8 + lane % 4 * 2 + i % 2) * stride + s * 16 + lane / 4 + i / 2 * 8] =
              totals[s][c][i] * unit;
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

// From the totals of the warps in shared memory, [k warp][token][rows + 4], to y, or to this block's part,
// [token][rows].
template <class S>
__device__ void finish_block(const Problem& p, const Plan& plan, float* staged, float* part, const Tile& tile,
                             const float* totals) {
  const int64_t first_row = static_cast<int64_t>(tile.token_block) * S::kTokens;
  const int stride = plan.rows + 4, step = S::kTokens * stride;
  const int rows = part ? kUnit : rows_of_unit(p), units = plan.rows / rows;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < S::kTokens * units; i += kThreads) {
    const int token = i / units, first = i % units * rows;
    const int64_t row = first_row + token, unit = static_cast<int64_t>(tile.row_block) * units + i % units;
    const float* from = totals + token * stride + first;
    if (row >= p.m) return;
    if (part) {
      float v[kUnit];
      add_parts(from, plan.k_warps, step, v);
      auto* to = reinterpret_cast<float4*>(part + token * plan.rows + first);
      to[0] = {v[0], v[1], v[2], v[3]}, to[1] = {v[4], v[5], v[6], v[7]};
    } else if (unit * kUnit < p.n_out) {
      finish_parts(p, staged, row, unit, from, plan.k_warps, step);
    }
  }
}

// y of the split tiles from their parts: a thread for 8 outputs.
constexpr int kReduceThreads = 128;
__global__ void __launch_bounds__(kReduceThreads)
    reduce(const __grid_constant__ Problem p, const __grid_constant__ Plan plan, const float* parts,
           float* staged) {
  const int rows = rows_of_unit(p), units = plan.rows / rows;
  const int i = static_cast<int>(blockIdx.y * kReduceThreads + threadIdx.x), token = i / units;
  const Tile tile = tile_at(plan, static_cast<uint32_t>(plan.whole_tiles) + blockIdx.x);
  const int64_t row = static_cast<int64_t>(tile.token_block) * plan.tokens + token;
  const int64_t unit = static_cast<int64_t>(tile.row_block) * units + i % units;
  if (token >= plan.tokens || row >= p.m || unit * kUnit >= p.n_out) return;
  const int64_t part_numbers = static_cast<int64_t>(plan.tokens) * plan.rows;
  const float* part = parts + blockIdx.x * part_numbers + token * plan.rows + i % units * rows;
  finish_parts(p, staged, row, unit, part, plan.splits, plan.split_tiles() * part_numbers);
}

// ---- The kernel ----

template <class Pipeline, class S, qf_format Format, class T, bool kHasOffsets>
__global__ void __launch_bounds__(kThreads, S::kBlocksPerSm)
    kernel(const __grid_constant__ Problem p, const __grid_constant__ Plan plan, float* parts,
           float* staged) {
  extern __shared__ __align__(kXRowBytes) char shared[];
  const StripLayout& w = p.strips.layout;
  const Share share = share_of(plan, w);
  const Feed<S, Format> feed(p, plan, share);
  const int warp = static_cast<int>(threadIdx.x / 32);
  Multiplier<S, Format, T, typename Pipeline::template Product<T>, kHasOffsets> multiplier = {
      w, static_cast<int>(threadIdx.x % 32), p.x_sums, int64_t{share.tile.token_block} * S::kTokens};
  const int x_at = feed.part() * S::kXBytes;
  const int tiles_at = plan.k_warps * S::kXBytes + warp * S::kStripsEach * w.tile_bytes;
  // A loop for each number of groups: in one for all of them, what each needs would be kept in registers.
  const auto run = [&]<int kGroups, bool kHasByteScales>() {
    Pipeline::run(feed, plan, shared, [&](int stage, const char* at, const auto& midway) {
      const uint32_t x = ptx::shared_address(at) + x_at;
      const int k_tile = share.first_k + stage * plan.k_warps + feed.part();
      if (!feed.has_tile(stage)) midway();
      else multiplier.template add<kGroups, kHasByteScales>(at + tiles_at, k_tile, x, midway);
    });
  };
  constexpr bool kMayHaveByteScales = StripCodes<Format, T>::kMayHaveByteScales;
  if (kMayHaveByteScales && linear::has_byte_scales(w)) run.template operator()<4, kMayHaveByteScales>();
  else if (w.groups == 1) run.template operator()<1, false>();
  else if (w.groups <= 4) run.template operator()<4, false>();
  else run.template operator()<8, false>();

  auto* totals = reinterpret_cast<float*>(shared);  // the ring's memory, which all are done with
  const int stride = plan.rows + 4;
  const int first_row = warp % plan.row_warps * S::kStripsEach * StripLayout::kRows;
  multiplier.store(totals + feed.part() * S::kTokens * stride + first_row, stride);
  __syncthreads();
  float* part = share.part < 0 ? nullptr : parts + share.part * (S::kTokens * plan.rows);
  finish_block<S>(p, plan, staged, part, share.tile, totals);
}

template <class Pipeline, class S, qf_format Format, class T>
void launch_shape(const char* name, const Problem& p, float* staged, const Launch& launch) {
  const Plan plan = make_plan<S>(p, Pipeline::limits(p));
  auto* parts =
      reinterpret_cast<float*>(static_cast<char*>(launch.workspace) + linear::plan_canonical(p).total_bytes);
  const LaunchShape shape = {dim3(static_cast<unsigned>(plan.blocks())), dim3(kThreads),
                             static_cast<size_t>(plan.smem_bytes)};
  choose_bool(p.strips.layout.has_offsets, [&](auto has_offsets) {
    constexpr bool kHasOffsets = has_offsets.value && is_integer(Format);
    launch_kernel(name, kernel<Pipeline, S, Format, T, kHasOffsets>, shape, launch, p, plan, parts, staged);
  });
  if (plan.splits == 1) return;
  const int units = plan.tokens * plan.rows / (p.weight.is_gated ? 2 * kUnit : kUnit);
  const LaunchShape second = {
      dim3(static_cast<unsigned>(plan.split_tiles()), static_cast<unsigned>(ceil_div(units, kReduceThreads))),
      dim3(kReduceThreads)};
  launch_kernel(name, reduce, second, launch, p, plan, parts, staged);
}

}  // namespace
}  // namespace quantfuse::linear_mma
