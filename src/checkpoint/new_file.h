// SPDX-License-Identifier: Apache-2.0
//
// A file that appears whole or not at all: written beside its place under another name, then renamed. Neither
// a full disk nor a killed process leaves half a file under the final name. A pipe or a device, which a
// rename would replace, is written to as it is.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace quantfuse::checkpoint {

class NewFile {
 public:
  // Throws std::system_error where `path` cannot be written to, so that a command finds out before its work.
  explicit NewFile(const std::filesystem::path& path);
  ~NewFile();  // removes what was not finished
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(std::span<const uint8_t> bytes);  // throws std::system_error
  void finish();                               // to its final name

 private:
  [[noreturn]] void refuse() const;
  std::filesystem::path path_;
  std::string temporary_;
  int descriptor_ = -1;
};

}  // namespace quantfuse::checkpoint
