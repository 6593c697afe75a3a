// SPDX-License-Identifier: Apache-2.0
//
// What is wrong with a checkpoint, in one line that names the tensor, the key or the file.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace quantfuse::checkpoint {

class CheckpointError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] void fail(const std::string& message);

bool is_utf8(std::string_view text);

// A name from a file, fit for a message: what is not text is escaped, and what is absurdly long is cut.
std::string printable(std::string_view name);

std::string shape_text(const std::vector<int64_t>& shape);  // "[2, 3]"

}  // namespace quantfuse::checkpoint
