// SPDX-License-Identifier: Apache-2.0
//
// wgmma of bytes (PTX ISA 8.0, sm_90a): d[64, n] += a[64, 32] b[32, n], operands in shared memory as rows of
// k, or a in registers; d in registers (ptx/wgmma.h says how).
#pragma once

#include <cstdint>

#include "cuda/ptx/wgmma.h"

namespace quantfuse::ptx {

// clang-format off
#define QF_NUMBERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define QF_NUMBERS_16 QF_NUMBERS_8 \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define QF_NUMBERS_24 QF_NUMBERS_16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23"
#define QF_NUMBERS_32 QF_NUMBERS_16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define QF_NUMBERS_64 QF_NUMBERS_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define QF_NUMBERS_96 QF_NUMBERS_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define QF_NUMBERS_128 QF_NUMBERS_96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define QF_SUMS_4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define QF_SUMS_8(c, i) QF_SUMS_4(c, i), QF_SUMS_4(c, i + 4)
#define QF_SUMS_16(c, i) QF_SUMS_8(c, i), QF_SUMS_8(c, i + 8)
#define QF_SUMS_24(c, i) QF_SUMS_16(c, i), QF_SUMS_8(c, i + 16)
#define QF_SUMS_32(c, i) QF_SUMS_16(c, i), QF_SUMS_16(c, i + 16)
#define QF_SUMS_64(c, i) QF_SUMS_32(c, i), QF_SUMS_32(c, i + 32)
#define QF_SUMS_96(c, i) QF_SUMS_64(c, i), QF_SUMS_32(c, i + 64)
#define QF_SUMS_128(c, i) QF_SUMS_64(c, i), QF_SUMS_64(c, i + 64)

// `sums` registers for n = 2 * sums, then a, b, and whether to add.
#define QF_WGMMA(n, sums, types, constraint, tail, A, B, ADDS)                                           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADDS ", 0;\n"                                       \
               "wgmma.mma_async.sync.aligned.m64n" #n "k32." types " {" QF_NUMBERS_##sums "}, %" #A ", %" #B \
               ", p" tail ";\n}"                                                                          \
               : QF_SUMS_##sums(constraint, 0)                                                            \
               : "l"(a), "l"(b), "r"(adds))
#define QF_WGMMA_OF_FORMATS(n, sums, A, B, ADDS)                                                          \
  __device__ __forceinline__ void wgmma_int8(int32_t (&d)[sums], uint64_t a, uint64_t b, int adds) {      \
    QF_WGMMA(n, sums, "s32.s8.s8", "+r", "", A, B, ADDS);                                                 \
  }                                                                                                       \
  __device__ __forceinline__ void wgmma_e4m3(float (&d)[sums], uint64_t a, uint64_t b, int adds) {        \
    QF_WGMMA(n, sums, "f32.e4m3.e4m3", "+f", ", 1, 1", A, B, ADDS);                                       \
  }
QF_WGMMA_OF_FORMATS(16, 8, 8, 9, 10)
QF_WGMMA_OF_FORMATS(32, 16, 16, 17, 18)
QF_WGMMA_OF_FORMATS(48, 24, 24, 25, 26)
QF_WGMMA_OF_FORMATS(64, 32, 32, 33, 34)
QF_WGMMA_OF_FORMATS(128, 64, 64, 65, 66)
QF_WGMMA_OF_FORMATS(192, 96, 96, 97, 98)
QF_WGMMA_OF_FORMATS(256, 128, 128, 129, 130)

// E5M2 on either side, or both.
#define QF_WGMMA_OF_E5M2(name, types)                                                                     \
  __device__ __forceinline__ void name(float (&d)[64], uint64_t a, uint64_t b, int adds) {                \
    QF_WGMMA(128, 64, "f32." types, "+f", ", 1, 1", 64, 65, 66);                                          \
  }
QF_WGMMA_OF_E5M2(wgmma_e5m2, "e5m2.e5m2")
QF_WGMMA_OF_E5M2(wgmma_e5m2_e4m3, "e5m2.e4m3")
QF_WGMMA_OF_E5M2(wgmma_e4m3_e5m2, "e4m3.e5m2")

// The same with a in registers: of rows g and g + 8 (t % 32 = 4 g + q) the columns 4 q .. 4 q + 3 in the
// first two, 16 + 4 q .. in the others.
#define QF_WGMMA_OF_REGISTERS(n, sums, A0, A1, A2, A3, B, ADDS)                                           \
  __device__ __forceinline__ void wgmma_int8(int32_t (&d)[sums], const uint32_t (&a)[4], uint64_t b,      \
                                             int adds) {                                                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADDS ", 0;\n"                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" QF_NUMBERS_##sums "}, {%" #A0   \
                 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p;\n}"                                        \
                 : QF_SUMS_##sums("+r", 0)                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));                        \
  }
QF_WGMMA_OF_REGISTERS(16, 8, 8, 9, 10, 11, 12, 13)
QF_WGMMA_OF_REGISTERS(32, 16, 16, 17, 18, 19, 20, 21)
QF_WGMMA_OF_REGISTERS(64, 32, 32, 33, 34, 35, 36, 37)
QF_WGMMA_OF_REGISTERS(128, 64, 64, 65, 66, 67, 68, 69)

// The same of BF16 or FP16: d[64, 256] += a[64, 16] b[16, 256].
#define QF_WGMMA_HALVES(type)                                                                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                             \
               "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" QF_NUMBERS_128           \
               "}, %128, %129, p, 1, 1, 0, 0;\n}"                                                         \
               : QF_SUMS_128("+f", 0)                                                                     \
               : "l"(a), "l"(b), "r"(adds))
template <class T>
__device__ __forceinline__ void wgmma_halves(float (&d)[128], uint64_t a, uint64_t b, int adds) {
  if constexpr (__is_same(T, bf16)) QF_WGMMA_HALVES("bf16");
  else QF_WGMMA_HALVES("f16");
}
// clang-format on

#undef QF_WGMMA_HALVES
#undef QF_WGMMA_OF_REGISTERS
#undef QF_WGMMA_OF_E5M2
#undef QF_WGMMA_OF_FORMATS
#undef QF_WGMMA
#undef QF_SUMS_128
#undef QF_SUMS_96
#undef QF_SUMS_64
#undef QF_SUMS_32
#undef QF_SUMS_24
#undef QF_SUMS_16
#undef QF_SUMS_8
#undef QF_SUMS_4
#undef QF_NUMBERS_128
#undef QF_NUMBERS_96
#undef QF_NUMBERS_64
#undef QF_NUMBERS_32
#undef QF_NUMBERS_24
#undef QF_NUMBERS_16
#undef QF_NUMBERS_8

}  // namespace quantfuse::ptx
