// SPDX-License-Identifier: Apache-2.0
//
// A file's bytes, mapped read-only: what is not looked at is not read, nor is what lies around it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <utility>

namespace quantfuse::checkpoint {

class MappedFile {
 public:
  explicit MappedFile(std::filesystem::path path);
  MappedFile(MappedFile&& other) noexcept
      : path_(std::move(other.path_)), bytes_(std::exchange(other.bytes_, {})) {}
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();

  const std::filesystem::path& path() const { return path_; }
  std::span<const uint8_t> bytes() const { return bytes_; }

 private:
  std::filesystem::path path_;
  std::span<const uint8_t> bytes_;
};

// Has the system read mapped bytes ahead, before all of them are looked at.
void prefetch_pages(std::span<const uint8_t> bytes);

// Gives mapped bytes back to the system, which reads them again if they are looked at again: a stream through
// a large file then takes the memory of one tensor. Pages that other tensors share are kept.
void release_pages(std::span<const uint8_t> bytes);

}  // namespace quantfuse::checkpoint
