// SPDX-License-Identifier: Apache-2.0
//
// The Hadamard rotation of `size` neighbouring numbers of a row, size a power of two:
//   y = x H / sqrt(size),   H[i,j] = (-1)^(number of bits that i and j have in common)
// H / sqrt(size) is symmetric and orthogonal, so it is its own inverse. By the fast transform in float32:
// at step s = 1, 2, 4, .. size / 2 every pair (i, i + s) becomes its sum and its difference, and in the end
// each number is multiplied by 1 / sqrt(size). Each step rounds once, and no step depends on how the pairs
// are divided: every kernel gives the same bits.
#pragma once

#include "formats/numbers.h"

namespace quantfuse {

QF_HD void hadamard_step(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// 1 / sqrt(size), rounded to float32.
QF_HD float hadamard_norm(int64_t size) {
  int log2 = 0;
  while ((int64_t{1} << log2) < size) ++log2;
  const float power = float_from_bits(static_cast<uint32_t>(127 - (log2 + 1) / 2) << 23);
  return log2 % 2 == 0 ? power : power * 1.41421356f;
}

// The largest power of two that divides n > 0.
QF_HD int64_t largest_hadamard(int64_t n) { return n & -n; }

QF_HD bool is_hadamard_size(int64_t size) { return size > 0 && (size & (size - 1)) == 0; }

// One number after the other, for sizes below a vector's and for the reference.
QF_HD void rotate_scalar(float* values, int64_t n, int64_t size) {
  const float norm = hadamard_norm(size);
  for (int64_t begin = 0; begin < n; begin += size) {
    for (int64_t step = 1; step < size; step *= 2) {
      for (int64_t i = begin; i < begin + size; ++i) {
        if (((i - begin) & step) == 0) hadamard_step(values[i], values[i + step]);
      }
    }
    for (int64_t i = begin; i < begin + size; ++i) values[i] *= norm;
  }
}

}  // namespace quantfuse
