// SPDX-License-Identifier: Apache-2.0
//
// The layer that `quantfuse demo` shows: in float32, and in one scheme, through the C interface as any
// program would.
#pragma once

#include <cstdint>
#include <vector>

#include "measure.h"
#include "problem.h"
#include "tensor.h"

namespace quantfuse::cli {

// The layer before it is quantized, and what it gives.
struct FloatLayer {
  int64_t n, k, tokens;
  Tensor weight;               // float32 [n, k]
  Tensor x;                    // bfloat16 [tokens, k]
  std::vector<float> exact_y;  // [tokens, n]

  FloatLayer(int64_t n, int64_t k, int64_t tokens);
  double bytes() const { return static_cast<double>(weight.bytes()); }

 private:
  float dot(int64_t token, int64_t row) const;
};

// The layer in one scheme, with as many copies of the packed weight as make every call find it in memory, not
// in a cache.
class QuantizedLayer {
 public:
  QuantizedLayer(const FloatLayer& layer, const cases::LinearSpec& spec, double cache_bytes);

  size_t bytes() const { return codes_.bytes() + scale_.bytes(); }
  double error() const;  // || y - exact || / || exact ||
  Timing time(int64_t tokens, double seconds) const;

 private:
  class Call;  // everything of a call that does not change from one to the next

  const FloatLayer& layer_;
  qf_format act_format_;
  Tensor codes_, scale_;
  std::vector<Tensor> packed_;
  qf_weight view_ = {};
};

}  // namespace quantfuse::cli
