// SPDX-License-Identifier: Apache-2.0
//
// The approximate functions of the special function unit, without the instructions that would keep subnormal
// numbers (PTX ISA 1.4): 2^x within 2 units in the last place, 1 / x within 1.
#pragma once

namespace quantfuse::ptx {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace quantfuse::ptx
