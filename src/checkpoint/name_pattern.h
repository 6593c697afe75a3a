// SPDX-License-Identifier: Apache-2.0
//
// A regular expression from a config, matched from the start of a module's name as Python's re.match does.
#pragma once

#include <regex>
#include <string>

namespace quantfuse::checkpoint {

class NamePattern {
 public:
  explicit NamePattern(const std::string& pattern);  // fails, naming it, where it is no regular expression
  bool matches(const std::string& name) const;

 private:
  std::regex regex_;
};

}  // namespace quantfuse::checkpoint
