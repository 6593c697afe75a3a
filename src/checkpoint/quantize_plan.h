// SPDX-License-Identifier: Apache-2.0
//
// What becomes of every tensor of a checkpoint that is to be quantized, and into which file it goes. Made
// from headers alone, the same every time, so that work that was stopped can go on where it was.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/name_pattern.h"
#include "checkpoint/weight_layout.h"

namespace quantfuse::checkpoint {

// Over the names of modules, found anywhere in them.
struct Selection {
  std::vector<NamePattern> exclude;  // left as they are
  std::optional<NamePattern>
      include;  // nothing else is quantized; heads and routers are, where it finds them
};

// Why a tensor is left as it is.
struct LeftAlone {
  const Tensor* tensor;
  std::string why;
};

struct QuantizePlan {
  // One tensor of the input: a weight that becomes `parts`, or one that is copied to its only part.
  struct Item {
    const Tensor* tensor;
    bool is_quantized;
    std::vector<TensorHeader> parts;

    int64_t bytes() const;  // of all parts
    std::string module() const;
  };
  struct Shard {
    std::string file;
    std::vector<Item> items;
    int64_t bytes = 0;  // of data
  };
  std::vector<Shard> shards;
  std::vector<LeftAlone> left_alone;
  std::vector<std::string> ignored;  // modules, for the config

  int64_t num_quantized() const;
};

// Fails where there is nothing to quantize. A shard has at most `shard_bytes`, unless one tensor alone has
// more.
QuantizePlan plan_quantization(const Checkpoint& checkpoint, const Selection& selection,
                               const WeightLayout& layout, int64_t shard_bytes);

}  // namespace quantfuse::checkpoint
