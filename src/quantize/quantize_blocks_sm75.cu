// SPDX-License-Identifier: Apache-2.0
//
// q[r,c] = saturate( round(x[r,c] * (1 / scale[R,C])) + zero[R,C] ),   R = r / block.rows, C = c / block.cols
//
// Every format, block and alignment: 2-D blocks, whole tensors, columns, groups of 4-bit codes that end
// within a byte. What the other kernels do not take; weights are quantized so. x is read twice, in tiles of
// rows of one band of blocks by 512 columns, of which a thread walks down two:
//   clear    ranges, row sums <- 0
//   range    x --max, min--> regs --> smem, a range per column block --atomic max--> workspace
//   scale    range --> scale, zero
//   code     x, scale, zero --> a byte of two codes, or two bytes --> q;  sums --atomic add--> row_sums
// The atomic operations are on integers (positive floats are ordered as their bits are): the order in which
// they happen does not matter.
#include "core/choose.h"
#include "core/element.h"
#include "cuda/launch.h"
#include "cuda/ptx/dependent_launch.h"
#include "cuda/row_codes.h"
#include "quantize/quantize.h"

namespace quantfuse::quantize_blocks_sm75 {
using quantize::Problem;
using quantize::Quantizer;
namespace {

constexpr const char* kName = "quantize_blocks_sm75";
constexpr int kThreads = 256, kTileCols = 2 * kThreads;
constexpr int64_t kTileRows = 64;

// max x and max -x of a block, at least 0, as bits.
struct RangeBits {
  uint32_t high, depth;
};

struct Tile {
  int64_t band, r0, r1, c;  // rows, and the first of this thread's two columns
  int count;                // of this thread's columns that there are
};

__device__ Tile tile_at(const Problem& p) {
  const int64_t col_tiles = (p.cols + kTileCols - 1) / kTileCols;
  const int64_t tiles_in_band = (p.block.rows + kTileRows - 1) / kTileRows;
  const int64_t row_tile = blockIdx.x / col_tiles, band = row_tile / tiles_in_band;
  const int64_t r0 = band * p.block.rows + row_tile % tiles_in_band * kTileRows;
  const int64_t band_end = min((band + 1) * p.block.rows, p.rows);
  const int64_t c = blockIdx.x % col_tiles * kTileCols + 2 * threadIdx.x;
  return {band, r0, min(r0 + kTileRows, band_end), c,
          static_cast<int>(min(max(p.cols - c, int64_t{0}), int64_t{2}))};
}

__global__ void __launch_bounds__(kThreads)
    clear_kernel(RangeBits* ranges, int64_t blocks, int32_t* row_sums, int64_t sums) {
  ptx::allow_next_kernel();
  ptx::wait_for_previous_kernel();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t i = first; i < blocks; i += static_cast<int64_t>(gridDim.x) * kThreads) ranges[i] = {0, 0};
  for (int64_t i = first; i < sums; i += static_cast<int64_t>(gridDim.x) * kThreads) row_sums[i] = 0;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    range_kernel(const __grid_constant__ Problem p, RangeBits* ranges) {
  __shared__ RangeBits parts[kTileCols];  // of the column blocks that the tile touches
  for (int i = threadIdx.x; i < kTileCols; i += kThreads) parts[i] = {0, 0};
  const Tile tile = tile_at(p);
  ptx::allow_next_kernel();
  ptx::wait_for_previous_kernel();

  float high[2] = {0, 0}, depth[2] = {0, 0};
#pragma unroll 4
  for (int64_t r = tile.r0; r < tile.r1; ++r) {
    const T* x = p.x.row<T>(r) + tile.c;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float v = i < tile.count ? to_float(x[i]) : 0.0f;
      high[i] = fmaxf(high[i], v), depth[i] = fmaxf(depth[i], -v);  // passes over NaN
    }
  }
  __syncthreads();
  const int64_t first_block = (tile.c - 2 * threadIdx.x) / p.block.cols;
  const auto include = [&](int64_t block, float h, float d) {
    atomicMax(&parts[block - first_block].high, __float_as_uint(h));
    atomicMax(&parts[block - first_block].depth, __float_as_uint(d));
  };
  const int64_t blocks[2] = {tile.c / p.block.cols, (tile.c + 1) / p.block.cols};
  const int64_t of_first_lane = __shfl_sync(~0u, blocks[0], 0);
  if (__all_sync(~0u, tile.count == 0 || (blocks[0] == of_first_lane && blocks[1] == of_first_lane))) {
    const float h = max_over_warp(fmaxf(high[0], high[1])), d = max_over_warp(fmaxf(depth[0], depth[1]));
    if (threadIdx.x % 32 == 0 && tile.count > 0) include(of_first_lane, h, d);
  } else {
    for (int i = 0; i < tile.count; ++i) include(blocks[i], high[i], depth[i]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTileCols && first_block + i < p.col_blocks(); i += kThreads) {
    RangeBits& range = ranges[tile.band * p.col_blocks() + first_block + i];
    if (parts[i].high != 0) atomicMax(&range.high, parts[i].high);
    if (parts[i].depth != 0) atomicMax(&range.depth, parts[i].depth);
  }
}

__global__ void __launch_bounds__(kThreads)
    scale_kernel(const __grid_constant__ Problem p, const RangeBits* ranges) {
  ptx::allow_next_kernel();
  ptx::wait_for_previous_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.row_blocks() * p.col_blocks()) return;
  const int64_t at = p.scale_index(i / p.col_blocks(), i % p.col_blocks());
  const Quantizer z =
      quantize::quantizer_from_range(p.scale_kind(), code_range(p.format), -__uint_as_float(ranges[i].depth),
                                     __uint_as_float(ranges[i].high));
  if (p.has_e8m0_scale()) static_cast<uint8_t*>(p.scale.data)[at] = z.e8m0;
  else static_cast<float*>(p.scale.data)[at] = z.scale;
  if (p.zero) static_cast<int8_t*>(p.zero.data)[i] = static_cast<int8_t>(z.zero);
}

template <class T>
__global__ void __launch_bounds__(kThreads) code_kernel(const __grid_constant__ Problem p) {
  const Tile tile = tile_at(p);
  ptx::allow_next_kernel();
  ptx::wait_for_previous_kernel();

  float inverse[2] = {1, 1};
  int zero[2] = {0, 0};
  int64_t blocks[2] = {0, 0};
  for (int i = 0; i < tile.count; ++i) {
    blocks[i] = (tile.c + i) / p.block.cols;
    const int64_t at = p.scale_index(tile.band, blocks[i]);
    inverse[i] = 1.0f / (p.has_e8m0_scale() ? E8m0::decode(static_cast<const uint8_t*>(p.scale.data)[at])
                                            : static_cast<const float*>(p.scale.data)[at]);
    if (p.zero) zero[i] = static_cast<const int8_t*>(p.zero.data)[tile.band * p.col_blocks() + blocks[i]];
  }
  const bool is_packed = is_packed_4bit(p.format);
#pragma unroll 2
  for (int64_t r = tile.r0; r < tile.r1; ++r) {
    const T* x = p.x.row<T>(r) + tile.c;
    uint8_t codes[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i < tile.count) codes[i] = encode_value(p.format, __fmul_rn(to_float(x[i]), inverse[i]), zero[i]);
    }
    uint8_t* q = p.q.row<uint8_t>(r);
    if (is_packed) {
      if (tile.count > 0) q[tile.c / 2] = static_cast<uint8_t>(codes[0] | codes[1] << 4);
    } else {
      for (int i = 0; i < tile.count; ++i) q[tile.c + i] = codes[i];
    }
    if (p.row_sums) {
      for (int i = 0; i < tile.count; ++i) {
        atomicAdd(&p.row_sums.row<int32_t>(r)[blocks[i]],
                  static_cast<int>(decode_at(p.format, &codes[i], 0)));
      }
    }
  }
}

