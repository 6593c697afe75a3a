// SPDX-License-Identifier: Apache-2.0
//
// JSON from files that nobody vouches for: bounded depth, no key twice, and errors that name the file.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>

namespace quantfuse::checkpoint {

using Json = nlohmann::json;

// `what` stands in front of every error.
Json parse_json(std::string_view text, const std::string& what);
Json read_json_file(const std::filesystem::path& path);

}  // namespace quantfuse::checkpoint
