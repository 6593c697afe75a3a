// SPDX-License-Identifier: Apache-2.0
//
// The codes of packed_strips.h as the 16-bit numbers that the tensor cores multiply: a step of 16 columns,
// which is one word of 4-bit codes or two of 8-bit ones a lane, becomes four registers of two numbers.
//
// Every code less an integer zero point is a number that bf16 and f16 hold exactly. Integers are made by
// bits: a magic number whose last place is worth 1 has the code in its lowest bits, and one subtraction takes
// off the magic number, the offset of the stored code and the zero point. Small floats are made by bits too:
// their exponent and mantissa at the place of the larger type's are the value times a power of two, which one
// multiplication takes off. A byte scale is a power of two as well, and bf16 has its range: there it is part
// of the same factor, and sums need no scaling.
//
// The numbers of a codebook are looked up. Those of IQ4_NL, and of FP4 BNB in units of codebook_unit(), are
// exact in 16 bits too; NF4's are rounded to the type of x.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "core/choose.h"
#include "core/dtype.h"
#include "cuda/ptx/logic.h"
#include "cuda/ptx/shared_memory.h"
#include "formats/codes.h"
#include "formats/numbers.h"
#include "linear/mxfp4_strips.h"

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

// The two numbers of a register.
__device__ __forceinline__ float2 as_floats(uint32_t pair, bf16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ __forceinline__ float2 as_floats(uint32_t pair, f16) {
  return {__half2float(__ushort_as_half(static_cast<uint16_t>(pair))),
          __half2float(__ushort_as_half(static_cast<uint16_t>(pair >> 16)))};
}

// The byte scales of a lane's rows g and g + 8, a byte a group.
struct ByteScales {
  uint32_t rows[2];

  // `from`: behind the codes of a tile in shared memory.
  __device__ __forceinline__ static ByteScales load(uint32_t from, int lane) {
    const float2 two = ptx::load_shared_float2(from + lane / 4 * 8);
    return {{__float_as_uint(two.x), __float_as_uint(two.y)}};
  }
  __device__ float scale(int row, int group) const {
    constexpr int kOfFloat = linear::kByteScaleBias - 127;
    return __uint_as_float(((rows[row] >> (8 * group) & 255u) - kOfFloat) << 23);
  }
  // The byte as the exponent field of a float: kByteScaleBias - 127 binades more than the scale.
  __device__ __forceinline__ float as_exponent(int row, int group) const {
    constexpr uint32_t kField = 0x7f800000u;
    return __uint_as_float((group == 3 ? rows[row] >> 1 : rows[row] << (23 - 8 * group)) & kField);
  }
  // The factor of StripCodes<QF_FP4_E2M1, bf16>::decode, twice.
  __device__ __forceinline__ uint32_t factor(int row, int group) const {
    const uint32_t two = group % 2 ? rows[row] >> 1 & 0x7f807f80u : (rows[row] & 0x00ff00ffu) << 7;
    return __byte_perm(two, 0, group < 2 ? 0x1010 : 0x3232);
  }
};

// f(format): the one whose code is compiled for `format`.
template <class F>
void choose_strip_format(qf_format format, const F& f) {
  choose_value<QF_INT4, QF_FP4_E2M1, QF_NF4, QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2>(device_code_path(format), f);
}

template <qf_format Format, class T>
struct StripCodes {
  __device__ explicit StripCodes(qf_format) {}
  static constexpr bool kIs4Bit = Format == QF_INT4 || Format == QF_FP4_E2M1;
  static constexpr bool kHasZeroPoints = is_integer(Format);
  static constexpr int kStepWords = kIs4Bit ? 1 : 2;
  static constexpr int kTileVectors = kIs4Bit ? 2 : 4;  // of 16 bytes a lane
  static constexpr bool kMayHaveByteScales = Format == QF_FP4_E2M1;
  static constexpr bool kFoldsByteScales = kMayHaveByteScales && std::is_same_v<T, bf16>;
  // Whether a pair's magic number leaves room for all 8 bits of a code.
  static constexpr bool kHasByteMagic = Pair<T>::kMantissaBits >= 8;

  // What decode() subtracts for a zero point, or multiplies with where there is none.
  __device__ static uint32_t term(float zero = 0) {
    if constexpr (Format == QF_INT4) return pair_of<T>(Pair<T>::kMagic + 8.0f + zero);
    if constexpr (Format == QF_INT8)
      return pair_of<T>(kHasByteMagic ? Pair<T>::kMagic + 128.0f + zero : zero);
    constexpr int kBias = Format == QF_FP4_E2M1 ? 1 : Format == QF_FP8_E4M3 ? 7 : 15;
    return pair_of<T>(__uint_as_float((127u + Pair<T>::kBias - kBias) << 23));  // 2^(difference of biases)
  }

  // decode() of E2M1 without its multiplication: the numbers times 2^(difference of biases).
  __device__ __forceinline__ static void place_bits(uint32_t word, uint32_t (&a)[4]) {
    static_assert(Format == QF_FP4_E2M1);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = e2m1(word, i);
  }

  // Rows g and g + 8 have terms of their own.
  __device__ __forceinline__ static void decode(const uint32_t* words, const uint32_t (&terms)[2],
                                                uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // register i: row i % 2, columns 2q and 2q + 1, or 8 more
      if constexpr (Format == QF_INT4) {
        a[i] = subtract_pair<T>(ptx::mask_and_join(words[0] >> (4 * i), 0x000f000fu, Pair<T>::kMagicBits),
                                terms[i % 2]);
      } else if constexpr (Format == QF_INT8) {
        const uint32_t v = words[i % 2] >> (i < 2 ? 0 : 8);
        if constexpr (kHasByteMagic) {
          a[i] = subtract_pair<T>(ptx::mask_and_join(v ^ 0x00800080u, 0x00ff00ffu, Pair<T>::kMagicBits),
                                  terms[i % 2]);
        } else {  // 7 bits, and the sign bit as what is subtracted: 128, or 256
          const uint32_t low = ptx::mask_and_join(v, 0x007f007fu, Pair<T>::kMagicBits);
          const uint32_t sign = ptx::mask_and_join(v, 0x00800080u, Pair<T>::kMagicBits);
          a[i] = subtract_pair<T>(subtract_pair<T>(low, sign), terms[i % 2]);
        }
      } else if constexpr (Format == QF_FP4_E2M1) {
        a[i] = multiply_pair<T>(e2m1(words[0], i), terms[i % 2]);
      } else {
        a[i] = fp8(words[i % 2] << (i < 2 ? 8 : 0));
        if constexpr (Format == QF_FP8_E4M3 || Pair<T>::kBias != 15)
          a[i] = multiply_pair<T>(a[i], terms[i % 2]);
      }
    }
  }

 private:
  __device__ __forceinline__ static uint32_t shifted(uint32_t word, int left) {
    return left < 0 ? word >> -left : word << left;
  }
  // The exponents of T begin here.
  static constexpr int kExponentAt = Pair<T>::kMantissaBits;

  // The codes number i of a word's halves, with the bits at T's places.
  __device__ __forceinline__ static uint32_t e2m1(uint32_t word, int i) {
    const linear::E2m1Place at = linear::e2m1_place(i);
    constexpr uint32_t kMagnitude = 7u << (kExponentAt - 1);
    const int to_magnitude = kExponentAt - 1 - at.magnitude, to_sign = 15 - at.sign;
    const uint32_t bits = shifted(word, to_magnitude);
    if (to_magnitude == to_sign) return bits & (0x80008000u | kMagnitude | kMagnitude << 16);
    const uint32_t sign = shifted(word, to_sign) & 0x80008000u;
    return ptx::mask_and_join(bits, kMagnitude | kMagnitude << 16, sign);
  }
  // The codes at the top of either half, with the bits at T's places.
  __device__ __forceinline__ static uint32_t fp8(uint32_t v) {
    constexpr int kExponentBits = Format == QF_FP8_E4M3 ? 4 : 5;
    constexpr int kShift = 15 - kExponentBits - kExponentAt;
    const uint32_t sign = v & 0x80008000u, magnitude = (v & 0x7f007f00u) >> kShift;
    return sign | magnitude;
  }
};

