// SPDX-License-Identifier: Apache-2.0
//
// The codes of packed_strips.h as the 16-bit numbers that the tensor cores multiply: a step of 16 columns,
// which is one word of 4-bit codes or two of 8-bit ones a lane, becomes four registers of two numbers.
//
// Every code less an integer zero point is a number that bf16 and f16 hold exactly. Integers are made by
// bits: a magic number whose last place is worth 1 has the code in its lowest bits, and one subtraction takes
// off the magic number, the offset of the stored code and the zero point. Small floats are made by bits too:
// their exponent and mantissa at the place of the larger type's are the value times a power of two.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/dtype.h"
#include "cuda/ptx/logic.h"
#include "formats/numbers.h"

namespace quantfuse {

// Two numbers of T in a register.
template <class T>
struct Pair;
template <>
struct Pair<bf16> {
  using Cuda = __nv_bfloat162;
  static constexpr int kMantissaBits = 7, kBias = 127;
  static constexpr uint32_t kMagicBits = 0x43004300u;  // 128
  static constexpr float kMagic = 128.0f;
  __device__ static Cuda of(float v) { return __float2bfloat162_rn(v); }
};
template <>
struct Pair<f16> {
  using Cuda = __half2;
  static constexpr int kMantissaBits = 10, kBias = 15;
  static constexpr uint32_t kMagicBits = 0x64006400u;  // 1024
  static constexpr float kMagic = 1024.0f;
  __device__ static Cuda of(float v) { return __float2half2_rn(v); }
};

template <class T>
__device__ __forceinline__ typename Pair<T>::Cuda as_pair(uint32_t bits) {
  return *reinterpret_cast<const typename Pair<T>::Cuda*>(&bits);
}
template <class V>
__device__ __forceinline__ uint32_t bits_of(V pair) {
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <class T>
__device__ __forceinline__ uint32_t pair_of(float v) {
  return bits_of(Pair<T>::of(v));
}
template <class T>
__device__ __forceinline__ uint32_t subtract_pair(uint32_t a, uint32_t b) {
  return bits_of(__hsub2(as_pair<T>(a), as_pair<T>(b)));
}
template <class T>
__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b) {
  return bits_of(__hmul2(as_pair<T>(a), as_pair<T>(b)));
}

template <qf_format Format, class T>
struct StripCodes {
  static constexpr bool kIs4Bit = Format == QF_INT4 || Format == QF_FP4_E2M1;
  static constexpr bool kHasZeroPoints = is_integer(Format);
  static constexpr int kStepWords = kIs4Bit ? 1 : 2;
  static constexpr int kTileVectors = kIs4Bit ? 2 : 4;  // of 16 bytes a lane
  // Whether a pair's magic number leaves room for all 8 bits of a code.
  static constexpr bool kHasByteMagic = Pair<T>::kMantissaBits >= 8;

  // What decode() subtracts for a zero point.
  __device__ static uint32_t offset(float zero) {
    if constexpr (Format == QF_INT4) return pair_of<T>(Pair<T>::kMagic + 8.0f + zero);
    if constexpr (Format == QF_INT8)
      return pair_of<T>(kHasByteMagic ? Pair<T>::kMagic + 128.0f + zero : zero);
    return 0;
  }

  // Rows g and g + 8 have offsets of their own.
  __device__ __forceinline__ static void decode(const uint32_t* words, const uint32_t (&offsets)[2],
                                                uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // register i: row i % 2, columns 2q and 2q + 1, or 8 more
      if constexpr (Format == QF_INT4) {
        a[i] = subtract_pair<T>(ptx::mask_and_join(words[0] >> (4 * i), 0x000f000fu, Pair<T>::kMagicBits),
                                offsets[i % 2]);
      } else if constexpr (Format == QF_INT8) {
        const uint32_t v = words[i % 2] >> (i < 2 ? 0 : 8);
        if constexpr (kHasByteMagic) {
          a[i] = subtract_pair<T>(ptx::mask_and_join(v ^ 0x00800080u, 0x00ff00ffu, Pair<T>::kMagicBits),
                                  offsets[i % 2]);
        } else {  // 7 bits, and the sign bit as what is subtracted: 128, or 256
          const uint32_t low = ptx::mask_and_join(v, 0x007f007fu, Pair<T>::kMagicBits);
          const uint32_t sign = ptx::mask_and_join(v, 0x00800080u, Pair<T>::kMagicBits);
          a[i] = subtract_pair<T>(subtract_pair<T>(low, sign), offsets[i % 2]);
        }
      } else if constexpr (Format == QF_FP4_E2M1) {
        a[i] = small_float<1, 1>(words[0] << (12 - 4 * i));
      } else if constexpr (Format == QF_FP8_E4M3) {
        a[i] = small_float<3, 7>(words[i % 2] << (i < 2 ? 8 : 0));
      } else {
        a[i] = small_float<2, 15>(words[i % 2] << (i < 2 ? 8 : 0));
      }
    }
  }

 private:
  // Two small floats at the top of either half.
  template <int kMantissa, int kBias>
  __device__ __forceinline__ static uint32_t small_float(uint32_t v) {
    constexpr int kExponent = Format == QF_FP4_E2M1 ? 2 : Format == QF_FP8_E4M3 ? 4 : 5;
    constexpr int kBits = kExponent + kMantissa;  // below the sign
    constexpr uint32_t kMagnitude = ((1u << kBits) - 1) << (15 - kBits);
    constexpr int kShift = 15 - kExponent - Pair<T>::kMantissaBits;  // of the exponent, to its place
    const uint32_t sign = v & 0x80008000u;
    const uint32_t magnitude = (v & (kMagnitude | kMagnitude << 16)) >> kShift;
    if constexpr (kBias == Pair<T>::kBias) return sign | magnitude;
    const float factor = __uint_as_float((127u + Pair<T>::kBias - kBias) << 23);  // 2^(difference of biases)
    return multiply_pair<T>(sign | magnitude, pair_of<T>(factor));
  }
};

}  // namespace quantfuse
