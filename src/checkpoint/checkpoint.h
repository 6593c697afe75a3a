// SPDX-License-Identifier: Apache-2.0
//
// A checkpoint as it lies on disk: a folder of safetensors (one file, or shards with an index), or a GGUF.
// Opening reads headers and config alone; a tensor's bytes are read when somebody looks at them.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/json.h"
#include "checkpoint/mapped_file.h"
#include "checkpoint/tensor.h"

namespace quantfuse::checkpoint {

enum class Container { safetensors, gguf };

class Checkpoint {
 public:
  // A folder, a .safetensors or a .gguf file. A file alone is read without a config, unless it is the
  // model.safetensors that the config.json beside it is about.
  explicit Checkpoint(const std::filesystem::path& path);
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  Container container() const { return container_; }
  const std::vector<std::unique_ptr<MappedFile>>& files() const { return files_; }
  int64_t file_bytes() const;  // of all files together

  const std::vector<Tensor>& tensors() const { return tensors_; }
  const Tensor* find(std::string_view name) const;  // null where there is none

  // config.json, or the key-values of a GGUF; an empty object where there is none.
  const Json& config() const { return config_; }
  // config.json's quantization_config, under whichever name the tool gave it; null where there is none.
  const Json& quantization_config() const { return quantization_config_; }
  // __metadata__ of all files together.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  std::string architecture() const;  // "" where nothing says

 private:
  void open_folder(const std::filesystem::path& folder);
  void open_index(const std::filesystem::path& index);
  void open_safetensors(const std::filesystem::path& file);
  void open_gguf(const std::filesystem::path& file);
  void read_config(const std::filesystem::path& folder);
  void add_tensors(std::vector<Tensor> tensors, const std::filesystem::path& file);

  Container container_ = Container::safetensors;
  std::vector<std::unique_ptr<MappedFile>> files_;
  std::vector<Tensor> tensors_;
  std::unordered_map<std::string, size_t> index_of_;
  Json config_ = Json::object(), quantization_config_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace quantfuse::checkpoint
