// SPDX-License-Identifier: Apache-2.0
//
// A checkpoint of floating-point weights as a folder of quantized ones, tensor by tensor. Memory, that of the
// mapped input included, is one tensor and its result at most; rows are worked on by all threads, each of
// which writes its own to their place in the file. Work that was stopped goes on with the first shard that is
// missing.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/quantize_plan.h"
#include "checkpoint/weight_layout.h"
#include "checkpoint/weight_rows.h"
#include "checkpoint/work_folder.h"

namespace quantfuse::checkpoint {

struct QuantizeJob {
  const Checkpoint& checkpoint;
  const WeightLayout& layout;
  const QuantizePlan& plan;
  Method method = Method::rtn;
  std::filesystem::path in;  // what was opened; the other files of a folder are copied
};

// All that the result depends on, to know unfinished work by: the options, and the files of the input.
Json describe_job(const Checkpoint& checkpoint, const Json& options);

struct QuantizedLayer {
  std::string name;  // of the weight
  std::vector<int64_t> shape;
  int64_t bytes_before = 0, bytes = 0;
  double error = 0;  // relative: root of the sum of squares of the errors over that of the numbers
};

struct QuantizeResult {
  std::vector<QuantizedLayer> layers;
  int64_t bytes = 0;                // of the safetensors files
  size_t num_resumed = 0;           // shards that were there
  std::vector<std::string> copied;  // other files
};

// Told before each tensor, with the bytes of input that are done.
using OnTensor = std::function<void(const std::string& name, int64_t bytes_done)>;

// Fails, naming the tensor, where a number is not finite. The input is only read; no file of the output has
// its name before it is whole, and config.json, without which nobody loads the folder, comes last.
QuantizeResult quantize_checkpoint(const QuantizeJob& job, WorkFolder& folder, const OnTensor& on_tensor);

}  // namespace quantfuse::checkpoint
