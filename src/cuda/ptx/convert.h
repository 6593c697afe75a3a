// SPDX-License-Identifier: Apache-2.0
//
// cvt: numbers narrowed and packed several at a time.
#pragma once

#include <cstdint>

#include "quantfuse/quantfuse.h"

namespace quantfuse::ptx {

// Four integers saturated to 8 bits, the first in the lowest byte (cvt.pack, PTX ISA 6.5, sm_72).
__device__ __forceinline__ uint32_t pack_s8(int a, int b, int c, int d) {
  uint32_t high, all;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(high) : "r"(d), "r"(c));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(b), "r"(a), "r"(high));
  return all;
}

// Two floats to nearest even, beyond the largest the largest; NaN gives 0x7f whatever its sign (PTX ISA 8.1,
// sm_89).
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
__device__ __forceinline__ uint16_t pack_e4m3(float low, float high) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
__device__ __forceinline__ uint16_t pack_e5m2(float low, float high) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
// Two floats as codes of 8 bits, to nearest even and saturated. NaN is 0 as an integer.
template <qf_format kFormat>
__device__ __forceinline__ uint16_t pack_codes(float low, float high) {
  if constexpr (kFormat == QF_FP8_E4M3) return pack_e4m3(low, high);
  else if constexpr (kFormat == QF_FP8_E5M2) return pack_e5m2(low, high);
  else return static_cast<uint16_t>(pack_s8(__float2int_rn(low), __float2int_rn(high), 0, 0));
}
// Two E4M3 numbers as f16, which has them all.
__device__ __forceinline__ uint32_t unpack_e4m3(uint16_t codes) {
  uint32_t numbers;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(numbers) : "h"(codes));
  return numbers;
}
#endif

}  // namespace quantfuse::ptx
