// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/json.h"

#include <unordered_set>
#include <vector>

#include "checkpoint/error.h"
#include "checkpoint/mapped_file.h"

namespace quantfuse::checkpoint {
namespace {

// A safetensors header is 2 deep, a quantization_config about 8.
constexpr int kDeepest = 64;
// What the safetensors library allows a header; the largest index.json so far is a tenth of it.
constexpr size_t kLongest = 100'000'000;

// The keys of an object that is being read.
struct OpenObject {
  std::string name;  // the key that it stands under
  std::unordered_set<std::string> keys;
};

}  // namespace

Json parse_json(std::string_view text, const std::string& what) {
  if (text.size() > kLongest) fail(what + ": more than 100 MB of JSON");
  if (!is_utf8(text)) fail(what + ": not UTF-8");
  std::vector<OpenObject> open;
  std::string last_key;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kDeepest) fail(what + ": JSON nested more than 64 deep");
    switch (event) {
      case Json::parse_event_t::object_start: open.push_back({last_key, {}}); break;
      case Json::parse_event_t::object_end: open.pop_back(); break;
      case Json::parse_event_t::key:
        last_key = parsed.get<std::string>();
        if (!open.back().keys.insert(last_key).second) {
          const std::string& parent = open.back().name;
          fail(what + ": duplicate key '" + printable(last_key) + "'" +
               (parent.empty() ? "" : " in '" + printable(parent) + "'"));
        }
        break;
      default: break;
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), watch);
  } catch (const Json::exception& e) {
    const std::string_view message = e.what();  // begins with the exception's own name in brackets
    fail(what + ": not valid JSON: " + printable(message.substr(message.find(']') + 1)));
  }
}

Json read_json_file(const std::filesystem::path& path) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  return parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, printable(path.string()));
}

}  // namespace quantfuse::checkpoint
