// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/new_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace quantfuse::checkpoint {

void NewFile::refuse() const {
  throw std::system_error(errno, std::generic_category(), "cannot write " + path_.string());
}

NewFile::NewFile(const std::filesystem::path& path, const std::filesystem::path& folder) : path_(path) {
  struct stat status;
  if (stat(path_.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    descriptor_ = open(path_.c_str(), O_WRONLY | O_CLOEXEC);  // refuses a folder by itself
  } else {
    temporary_ = (folder.empty() ? path_ : folder / path_.filename()).string() + ".XXXXXX";
    descriptor_ = mkostemp(temporary_.data(), O_CLOEXEC);
    if (descriptor_ < 0) temporary_.clear();
    if (descriptor_ >= 0) fchmod(descriptor_, 0644);
  }
  if (descriptor_ < 0) refuse();
}

NewFile::~NewFile() {
  if (descriptor_ >= 0) close(descriptor_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
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
  if (close(std::exchange(descriptor_, -1)) != 0) refuse();
  if (temporary_.empty()) return;
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) refuse();
  temporary_.clear();
}

}  // namespace quantfuse::checkpoint
