// SPDX-License-Identifier: Apache-2.0
//
// A regular expression over the names of modules.
#pragma once

#include <regex>
#include <string>

namespace quantfuse::checkpoint {

class NamePattern {
 public:
  // Fails, naming it and where it is from, where it is no regular expression.
  explicit NamePattern(const std::string& pattern, const std::string& from = "quantization_config");
  bool matches(const std::string& name) const;      // from the start of the name, as Python's re.match does
  bool is_found_in(const std::string& name) const;  // anywhere in the name, as re.search does

 private:
  std::regex regex_;
};

}  // namespace quantfuse::checkpoint
