// SPDX-License-Identifier: Apache-2.0
//
// Where this binary comes from.
#pragma once

#include <string>

namespace quantfuse::cli {

std::string build_commit();    // `git describe`, or "unknown"
std::string build_compiler();  // "gcc 12.2.0"

}  // namespace quantfuse::cli
