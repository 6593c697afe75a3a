// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/quantize_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/error.h"

namespace quantfuse::checkpoint {
namespace {

constexpr std::string_view kWeight = ".weight";

// Heads that may share the embedding's weight, by type of model: they are in the model then, though not in
// the file.
struct Head {
  const char* model_type;  // null: any other
  const char* module;
};
constexpr Head kHeads[] = {{"albert", "predictions.decoder"},  {"bert", "cls.predictions.decoder"},
                           {"camembert", "lm_head.decoder"},   {"distilbert", "vocab_projector"},
                           {"roberta", "lm_head.decoder"},     {"whisper", "proj_out"},
                           {"xlm-roberta", "lm_head.decoder"}, {nullptr, "lm_head"}};

const char* head_of(const Checkpoint& checkpoint) {
  const Json type = checkpoint.config().value("model_type", Json());
  const Head* head = kHeads;
  while (head->model_type && type != head->model_type) ++head;
  return head->module;
}

// Layers that are not linear ones, or whose error costs more than their size saves. The pattern is for the
// last name of the module; what a model's authors call them is all that a checkpoint tells.
struct Kind {
  const char* why;
  NamePattern last_name;
  bool is_linear;  // and quantized where the user includes it
};

const std::vector<Kind>& kinds_left_alone() {
  static const std::vector<Kind> kinds = {
      {"output head", NamePattern("(.*lm_head|embed_out|output)$"), true},
      {"router", NamePattern("(gate|router|.*_router|.*expert_gate)$"), true},
      {"embedding", NamePattern(".*embed|(wte|wpe|shared|relative_attention_bias)$"), false},
      {"norm", NamePattern(".*norm|ln(_.*|[0-9]*)$"), false},
  };
  return kinds;
}

// GPT-2 and its kin keep weights as [in, out], in a layer that is not a linear one.
bool is_conv1d(const Checkpoint& checkpoint, const std::string& last_name) {
  const Json type = checkpoint.config().value("model_type", Json());
  const bool is_kin =
      type == "gpt2" || type == "openai-gpt" || type == "imagegpt" || type == "decision_transformer";
  return is_kin &&
         (last_name == "c_attn" || last_name == "c_proj" || last_name == "c_fc" || last_name == "q_attn");
}

std::string last_name_of(const std::string& module) { return module.substr(module.rfind('.') + 1); }

std::string module_of(const Tensor& tensor) {
  return tensor.name.ends_with(kWeight) ? tensor.name.substr(0, tensor.name.size() - kWeight.size())
                                        : tensor.name;
}

bool is_float(Type type) { return type == Type::f32 || type == Type::f16 || type == Type::bf16; }

// Why a tensor is not to be quantized; empty where it is.
std::string reason_to_leave(const Checkpoint& checkpoint, const Tensor& tensor, const Selection& selection,
                            const WeightLayout& layout) {
  if (!tensor.name.ends_with(kWeight)) return "no weight";
  if (tensor.rank() != 2) return fmt::format("{} dimension{}", tensor.rank(), tensor.rank() == 1 ? "" : "s");
  if (tensor.numel() == 0) return "empty";
  const std::string module = module_of(tensor), last_name = last_name_of(module);
  const bool is_included = selection.include && selection.include->is_found_in(module);
  for (const Kind& kind : kinds_left_alone()) {
    if (kind.last_name.matches(last_name) && !(kind.is_linear && is_included)) return kind.why;
  }
  if (is_conv1d(checkpoint, last_name)) return "Conv1D";
  if (!is_float(tensor.type)) return std::string("type ") + type_name(tensor.type);
  for (const NamePattern& pattern : selection.exclude) {
    if (pattern.is_found_in(module)) return "excluded";
  }
  if (selection.include && !is_included) return "not included";
  return layout.refusal(tensor.size(0), tensor.size(1));
}

// Matrices that a reader of the config would take for quantized, if it were not told.
bool needs_mention(const Tensor& tensor) { return tensor.rank() == 2 && tensor.name.ends_with(kWeight); }

std::string shard_name(size_t index, size_t count) {
  if (count == 1) return "model.safetensors";
  return fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

}  // namespace

int64_t QuantizePlan::Item::bytes() const {
  int64_t total = 0;
  for (const TensorHeader& part : parts) total += declared_bytes(part.name, part.type, part.shape);
  return total;
}

std::string QuantizePlan::Item::module() const { return module_of(*tensor); }

int64_t QuantizePlan::num_quantized() const {
  int64_t count = 0;
  for (const Shard& shard : shards) {
    count +=
        std::count_if(shard.items.begin(), shard.items.end(), [](const Item& i) { return i.is_quantized; });
  }
  return count;
}

QuantizePlan plan_quantization(const Checkpoint& checkpoint, const Selection& selection,
                               const WeightLayout& layout, int64_t shard_bytes) {
  QuantizePlan plan;
  for (const Tensor& tensor : checkpoint.tensors()) {
    QuantizePlan::Item item{&tensor, true, {}};
    const std::string why = reason_to_leave(checkpoint, tensor, selection, layout);
    if (!why.empty()) {
      if (needs_mention(tensor)) plan.ignored.push_back(item.module());
      plan.left_alone.push_back({&tensor, why});
      item.is_quantized = false;
      item.parts = {{tensor.name, tensor.type, tensor.shape}};
    } else {
      item.parts = layout.parts(item.module(), tensor.size(0), tensor.size(1), tensor.type);
      for (const TensorHeader& part : item.parts) {
        if (part.name != tensor.name && checkpoint.find(part.name)) {
          fail(printable(part.name) + " is there already: is the checkpoint quantized?");
        }
      }
    }
    const int64_t bytes = item.bytes();
    if (plan.shards.empty() ||
        (plan.shards.back().bytes > 0 && plan.shards.back().bytes + bytes > shard_bytes)) {
      plan.shards.emplace_back();
    }
    plan.shards.back().bytes += bytes;
    plan.shards.back().items.push_back(std::move(item));
  }
  if (plan.num_quantized() == 0) {
    std::string why = plan.left_alone.empty() ? "it has no tensors" : "";
    for (const LeftAlone& left : plan.left_alone) {
      if (needs_mention(*left.tensor)) why = printable(left.tensor->name) + ": " + left.why;
    }
    fail("there is nothing to quantize: " +
         (why.empty() ? "no tensor is the weight of a linear layer" : why));
  }
  const std::string head = head_of(checkpoint);
  if (!checkpoint.find(head + std::string(kWeight))) plan.ignored.push_back(head);
  for (size_t i = 0; i < plan.shards.size(); ++i) plan.shards[i].file = shard_name(i, plan.shards.size());
  return plan;
}

}  // namespace quantfuse::checkpoint
