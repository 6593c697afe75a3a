// SPDX-License-Identifier: Apache-2.0
//
// The Hadamard rotation of a row in shared memory: formats/hadamard.h, with the same sums in the same order.
//
// A pass takes kRadix numbers `stride` apart into registers, and does log2(kRadix) steps on them; with kRadix
// = 8 a row of 4096 numbers goes through shared memory four times. One number in nine of it is padding: then
// the threads of a warp are on different banks for strides of 1, 8 and from 64 on.
#pragma once

#include "formats/hadamard.h"

namespace quantfuse {

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
