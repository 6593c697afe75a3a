// SPDX-License-Identifier: Apache-2.0
//
// The narrow number formats of the instructions, as float32. Written anew, and not with formats/numbers.h of
// the library: what checks it should not share its mistakes.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace emulator {

inline float bits_to_float(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
inline uint32_t float_to_bits(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}

inline float f16_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t float_to_f16(float v) {
  return std::isnan(v) ? 0x7fff : static_cast<uint16_t>(_cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT));
}
inline float bf16_to_float(uint16_t h) { return bits_to_float(uint32_t{h} << 16); }
inline uint16_t float_to_bf16(float v) {
  if (std::isnan(v)) return 0x7fff;
  const uint32_t bits = float_to_bits(v);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// E4M3 has no infinity and one NaN of each sign; E5M2 is the upper byte of an f16.
inline float e4m3_to_float(uint8_t c) {
  const int exponent = c >> 3 & 15, mantissa = c & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return c & 0x80 ? -magnitude : magnitude;
}
inline float e5m2_to_float(uint8_t c) { return f16_to_float(static_cast<uint16_t>(c << 8)); }

// To nearest even, beyond the largest the largest; NaN is 0x7f.
inline uint8_t float_to_e4m3(float v) {
  if (std::isnan(v)) return 0x7f;
  const uint8_t sign = std::signbit(v) ? 0x80 : 0;
  const float a = std::fabs(v);
  if (a >= 448.f) return sign | 0x7e;
  int exponent = 0;
  std::frexp(a, &exponent);                     // a < 2^exponent
  const int step = std::max(exponent - 4, -9);  // of the last bit of four
  const auto units = static_cast<int>(std::nearbyint(std::ldexp(a, -step)));
  if (units < 8) return sign | static_cast<uint8_t>(units);  // step is -9: subnormal
  return units == 16 ? sign | static_cast<uint8_t>((step + 11) << 3)
                     : sign | static_cast<uint8_t>((step + 10) << 3 | (units - 8));
}
inline uint8_t float_to_e5m2(float v) {
  if (std::isnan(v)) return 0x7f;
  const uint8_t sign = std::signbit(v) ? 0x80 : 0;
  const float a = std::fabs(v);
  if (a >= 57344.f) return sign | 0x7b;
  int exponent = 0;
  std::frexp(a, &exponent);
  const int step = std::max(exponent - 3, -16);
  const auto units = static_cast<int>(std::nearbyint(std::ldexp(a, -step)));
  if (units < 4) return sign | static_cast<uint8_t>(units);
  return units == 8 ? sign | static_cast<uint8_t>((step + 18) << 2)
                    : sign | static_cast<uint8_t>((step + 17) << 2 | (units - 4));
}

// What .ftz does with numbers too small to be normal.
inline float flush(float v) { return std::fabs(v) < 0x1p-126f ? std::copysign(0.f, v) : v; }

}  // namespace emulator
