// SPDX-License-Identifier: Apache-2.0
//
// x for the tensor cores' products of bytes. By token and tile of 128 columns, x is rounded to a fixed point
// under its largest magnitude and split into three signed bytes, its limbs:
//
//   x = factor (65536 x2 + 256 x1 + x0) + error,      2^e <= max |x| < 2^(e+1),  factor = 2^(e-20)
//
// |error| <= factor / 2 <= 2^-21 max |x|: none for a bf16 number of the 13 binades below the largest, nor for
// an f16 number of the 10. Sums over products of limbs and codes are exact integers. A NaN or an infinity
// makes the factor NaN, and so every sum of that token.
//
// In shared memory a tile is
//   | token 0: limb 0, 1, 2 of 128 bytes | token 1 ... | factor f32 [8] | sum of x / factor f32 [groups][8] |
// the sums for weights with zero points or offsets alone. The bytes of a limb are in the order of
// packed_strips.h: lane 4 g + q of a warp wants of each 16 columns (a step) 2 q, 2 q + 8, 2 q + 1, 2 q + 9,
// and of 4 steps 16 bytes:
//   [half of the tile; swapped for odd tokens][q][step of the half][4 bytes]
// The swap keeps neighbouring tokens in other banks.
#pragma once

#include <cuda_fp16.h>

#include "cuda/ptx/shared_memory.h"
#include "linear/packed_strips.h"
#include "linear/strip_codes.h"

namespace quantfuse::linear {

struct XLimbs {
  static constexpr int kLimbs = 3, kLimbBytes = StripLayout::kCols, kTokenBytes = kLimbs * kLimbBytes;
  static constexpr int kRowBytes = 8 * 4;  // of factors or sums
  uint32_t at;                             // shared memory
  int m, tiles, tile_bytes;

  QF_HD static int bytes_of_tile(int m, int groups, bool has_sums) {
    return m * kTokenBytes + kRowBytes * (has_sums ? 1 + groups : 1);
  }
  __device__ uint32_t tile(int i) const { return at + i * tile_bytes; }
  __device__ uint32_t factors(int i) const { return tile(i) + m * kTokenBytes; }
  __device__ uint32_t sums(int i) const { return factors(i) + kRowBytes; }
};

// Starts copying x to where its limbs will be: the tiles warp, warp + kWarps, ..., all of it at once. Through
// L2 alone, because L1 may hold what was there before. Half a warp copies a tile of a token, 8 columns a
// lane.
template <int kWarps>
__device__ void fetch_x(const Matrix& x, int first_column, bool is_aligned, const XLimbs& limbs, int warp,
                        int lane) {
  constexpr int kStep = 2 * kWarps;  // tiles
  const int first = warp + lane / 16 * kWarps;
  const int column = first_column + first * StripLayout::kCols + lane % 16 * 8;
  for (int token = 0; token < limbs.m; ++token) {
    const uint16_t* from = x.row<const uint16_t>(token) + column;
    uint32_t to = limbs.tile(first) + token * XLimbs::kTokenBytes + lane % 16 * 16;
    int left = static_cast<int>(x.cols) - column;
#pragma unroll 2
    for (int tile = first; tile < limbs.tiles; tile += kStep) {
      const int valid = min(max(left, 0), 8);
      if (is_aligned && valid == 8) {
        ptx::copy16_async(to, from);
      } else {
#pragma unroll 1
        for (int i = 0; i < 8; i += 2) {
          const auto bits = [&](int j) { return j < valid ? static_cast<uint32_t>(__ldcg(from + j)) : 0u; };
          ptx::store_shared4(to + i * 2, bits(i) | bits(i + 1) << 16);
        }
      }
      from += kStep * StripLayout::kCols, to += kStep * limbs.tile_bytes, left -= kStep * StripLayout::kCols;
    }
  }
}

// A magnitude as the bits of a float.
template <class T>
__device__ __forceinline__ uint32_t magnitude_as_float(uint32_t magnitude) {
  return __float_as_uint(as_floats(magnitude, T{}).x);
}

template <int kLanes>
__device__ __forceinline__ int sum_over_lanes(int v) {
  if constexpr (kLanes == 32) {
    return __reduce_add_sync(~0u, v);
  } else {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) v += __shfl_xor_sync(~0u, v, distance);
    return v;
  }
}

