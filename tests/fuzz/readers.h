// SPDX-License-Identifier: Apache-2.0
//
// What the fuzzers feed: one function per reader, which takes any bytes and may end in a CheckpointError and
// in nothing else. The fuzzers and the test of what they once found share them.
#pragma once

#include <fstream>
#include <span>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define QF_HAS_ASAN 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define QF_HAS_ASAN 1
#endif
#ifdef QF_HAS_ASAN
#include <sanitizer/asan_interface.h>
#endif

#include "../checkpoint_files.h"
#include "checkpoint/error.h"
#include "checkpoint/gguf.h"
#include "checkpoint/import.h"
#include "checkpoint/safetensors.h"

namespace quantfuse::checkpoint::fuzz {

using Input = std::span<const uint8_t>;

// Behind the end of a mapped file the rest of its last page reads as zeros. AddressSanitizer is told that it
// is not ours, so that reading it is found.
class FencedEnd {
 public:
  explicit FencedEnd([[maybe_unused]] const MappedFile& file) {
#ifdef QF_HAS_ASAN
    constexpr size_t kPage = 4096;
    end_ = file.bytes().data() + file.bytes().size();
    slack_ = (kPage - file.bytes().size() % kPage) % kPage;
    ASAN_POISON_MEMORY_REGION(end_, slack_);
  }
  ~FencedEnd() {
    ASAN_UNPOISON_MEMORY_REGION(end_, slack_);
#endif
  }
  FencedEnd(const FencedEnd&) = delete;
  FencedEnd& operator=(const FencedEnd&) = delete;

#ifdef QF_HAS_ASAN
 private:
  const uint8_t* end_;
  size_t slack_;
#endif
};

// One folder for all inputs of the process.
inline const TemporaryFolder& input_folder() {
  static const TemporaryFolder folder;
  return folder;
}

inline fs::path write_input(const std::string& name, Input bytes) {
  const fs::path path = input_folder() / name;
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  return path;
}

// Everything that can be asked of the layers.
inline void read_layers(const Checkpoint& checkpoint) {
  const Import import = import_checkpoint(checkpoint);
  for (const auto& layer : import.layers) {
    try {
      layer->values();
      layer->canonical();
      std::vector<float> numbers(static_cast<size_t>(layer->info().numel()));
      layer->dequantize(numbers);
    } catch (const CheckpointError&) {  // the layers behind it are looked at all the same
    }
  }
}

inline void read_checkpoint(const fs::path& path) {
  const Checkpoint checkpoint(path);
  std::vector<std::unique_ptr<FencedEnd>> fences;
  for (const auto& file : checkpoint.files()) fences.push_back(std::make_unique<FencedEnd>(*file));
  read_layers(checkpoint);
}

// A safetensors file.
inline void safetensors(Input input) {
  try {
    const MappedFile file(write_input("a.safetensors", input));
    const FencedEnd fence(file);
    read_safetensors(file);
  } catch (const CheckpointError&) {
  }
}

// A GGUF file, with all its layers.
inline void gguf(Input input) {
  try {
    const fs::path path = write_input("a.gguf", input);
    {
      const MappedFile file(path);
      const FencedEnd fence(file);
      read_gguf(file);
    }
    read_checkpoint(path);
  } catch (const CheckpointError&) {
  }
}

// config.json, a zero byte, model.safetensors: the plan that follows from both, and all its layers.
inline void quantization_config(Input input) {
  const size_t length = static_cast<size_t>(std::find(input.begin(), input.end(), 0) - input.begin());
  write_input("config.json", input.first(length));
  write_input("model.safetensors", input.subspan(std::min(length + 1, input.size())));
  try {
    read_checkpoint(input_folder().path());
  } catch (const CheckpointError&) {
  }
}

}  // namespace quantfuse::checkpoint::fuzz
