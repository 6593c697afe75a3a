// SPDX-License-Identifier: Apache-2.0
//
// One number of every format: the bits, and their exact conversion from and to float32. Host and device.
//
//   format   sign exponent mantissa  bias  largest  smallest normal / subnormal   specials
//   f16       1      5        10      15    65504    2^-14  / 2^-24   inf, NaN
//   bf16      1      8         7     127    3.4e38   2^-126 / 2^-133   inf, NaN
//   e4m3      1      4         3       7    448      2^-6   / 2^-9   NaN = S.1111.111, no infinity
//   e5m2      1      5         2      15    57344    2^-14  / 2^-16   inf = S.11111.00, NaN above it
//   e2m1      1      2         1       1    6        1      / 0.5   none
//   e8m0      0      8         0     127    2^127    2^-127   NaN = 255
//
// Encoding rounds to nearest, ties to even. FP8 and FP4 saturate: beyond the largest, infinity included,
// comes the largest. NaN of either sign becomes 0x7f in FP8 (GPUs drop the sign) and 0 in FP4, which has
// none. f16 and bf16 overflow to infinity, as IEEE has it.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include <cstdint>

#if defined(__CUDACC__)
#define QF_HD __host__ __device__ __forceinline__
#else
// Always inlined, so that no copy compiled for one instruction set can be linked into code for another.
#define QF_HD inline __attribute__((always_inline))
#endif

namespace quantfuse {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};
static_assert(sizeof(f16) == 2 && sizeof(bf16) == 2);

QF_HD uint32_t float_bits(float x) {
  union {
    float f;
    uint32_t u;
  } v = {x};
  return v.u;
}
QF_HD float float_from_bits(uint32_t u) {
  union {
    uint32_t u;
    float f;
  } v = {u};
  return v.f;
}
QF_HD bool is_nan(float x) { return (float_bits(x) & 0x7fffffffu) > 0x7f800000u; }
QF_HD bool is_finite(float x) { return (float_bits(x) & 0x7f800000u) != 0x7f800000u; }

// A small float with a sign, E exponent and M mantissa bits, whose largest code (without sign) is Largest.
template <int E, int M, int Bias, uint32_t Largest, bool HasNan>
struct SmallFloat {
  static constexpr int kDropped = 23 - M;
  static constexpr uint32_t kSign = 1u << (E + M);
  static constexpr uint32_t kNan = kSign - 1;

  QF_HD static uint8_t encode(float x) {
    const uint32_t u = float_bits(x);
    const uint32_t sign = (u >> 31) << (E + M);
    uint32_t a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return static_cast<uint8_t>(HasNan ? kNan : 0);
    uint32_t code;
    if (a < static_cast<uint32_t>(128 - Bias) << 23) {
      // Below the smallest normal, 2^(1 - Bias): adding 2^(23 + 1 - Bias - M) makes one unit of the float's
      // last place one step of the format, so that the addition rounds and its low bits are the code.
      const float magic = float_from_bits(static_cast<uint32_t>(127 + 24 - Bias - M) << 23);
      code = float_bits(float_from_bits(a) + magic) - float_bits(magic);
    } else {
      a += (1u << (kDropped - 1)) - 1 + ((a >> kDropped) & 1);  // to nearest, ties to even; may carry into
                                                                // the exponent
      code = (a >> kDropped) - (static_cast<uint32_t>(127 - Bias) << M);
      if (code > Largest) code = Largest;
    }
    return static_cast<uint8_t>(sign | code);
  }

  QF_HD static float decode(uint8_t bits) {
    const uint32_t sign = (bits & kSign) ? 0x80000000u : 0;
    const uint32_t code = bits & (kSign - 1);
    if (HasNan && code == kNan) return float_from_bits(sign | 0x7fc00000u);
    if ((code >> M) == 0) {  // subnormal: code * 2^(1 - Bias - M)
      const float step = float_from_bits(static_cast<uint32_t>(127 + 1 - Bias - M) << 23);
      return float_from_bits(float_bits(static_cast<float>(code) * step) | sign);
    }
    return float_from_bits(sign | ((code << kDropped) + (static_cast<uint32_t>(127 - Bias) << 23)));
  }
};

