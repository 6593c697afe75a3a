// SPDX-License-Identifier: Apache-2.0
//
// From the sums of a tile of y to y, for the kernels whose blocks of a cluster split k: the sums lie in
// shared memory as [tokens][stride] floats, a row of them for each token.
#pragma once

#include "cuda/ptx/async_copy.h"
#include "cuda/ptx/cluster.h"
#include "linear/finish_unit.h"

namespace quantfuse::linear {

// The sums of some tokens of a tile: `parts` of them, [tokens][stride] each, to be added in this order.
struct TileSums {
  const float* data;
  int parts, first_token, tokens;
};

template <int kStride>
__device__ __forceinline__ void add_parts(const TileSums& sums, int offset, float (&v)[kUnit]) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) v[i] = sums.data[offset + i];
#pragma unroll 4
  for (int part = 1; part < sums.parts; ++part) {
    const float* more = sums.data + part * sums.tokens * kStride + offset;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] += more[i];
  }
}

// y of the tile whose first token and first row of the weight these are, by all of `threads`.
template <int kRows, int kStride>
__device__ __forceinline__ void finish_tile(const Problem& p, float* staged, int64_t first_token,
                                            int64_t first_row, const TileSums& sums, int thread,
                                            int threads) {
  const int rows = p.weight.is_gated ? 2 * kUnit : kUnit;  // of the weight, for a unit of y
  const int units = kRows / rows;                          // of a token
  first_token += sums.first_token;
  const int64_t first_col = first_row / rows * kUnit;
#pragma unroll 1
  for (int i = thread; i < sums.tokens * units; i += threads) {
    const int token = i / units, unit = i % units;
    const int64_t row = first_token + token, col = first_col + unit * kUnit;
    if (row >= p.m || col >= p.n_out) continue;
    const int offset = token * kStride + unit * rows;
    float v[kUnit], up[kUnit] = {};
    add_parts<kStride>(sums, offset, v);
    if (p.weight.is_gated) add_parts<kStride>(sums, offset + kUnit, up);
    finish_unit(p, staged, row, col, v, up);
  }
}

// How the ranks of a cluster add their sums of a tile: each sends every other the sums of that one's tokens,
// and adds what it gets in the order of the ranks, which is the order of k.
template <int kTokens, int kStride>
struct Exchange {
  static constexpr int inbox_bytes(int splits) { return (kTokens + splits) * kStride * 4; }
  uint32_t totals, inbox, arrived;  // in shared memory: what is sent, what comes, the barrier that counts it
  int splits, rank;

  __device__ int first_token(int of) const { return kTokens * of / splits; }
  __device__ uint32_t bytes_of(int tokens) const { return static_cast<uint32_t>(tokens * kStride * 4); }
  // By one thread, before any rank sends.
  __device__ void expect() const {
    ptx::barrier_expect(arrived, splits * bytes_of(first_token(rank + 1) - first_token(rank)));
  }
  // By threads 0 .. splits - 1 and more, when the totals are stored and all ranks are ready for them.
  __device__ TileSums run(int thread) const {
    if (thread < splits) {
      const int first = first_token(thread), tokens = first_token(thread + 1) - first;
      ptx::copy_to_block(inbox + bytes_of(rank * tokens), totals + bytes_of(first), bytes_of(tokens), arrived,
                         thread);
    }
    ptx::barrier_wait(arrived, 0);
    const int first = first_token(rank);
    return {static_cast<const float*>(__cvta_shared_to_generic(inbox)), splits, first,
            first_token(rank + 1) - first};
  }
};

}  // namespace quantfuse::linear
