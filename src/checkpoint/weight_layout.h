// SPDX-License-Identifier: Apache-2.0
//
// How a quantized weight lies in a checkpoint: which tensors it becomes, and what their bytes are. One layout
// is that of compressed-tensors, which other engines load; the other is QuantFuse's own, which holds every
// scheme.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/json.h"
#include "checkpoint/safetensors_writer.h"
#include "checkpoint/scheme.h"
#include "checkpoint/weight_rows.h"

namespace quantfuse::checkpoint {

class WeightLayout {
 public:
  // Bytes of tensor `part` of a weight, from `offset` on.
  using Store = std::function<void(size_t part, int64_t offset, std::span<const uint8_t> bytes)>;

  explicit WeightLayout(Scheme scheme) : scheme_(std::move(scheme)) {}
  virtual ~WeightLayout() = default;
  const Scheme& scheme() const { return scheme_; }

  // Why a weight [n, k] cannot be held; empty where it can.
  virtual std::string refusal(int64_t n, int64_t k) const = 0;
  // What scales are stored in, for a weight of a floating-point type.
  virtual Type scale_type(Type weight_type) const = 0;
  // The tensors of module.weight [n, k], and what the file's __metadata__ say about them.
  virtual std::vector<TensorHeader> parts(const std::string& module, int64_t n, int64_t k,
                                          Type weight_type) const = 0;
  virtual std::map<std::string, std::string> metadata(const std::string& module, int64_t n,
                                                      int64_t k) const = 0;
  // Stores the bytes that some rows have in each of the parts. Threads may do so at once, with rows of their
  // own, which are scratch memory afterwards.
  virtual void store(WeightRows& rows, Type weight_type, const Store& store) const = 0;
  // quantization_config; `ignored` are the linear layers that were left as they are.
  virtual nlohmann::ordered_json config(const std::vector<std::string>& ignored) const = 0;

 private:
  Scheme scheme_;
};

// Throws std::invalid_argument where compressed-tensors has no such scheme.
std::unique_ptr<WeightLayout> compressed_tensors_layout(const Scheme& scheme);
std::unique_ptr<WeightLayout> quantfuse_layout(const Scheme& scheme);

}  // namespace quantfuse::checkpoint
