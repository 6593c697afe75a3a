// SPDX-License-Identifier: Apache-2.0
//
// Rows on their way through registers: vectors of 16 bytes as floats and back, reductions over the threads
// that share a row, and the codes of several numbers at once. What the kernels that write activations share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx/convert.h"
#include "formats/codes.h"

namespace quantfuse {

inline constexpr int kMaxRowThreads = 1024;  // of a block that shares a row

// n / divisor for n < 2^31 by a multiplication: with 2^shift >= divisor, (2^32 + factor) / 2^(32 + shift)
// exceeds 1 / divisor by less than 2^-32 / divisor.
struct Divider {
  explicit Divider(uint32_t divisor) : divisor(divisor) {
    while ((1ull << shift) < divisor) ++shift;
    factor = static_cast<uint32_t>(((1ull << 32) * ((1ull << shift) - divisor)) / divisor + 1);
  }
  __device__ uint32_t quotient(uint32_t n) const { return (__umulhi(n, factor) + n) >> shift; }
  uint32_t divisor, factor = 0, shift = 0;
};

// ---- Vectors ----

template <class T>
inline constexpr int kVectorWidth = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ void unpack(const uint4& v, float (&x)[4], float) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(words[i]);
}
__device__ __forceinline__ void unpack(const uint4& v, float (&x)[8], bf16) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ void unpack(const uint4& v, float (&x)[8], f16) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}

// Two numbers, rounded, in a word.
__device__ __forceinline__ uint32_t pack2(float low, float high, bf16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack2(float low, float high, f16) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// kCount numbers rounded to T, in words.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Rounded {
  static constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / 4;
  uint32_t words[kWords];
  __device__ __forceinline__ explicit Rounded(const float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) words[i] = __float_as_uint(x[i]);
      else words[i] = pack2(x[2 * i], x[2 * i + 1], T{});
    }
  }
};

// ---- Reductions ----
// Over the `lanes` neighbouring threads of a warp that share something; a power of two up to 32. All threads
// of the warp take part.

__device__ __forceinline__ float max_over_lanes(float x, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}
template <class Number>
__device__ __forceinline__ Number sum_over_lanes(Number x, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

// Of x >= 0, whose bits are ordered as the numbers are.
__device__ __forceinline__ float max_over_warp(float x) {
#if __CUDA_ARCH__ >= 800
  return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x)));
#else
  return max_over_lanes(x, 32);
#endif
}

// Over a block. `parts` is used by nothing else before the next __syncthreads().
__device__ __forceinline__ float max_over_block(float x, float (&parts)[32]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  x = max_over_warp(x);
  if (lane == 0) parts[warp] = x;
  __syncthreads();
  return max_over_warp(lane < blockDim.x / 32 ? parts[lane] : 0.0f);
}
template <class Number>
__device__ __forceinline__ Number sum_over_block(Number x, Number (&parts)[32]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  x = sum_over_lanes(x, 32);
  if (lane == 0) parts[warp] = x;
  __syncthreads();
  return sum_over_lanes(lane < blockDim.x / 32 ? parts[lane] : Number(0), 32);
}

// ---- Codes ----

// 8-bit codes of four numbers, the first in the lowest byte.
template <qf_format Format, bool kHasZero = false>
__device__ __forceinline__ uint32_t encode4(const float* x, float inverse, int zero = 0) {
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __fmul_rn(x[i], inverse);
  if constexpr (Format == QF_INT8) {
    int q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      q[i] = __float2int_rn(v[i]);  // saturates; NaN gives 0
      if (kHasZero) q[i] = is_nan(v[i]) ? 0 : min(max(q[i], -512), 512) + zero;
    }
    return ptx::pack_s8(q[0], q[1], q[2], q[3]);
  } else {
    static_assert(is_fp8(Format));
#if __CUDA_ARCH__ >= 890
    auto pack = [](float low, float high) -> uint32_t {
      return Format == QF_FP8_E4M3 ? ptx::pack_e4m3(low, high) : ptx::pack_e5m2(low, high);
    };
    return pack(v[0], v[1]) | pack(v[2], v[3]) << 16;
#else
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t code = Format == QF_FP8_E4M3 ? E4m3::encode(v[i]) : E5m2::encode(v[i]);
      codes |= code << (8 * i);
    }
    return codes;
#endif
  }
}

}  // namespace quantfuse