int64_t tiles_of(const Problem& p) {
  return p.row_blocks() * ceil_div(p.block.rows, kTileRows) * ceil_div(p.cols, kTileCols);
}

Verdict accepts(const Problem& p) {
  return Requirements()
      .require(p.mode != QF_SCALE_MSE, "the MSE search is for weights, which are quantized on the CPU")
      .require(p.hadamard == 0, "nothing is rotated here")
      .require(tiles_of(p) < 1ll << 31, "there are 2^31 tiles or more");
}

size_t workspace_bytes(const Problem& p) {
  return p.is_static() ? 0 : static_cast<size_t>(p.row_blocks() * p.col_blocks()) * sizeof(RangeBits);
}

void launch(const Problem& p, const Launch& launch) {
  auto* ranges = static_cast<RangeBits*>(launch.workspace);
  const int64_t blocks = p.is_static() ? 0 : p.row_blocks() * p.col_blocks();
  const int64_t sums = p.row_sums ? p.rows * p.col_blocks() : 0;
  const auto grid = [](int64_t number) {
    return LaunchShape{dim3(static_cast<unsigned>(number)), dim3(kThreads), 0, /*overlap_previous=*/true};
  };
  if (blocks + sums > 0) {
    const int64_t most = ceil_div(blocks > sums ? blocks : sums, kThreads);
    launch_kernel(kName, clear_kernel, grid(most < 1024 ? most : 1024), launch, ranges, blocks,
                  static_cast<int32_t*>(p.row_sums.data), sums);
  }
  choose_float(p.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (blocks > 0) {
      launch_kernel(kName, range_kernel<T>, grid(tiles_of(p)), launch, p, ranges);
      launch_kernel(kName, scale_kernel, grid(ceil_div(blocks, kThreads)), launch, p, ranges);
    }
    launch_kernel(kName, code_kernel<T>, grid(tiles_of(p)), launch, p);
  });
}

}  // namespace

extern const Kernel<Problem> entry = {kName, Target::sm75, accepts, workspace_bytes, launch};

}  // namespace quantfuse::quantize_blocks_sm75
