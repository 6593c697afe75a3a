// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace quantfuse::checkpoint {

void fail(const std::string& message) { throw CheckpointError(message); }

bool is_utf8(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  for (size_t i = 0; i < text.size();) {
    const unsigned char lead = byte(i++);
    if (lead < 0x80) continue;
    const int more = lead >= 0xc2 && lead < 0xe0   ? 1
                     : lead >= 0xe0 && lead < 0xf0 ? 2
                     : lead >= 0xf0 && lead < 0xf5 ? 3
                                                   : 0;
    if (more == 0 || text.size() - i < static_cast<size_t>(more)) return false;
    // No second way to write a shorter sequence, no surrogates, nothing beyond U+10FFFF.
    const unsigned char lowest = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const unsigned char highest = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (byte(i) < lowest || byte(i) > highest) return false;
    for (int j = 1; j < more; ++j) {
      if ((byte(i + static_cast<size_t>(j)) & 0xc0) != 0x80) return false;
    }
    i += static_cast<size_t>(more);
  }
  return true;
}

std::string printable(std::string_view name) {
  constexpr size_t kLongest = 300;
  const bool is_text = is_utf8(name);
  std::string text;
  for (const char c : name.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f || (byte >= 0x80 && !is_text)) {
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
