// SPDX-License-Identifier: Apache-2.0
//
// The Hadamard rotation of formats/hadamard.h, with the same sums in the same order, of numbers in registers
// and of a row in shared memory.
//
// In registers: a thread has kWidth neighbouring numbers, and the threads of a warp follow each other. Steps
// below kWidth are the thread's own; for the others it gets its partner's number, and makes of the two the
// sum or, in the upper lane of the pair, the difference.
//
// In shared memory: a pass takes kRadix numbers `stride` apart into registers, and does log2(kRadix) steps on
// them; with kRadix = 8 a row of 4096 numbers goes through shared memory four times. One number in nine of it
// is padding: then the threads of a warp are on different banks for strides of 1, 8 and from 64 on.
#pragma once

#include "formats/hadamard.h"

namespace quantfuse {

// Runs of `size` numbers, which lie in whole groups of lanes: size <= 32 * kWidth. All lanes take part.
template <int kVecs, int kWidth>
__device__ __forceinline__ void rotate_vectors(float (&v)[kVecs][kWidth], int size) {
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
#pragma unroll
    for (int step = 1; step < kWidth; step *= 2) {
      if (step >= size) break;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if ((j & step) == 0) hadamard_step(v[i][j], v[i][j + step]);
      }
    }
  }
  for (int distance = 1; distance * kWidth < size; distance *= 2) {
    const uint32_t sign = (threadIdx.x & static_cast<unsigned>(distance)) != 0 ? 0x80000000u : 0;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float partner = __shfl_xor_sync(~0u, v[i][j], distance);
        v[i][j] = partner + __uint_as_float(__float_as_uint(v[i][j]) ^ sign);
      }
    }
  }
  const float norm = hadamard_norm(size);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) v[i][j] *= norm;
  }
}

struct PaddedRow {
  float* numbers;
  __device__ __forceinline__ float& operator[](int i) const { return numbers[i + (i >> 3)]; }
  static size_t bytes(int64_t n) { return static_cast<size_t>(n + n / 8 + 1) * sizeof(float); }
};

template <int kRadix>
__device__ __forceinline__ void rotate_pass(const PaddedRow& row, int n, int stride) {
  for (int t = threadIdx.x; t < n / kRadix; t += blockDim.x) {
    const int first = (t & ~(stride - 1)) * kRadix + (t & (stride - 1));
    float v[kRadix];
#pragma unroll
    for (int i = 0; i < kRadix; ++i) v[i] = row[first + i * stride];
#pragma unroll
    for (int step = 1; step < kRadix; step *= 2) {
#pragma unroll
      for (int i = 0; i < kRadix; ++i) {
        if ((i & step) == 0) hadamard_step(v[i], v[i + step]);
      }
    }
#pragma unroll
    for (int i = 0; i < kRadix; ++i) row[first + i * stride] = v[i];
  }
  __syncthreads();
}

// Every `size` neighbours of the row's n numbers, which all threads of the block have written and see. The
// factor hadamard_norm(size) is left to whoever reads them.
__device__ __forceinline__ void rotate_row(const PaddedRow& row, int n, int size) {
  int stride = 1;
  for (; stride * 8 <= size; stride *= 8) rotate_pass<8>(row, n, stride);
  if (stride * 4 <= size) rotate_pass<4>(row, n, stride);
  else if (stride * 2 <= size) rotate_pass<2>(row, n, stride);
}

}  // namespace quantfuse
