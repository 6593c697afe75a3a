// SPDX-License-Identifier: Apache-2.0
//
// Dot products for the references and for bounds: every sum one chain in order of k, as written.
#pragma once

#include <algorithm>
#include <cstdint>

namespace quantfuse {

// sums[i] = sum over k of rows[i * length + k] * vector[k]. Eight sums side by side, because each has to wait
// for its own last addition; the last row is multiplied again where there are fewer.
template <class Number>
void dot_products(const Number* rows, int64_t count, int64_t length, const Number* vector, Number* sums) {
  constexpr int kSideBySide = 8;
  for (int64_t first = 0; first < count; first += kSideBySide) {
    const Number* row[kSideBySide];
    Number sum[kSideBySide] = {};
    for (int i = 0; i < kSideBySide; ++i) row[i] = rows + std::min(first + i, count - 1) * length;
    for (int64_t k = 0; k < length; ++k) {
      for (int i = 0; i < kSideBySide; ++i) sum[i] += row[i][k] * vector[k];
    }
    std::copy_n(sum, std::min<int64_t>(kSideBySide, count - first), sums + first);
  }
}

}  // namespace quantfuse
