// SPDX-License-Identifier: Apache-2.0
//
// The epilogue of linear for 8 neighbouring outputs of a token, on a CUDA device: 16 bytes of a 16-bit
// tensor. P is linear::Problem, or another with its epilogue's fields.
#pragma once

#include "cuda/activation.h"
#include "cuda/ptx/global_memory.h"
#include "linear/linear_canonical.h"

namespace quantfuse::linear {

inline constexpr int kUnit = 8;

// Two numbers of 16 bits in a word.
template <class T>
__device__ uint32_t pack_two(float low, float high) {
  T first, second;
  from_float(low, first), from_float(high, second);
  return first.bits | static_cast<uint32_t>(second.bits) << 16;
}
template <class T>
__device__ void unpack_two(uint32_t word, float& low, float& high) {
  low = to_float(T{static_cast<uint16_t>(word)}), high = to_float(T{static_cast<uint16_t>(word >> 16)});
}

template <class T>
__device__ void load_numbers(const T* from, int count, float (&v)[kUnit]) {
  if constexpr (sizeof(T) == 2) {
    if (count == kUnit && reinterpret_cast<uint64_t>(from) % 16 == 0) {
      const uint4 words = *reinterpret_cast<const uint4*>(from);
      unpack_two<T>(words.x, v[0], v[1]), unpack_two<T>(words.y, v[2], v[3]);
      unpack_two<T>(words.z, v[4], v[5]), unpack_two<T>(words.w, v[6], v[7]);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kUnit; ++i) v[i] = i < count ? to_float(from[i]) : 0.0f;
}

// Columns [col, col + count) of a row of any float type.
__device__ __forceinline__ void load_unit(const void* data, DType dtype, int64_t index, int count,
                                          float (&v)[kUnit]) {
  if (dtype == DType::bf16) load_numbers(static_cast<const bf16*>(data) + index, count, v);
  else if (dtype == DType::f16) load_numbers(static_cast<const f16*>(data) + index, count, v);
  else load_numbers(static_cast<const float*>(data) + index, count, v);
}

template <class T>
__device__ void store_numbers(T* to, int count, const float (&v)[kUnit]) {
  if constexpr (sizeof(T) == 2) {
    if (count == kUnit && reinterpret_cast<uint64_t>(to) % 16 == 0) {
      ptx::store16(to, {pack_two<T>(v[0], v[1]), pack_two<T>(v[2], v[3]), pack_two<T>(v[4], v[5]),
                        pack_two<T>(v[6], v[7])});
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    if (i < count) from_float(v[i], to[i]);
  }
}

// As finish_device() for the outputs from `col` on, those of them that there are.
template <class P>
__device__ __forceinline__ void finish_unit(const P& p, float* staged, int64_t row, int64_t col,
                                            float (&v)[kUnit], float (&up)[kUnit]) {
  const int count = static_cast<int>(min(p.n_out - col, int64_t{kUnit}));
  float more[kUnit];
  if (p.bias) {
    load_unit(p.bias.data, p.bias.dtype, col, count, more);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] += more[i];
  }
  activate(p.activation, v);
  if (p.is_gated()) {
    if (p.bias) {
      load_unit(p.bias.data, p.bias.dtype, p.n_out + col, count, more);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) up[i] += more[i];
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] *= up[i];
  }
  if (p.residual) {
    load_unit(p.residual.data, p.residual.dtype, row * p.residual.row_stride + col, count, more);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] += more[i];
  }
  const Matrix& y = p.out.y;
  const int64_t at = row * y.row_stride + col;
  if (staged) {
    store_numbers(staged + row * p.n_out + col, count, v);
  } else if (p.out.is_quantized()) {
    const float inverse = 1.0f / *static_cast<const float*>(p.out.scale.data);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (i < count) static_cast<uint8_t*>(y.data)[at + i] = encode_device_call(p.out.format, v[i] * inverse);
    }
  } else if (y.dtype == DType::bf16) {
    store_numbers(static_cast<bf16*>(y.data) + at, count, v);
  } else if (y.dtype == DType::f16) {
    store_numbers(static_cast<f16*>(y.data) + at, count, v);
  } else {
    store_numbers(static_cast<float*>(y.data) + at, count, v);
  }
}

}  // namespace quantfuse::linear
