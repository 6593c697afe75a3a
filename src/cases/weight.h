// SPDX-License-Identifier: Apache-2.0
//
// The canonical tensors of a quantized matrix w[n,k] = (codes - zero) * scale + offset, for every case that
// reads one.
#pragma once

#include <functional>
#include <vector>

#include "cases/tensor.h"

namespace quantfuse::cases {

class CanonicalWeight {
 public:
  // Declares a tensor of the case: (name, role, dtype, shape, row_padding).
  using Declare = std::function<Tensor&(std::string, Role, qf_dtype, std::vector<int64_t>, int64_t)>;

  CanonicalWeight() = default;
  CanonicalWeight(const WeightSpec& spec, int64_t n, int64_t k, int64_t row_padding, const Declare& declare);

  // Random codes over their whole range, zero points over theirs, and scales that bring w to about
  // +-`magnitude`; offsets of that size.
  void fill(Random& random, double magnitude);
  qf_weight view(int set, qf_device device) const;  // without the packed form

  // (|code| + |zero|) * |scale| + |offset|, [n, k]: what one term of a product may be made of.
  std::vector<double> magnitudes() const;

 private:
  WeightSpec spec_;
  int64_t n_ = 0, k_ = 0;
  qf_block block_ = {1, 1};  // resolved
  int64_t num_groups_ = 0;
  Tensor *codes_ = nullptr, *scale_ = nullptr, *zero_ = nullptr, *offset_ = nullptr, *g_idx_ = nullptr;
};

// The weights of test cases: every format, block, zero point and order that a checkpoint may have.
WeightSpec random_weight(Random& random);

}  // namespace quantfuse::cases
