// SPDX-License-Identifier: Apache-2.0
//
// What the writer and the reader of QuantFuse's own layout share.
#pragma once

#include <string>

#include "checkpoint/tensor.h"
#include "quantfuse/quantfuse.h"

namespace quantfuse::checkpoint {

inline constexpr const char* kQuantfuseFormat = "quantfuse.weight.1";

// "int4", "fp8_e4m3"; "mxfp4" and "mxfp8" where the scales are E8M0.
std::string stored_format_name(qf_format format, bool has_e8m0_scale);
Type stored_code_type(qf_format format);

}  // namespace quantfuse::checkpoint
