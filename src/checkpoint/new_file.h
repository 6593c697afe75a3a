// SPDX-License-Identifier: Apache-2.0
//
// A file that appears whole or not at all: written beside its place without a name (or under another one,
// where the file system has no files without names), then renamed. Neither a full disk nor a killed process
// leaves half a file under the final name. A pipe or a device, which a rename would replace, is written to as
// it is.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace quantfuse::checkpoint {

class NewFile {
 public:
  // Throws std::system_error where `path` cannot be written to, so that a command finds out before its work.
  // Until it is finished it lies beside its place, or in `folder` where that is given, of the same file
  // system.
  explicit NewFile(const std::filesystem::path& path, const std::filesystem::path& folder = {});
  ~NewFile();  // removes what was not finished
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(std::span<const uint8_t> bytes);  // throws std::system_error
  // The same at a place of the caller's choice; threads may do so at once. What `write` does next is as
  // before.
  void write_at(int64_t offset, std::span<const uint8_t> bytes);
  // Takes the disk space for that many bytes now, where the file system can: a full disk shows before the
  // work.
  void reserve(int64_t bytes);
  void finish();  // to its final name

 private:
  [[noreturn]] void refuse() const;
  void give_name();
  std::filesystem::path path_;
  std::string temporary_;  // the name before the final one, or how it begins; empty where there is none
  bool has_name_ = false;  // that one is on the disk
  int descriptor_ = -1;
};

}  // namespace quantfuse::checkpoint
