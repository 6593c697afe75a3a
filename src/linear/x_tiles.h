// SPDX-License-Identifier: Apache-2.0
//
// x of up to 16 tokens in shared memory, for products with mma:
//
//   tile of x: [token][128 columns], pieces of 16 bytes permuted by token within 128 bytes, so that eight
//              rows are in different banks. (Rows padded to be so took half as long again to copy: a line
//              of 128 bytes then goes to two.)
//
// A warp brings the tiles warp, warp + kWarps, ..., and so waits for no other where it multiplies no others.
#pragma once

#include "core/expect.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/shared_memory.h"
#include "linear/packed_strips.h"

namespace quantfuse::linear {

template <int kTokens_, int kWarps_>
struct XTiles {
  static constexpr int kTokens = kTokens_, kWarps = kWarps_, kBlocks = kTokens / 8;
  static constexpr int kRowBytes = StripLayout::kCols * 2;
  static constexpr int kSteps = StripLayout::kCols / StripLayout::kStepCols;
  uint32_t at, sums_at;  // shared memory; sums: [tile][group][token] f32
  int m, tiles, tile_bytes;
  int warp, lane;

  __device__ uint32_t tile(int i) const { return at + i * tile_bytes; }
  // Where 16 bytes of a row are in a tile.
  __device__ static uint32_t piece(int token, int i) { return token * kRowBytes + ((i ^ (token & 7)) << 4); }

  // Begins to copy. Half a warp takes a row of a tile. Through L2 alone, because L1 may hold what was there
  // before.
  __device__ __forceinline__ void fetch(const Matrix& x, int first_tile, bool is_aligned) const {
    const int64_t row_bytes = x.row_stride * 2;
#pragma unroll 1
    for (int i = warp; i < tiles; i += kWarps) {
      const int column = (first_tile + i) * StripLayout::kCols + lane % 16 * 8;
      const char* from = static_cast<const char*>(x.data) + lane / 16 * row_bytes + column * 2;
      if (is_aligned && column + 8 <= x.cols) {
#pragma unroll
        for (int pair = 0; pair < kTokens / 2; ++pair) {
          const int token = 2 * pair + lane / 16;
          if (token < m) ptx::copy16_async(tile(i) + piece(token, lane % 16), from);
          from += 2 * row_bytes;
        }
      } else {
#pragma unroll 1
        for (int token = lane / 16; token < m; token += 2) {
#pragma unroll 1
          for (int j = 0; j < 8; j += 2) {
            const auto* numbers = reinterpret_cast<const uint16_t*>(from) + j;
            const auto bits = [&](int k) {
              return column + j + k < x.cols ? static_cast<uint32_t>(__ldcg(numbers + k)) : 0u;
            };
            ptx::store_shared4(tile(i) + piece(token, lane % 16) + j * 2, bits(0) | bits(1) << 16);
          }
          from += 2 * row_bytes;
        }
      }
    }
  }
  __device__ static void wait() {
    ptx::wait_copies();
    __syncwarp();
  }

  // Where this lane's row is of the matrices that load_matrices brings: lane 8 i + r has row r of matrix i.
  // Of 8 tokens these are 4 pieces, two steps; of 16, 2 pieces of either 8 tokens, one step.
  __device__ uint32_t matrix_row(int i) const {
    const int matrix = lane / 8;
    const int token = min(lane % 8 + (kBlocks > 1 ? matrix / 2 * 8 : 0), m - 1);
    return tile(i) + piece(token, kBlocks > 1 ? matrix % 2 : matrix);
  }
  // The same of a later step.
  __device__ __forceinline__ static uint32_t at_step(uint32_t matrix_row, int step) {
    return (matrix_row ^ (step % 4 * 32)) + step / 4 * 128;
  }

  // Sums of x by group of columns, of this warp's tiles: products with ones.
  template <class T, int kGroups>
  __device__ void sum() const {
    constexpr uint32_t kOnes = __is_same(T, bf16) ? 0x3f803f80u : 0x3c003c00u;
    const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll 1
    for (int i = warp; i < tiles; i += kWarps) {
      const uint32_t x = matrix_row(i);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        float sums[kBlocks][4] = {};
#pragma unroll
        for (int s = group * (kSteps / kGroups); s < (group + 1) * (kSteps / kGroups); ++s) {
          uint32_t b[4];
          ptx::load_matrices(b, at_step(x, kBlocks > 1 ? s : s / 2 * 2));
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            const int of_step = kBlocks > 1 ? block * 2 : s % 2 * 2;
            ptx::mma_m16n8k16<T>(sums[block], ones, b[of_step], b[of_step + 1], sums[block]);
          }
        }
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const uint32_t to = sums_at + ((i * kGroups + group) * kTokens + block * 8 + lane % 4 * 2) * 4;
          if (lane < 4) ptx::store_shared_float2(to, {sums[block][0], sums[block][1]});
        }
      }
    }
    __syncwarp();
  }
};

}  // namespace quantfuse::linear