// Makes limbs of what fetch_x<kWarps> brought to this warp. `F` has kGroups (of a tile), kHasSums, and
// kCodeShift: codes are multiplied as code << kCodeShift, which the factor takes back.
//
// Lane 4 s + q has the four columns that lane q wants of step s: two words, of which the lanes of the upper
// half load the second one first, or four would meet in a bank. Several jobs, a tile of one token each, are
// done side by side: each is a chain of reductions over the warp.
template <int kWarps, class F, class T>
__device__ void convert_x(const XLimbs& limbs, int warp, int lane) {
  constexpr int kJobs = 4, kGroupLanes = 32 / F::kGroups;
  constexpr uint32_t kExponent = 0x7f800000u;
  constexpr uint32_t kToFactor =
      20 + F::kCodeShift;  // binades from the largest; the factor is a normal number
  const int step = lane / 4, q = lane % 4;
  const bool is_upper = lane >= 16;
  const uint32_t load_at = step * 32 + q * 4 + (is_upper ? 16 : 0);
  const uint32_t store_at = q * 16 + step % 4 * 4;
  const uint32_t order =
      is_upper ? 0x1504u : 0x5140u;  // of the bytes, from the pairs in the order of loading
  int tile = warp, token = 0;
  while (tile < limbs.tiles) {
    uint32_t tile_at[kJobs], largest[kJobs], x[kJobs][2];
    int tokens[kJobs], sums[kJobs];
#pragma unroll
    for (int j = 0; j < kJobs; ++j) {  // at the end the last job again
      tile_at[j] = limbs.tile(tile), tokens[j] = token;
      const bool ends_tile = token + 1 == limbs.m;
      const int next_tile = ends_tile ? tile + kWarps : tile;
      if (next_tile < limbs.tiles || j == kJobs - 1) tile = next_tile, token = ends_tile ? 0 : token + 1;
      const uint32_t from = tile_at[j] + tokens[j] * XLimbs::kTokenBytes + load_at;
      x[j][0] = ptx::load_shared4(from), x[j][1] = ptx::load_shared4(is_upper ? from - 16 : from + 16);
      // magnitudes as integers are in order, NaN above infinity above the rest
      const uint32_t pair = __vmaxu2(x[j][0] & 0x7fff7fffu, x[j][1] & 0x7fff7fffu);
      largest[j] = max(pair & 0xffffu, pair >> 16);
    }
    __syncwarp();  // the limbs go where x was
#pragma unroll
    for (int j = 0; j < kJobs; ++j) largest[j] = magnitude_as_float<T>(__reduce_max_sync(~0u, largest[j]));
#pragma unroll
    for (int j = 0; j < kJobs; ++j) {
      // times 2^(20-e) all are under 2^21; the very small need not be as fine
      const uint32_t exponent = max(largest[j] & kExponent, (kToFactor + 1) << 23);
      const float up = __uint_as_float((274u << 23) - exponent);
      const float2 v01 = as_floats(x[j][0], T{}), v23 = as_floats(x[j][1], T{});
      // 1.5 2^23 more has the integer in its low bits; 0x8080 more, bytes x0 + 128, x1 + 128, x2 + 64
      constexpr float kOffset = 12582912.0f + 32896.0f;
      const uint32_t n[4] = {
          __float_as_uint(fmaf(v01.x, up, kOffset)), __float_as_uint(fmaf(v01.y, up, kOffset)),
          __float_as_uint(fmaf(v23.x, up, kOffset)), __float_as_uint(fmaf(v23.y, up, kOffset))};
      if constexpr (F::kHasSums) sums[j] = static_cast<int>(n[0] + n[1] + n[2] + n[3] - 4u * 0x4b408080u);
      const uint32_t low01 = __byte_perm(n[0], n[1], 0x5140), low23 = __byte_perm(n[2], n[3], 0x5140);
      const uint32_t high =
          __byte_perm(__byte_perm(n[0], n[1], 0x0062), __byte_perm(n[2], n[3], 0x0062), order);
      const uint32_t words[XLimbs::kLimbs] = {__byte_perm(low01, low23, order) ^ 0x80808080u,
                                              __byte_perm(low01, low23, order + 0x2222u) ^ 0x80808080u,
                                              (high & 0x3f3f3f3fu) | (~high & 0x40404040u) * 3};
      const int half = lane / 16 ^ (tokens[j] & 1);
      const uint32_t to = tile_at[j] + tokens[j] * XLimbs::kTokenBytes + half * 64 + store_at;
#pragma unroll
      for (int limb = 0; limb < XLimbs::kLimbs; ++limb)
        ptx::store_shared4(to + limb * XLimbs::kLimbBytes, words[limb]);
      const float factor = __uint_as_float(exponent - (kToFactor << 23));
      const uint32_t factor_at = tile_at[j] + limbs.m * XLimbs::kTokenBytes + tokens[j] * 4;
      if (lane == 0)
        ptx::store_shared_float(factor_at, largest[j] < kExponent ? factor : __uint_as_float(~0u));
    }
    if constexpr (F::kHasSums) {
#pragma unroll
      for (int j = 0; j < kJobs; ++j) sums[j] = sum_over_lanes<kGroupLanes>(sums[j]);
#pragma unroll
      for (int j = 0; j < kJobs; ++j) {
        const uint32_t sum_at = tile_at[j] + limbs.m * XLimbs::kTokenBytes +
                                (1 + lane / kGroupLanes) * XLimbs::kRowBytes + tokens[j] * 4;
        if (lane % kGroupLanes == 0)
          ptx::store_shared_float(sum_at, static_cast<float>(sums[j]) * (1 << F::kCodeShift));
      }
    }
  }
  __syncwarp();
}

}  // namespace quantfuse::linear
