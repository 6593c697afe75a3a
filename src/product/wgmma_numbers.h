// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of products on wgmma share: blocks of k, and the instruction for a format.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/wgmma_bytes.h"
#include "formats/codes.h"

namespace quantfuse::product {

constexpr int kBlockK = 128, kSteps = 4;  // 128 bytes: what a swizzled row has; of 32, what wgmma takes

enum class Scaling { whole, blocks };  // scales that are the same for all k, or one for each 128 of k

// Of the operand whose rows are wgmma's rows, and of the other one: INT8 both, E4M3 or E5M2 each, or INT4,
// decoded to registers, and INT8.
template <qf_format kRows, qf_format kColumns = kRows>
struct Numbers {
  static constexpr bool kIsInteger = is_integer(kRows), kIsExact = kRows == QF_INT8;
  static constexpr bool kDecodes = kRows == QF_INT4;
  using Sum = std::conditional_t<kIsInteger, int32_t, float>;
  // d[64, 2 kSums] (+)= 32 columns of 64 rows, times those of 2 kSums rows.
  template <int kSums, class Rows>
  __device__ static __forceinline__ void multiply(Sum (&d)[kSums], const Rows& rows, uint64_t columns,
                                                  int adds) {
    constexpr bool kIsE5m2[2] = {kRows == QF_FP8_E5M2, kColumns == QF_FP8_E5M2};
    if constexpr (kIsInteger) ptx::wgmma_int8(d, rows, columns, adds);
    else if constexpr (kIsE5m2[0] && kIsE5m2[1]) ptx::wgmma_e5m2(d, rows, columns, adds);
    else if constexpr (kIsE5m2[0]) ptx::wgmma_e5m2_e4m3(d, rows, columns, adds);
    else if constexpr (kIsE5m2[1]) ptx::wgmma_e4m3_e5m2(d, rows, columns, adds);
    else ptx::wgmma_e4m3(d, rows, columns, adds);
  }
};

// The same without promotion: all of k is added in the tensor cores, as the caller allows.
template <class N>
struct Unpromoted : N {
  static constexpr bool kIsExact = true;
};

// Integer sums are exact for as long as they last. All else is promoted to totals, because the tensor cores
// add FP8 products with fewer bits than float32 has; so are those of INT4, most of which have groups.
template <class N, Scaling kScaling>
inline constexpr bool kPromotes = !N::kIsExact || kScaling == Scaling::blocks;

}  // namespace quantfuse::product
