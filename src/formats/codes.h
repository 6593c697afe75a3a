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
    case QF_NF4:
    case QF_FP4_BNB: return {1.0f, 0, 0, 0};
    case QF_IQ4_NL: return {127.0f, 0, 0, 6};
    default: break;
  }
  return {1.0f, 0, 0, 0};
}

// The 16 numbers of a 4-bit format, by code.
struct Values16 {
  float values[16];
};
constexpr Values16 values_of(qf_format f) {
  switch (f) {
    case QF_INT4: return {{0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1}};
    case QF_FP4_E2M1: return {{0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6}};
    case QF_NF4:
      return {{-1.0f, -0.696192801f, -0.525073051f, -0.394917488f, -0.284441382f, -0.184773430f,
               -0.0910500363f, 0.0f, 0.0795802996f, 0.160930201f, 0.246112302f, 0.337915242f, 0.440709829f,
               0.562617004f, 0.722956836f, 1.0f}};
    case QF_FP4_BNB:
      return {{0, 0.0052083333f, 2.0f / 3, 1, 1.0f / 3, 0.5f, 1.0f / 6, 0.25f,  //
               0, -0.0052083333f, -2.0f / 3, -1, -1.0f / 3, -0.5f, -1.0f / 6, -0.25f}};
    case QF_IQ4_NL: return {{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};
    default: return {};
  }
}
template <qf_format F>
inline constexpr Values16 kValuesOf = values_of(F);

// The same for kernels that load the table: those of FP4 and the codebooks differ in nothing else.
QF_HD const float* codebook_of(qf_format f) {
  return f == QF_NF4       ? kValuesOf<QF_NF4>.values
         : f == QF_FP4_BNB ? kValuesOf<QF_FP4_BNB>.values
         : f == QF_IQ4_NL  ? kValuesOf<QF_IQ4_NL>.values
                           : kValuesOf<QF_FP4_E2M1>.values;
}
// The format whose code is compiled for `f`; on a GPU that of NF4 looks all codebooks up.
constexpr qf_format code_path(qf_format f) { return is_codebook(f) ? QF_FP4_E2M1 : f; }
constexpr qf_format device_code_path(qf_format f) { return is_codebook(f) ? QF_NF4 : f; }

// A number of a codebook. On a GPU the table is a constant of the function.
template <qf_format F>
QF_HD float codebook_value(uint8_t code) {
  constexpr Values16 kTable = values_of(F);
  return kTable.values[code];
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
    case QF_NF4: return codebook_value<QF_NF4>(nibble_at(bytes, i));
    case QF_FP4_BNB: return codebook_value<QF_FP4_BNB>(nibble_at(bytes, i));
    case QF_IQ4_NL: return codebook_value<QF_IQ4_NL>(nibble_at(bytes, i));
    default: return 0.0f;
  }
}

// Where the codes of NF4, whose numbers are in order, meet: a number above midpoint i has code i + 1 or more.
constexpr float nf4_midpoint(int i) {
  constexpr Values16 kTable = values_of(QF_NF4);
  return 0.5f * (kTable.values[i] + kTable.values[i + 1]);
}
inline constexpr uint8_t kNf4Zero = 7;  // the code of 0

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
    case QF_NF4: {
      int code = is_nan(v) ? kNf4Zero : 0;
      for (int i = 0; i < 15; ++i) code += v > nf4_midpoint(i);  // never true for NaN
      return static_cast<uint8_t>(code);
    }
    default: return 0;
  }
}

// Writes code i of a row. 4-bit codes must be written in order: an even one clears its byte's high nibble.
QF_HD void store_code(qf_format f, void* row, int64_t i, uint8_t code) {
  auto* bytes = static_cast<uint8_t*>(row);
  if (is_packed_4bit(f)) {
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
