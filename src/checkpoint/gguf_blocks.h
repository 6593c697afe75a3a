// SPDX-License-Identifier: Apache-2.0
//
// The block types of GGUF, byte by byte. A block of kCount numbers has groups of kGroup with a scale each:
//
//   value(i) = scale(i / kGroup) * code(i) [+ offset(i / kGroup)]          in float32, in this order
//
// where offset is there for the asymmetric types alone. kLowest and kHighest are the ends of the codes.
// Blocks are copied out of the file before they are looked at, so that alignment does not matter.
#pragma once

#include <cstdint>

#include "formats/numbers.h"

namespace quantfuse::checkpoint::gguf {

// The nibbles of 16 bytes: the low ones are numbers 0 to 15, the high ones 16 to 31.
inline int split_nibble(const uint8_t* bytes, int i) { return i < 16 ? bytes[i] & 15 : bytes[i - 16] >> 4; }
// 2-bit fields: 32 bytes hold 128 numbers, field f of byte b is number 32 f + b.
inline int crumb(const uint8_t* bytes, int i) {
  return bytes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
}
// Nibbles of 32 bytes hold 64 numbers: the low ones are numbers 0 to 31, the high ones 32 to 63.
inline int wide_nibble(const uint8_t* bytes, int i) {
  return bytes[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
}

struct Q4_0 {
  static constexpr int kCount = 32, kGroup = 32, kBits = 4, kLowest = -8, kHighest = 7;
  f16 d;
  uint8_t qs[16];
  float scale(int) const { return to_float(d); }
  int code(int i) const { return split_nibble(qs, i) - 8; }
};
static_assert(sizeof(Q4_0) == 18);

struct Q4_1 {
  static constexpr int kCount = 32, kGroup = 32, kBits = 4, kLowest = 0, kHighest = 15;
  f16 d, m;
  uint8_t qs[16];
  float scale(int) const { return to_float(d); }
  float offset(int) const { return to_float(m); }
  int code(int i) const { return split_nibble(qs, i); }
};
static_assert(sizeof(Q4_1) == 20);

struct Q5_0 {
  static constexpr int kCount = 32, kGroup = 32, kBits = 5, kLowest = -16, kHighest = 15;
  f16 d;
  uint8_t qh[4];  // the fifth bits: bit i for number i
  uint8_t qs[16];
  float scale(int) const { return to_float(d); }
  int code(int i) const { return (split_nibble(qs, i) | (qh[i / 8] >> i % 8 & 1) << 4) - 16; }
};
static_assert(sizeof(Q5_0) == 22);

struct Q5_1 {
  static constexpr int kCount = 32, kGroup = 32, kBits = 5, kLowest = 0, kHighest = 31;
  f16 d, m;
  uint8_t qh[4];
  uint8_t qs[16];
  float scale(int) const { return to_float(d); }
  float offset(int) const { return to_float(m); }
  int code(int i) const { return split_nibble(qs, i) | (qh[i / 8] >> i % 8 & 1) << 4; }
};
static_assert(sizeof(Q5_1) == 24);

struct Q8_0 {
  static constexpr int kCount = 32, kGroup = 32, kBits = 8, kLowest = -128, kHighest = 127;
  f16 d;
  int8_t qs[32];
  float scale(int) const { return to_float(d); }
  int code(int i) const { return qs[i]; }
};
static_assert(sizeof(Q8_0) == 34);

struct Q2_K {
  static constexpr int kCount = 256, kGroup = 16, kBits = 2, kLowest = 0, kHighest = 3;
  uint8_t scales[16];  // low nibble: scale, high nibble: minimum
  uint8_t qs[64];
  f16 d, dmin;
  float scale(int g) const { return to_float(d) * static_cast<float>(scales[g] & 15); }
  float offset(int g) const { return -(to_float(dmin) * static_cast<float>(scales[g] >> 4)); }
  int code(int i) const { return crumb(qs, i); }
};
static_assert(sizeof(Q2_K) == 84);

struct Q3_K {
  static constexpr int kCount = 256, kGroup = 16, kBits = 3, kLowest = -4, kHighest = 3;
  uint8_t hmask[32];  // the third bits: bit i / 32 of byte i % 32
  uint8_t qs[64];
  uint8_t scales[12];  // 6 bits each: 16 nibbles (low halves first), then 16 pairs of high bits
  f16 d;
  float scale(int g) const {
    const int low = g < 8 ? scales[g] & 15 : scales[g - 8] >> 4;
    const int high = scales[8 + g % 4] >> (g / 4 * 2) & 3;
    return to_float(d) * static_cast<float>((low | high << 4) - 32);
  }
  int code(int i) const { return crumb(qs, i) - (hmask[i % 32] >> (i / 32) & 1 ? 0 : 4); }
};
static_assert(sizeof(Q3_K) == 110);

// Eight scales and eight minima of 6 bits in 12 bytes: the first four of each in the low bits of bytes 0-3
// and 4-7, whose high bits are those of the last four; the low bits of these are the nibbles of bytes 8-11.
struct ScalesAndMins {
  uint8_t bytes[12];
  float scale(int g) const {
    return static_cast<float>(g < 4 ? bytes[g] & 63 : (bytes[g + 4] & 15) | bytes[g - 4] >> 6 << 4);
  }
  float min(int g) const {
    return static_cast<float>(g < 4 ? bytes[g + 4] & 63 : bytes[g + 4] >> 4 | bytes[g] >> 6 << 4);
  }
};

struct Q4_K {
  static constexpr int kCount = 256, kGroup = 32, kBits = 4, kLowest = 0, kHighest = 15;
  f16 d, dmin;
  ScalesAndMins scales;
  uint8_t qs[128];
  float scale(int g) const { return to_float(d) * scales.scale(g); }
  float offset(int g) const { return -(to_float(dmin) * scales.min(g)); }
  int code(int i) const { return wide_nibble(qs, i); }
};
static_assert(sizeof(Q4_K) == 144);

struct Q5_K {
  static constexpr int kCount = 256, kGroup = 32, kBits = 5, kLowest = 0, kHighest = 31;
  f16 d, dmin;
  ScalesAndMins scales;
  uint8_t qh[32];  // the fifth bits: bit i / 32 of byte i % 32
  uint8_t qs[128];
  float scale(int g) const { return to_float(d) * scales.scale(g); }
  float offset(int g) const { return -(to_float(dmin) * scales.min(g)); }
  int code(int i) const { return wide_nibble(qs, i) | (qh[i % 32] >> (i / 32) & 1) << 4; }
};
static_assert(sizeof(Q5_K) == 176);

struct Q6_K {
  static constexpr int kCount = 256, kGroup = 16, kBits = 6, kLowest = -32, kHighest = 31;
  uint8_t ql[128];  // low nibbles: of 64 bytes the low ones, then the high ones
  uint8_t qh[64];   // the two high bits
  int8_t scales[16];
  f16 d;
  float scale(int g) const { return to_float(d) * static_cast<float>(scales[g]); }
  int code(int i) const {
    const int low = ql[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4) & 15;
    return (low | crumb(qh, i) << 4) - 32;
  }
};
static_assert(sizeof(Q6_K) == 210);

inline constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};

struct IQ4_NL {
  static constexpr int kCount = 32, kGroup = 32, kBits = 4, kLowest = -127, kHighest = 113;
  f16 d;
  uint8_t qs[16];
  float scale(int) const { return to_float(d); }
  int index(int i) const { return split_nibble(qs, i); }
  int code(int i) const { return kNonLinear[index(i)]; }
};
static_assert(sizeof(IQ4_NL) == 18);

struct IQ4_XS {
  static constexpr int kCount = 256, kGroup = 32, kBits = 4, kLowest = -127, kHighest = 113;
  f16 d;
  uint16_t scales_h;    // the two high bits of each scale
  uint8_t scales_l[4];  // their low nibbles
  uint8_t qs[128];
  float scale(int g) const {
    const int low = scales_l[g / 2] >> (g % 2 * 4) & 15, high = scales_h >> (g * 2) & 3;
    return to_float(d) * static_cast<float>((low | high << 4) - 32);
  }
  int index(int i) const { return split_nibble(qs + i / 32 * 16, i % 32); }
  int code(int i) const { return kNonLinear[index(i)]; }
};
static_assert(sizeof(IQ4_XS) == 136);

struct TQ2_0 {
  static constexpr int kCount = 256, kGroup = 256, kBits = 2, kLowest = -1,
                       kHighest = 1;  // 2 is never written
  uint8_t qs[64];
  f16 d;
  float scale(int) const { return to_float(d); }
  int code(int i) const { return crumb(qs, i) - 1; }
};
static_assert(sizeof(TQ2_0) == 66);

struct MXFP4 {
  static constexpr int kCount = 32, kGroup = 32, kBits = 4, kLowest = -12, kHighest = 12;
  // E2M1 times 2, under half the scale. There is one zero: the code of -0 is +0.
  static constexpr int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  uint8_t e;
  uint8_t qs[16];
  // 2^(e - 128), whose two smallest are subnormal. 255 is no NaN here.
  float scale(int) const {
    return float_from_bits(e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23);
  }
  int code(int i) const { return kDoubled[split_nibble(qs, i)]; }
  uint8_t e2m1(int i) const {
    return static_cast<uint8_t>(split_nibble(qs, i) == 8 ? 0 : split_nibble(qs, i));
  }
};
static_assert(sizeof(MXFP4) == 17);

}  // namespace quantfuse::checkpoint::gguf
