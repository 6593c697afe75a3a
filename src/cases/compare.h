// SPDX-License-Identifier: Apache-2.0
//
// Results against the reference's, by the rules of bounds.h. Each function returns "" or what is wrong.
#pragma once

#include <string>
#include <vector>

#include "cases/tensor.h"

namespace quantfuse::cases {

// Collects the differences of one tensor: the first is told in full, the others are counted.
class Differences {
 public:
  explicit Differences(std::string tensor) : tensor_(std::move(tensor)) {}
  // what(): the difference in words, asked for the first one alone.
  template <class What>
  void add(int64_t r, int64_t c, const What& what) {
    if (count_++ == 0) describe_first(r, c, what());
  }
  std::string text() const;

 private:
  void describe_first(int64_t r, int64_t c, const std::string& what);

  std::string tensor_, first_;
  int64_t count_ = 0;
};

// Bit by bit (rule 1), but any NaN equals any other in a float tensor.
std::string compare_exactly(const Tensor& tensor, const Image& expected);

// What the reference says before the output's own rounding or quantization: values and their bounds, [m, n].
struct Expected {
  std::vector<double> values, bounds;
};

// The same after the Hadamard rotation of every `size` columns, which divide n: a step rounds once, and what
// a number was off by reaches every number of its run.
void rotate_expected(Expected& expected, int64_t size);

// A float output (rule 2).
std::string compare_floats(const Tensor& y, const Expected& expected);

// The output of linear, rms_norm and gated_act: floats, or codes of `format` with static or dynamic scales
// (rule 3).
struct Output {
  qf_format format = QF_FORMAT_NONE;
  qf_scale_mode mode = QF_SCALE_DYNAMIC;
  int64_t group = 0;
  Tensor* y = nullptr;
  Tensor* scale = nullptr;  // null where y holds floats
  bool has_transposed_scale = false;

  bool is_quantized() const { return format != QF_FORMAT_NONE; }
};
std::string compare_output(const Output& output, const Expected& expected);

}  // namespace quantfuse::cases
