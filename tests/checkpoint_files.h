// SPDX-License-Identifier: Apache-2.0
//
// Files for the tests of checkpoints: the fixtures, a folder that goes away, and checkpoints made on the
// spot.
#pragma once

#include <stdlib.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/safetensors_writer.h"

namespace quantfuse::checkpoint {

namespace fs = std::filesystem;
using Bytes = std::vector<uint8_t>;

// tests/fixtures, and the folder in QUANTFUSE_FIXTURES where that is set.
inline std::vector<fs::path> fixture_roots() {
  std::vector<fs::path> roots = {QF_TEST_FIXTURES};
  const char* whole = std::getenv("QUANTFUSE_FIXTURES");
  if (whole && *whole) roots.emplace_back(whole);
  return roots;
}

inline nlohmann::json read_json(const fs::path& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

// The name of a test from a path and its place in the list: letters, digits and underscores.
inline std::string test_name(const fs::path& path, size_t index) {
  std::string name = path.filename().string() + "_" + std::to_string(index);
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
}

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string path = (fs::temp_directory_path() / "quantfuse-test-XXXXXX").string();
    path_ = mkdtemp(path.data());
  }
  ~TemporaryFolder() { fs::remove_all(path_); }
  fs::path operator/(const std::string& name) const { return path_ / name; }
  const fs::path& path() const { return path_; }

  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
  }
  size_t num_files() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(path_), fs::directory_iterator()));
  }

 private:
  fs::path path_;
};

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}
inline Bytes bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

// A tensor to write.
struct NewTensor {
  TensorHeader header;
  Bytes data;
};

inline void write_safetensors(const fs::path& path, const std::vector<NewTensor>& tensors) {
  NewFile file(path);
  std::vector<TensorHeader> headers;
  for (const NewTensor& tensor : tensors) headers.push_back(tensor.header);
  write_safetensors_header(file, headers);
  for (const NewTensor& tensor : tensors) file.write(tensor.data);
  file.finish();
}

// A folder with config.json and model.safetensors.
inline void write_checkpoint(const TemporaryFolder& folder, const nlohmann::json& quantization_config,
                             const std::vector<NewTensor>& tensors) {
  folder.write("config.json", nlohmann::json{{"quantization_config", quantization_config}}.dump());
  write_safetensors(folder / "model.safetensors", tensors);
}

// Fields of `bits` bits, one after the other from the lowest bit of word 0.
inline std::vector<uint32_t> packed(const std::vector<uint32_t>& fields, int bits) {
  std::vector<uint32_t> words((fields.size() * static_cast<size_t>(bits) + 31) / 32);
  for (size_t i = 0; i < fields.size(); ++i) {
    for (int b = 0; b < bits; ++b) {
      const size_t bit = i * static_cast<size_t>(bits) + static_cast<size_t>(b);
      words[bit / 32] |= (fields[i] >> b & 1) << bit % 32;
    }
  }
  return words;
}

}  // namespace quantfuse::checkpoint