using E4m3 = SmallFloat<4, 3, 7, 0x7e, true>;
using E2m1 = SmallFloat<2, 1, 1, 0x7, false>;

struct E5m2 {
  using Finite = SmallFloat<5, 2, 15, 0x7b, true>;
  QF_HD static uint8_t encode(float x) { return Finite::encode(x); }
  QF_HD static float decode(uint8_t bits) {
    const uint32_t code = bits & 0x7f;
    if (code >= 0x7c) {
      const uint32_t sign = (bits & 0x80) ? 0x80000000u : 0;
      return float_from_bits(sign | (code == 0x7c ? 0x7f800000u : 0x7fc00000u));
    }
    return Finite::decode(bits);
  }
};

struct E8m0 {
  static constexpr uint8_t kNan = 255;
  QF_HD static float decode(uint8_t bits) {
    if (bits == kNan) return float_from_bits(0x7fc00000u);
    return bits == 0 ? float_from_bits(0x00400000u) : float_from_bits(static_cast<uint32_t>(bits) << 23);
  }
  // The power of two at or below x > 0 (NaN for NaN and anything not positive).
  QF_HD static uint8_t encode_floor(float x) {
    const uint32_t u = float_bits(x);
    if (is_nan(x) || (u >> 31) || u == 0) return kNan;
    const uint32_t exponent = u >> 23;
    return static_cast<uint8_t>(exponent >= 255 ? 254 : exponent);
  }
};

QF_HD float to_float(float x) { return x; }
QF_HD float to_float(bf16 x) { return float_from_bits(static_cast<uint32_t>(x.bits) << 16); }
QF_HD float to_float(f16 x) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(x.bits));
#endif
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t code = x.bits & 0x7fffu;
  if (code >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | (code & 0x3ffu) << 13);
  if (code < 0x400u) {
    return float_from_bits(float_bits(static_cast<float>(code) * float_from_bits(103u << 23)) |
                           sign);  // * 2^-24
  }
  return float_from_bits(sign | ((code << 13) + (112u << 23)));
}

QF_HD void from_float(float x, float& out) { out = x; }
QF_HD void from_float(float x, bf16& out) {
#ifdef __CUDA_ARCH__
  out.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
  return;
#endif
  const uint32_t u = float_bits(x);
  out.bits = static_cast<uint16_t>(is_nan(x) ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
QF_HD void from_float(float x, f16& out) {
#ifdef __CUDA_ARCH__
  out.bits = __half_as_ushort(__float2half_rn(x));
  return;
#endif
  const uint32_t u = float_bits(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  uint32_t a = u & 0x7fffffffu;
  uint32_t code;
  if (a > 0x7f800000u) {
    code = 0x7e00u;
  } else if (a < 113u << 23) {  // below 2^-14: as in SmallFloat::encode
    code = float_bits(float_from_bits(a) + 0.5f) - float_bits(0.5f);
  } else {
    a += 0xfffu + ((a >> 13) & 1);
    code = (a >> 13) - (112u << 10);
    if (code > 0x7c00u) code = 0x7c00u;
  }
  out.bits = static_cast<uint16_t>(sign | code);
}

// Round to nearest even and saturate to [lowest, highest]; NaN gives 0.
QF_HD int round_saturate(float x, int lowest, int highest) {
  if (is_nan(x)) return 0;
  if (x <= static_cast<float>(lowest)) return lowest;
  if (x >= static_cast<float>(highest)) return highest;
  // |x| < 2^22, so adding 1.5 * 2^23 leaves the rounded integer in the low bits.
  return static_cast<int>(float_bits(x + 12582912.0f) - 0x4b400000u);
}

QF_HD int int4_at(const uint8_t* row, int64_t i) {
  const int nibble = i & 1 ? row[i / 2] >> 4 : row[i / 2] & 15;
  return (nibble ^ 8) - 8;
}
QF_HD uint8_t nibble_at(const uint8_t* row, int64_t i) {
  return static_cast<uint8_t>(i & 1 ? row[i / 2] >> 4 : row[i / 2] & 15);
}

}  // namespace quantfuse
