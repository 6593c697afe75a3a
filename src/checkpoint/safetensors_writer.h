// SPDX-License-Identifier: Apache-2.0
//
// Writes a safetensors file tensor by tensor: all names, types and shapes first, then the data in that order.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "checkpoint/new_file.h"
#include "checkpoint/tensor.h"

namespace quantfuse::checkpoint {

struct TensorHeader {
  std::string name;
  Type type;
  std::vector<int64_t> shape;
};

// Data follows in the order of `headers`, through file.write.
void write_safetensors_header(NewFile& file, const std::vector<TensorHeader>& headers);

}  // namespace quantfuse::checkpoint
