// SPDX-License-Identifier: Apache-2.0
//
// A safetensors file:
//
//   u64 n | n bytes of JSON, padded with spaces | data
//
//   {"__metadata__": {"format": "pt"}, "NAME": {"dtype": "F16", "shape": [4, 8], "data_offsets": [0, 64]}}
//
// Offsets count from the start of the data. The tensors cover the data without overlap and without a hole,
// which is checked, so that no byte of the file is unaccounted for.
#pragma once

#include <map>
#include <vector>

#include "checkpoint/mapped_file.h"
#include "checkpoint/tensor.h"

namespace quantfuse::checkpoint {

struct SafetensorsHeader {
  std::vector<Tensor> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;
};

// The tensors point into the file's bytes.
SafetensorsHeader read_safetensors(const MappedFile& file);

}  // namespace quantfuse::checkpoint
