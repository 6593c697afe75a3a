// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/error.h"
#include "checkpoint/gguf.h"
#include "checkpoint/safetensors.h"

namespace quantfuse::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kSingleGguf = "model.gguf";
constexpr const char* kIndexSuffix = ".safetensors.index.json";

bool has_suffix(const std::string& text, std::string_view suffix) {
  return text.size() >= suffix.size() && text.ends_with(suffix);
}

std::vector<fs::path> files_ending(const fs::path& folder, std::string_view suffix) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (has_suffix(entry.path().filename().string(), suffix)) found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

// An index names files beside it, and never leads out of the folder.
void expect_plain_name(const fs::path& index, const std::string& shard) {
  const bool is_plain = !shard.empty() && shard != "." && shard != ".." &&
                        shard.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
  if (!is_plain) {
    fail(fmt::format("{}: the shard '{}' is not the name of a file in the folder",
                     printable(index.filename().string()), printable(shard)));
  }
}

}  // namespace

Checkpoint::Checkpoint(const fs::path& path) {
  if (fs::is_directory(path)) {
    open_folder(path);
  } else if (has_suffix(path.string(), ".gguf")) {
    open_gguf(path);
  } else if (has_suffix(path.string(), ".safetensors")) {
    open_safetensors(path);
    if (path.filename() == kSingle) read_config(path.parent_path());
  } else {
    fail(printable(path.string()) + ": expected a folder, a .safetensors or a .gguf file");
  }
}

int64_t Checkpoint::file_bytes() const {
  int64_t total = 0;
  for (const auto& file : files_) total += static_cast<int64_t>(file->bytes().size());
  return total;
}

const Tensor* Checkpoint::find(std::string_view name) const {
  const auto found = index_of_.find(std::string(name));
  return found == index_of_.end() ? nullptr : &tensors_[found->second];
}

std::string Checkpoint::architecture() const {
  const auto text = [](const Json& json, const char* key) {
    const auto found = json.find(key);
    return found != json.end() && found->is_string() ? found->get<std::string>() : std::string();
  };
  if (container_ == Container::gguf) return text(config_, "general.architecture");
  const auto names = config_.find("architectures");
  if (names != config_.end() && names->is_array() && !names->empty() && names->front().is_string()) {
    return names->front().get<std::string>();
  }
  return text(config_, "model_type");
}

void Checkpoint::open_folder(const fs::path& folder) {
  const fs::path standard_index = folder / (std::string("model") + kIndexSuffix);
  const auto indexes = files_ending(folder, kIndexSuffix);
  if (fs::exists(standard_index)) {
    open_index(standard_index);
  } else if (fs::exists(folder / kSingle)) {
    open_safetensors(folder / kSingle);
  } else if (indexes.size() == 1) {
    open_index(indexes[0]);
  } else if (fs::exists(folder / kSingleGguf)) {
    return open_gguf(folder / kSingleGguf);
  } else {
    const auto safetensors = files_ending(folder, ".safetensors"), ggufs = files_ending(folder, ".gguf");
    if (safetensors.size() + ggufs.size() != 1) {
      fail(fmt::format("{}: {} .safetensors and {} .gguf files and no index: name the file to read",
                       printable(folder.string()), safetensors.size(), ggufs.size()));
    }
    if (!ggufs.empty()) return open_gguf(ggufs[0]);
    open_safetensors(safetensors[0]);
  }
  read_config(folder);
}

void Checkpoint::open_index(const fs::path& index) {
  const std::string what = printable(index.filename().string());
  const Json json = read_json_file(index);
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (map == json.end() || !map->is_object()) fail(what + ": no weight_map");

  std::map<std::string, size_t> shards;  // and how many tensors the index has in each
  for (const auto& [name, shard] : map->items()) {
    if (!shard.is_string()) fail(fmt::format("{}: the shard of {} is not a string", what, printable(name)));
    expect_plain_name(index, shard.get<std::string>());
    ++shards[shard.get<std::string>()];
  }
  for (const auto& [shard, count] : shards) {
    const fs::path file = index.parent_path() / shard;
    if (!fs::exists(file)) fail(fmt::format("{}: the shard {} is missing", what, printable(shard)));
    const size_t before = tensors_.size();
    open_safetensors(file);
    for (size_t i = before; i < tensors_.size(); ++i) {
      const auto entry = map->find(tensors_[i].name);
      if (entry == map->end() || entry->get<std::string>() != shard) {
        fail(fmt::format("{}: {} is in {}, which the index does not say", what, printable(tensors_[i].name),
                         printable(shard)));
      }
    }
    if (tensors_.size() - before == count) continue;
    for (const auto& [name, named_shard] : map->items()) {
      if (named_shard.get<std::string>() == shard && !find(name)) {
        fail(fmt::format("{}: {} is missing from {}", what, printable(name), printable(shard)));
      }
    }
  }
}

void Checkpoint::open_safetensors(const fs::path& path) {
  files_.push_back(std::make_unique<MappedFile>(path));
  SafetensorsHeader header = read_safetensors(*files_.back());
  metadata_.merge(header.metadata);
  add_tensors(std::move(header.tensors), path);
}

void Checkpoint::open_gguf(const fs::path& path) {
  container_ = Container::gguf;
  files_.push_back(std::make_unique<MappedFile>(path));
  GgufHeader header = read_gguf(*files_.back());
  config_ = std::move(header.metadata);
  const auto parts = config_.find("split.count");
  if (parts != config_.end() && parts->is_number_unsigned() && parts->get<uint64_t>() > 1) {
    fail(fmt::format("{}: one of {} parts of a split GGUF; join them with llama-gguf-split --merge first",
                     printable(path.filename().string()), parts->get<uint64_t>()));
  }
  add_tensors(std::move(header.tensors), path);
}

void Checkpoint::add_tensors(std::vector<Tensor> tensors, const fs::path& file) {
  for (Tensor& tensor : tensors) {
    if (!index_of_.emplace(tensor.name, tensors_.size()).second) {
      fail(fmt::format("{}: {} is also in another shard", printable(file.filename().string()),
                       printable(tensor.name)));
    }
    tensors_.push_back(std::move(tensor));
  }
}

void Checkpoint::read_config(const fs::path& folder) {
  if (fs::exists(folder / "config.json")) config_ = read_json_file(folder / "config.json");
  if (!config_.is_object()) fail("config.json: not a JSON object");
  // compression_config is what compressed-tensors wrote first; a model of several parts may have the config
  // in its language part; auto-gptq first wrote a file of its own.
  for (const char* key : {"quantization_config", "compression_config"}) {
    if (quantization_config_.is_null()) quantization_config_ = config_.value(key, Json());
  }
  const Json text_config = config_.value("text_config", Json());
  if (quantization_config_.is_null() && text_config.is_object()) {
    quantization_config_ = text_config.value("quantization_config", Json());
  }
  if (quantization_config_.is_null() && fs::exists(folder / "quantize_config.json")) {
    quantization_config_ = read_json_file(folder / "quantize_config.json");
    if (quantization_config_.is_object() && !quantization_config_.contains("quant_method")) {
      quantization_config_["quant_method"] = "gptq";
    }
  }
  if (!quantization_config_.is_null() && !quantization_config_.is_object()) {
    fail("config.json: quantization_config is not a JSON object");
  }
}

}  // namespace quantfuse::checkpoint
