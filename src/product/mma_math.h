// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of a product of codes: what a unit of 16 bytes of shared memory holds, how the tensor cores
// multiply it, and whether its sums are promoted. Arch is that of product_mma_sm80 or product_mma_sm75.
//
//   IntegerSums        signed bytes, int32 over all of k; zero points by the sums of rows and columns
//   IntegerGroups      the same by parts of k, each promoted to float32; zero points of b alone, as bytes
//   IntegerWideZeros   the same with zero points of 32 bits, of both
//   Fp8                E4M3 as it is, promoted every 128 columns: the tensor cores add FP8 products with less
//                      than float32's precision
//   Halves             f16, which every format is exactly: FP8 where there is no mma of it, mixed formats
#pragma once

#include "cuda/ptx/mma.h"
#include "cuda/ptx/mma_int8.h"
#include "product/mma_units.h"

namespace quantfuse::product_mma {
using namespace product;
namespace {

template <class Arch>
struct Bytes {
  static constexpr int kUnitCodes = 16, kStepColumns = 32, kTileColumns = 128;
  static constexpr bool kHasAsyncCopies = Arch::kHasAsyncCopies, kSubtractsZeros = false;
  __device__ __forceinline__ static uint4 unit(qf_format format, uint4 codes, int) {
    return as_bytes(format, codes);
  }
  // body(format) as a constant: all of 8 bits are the same here.
  template <class Body>
  __device__ __forceinline__ static void with_format(qf_format format, const Body& body) {
    if (format == QF_INT4) body(std::integral_constant<qf_format, QF_INT4>{});
    else body(std::integral_constant<qf_format, QF_INT8>{});
  }
};

template <class Arch>
struct IntegerSums : Bytes<Arch> {
  using Sum = int;
  static constexpr bool kPromotes = false, kHasWideZeros = true;
  static constexpr int kInitial = 0;
  __device__ __forceinline__ static void multiply(int (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                  uint32_t b1) {
    Arch::multiply_bytes(c, a, b0, b1);
  }
};

// A sum of 128 products, (code - zero) of 9 bits times a code, is below 2^22: added to the bits of 1.5 * 2^23
// it is the low part of a float32.
template <class Arch>
struct IntegerGroups : IntegerSums<Arch> {
  static constexpr bool kPromotes = true, kHasWideZeros = false;
  static constexpr int kInitial = 0x4b400000;
  __device__ __forceinline__ static float to_float(int sum) {
    return float_from_bits(static_cast<uint32_t>(sum)) - 12582912.0f;
  }
};

template <class Arch>
struct IntegerWideZeros : IntegerGroups<Arch> {
  static constexpr bool kHasWideZeros = true;
};

template <class Arch>
struct Fp8 : Bytes<Arch> {
  using Sum = float;
  static constexpr bool kPromotes = true;
  static constexpr float kInitial = 0.0f;
  __device__ __forceinline__ static void multiply([[maybe_unused]] float (&c)[4],
                                                  [[maybe_unused]] const uint32_t (&a)[4],
                                                  [[maybe_unused]] uint32_t b0,
                                                  [[maybe_unused]] uint32_t b1) {
#if __CUDA_ARCH__ >= 890  // runs_fp8() asks whether the code that would run has it
    ptx::mma_m16n8k32_e4m3(c, a, b0, b1);
#endif
  }
  __device__ __forceinline__ static float to_float(float sum) { return sum; }
};

template <class Arch>
struct Halves {
  using Sum = float;
  static constexpr int kUnitCodes = 8, kStepColumns = 16, kTileColumns = 64;
  static constexpr bool kHasAsyncCopies = false, kSubtractsZeros = true, kPromotes = true;
  static constexpr float kInitial = 0.0f;
  __device__ __forceinline__ static uint4 unit(qf_format format, uint4 codes, int zero) {
    return as_halves(format, codes, zero);
  }
  template <class Body>
  __device__ __forceinline__ static void with_format(qf_format format, const Body& body) {
    if (format == QF_INT8) body(std::integral_constant<qf_format, QF_INT8>{});
    else if (format == QF_INT4) body(std::integral_constant<qf_format, QF_INT4>{});
    else if (format == QF_FP8_E4M3) body(std::integral_constant<qf_format, QF_FP8_E4M3>{});
    else if (format == QF_FP8_E5M2) body(std::integral_constant<qf_format, QF_FP8_E5M2>{});
    else body(std::integral_constant<qf_format, QF_FP4_E2M1>{});
  }
  __device__ __forceinline__ static void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                  uint32_t b1) {
    Arch::multiply_halves(c, a, b0, b1);
  }
  __device__ __forceinline__ static float to_float(float sum) { return sum; }
};

// (sum a b) less what zero points of 32 bits take from it, in 64 bits. `count`: the columns that were added.
__device__ inline int64_t subtract_zeros(int64_t sum, int row_sum, int column_sum, int a_zero, int b_zero,
                                         int count) {
  return sum - int64_t{b_zero} * row_sum - a_zero * (column_sum - int64_t{count} * b_zero);
}

}  // namespace
}  // namespace quantfuse::product_mma
