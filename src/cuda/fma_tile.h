// SPDX-License-Identifier: Apache-2.0
//
// A tile of a product in float32, for the kernels that must take anything: 16 kRows rows by 128 columns, 256
// threads, 16 steps of the summed dimension at a time from shared memory.
//
//   thread (tx, ty):  rows ty, ty + 16, ...   columns 4 tx .. 4 tx + 3 and 64 more
//
// The two halves of its columns let a thread have a gate and its up projection.
#pragma once

#include <cstdint>

namespace quantfuse {

template <int kRows_>
struct FmaTile {
  static constexpr int kRows = kRows_, kTileRows = 16 * kRows, kTileCols = 128, kSteps = 16, kThreads = 256;
  struct Shared {
    float a[kSteps][kTileRows + 1];
    alignas(16) float b[kSteps][kTileCols];
  };
  float sums[kRows][2][4] = {};

  __device__ static int tx() { return threadIdx.x % 16; }
  __device__ static int ty() { return threadIdx.x / 16; }

  __device__ void add(const Shared& s) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float4 b0 = *reinterpret_cast<const float4*>(&s.b[step][4 * tx()]);
      const float4 b1 = *reinterpret_cast<const float4*>(&s.b[step][64 + 4 * tx()]);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float a = s.a[step][ty() + 16 * i];
        float* first = sums[i][0];
        float* second = sums[i][1];
        first[0] = fmaf(a, b0.x, first[0]), first[1] = fmaf(a, b0.y, first[1]);
        first[2] = fmaf(a, b0.z, first[2]), first[3] = fmaf(a, b0.w, first[3]);
        second[0] = fmaf(a, b1.x, second[0]), second[1] = fmaf(a, b1.y, second[1]);
        second[2] = fmaf(a, b1.z, second[2]), second[3] = fmaf(a, b1.w, second[3]);
      }
    }
  }
};

}  // namespace quantfuse
