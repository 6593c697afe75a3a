// SPDX-License-Identifier: Apache-2.0
//
// Quantizes some rows of a weight by the library's own kernels, and says how far the result is off. Rows are
// taken in pieces that stay in a cache: the numbers come from memory once, for all of the steps.
#pragma once

#include <vector>

#include "checkpoint/scheme.h"
#include "checkpoint/tensor.h"

namespace quantfuse::checkpoint {

enum class Method { rtn, mse };  // the scale that holds the largest number; the one of least squared error

// Rows [first, first + count) of a weight [n, k] in canonical form, and scratch memory that is used again.
struct WeightRows {
  int64_t n = 0, k = 0, first = 0, count = 0;
  std::vector<uint8_t> codes;  // [count, k], or [count, ceil(k/2)]
  std::vector<float> scale;  // of the blocks that begin in these rows, rounded to the type they are stored in
  std::vector<uint8_t> scale_e8m0;  // in place of `scale`
  std::vector<int8_t> zero;         // where asymmetric
  std::vector<uint8_t> input, decoded, packed;
};

struct SquaredError {
  double error = 0, norm = 0;

  void add(const SquaredError& other) { error += other.error, norm += other.norm; }
  double relative() const;  // root of error / norm; 0 where all numbers are 0
};

// Whole blocks, and whole words of packed zero points: a piece begins at a multiple of this.
int64_t rows_of_piece(const Scheme& scheme, const Tensor& weight);

// Fills `rows` beyond its first four fields. `scale_type` is what the scales are stored in: f32, f16 or bf16;
// they are rounded to it before the codes are computed. Fails, naming the tensor, where a number is not
// finite.
SquaredError quantize_rows(const Tensor& weight, const Scheme& scheme, Method method, Type scale_type,
                           WeightRows& rows);

}  // namespace quantfuse::checkpoint
