// SPDX-License-Identifier: Apache-2.0
//
// 16 bytes to global memory in one instruction: of a store of uint4 the compiler may make four.
#pragma once

#include <cstdint>

namespace quantfuse::ptx {

__device__ __forceinline__ void store16(void* to, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

}  // namespace quantfuse::ptx
