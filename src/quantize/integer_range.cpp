// SPDX-License-Identifier: Apache-2.0
#include "quantize/integer_range.h"

#include <cmath>

#include "core/element.h"

namespace quantfuse::quantize {

void check_finite(const Arguments& arg, const char* name, const Matrix& x) {
  if (arg.device().type != QF_CPU || !arg.needs_data()) return;
  for (int64_t r = 0; r < x.rows; ++r) {
    // The sum of numbers times zero is zero unless one of them is not finite; and it has no branches.
    float sum = 0;
    for (int64_t c = 0; c < x.cols; ++c) sum += 0.0f * float_at(x, r, c);
    if (sum == 0) continue;
    for (int64_t c = 0; c < x.cols; ++c) {
      if (std::isfinite(float_at(x, r, c))) continue;
      arg.fail(std::string(name) + " has the value " + std::to_string(float_at(x, r, c)) + " at (" +
               std::to_string(r) + ", " + std::to_string(c) + "), expected finite numbers");
    }
  }
}

}  // namespace quantfuse::quantize
