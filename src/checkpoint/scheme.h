// SPDX-License-Identifier: Apache-2.0
//
// What the weights of a model become, by name: "int4", "w8a8-fp8". A name beginning with w says what becomes
// of the activations too; the others leave them as they are.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "quantfuse/quantfuse.h"

namespace quantfuse::checkpoint {

struct Scheme {
  std::string name;
  qf_format format = QF_FORMAT_NONE;
  bool has_e8m0_scale = false;  // MXFP4, MXFP8
  qf_block block = {1, 0};
  bool is_asymmetric = false;
  qf_format act_format =
      QF_FORMAT_NONE;     // of activations that are quantized on the way in, by dynamic scales
  int64_t act_group = 0;  // of them that share a scale; 0: those of a token

  int bits() const;
};

std::vector<std::string> scheme_names();

// What may be said about a scheme beside its name.
struct SchemeOptions {
  std::string name;
  std::optional<std::string> group;  // a number of columns; "channel" or 0: a row; "tensor"
  bool is_asymmetric = false;
};
// Throws std::invalid_argument where the options do not go together.
Scheme scheme_from(const SchemeOptions& options);

}  // namespace quantfuse::checkpoint
