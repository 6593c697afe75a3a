// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/new_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

namespace quantfuse::checkpoint {
namespace {

constexpr const char* kOpenFiles = "/proc/self/fd/";  // where a file without a name can be found

}  // namespace

void NewFile::refuse() const {
  throw std::system_error(errno, std::generic_category(), "cannot write " + path_.string());
}

NewFile::NewFile(const std::filesystem::path& path, const std::filesystem::path& folder) : path_(path) {
  struct stat status;
  if (stat(path_.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    descriptor_ = open(path_.c_str(), O_WRONLY | O_CLOEXEC);  // refuses a folder by itself
  } else {
    errno = ENOENT;
    if (!path_.has_filename()) refuse();
    const std::filesystem::path place = folder.empty() ? path_ : folder / path_.filename();
    temporary_ = place.string() + ".";
    const std::string its_folder = place.has_parent_path() ? place.parent_path().string() : ".";
    if (access(kOpenFiles, X_OK) == 0) {
      descriptor_ = open(its_folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    }
    if (descriptor_ < 0) {
      temporary_ += "XXXXXX";
      descriptor_ = mkostemp(temporary_.data(), O_CLOEXEC);
      has_name_ = descriptor_ >= 0;
    }
    if (descriptor_ >= 0) fchmod(descriptor_, 0644);
  }
  if (descriptor_ < 0) refuse();
}

// Only now, because a file may not take the place of another without a name of its own.
void NewFile::give_name() {
  const std::string open_file = kOpenFiles + std::to_string(descriptor_), stem = temporary_;
  for (int attempt = 0; !has_name_; ++attempt) {
    temporary_ = stem + std::to_string(getpid()) + "-" + std::to_string(attempt);
    has_name_ = linkat(AT_FDCWD, open_file.c_str(), AT_FDCWD, temporary_.c_str(), AT_SYMLINK_FOLLOW) == 0;
    if (!has_name_ && errno != EEXIST) refuse();
  }
}

NewFile::~NewFile() {
  if (descriptor_ >= 0) close(descriptor_);
  if (has_name_) unlink(temporary_.c_str());
}

void NewFile::write(std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) refuse();
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void NewFile::write_at(int64_t offset, std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = pwrite(descriptor_, bytes.data(), bytes.size(), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) refuse();
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += written;
  }
}

void NewFile::reserve(int64_t bytes) {
  const bool is_refused = fallocate(descriptor_, FALLOC_FL_KEEP_SIZE, 0, bytes) != 0;
  if (is_refused && (errno == ENOSPC || errno == EFBIG || errno == EDQUOT)) refuse();
}

void NewFile::finish() {
  // Data before name: a power cut must not leave the final name on an empty file.
  if (!temporary_.empty() && fsync(descriptor_) != 0) refuse();
  if (!temporary_.empty()) give_name();
  if (close(std::exchange(descriptor_, -1)) != 0) refuse();
  if (temporary_.empty()) return;
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) refuse();
  has_name_ = false;
}

}  // namespace quantfuse::checkpoint
