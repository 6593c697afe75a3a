// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/work_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "checkpoint/error.h"
#include "checkpoint/new_file.h"

namespace quantfuse::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char *kJob = "job.json", *kNoteEnd = ".json";

[[noreturn]] void refuse(const fs::path& path, const std::string& why) {
  throw FolderError(printable(path.string()) + " " + why);
}

void write_json(const fs::path& path, const Json& json) {
  const std::string text = json.dump();
  NewFile file(path);
  file.write({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  file.finish();
}

// The first field in which two jobs differ, and its two values.
std::string difference(const Json& before, const Json& now) {
  for (const auto& [key, value] : now.items()) {
    const Json earlier = before.is_object() ? before.value(key, Json()) : Json();
    if (earlier == value) continue;
    if (key == "input") return "the input has changed since";
    return fmt::format("{} was {} and is {} now", key, printable(earlier.dump()), printable(value.dump()));
  }
  return "another version began it";
}

}  // namespace

// The delegation makes this an object whose destructor runs, should anything below throw.
WorkFolder::WorkFolder(const fs::path& path, const Json& job) : WorkFolder(path) {
  try {
    if (fs::exists(path_) && !fs::is_directory(path_)) refuse(path_, "is not a folder");
    is_folder_new_ = fs::create_directory(path_);
    if (!fs::exists(notes()) && !fs::is_empty(path_)) {
      refuse(path_, "is not empty, and has no unfinished work to go on with: choose another folder");
    }
    is_work_new_ = fs::create_directory(notes());
    lock();
    if (!fs::exists(notes() / kJob)) {
      write_json(notes() / kJob, job);
    } else {
      expect_same_job(job);
      remove_leftovers();
    }
  } catch (const std::system_error& e) {
    refuse(path_, "cannot be written: " + e.code().message());
  }
}

WorkFolder::~WorkFolder() {
  std::error_code ignored;
  if (is_work_new_) fs::remove_all(notes(), ignored);
  if (is_folder_new_) fs::remove(path_, ignored);  // refuses where something is in it
  if (lock_ >= 0) close(lock_);
}

void WorkFolder::lock() {
  lock_ = open(notes().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock_ >= 0 && flock(lock_, LOCK_EX | LOCK_NB) == 0) return;
  if (errno == EWOULDBLOCK) refuse(path_, "is being written by another process");
  throw std::system_error(errno, std::generic_category());
}

void WorkFolder::expect_same_job(const Json& job) const {
  const Json before = read_json_file(notes() / kJob);
  if (before == job) return;
  refuse(path_,
         fmt::format("has unfinished work that is not the same ({}): finish that, remove the folder or "
                     "choose another",
                     difference(before, job)));
}

void WorkFolder::remove_leftovers() const {
  for (const auto& entry : fs::directory_iterator(notes())) {
    if (!entry.path().filename().string().ends_with(kNoteEnd)) fs::remove(entry.path());
  }
}

Json WorkFolder::finished(const std::string& file) const {
  const fs::path note = notes() / (file + kNoteEnd);
  return fs::exists(path_ / file) && fs::exists(note) ? read_json_file(note) : Json();
}

void WorkFolder::note(const std::string& file, const Json& json) {
  write_json(notes() / (file + kNoteEnd), json);
  is_work_new_ = is_folder_new_ = false;
}

void WorkFolder::finish() {
  fs::remove_all(notes());
  is_work_new_ = is_folder_new_ = false;
}

}  // namespace quantfuse::checkpoint
