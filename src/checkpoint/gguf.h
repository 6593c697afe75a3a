// SPDX-License-Identifier: Apache-2.0
//
// A GGUF file, version 2 or 3, little-endian:
//
//   "GGUF" | u32 version | u64 tensors | u64 kvs | kv... | tensor... | padding | data
//
//   string   u64 length, bytes
//   kv       string key, u32 type, value          an array is u32 type, u64 count, values
//   tensor   string name, u32 rank, u64 dims[rank] (fastest first), u32 type, u64 offset
//
// Offsets count from the start of the data, which lies at the next multiple of general.alignment (32 unless
// said otherwise), as every tensor does.
#pragma once

#include <vector>

#include "checkpoint/json.h"
#include "checkpoint/mapped_file.h"
#include "checkpoint/tensor.h"

namespace quantfuse::checkpoint {

struct GgufHeader {
  std::vector<Tensor> tensors;  // in the order of the header; shapes slowest dimension first
  Json metadata;  // an array, which may be a whole vocabulary, stands as {"array": TYPE, "count": N}
};

// The tensors point into the file's bytes.
GgufHeader read_gguf(const MappedFile& file);

}  // namespace quantfuse::checkpoint
