// SPDX-License-Identifier: Apache-2.0
//
// A whole code format chosen at run time: ranges, and scalar access to a code inside a row. The fast kernels
// have their own vector forms; this is what the reference, the packers and the edges use.
#pragma once

#include "core/dtype.h"
#include "formats/numbers.h"

namespace quantfuse {

struct CodeRange {
  float symmetric_max;  // scale = max|x| / symmetric_max
  int lowest, highest;  // of the integer formats
  int emax;             // of the floating formats: floor(log2(largest))
};

constexpr CodeRange code_range(qf_format f) {
  switch (f) {
    case QF_INT8: return {127.0f, -128, 127, 6};
    case QF_INT4: return {7.0f, -8, 7, 2};
    case QF_FP8_E4M3: return {448.0f, 0, 0, 8};
    case QF_FP8_E5M2: return {57344.0f, 0, 0, 15};
    case QF_FP4_E2M1: return {6.0f, 0, 0, 2};
    case QF_FORMAT_NONE: break;
  }
  return {1.0f, 0, 0, 0};
}

// The value of code i of a row.
QF_HD float decode_at(qf_format f, const void* row, int64_t i) {
  const auto* bytes = static_cast<const uint8_t*>(row);
  switch (f) {
    case QF_INT8: return static_cast<float>(static_cast<const int8_t*>(row)[i]);
    case QF_INT4: return static_cast<float>(int4_at(bytes, i));
    case QF_FP8_E4M3: return E4m3::decode(bytes[i]);
    case QF_FP8_E5M2: return E5m2::decode(bytes[i]);
    case QF_FP4_E2M1: return E2m1::decode(nibble_at(bytes, i));
    default: return 0.0f;
  }
}

// The code nearest to v (v is already divided by the scale; `zero` is 0 in the floating formats), as the low
// bits.
QF_HD uint8_t encode_value(qf_format f, float v, int zero) {
  switch (f) {
    // round(v) + zero: v is rounded before the zero point is added, and both saturate.
    case QF_INT8: {
      const int q = round_saturate(v, -512, 512) + (is_nan(v) ? 0 : zero);
      return static_cast<uint8_t>(q < -128 ? -128 : q > 127 ? 127 : q);
    }
    case QF_INT4: {
      const int q = round_saturate(v, -512, 512) + (is_nan(v) ? 0 : zero);
      return static_cast<uint8_t>((q < -8 ? -8 : q > 7 ? 7 : q) & 15);
    }
    case QF_FP8_E4M3: return E4m3::encode(v);
    case QF_FP8_E5M2: return E5m2::encode(v);
    case QF_FP4_E2M1: return E2m1::encode(v);
    default: return 0;
  }
}

// Writes code i of a row. 4-bit codes must be written in order: an even one clears its byte's high nibble.
QF_HD void store_code(qf_format f, void* row, int64_t i, uint8_t code) {
  auto* bytes = static_cast<uint8_t*>(row);
  if (f == QF_INT4 || f == QF_FP4_E2M1) {
    bytes[i / 2] = i & 1 ? static_cast<uint8_t>(bytes[i / 2] | code << 4) : code;
  } else {
    bytes[i] = code;
  }
}

// The dynamic scale of a block with largest magnitude `amax` (never NaN: amax ignores NaN, infinity counts as
// FLT_MAX).
QF_HD float scale_from_amax(float amax, float symmetric_max) {
  const float largest = float_from_bits(0x7f7fffffu), smallest = float_from_bits(0x00800000u);
  const float scale = (amax > largest ? largest : amax) / symmetric_max;
  return scale < smallest ? smallest : scale;
}

// OCP microscaling: 2^(floor(log2(amax)) - emax), within E8M0's range.
QF_HD uint8_t e8m0_from_amax(float amax, int emax) {
  const uint32_t exponent = float_bits(amax) >> 23;  // 0 for zero and subnormals
  const int code = static_cast<int>(exponent >= 255 ? 254 : exponent) - emax;
  return static_cast<uint8_t>(code < 0 ? 0 : code);
}

}  // namespace quantfuse
