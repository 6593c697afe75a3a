// SPDX-License-Identifier: Apache-2.0
#include "build_info.h"

#include "quantfuse_commit.h"  // written by commit.cmake at every build

namespace quantfuse::cli {

std::string build_commit() { return QUANTFUSE_COMMIT; }

std::string build_compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}

}  // namespace quantfuse::cli
