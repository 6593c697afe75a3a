// SPDX-License-Identifier: Apache-2.0
//
// What the commands that read checkpoints share: what the user typed, as the readers take it.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/settings.h"

namespace quantfuse::cli {

// Throws UsageError where nothing is there.
void expect_exists(const std::string& path);
// From KEY=VALUE; throws UsageError for anything else.
checkpoint::StatedFields stated_fields(const std::vector<std::string>& options);

}  // namespace quantfuse::cli
