// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "checkpoint/error.h"

namespace quantfuse::checkpoint {

MappedFile::MappedFile(std::filesystem::path path) : path_(std::move(path)) {
  const auto refuse = [&](const std::string& why) { fail(printable(path_.string()) + ": " + why); };
  // Without O_NONBLOCK a named pipe would keep us waiting for a writer.
  const int descriptor = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) refuse(std::string("cannot be opened: ") + std::strerror(errno));
  struct stat status;
  const bool is_file = fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
  const auto size = is_file ? static_cast<size_t>(status.st_size) : 0;
  void* data = size > 0 ? mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0) : nullptr;
  const int map_error = errno;
  close(descriptor);
  if (!is_file) refuse("is not a regular file");
  if (data == MAP_FAILED) refuse(std::string("cannot be mapped: ") + std::strerror(map_error));
  // Without this a few bytes here and there, which is what describing a checkpoint takes, read 128 KB each.
  if (data) madvise(data, size, MADV_RANDOM);
  bytes_ = {static_cast<const uint8_t*>(data), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<uint8_t*>(bytes_.data()), bytes_.size());
}

void prefetch_pages(std::span<const uint8_t> bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(bytes.data()) / page * page;
  const auto size = reinterpret_cast<uintptr_t>(bytes.data()) + bytes.size() - begin;
  if (!bytes.empty()) madvise(reinterpret_cast<void*>(begin), size, MADV_WILLNEED);
}

void release_pages(std::span<const uint8_t> bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data());
  const uintptr_t first = (begin + page - 1) / page * page, last = (begin + bytes.size()) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace quantfuse::checkpoint
