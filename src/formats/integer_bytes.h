// SPDX-License-Identifier: Apache-2.0
//
// Formats whose numbers are integers times a unit, as the unsigned bytes that 8-bit dot products multiply:
//
//   number = (byte - offset) * unit
#pragma once

#include "formats/codes.h"

namespace quantfuse {

constexpr bool has_integer_numbers(qf_format f) {
  return is_integer(f) || f == QF_FP4_E2M1 || f == QF_IQ4_NL;
}
constexpr int32_t byte_offset_of(qf_format f) {
  return f == QF_INT4 ? 8 : f == QF_FP4_E2M1 ? 12 : f == QF_IQ4_NL ? 127 : 128;
}
constexpr float byte_unit_of(qf_format f) { return f == QF_FP4_E2M1 ? 0.5f : 1.0f; }

// The bytes of the 16 codes.
struct Bytes16 {
  alignas(16) uint8_t bytes[16];
};
constexpr Bytes16 bytes_of(qf_format f) {
  Bytes16 table = {};
  for (int code = 0; code < 16; ++code) {
    const float integer = values_of(f).values[code] / byte_unit_of(f);
    table.bytes[code] = static_cast<uint8_t>(static_cast<int32_t>(integer) + byte_offset_of(f));
  }
  return table;
}
inline constexpr Bytes16 kBytesOfE2m1 = bytes_of(QF_FP4_E2M1), kBytesOfIq4Nl = bytes_of(QF_IQ4_NL);

}  // namespace quantfuse
