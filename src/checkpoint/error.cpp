// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace quantfuse::checkpoint {

void fail(const std::string& message) { throw CheckpointError(message); }

std::string printable(std::string_view name) {
  constexpr size_t kLongest = 300;
  std::string text;
  for (const char c : name.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      text += fmt::format("\\x{:02x}", byte);
    } else {
      text += c;
    }
  }
  return name.size() > kLongest ? text + "..." : text;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

}  // namespace quantfuse::checkpoint
