// SPDX-License-Identifier: Apache-2.0
//
// Codes of any format as 16 bytes of an operand of the tensor cores: a unit. 16 signed bytes, 16 E4M3 codes
// as they are, or 8 f16 numbers, which hold every format exactly, less their zero point.
#pragma once

#include <cuda_fp16.h>

#include "cuda/ptx/convert.h"
#include "product/product.h"

namespace quantfuse::product {

// ---- Loads: the codes of a unit, from its first bits on ----

// Codes [k, k + count) of a row that may begin and end anywhere, then zeros.
static __device__ __noinline__ uint4 gather_codes(const uint8_t* row, int64_t k, int count, bool is_4bit) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i >= count) continue;
    if (is_4bit) words[i / 8] |= static_cast<uint32_t>(nibble_at(row, k + i)) << (4 * (i % 8));
    else words[i / 4] |= static_cast<uint32_t>(row[k + i]) << (8 * (i % 4));
  }
  return {words[0], words[1], words[2], words[3]};
}

// kBytes at a multiple of as many.
template <int kBytes>
__device__ __forceinline__ uint4 load_codes(const uint8_t* from) {
  uint4 v = {};
  if constexpr (kBytes == 16) {
    v = *reinterpret_cast<const uint4*>(from);
  } else if constexpr (kBytes == 8) {
    const uint2 half = *reinterpret_cast<const uint2*>(from);
    v.x = half.x, v.y = half.y;
  } else {
    v.x = *reinterpret_cast<const uint32_t*>(from);
  }
  return v;
}

// Codes [k, k + count) of a column of b in order KN as bytes, signed ones of INT4; zeros beyond n.
static __device__ __noinline__ uint4 gather_column(const Operand& o, int64_t k, int count, int64_t col,
                                                   int64_t n) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i >= count || col >= n) continue;
    const auto* row = static_cast<const uint8_t*>(o.codes.data) + (k + i) * o.codes.row_stride;
    const auto code = static_cast<uint8_t>(o.format == QF_INT4 ? int4_at(row, col) : row[col]);
    words[i / 4] |= static_cast<uint32_t>(code) << (8 * (i % 4));
  }
  return {words[0], words[1], words[2], words[3]};
}

// ---- Bytes ----

// Eight nibbles as bytes, in their order.
__device__ __forceinline__ uint2 nibbles_to_bytes(uint32_t word) {
  const uint32_t even = word & 0x0f0f0f0fu, odd = (word >> 4) & 0x0f0f0f0fu;
  return {__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362)};
}
// Four INT4 codes in bytes as INT8: bit 3 times 30 are bits 4 to 7.
__device__ __forceinline__ uint32_t extend_signs(uint32_t word) { return word | (word & 0x08080808u) * 30; }

__device__ __forceinline__ uint4 as_bytes(qf_format format, uint4 codes) {
  if (format != QF_INT4) return codes;
  const uint2 low = nibbles_to_bytes(codes.x), high = nibbles_to_bytes(codes.y);
  return {extend_signs(low.x), extend_signs(low.y), extend_signs(high.x), extend_signs(high.y)};
}

// v[i] byte j becomes v[j] byte i.
__device__ __forceinline__ void transpose_bytes(uint32_t (&v)[4]) {
  const uint32_t a = __byte_perm(v[0], v[1], 0x5140), b = __byte_perm(v[2], v[3], 0x5140);
  const uint32_t c = __byte_perm(v[0], v[1], 0x7362), d = __byte_perm(v[2], v[3], 0x7362);
  v[0] = __byte_perm(a, b, 0x5410), v[1] = __byte_perm(a, b, 0x7632);
  v[2] = __byte_perm(c, d, 0x5410), v[3] = __byte_perm(c, d, 0x7632);
}

// ---- f16 ----

__device__ __forceinline__ uint32_t bits_of(__half2 x) { return *reinterpret_cast<const uint32_t*>(&x); }
__device__ __forceinline__ __half2 half2_of(uint32_t bits) {
  return *reinterpret_cast<const __half2*>(&bits);
}

// Two codes in the high bytes of 16 bits each, times the power of two that makes up for f16's exponent bias.
__device__ __forceinline__ uint32_t halves_of_e4m3(uint32_t codes) {
  const uint32_t magnitude = codes & 0x7f007f00u;
  const uint32_t bits = (codes & 0x80008000u) | magnitude >> 1;
  const uint32_t nan = (magnitude + 0x01000100u) & 0x80008000u;  // of 0x7f alone
  return bits_of(__hmul2(half2_of(bits), __float2half2_rn(256.0f))) | (nan - (nan >> 15));
}
__device__ __forceinline__ uint32_t halves_of_e2m1(uint32_t codes) {
  const uint32_t bits = (codes & 0x08000800u) << 4 | (codes & 0x07000700u) << 1;
  return bits_of(__hmul2(half2_of(bits), __float2half2_rn(16384.0f)));
}
// Four codes in bytes.
__device__ __forceinline__ uint2 halves_of_bytes(qf_format format, uint32_t codes, int zero) {
  if (is_integer(format)) {
    // A byte below 0x64 is 1024 and its value.
    const int lowest = format == QF_INT8 ? -128 : -8;
    const uint32_t raised = codes ^ (format == QF_INT8 ? 0x80808080u : 0x08080808u);
    const __half2 offset = __half2half2(__int2half_rn(1024 - lowest + zero));
    return {bits_of(__hsub2(half2_of(__byte_perm(raised, 0x64646464u, 0x4140)), offset)),
            bits_of(__hsub2(half2_of(__byte_perm(raised, 0x64646464u, 0x4342)), offset))};
  }
#if __CUDA_ARCH__ >= 890
  if (format == QF_FP8_E4M3) {
    return {ptx::unpack_e4m3(static_cast<uint16_t>(codes)),
            ptx::unpack_e4m3(static_cast<uint16_t>(codes >> 16))};
  }
#endif
  const uint2 high = {__byte_perm(codes, 0, 0x1404), __byte_perm(codes, 0, 0x3424)};
  if (format == QF_FP8_E5M2) return high;  // the upper half of an f16
  if (format == QF_FP8_E4M3) return {halves_of_e4m3(high.x), halves_of_e4m3(high.y)};
  return {halves_of_e2m1(high.x), halves_of_e2m1(high.y)};
}

__device__ __forceinline__ uint4 as_halves(qf_format format, uint4 codes, int zero) {
  uint2 bytes = {codes.x, codes.y};
  if (is_packed_4bit(format)) bytes = nibbles_to_bytes(codes.x);
  const uint2 low = halves_of_bytes(format, bytes.x, zero), high = halves_of_bytes(format, bytes.y, zero);
  return {low.x, low.y, high.x, high.y};
}

}  // namespace quantfuse::product
