// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/import.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>

#include "checkpoint/error.h"
#include "checkpoint/quantfuse_layout.h"

namespace quantfuse::checkpoint {
namespace {

const char* matching_end(const std::string& name, const std::vector<const char*>& ends) {
  for (const char* end : ends) {
    if (name.ends_with(end)) return end;
  }
  return nullptr;
}

bool has_metadata(const Checkpoint& checkpoint, const std::string& key, const std::string& value) {
  const auto found = checkpoint.metadata().find(key);
  return found != checkpoint.metadata().end() && found->second == value;
}

// What quantization_config says; a file that needs none says it by itself.
const Importer* importer_of(const Checkpoint& checkpoint, const Settings& settings, bool has_settings) {
  const bool is_one_weight = has_metadata(checkpoint, "format", kQuantfuseFormat);
  if (!has_settings && !is_one_weight && checkpoint.container() == Container::safetensors) return nullptr;
  const std::string method = checkpoint.container() == Container::gguf ? "gguf"
                             : is_one_weight                           ? "quantfuse"
                                                                       : settings.text("quant_method");
  std::string known;
  for (const Importer* importer : importers()) {
    if (method == importer->method) return importer;
    known += (known.empty() ? "" : ", ") + std::string(importer->method);
  }
  fail(fmt::format("quantization_config.quant_method '{}' is not one that is read: {}", printable(method),
                   known));
}

// Types that say nothing without a scale.
bool needs_scale(Type type) {
  return type == Type::e4m3 || type == Type::e5m2 || type == Type::i8 || type == Type::u8 ||
         type == Type::i32 || type == Type::f4;
}

// Fails where a tensor that no layer took cannot be an ordinary one.
void expect_plain(const Tensor& tensor, const Importer* chosen) {
  const std::string name = printable(tensor.name);
  const bool is_part =
      chosen && (matching_end(tensor.name, chosen->marks) || matching_end(tensor.name, chosen->parts));
  if (is_part || (chosen && tensor.name.ends_with(".weight") && needs_scale(tensor.type))) {
    fail(fmt::format("{} ({} {}) belongs to no layer: what {} keeps beside it is missing, or it is left over",
                     name, type_name(tensor.type), shape_text(tensor.shape), chosen->method));
  }
  std::string methods;
  for (const Importer* importer : importers()) {
    if (!matching_end(tensor.name, importer->marks)) continue;
    methods += (methods.empty() ? "" : " or ") + std::string(importer->method);
  }
  if (methods.empty()) return;
  fail(fmt::format("{} is a tensor of {}, but {}", name, methods,
                   chosen ? fmt::format("quantization_config says {}", chosen->method)
                          : "there is no quantization_config: state quant_method=METHOD and the rest"));
}

}  // namespace

const Tensor& Plan::need(const std::string& name, const std::string& for_whom) const {
  const Tensor* tensor = find(name);
  if (!tensor) {
    fail(printable(name) + " is missing" +
         (for_whom.empty() ? "" : ", which belongs to " + printable(for_whom)));
  }
  return *tensor;
}

std::vector<std::string> Plan::modules_with(std::string_view suffix) const {
  std::vector<std::string> modules;
  for (const Tensor& tensor : checkpoint.tensors()) {
    if (!tensor.name.ends_with(suffix)) continue;
    modules.push_back(tensor.name.substr(0, tensor.name.size() - suffix.size()));
  }
  return modules;
}

Import import_checkpoint(const Checkpoint& checkpoint, const StatedFields& stated) {
  const Json config = with_stated(checkpoint.quantization_config(), stated);
  Plan plan(checkpoint, Settings(config, "quantization_config"));
  const Importer* importer = importer_of(checkpoint, plan.settings, !config.is_null());
  if (importer) importer->plan(plan);
  if (importer && plan.layers.empty() && checkpoint.container() == Container::safetensors) {
    fail(fmt::format("quantization_config says {}, but no tensor is quantized that way", importer->method));
  }

  Import result;
  result.format = plan.format;
  result.layers = std::move(plan.layers);
  std::unordered_set<const Tensor*> used;
  std::unordered_set<std::string> names;
  for (const auto& layer : result.layers) {
    names.insert(layer->info().name);
    for (const Tensor* tensor : layer->info().tensors) {
      if (!used.insert(tensor).second) fail(printable(tensor->name) + " is used by two layers");
    }
  }
  for (const Tensor& tensor : checkpoint.tensors()) {
    if (used.contains(&tensor)) continue;
    if (checkpoint.container() == Container::safetensors) expect_plain(tensor, importer);
    if (!names.insert(tensor.name).second) {
      fail(printable(tensor.name) + " is there both quantized and as it is");
    }
    result.plain.push_back(&tensor);
  }
  return result;
}

bool is_listed(const std::vector<std::string>& modules, const std::string& module) {
  const std::string dotted = "." + module + ".";
  return std::any_of(modules.begin(), modules.end(), [&](const std::string& listed) {
    return !listed.empty() && dotted.find("." + listed + ".") != std::string::npos;
  });
}

}  // namespace quantfuse::checkpoint
