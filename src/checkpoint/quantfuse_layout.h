// SPDX-License-Identifier: Apache-2.0
//
// What the writer and the reader of QuantFuse's own layout share.
#pragma once

#include <string>

#include "checkpoint/tensor.h"
#include "core/dtype.h"

namespace quantfuse::checkpoint {

inline constexpr const char* kQuantfuseFormat = "quantfuse.weight.1";

// "int4", "fp8_e4m3"; "mxfp4" and "mxfp8" where the scales are E8M0.
inline std::string stored_format_name(qf_format format, bool has_e8m0_scale) {
  if (!has_e8m0_scale) return format_name(format);
  return format == QF_FP4_E2M1 ? "mxfp4" : "mxfp8";
}

inline Type stored_code_type(qf_format format) {
  switch (format) {
    case QF_INT8: return Type::i8;
    case QF_FP8_E4M3: return Type::e4m3;
    case QF_FP8_E5M2: return Type::e5m2;
    default: return Type::u8;
  }
}

}  // namespace quantfuse::checkpoint
