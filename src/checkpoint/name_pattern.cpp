// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/name_pattern.h"

#include "checkpoint/error.h"

namespace quantfuse::checkpoint {
namespace {

// The pattern comes from a file: matching must not take exponential time, which a backtracking matcher may.
#if defined(__GLIBCXX__)
constexpr auto kSyntax = std::regex::ECMAScript | std::regex_constants::__polynomial;
#else
constexpr auto kSyntax = std::regex::ECMAScript;
#endif

}  // namespace

NamePattern::NamePattern(const std::string& pattern, const std::string& from) try : regex_(pattern, kSyntax) {
} catch (const std::regex_error& e) {
  fail(from + ": the pattern '" + printable(pattern) + "' is not one that is understood: " + e.what());
}

bool NamePattern::matches(const std::string& name) const {
  return std::regex_search(name, regex_, std::regex_constants::match_continuous);
}

bool NamePattern::is_found_in(const std::string& name) const { return std::regex_search(name, regex_); }

}  // namespace quantfuse::checkpoint