// Numbers 4 i .. 4 i + 3 of a codebook in T: their lower bytes, and their upper ones.
struct CodebookBytes {
  uint32_t low[4], high[4];
};
template <class T>
constexpr CodebookBytes codebook_bytes(qf_format format) {
  constexpr int kDropped = 23 - Pair<T>::kMantissaBits;
  CodebookBytes bytes = {};
  for (int i = 0; i < 16; ++i) {
    const float number = values_of(format).values[i] / linear::codebook_unit(format);
    const uint32_t bits = __builtin_bit_cast(uint32_t, number);
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude != 0) {  // a normal number of T; to nearest, ties to even
      magnitude -= static_cast<uint32_t>(127 - Pair<T>::kBias) << 23;
      magnitude += (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1);
    }
    const uint32_t half = magnitude >> kDropped | (bits >> 31) << 15;
    bytes.low[i / 4] |= (half & 255) << (i % 4 * 8);
    bytes.high[i / 4] |= (half >> 8) << (i % 4 * 8);
  }
  return bytes;
}

// All codebooks. Four codes are looked up at once: three bits of each choose one of eight bytes, in either
// half of the table, the fourth chooses the half; and so for the lower bytes and the upper ones.
template <class T>
struct StripCodes<QF_NF4, T> {
  static constexpr bool kIs4Bit = true, kHasZeroPoints = false;
  static constexpr int kStepWords = 1, kTileVectors = 2;
  static constexpr bool kMayHaveByteScales = false, kFoldsByteScales = false;

  __device__ explicit StripCodes(qf_format format) {
    constexpr CodebookBytes kNf4 = codebook_bytes<T>(QF_NF4), kFp4Bnb = codebook_bytes<T>(QF_FP4_BNB),
                            kIq4Nl = codebook_bytes<T>(QF_IQ4_NL);
    table_ = format == QF_NF4 ? kNf4 : format == QF_FP4_BNB ? kFp4Bnb : kIq4Nl;
  }
  __device__ static uint32_t term(float = 0) { return 0; }

  __device__ __forceinline__ void decode(const uint32_t* words, const uint32_t (&)[2],
                                         uint32_t (&a)[4]) const {
    const uint32_t of_eight = words[0] & 0x77777777u;
    const uint32_t half = (words[0] >> 1 & 0x44444444u) | 0x32103210u;  // 4 more: the byte of the upper half
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t low = look_up(table_.low, of_eight >> (16 * i), half >> (16 * i));
      const uint32_t high = look_up(table_.high, of_eight >> (16 * i), half >> (16 * i));
      a[2 * i] = __byte_perm(low, high, 0x5140), a[2 * i + 1] = __byte_perm(low, high, 0x7362);
    }
  }

 private:
  __device__ __forceinline__ static uint32_t look_up(const uint32_t (&bytes)[4], uint32_t of_eight,
                                                     uint32_t half) {
    return __byte_perm(__byte_perm(bytes[0], bytes[1], of_eight), __byte_perm(bytes[2], bytes[3], of_eight),
                       half);
  }
  CodebookBytes table_;
};

}  // namespace quantfuse
