// SPDX-License-Identifier: Apache-2.0
//
// The codes of an integer format of which fewer bits may be in use: 3-bit codes live in INT4, 6-bit ones in
// INT8.
#pragma once

#include <string>

#include "core/block.h"
#include "formats/codes.h"

namespace quantfuse::quantize {

// Of a call with the fields `format` and `bits` (0: all bits of the format).
inline CodeRange parse_integer_range(const Arguments& arg, qf_format format, int32_t bits) {
  check_format(arg, "format", format, {QF_INT4, QF_INT8});
  const int32_t most = format == QF_INT4 ? 4 : 8;
  if (bits != 0 && (bits < 2 || bits > most)) {
    arg.fail("bits is " + std::to_string(bits) + ", expected 2 to " + std::to_string(most) + " in " +
             format_name(format) + " codes, or 0 for all");
  }
  const int highest = (1 << ((bits == 0 ? most : bits) - 1)) - 1;
  return {static_cast<float>(highest), -highest - 1, highest, 0};
}

// Fails if the tensor, f32 | f16 | bf16 in CPU memory, has a NaN or an infinity.
void check_finite(const Arguments& arg, const char* name, const Matrix& x);

}  // namespace quantfuse::quantize
