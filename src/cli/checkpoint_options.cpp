// SPDX-License-Identifier: Apache-2.0
#include "checkpoint_options.h"

#include <filesystem>

#include "commands.h"

namespace quantfuse::cli {

void expect_exists(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) throw UsageError(path + ": there is no such file or folder");
}

checkpoint::StatedFields stated_fields(const std::vector<std::string>& options) {
  checkpoint::StatedFields fields;
  for (const std::string& option : options) {
    const size_t equals = option.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw UsageError("--config: expected KEY=VALUE, not '" + option + "'");
    }
    fields.emplace_back(option.substr(0, equals), option.substr(equals + 1));
  }
  return fields;
}

}  // namespace quantfuse::cli
