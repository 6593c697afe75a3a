// SPDX-License-Identifier: Apache-2.0
//
// Writes a safetensors file tensor by tensor: all names, types and shapes first, then the data in that order.
#pragma once

#include <map>
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

// Wide types first keeps every tensor aligned to its own type, which PyTorch insists on.
inline bool is_wider(Type a, Type b) { return type_info(a).bytes > type_info(b).bytes; }

// Data follows in the order of `headers`, through file.write or file.write_at. Returns where the data of each
// begin in the file, and in the end where the file does.
std::vector<int64_t> write_safetensors_header(NewFile& file, const std::vector<TensorHeader>& headers,
                                              const std::map<std::string, std::string>& metadata = {});

}  // namespace quantfuse::checkpoint
