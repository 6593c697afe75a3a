// SPDX-License-Identifier: Apache-2.0
//
// Sums of x for weights with offsets, as linear_sums_first_sm75 makes them and the kernels after it add them:
// Problem::x_sums is [tile of k][group of a tile][token, padded] float32.
#pragma once

#include "linear/linear.h"

namespace quantfuse::linear {

// Tokens are padded to what the largest tile of a kernel has, so that no load asks whether there is a token.
inline constexpr int64_t kSumTokens = 128;

// Of kernels that read x_sums.
inline Requirements require_sums(const Problem& p) {
  return Requirements().require(!p.strips.layout.has_offsets || p.x_sums,
                                "the weight has offsets, and the sums of x are to be made first");
}

#ifdef __CUDACC__
// What lane 4 g + q of a warp has beside sums of mma and wgmma: those of tokens 8 i + 2 q and + 1.
template <int kTokens>
struct XSums {
  float2 of_tokens[kTokens / 8];

  // `from`: of a group, and the tile's first token. Through L2 alone, because L1 may hold what was there
  // before.
  __device__ __forceinline__ void load(const float* from, int lane) {
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i)
      of_tokens[i] = __ldcg(reinterpret_cast<const float2*>(from + i * 8) + lane % 4);
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float2& sums : of_tokens) sums = {};
  }
  // totals[4 i ..]: row g, row g + 8 of the tokens.
  __device__ __forceinline__ void add_to(float* totals, const float (&offset)[2]) const {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) {
      const float2& sums = of_tokens[i / 4];
      totals[i] = fmaf(offset[i / 2 % 2], i % 2 ? sums.y : sums.x, totals[i]);
    }
  }
};
#endif

}  // namespace quantfuse::linear
