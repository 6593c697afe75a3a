// SPDX-License-Identifier: Apache-2.0
//
// Element types as the library sees them, and their DLPack codes.
#pragma once

#include <cstdint>

#include "quantfuse/quantfuse.h"

namespace quantfuse {

enum class DType : uint8_t { f32, f16, bf16, i8, u8, i32, e4m3, e5m2, e8m0, other };

constexpr DType dtype_of(qf_dtype t) {
  if (t.lanes != 1) return DType::other;
  switch (t.code << 8 | t.bits) {
    case 2 << 8 | 32: return DType::f32;
    case 2 << 8 | 16: return DType::f16;
    case 4 << 8 | 16: return DType::bf16;
    case 0 << 8 | 8: return DType::i8;
    case 1 << 8 | 8: return DType::u8;
    case 0 << 8 | 32: return DType::i32;
    case 10 << 8 | 8: return DType::e4m3;
    case 12 << 8 | 8: return DType::e5m2;
    case 14 << 8 | 8: return DType::e8m0;
    default: return DType::other;
  }
}

constexpr int64_t dtype_bytes(DType t) {
  switch (t) {
    case DType::f32:
    case DType::i32: return 4;
    case DType::f16:
    case DType::bf16: return 2;
    default: return 1;
  }
}

constexpr const char* dtype_name(DType t) {
  switch (t) {
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::i8: return "i8";
    case DType::u8: return "u8";
    case DType::i32: return "i32";
    case DType::e4m3: return "e4m3";
    case DType::e5m2: return "e5m2";
    case DType::e8m0: return "e8m0";
    default: return "an unsupported type";
  }
}

// Formats that are a table of 16 numbers and nothing else.
constexpr bool is_codebook(qf_format f) { return f == QF_NF4 || f == QF_FP4_BNB || f == QF_IQ4_NL; }
constexpr bool is_packed_4bit(qf_format f) { return f == QF_INT4 || f == QF_FP4_E2M1 || is_codebook(f); }
// Formats that are numbers themselves: weights that are not quantized.
constexpr bool is_plain(qf_format f) { return f == QF_F32 || f == QF_F16 || f == QF_BF16; }
constexpr DType plain_dtype(qf_format f) {
  return f == QF_F32 ? DType::f32 : f == QF_F16 ? DType::f16 : DType::bf16;
}
constexpr bool is_integer(qf_format f) { return f == QF_INT8 || f == QF_INT4; }
constexpr bool is_fp8(qf_format f) { return f == QF_FP8_E4M3 || f == QF_FP8_E5M2; }

constexpr const char* format_name(qf_format f) {
  switch (f) {
    case QF_FORMAT_NONE: return "none";
    case QF_INT8: return "int8";
    case QF_INT4: return "int4";
    case QF_FP8_E4M3: return "fp8_e4m3";
    case QF_FP8_E5M2: return "fp8_e5m2";
    case QF_FP4_E2M1: return "fp4_e2m1";
    case QF_NF4: return "nf4";
    case QF_FP4_BNB: return "fp4_bnb";
    case QF_IQ4_NL: return "iq4_nl";
    case QF_F32: return "f32";
    case QF_F16: return "f16";
    case QF_BF16: return "bf16";
  }
  return "unknown";
}

// Bits of a code.
constexpr int code_bits(qf_format f) {
  return is_packed_4bit(f) ? 4 : !is_plain(f) ? 8 : f == QF_F32 ? 32 : 16;
}
// Bytes that hold `count` codes of a row.
constexpr int64_t row_bytes(qf_format f, int64_t count) {
  return is_packed_4bit(f) ? (count + 1) / 2 : count * (code_bits(f) / 8);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace quantfuse
