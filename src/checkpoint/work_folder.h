// SPDX-License-Identifier: Apache-2.0
//
// A folder that a long piece of work fills file by file, and that can go on after it was stopped. While the
// work is not done, a folder .quantize inside says what it is (the options and the input) and what is known
// of each finished file, and has the files that are being written. A file counts when it has its place and
// name.
#pragma once

#include <filesystem>
#include <stdexcept>
#include <string>

#include "checkpoint/json.h"

namespace quantfuse::checkpoint {

// The folder is not one to work in, for a reason that its user can do something about.
class FolderError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class WorkFolder {
 public:
  // Makes the folder, or takes up the work in it. Throws FolderError where it cannot be written, holds
  // anything else, or work that is not the same as `job` says: the message has what differs.
  WorkFolder(const std::filesystem::path& path, const Json& job);
  ~WorkFolder();  // leaves nothing behind where the work was begun here and no file finished
  WorkFolder(const WorkFolder&) = delete;
  WorkFolder& operator=(const WorkFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  // Where files lie before they have their place.
  std::filesystem::path notes() const { return path_ / ".quantize"; }

  // What was noted of a file that is finished; null where there is none.
  Json finished(const std::string& file) const;
  // Right before the file gets its place.
  void note(const std::string& file, const Json& json);
  // All is there: nothing but the work's result stays.
  void finish();

 private:
  explicit WorkFolder(const std::filesystem::path& path) : path_(path) {}
  void lock();
  void expect_same_job(const Json& job) const;
  void remove_leftovers() const;

  std::filesystem::path path_;
  bool is_folder_new_ = false,
       is_work_new_ = false;  // made here, and so to be removed where nothing came of it
  int lock_ = -1;
};

}  // namespace quantfuse::checkpoint
