// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/settings.h"

#include <fmt/format.h>

#include "checkpoint/error.h"

namespace quantfuse::checkpoint {
namespace {

std::string shown(const Json& json) {
  return printable(json.dump(-1, ' ', false, Json::error_handler_t::replace));
}

}  // namespace

Settings::Settings(Json json, std::string path) : json_(std::move(json)), path_(std::move(path)) {}

const Json* Settings::find(const char* key) const {
  const auto found = json_.find(key);
  return found == json_.end() || found->is_null() ? nullptr : &*found;
}

void Settings::refuse(const char* key, const std::string& expected) const {
  const Json* value = find(key);
  fail(fmt::format("{}.{} is {}, expected {}", path_, key, value ? shown(*value) : "absent", expected));
}

void Settings::refuse_absent(const char* key) const {
  fail(fmt::format("{}.{} is missing: state {}=VALUE", path_, key, key));
}

bool Settings::has(const char* key) const { return find(key) != nullptr; }

std::optional<int64_t> Settings::find_integer(const char* key) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  // Bounded, so that arithmetic on sizes cannot overflow.
  constexpr int64_t kLargest = int64_t{1} << 40;
  const bool fits = value->is_number_integer() &&
                    (value->is_number_unsigned() ? value->get<uint64_t>() <= uint64_t{kLargest}
                                                 : value->get<int64_t>() >= -kLargest);
  if (!fits) refuse(key, "an integer");
  return value->get<int64_t>();
}

std::optional<bool> Settings::find_flag(const char* key) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_boolean()) refuse(key, "true or false");
  return value->get<bool>();
}

std::optional<std::string> Settings::find_text(const char* key) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_string()) refuse(key, "a string");
  return value->get<std::string>();
}

std::vector<std::string> Settings::texts(const char* key) const {
  std::vector<std::string> result;
  const Json* value = find(key);
  if (!value) return result;
  if (!value->is_array()) refuse(key, "a list of strings");
  for (const Json& item : *value) {
    if (!item.is_string()) refuse(key, "a list of strings");
    result.push_back(item.get<std::string>());
  }
  return result;
}

std::optional<std::vector<int64_t>> Settings::find_integers(const char* key) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_array()) refuse(key, "a list of integers");
  std::vector<int64_t> result;
  for (const Json& item : *value) {
    if (!item.is_number_integer()) refuse(key, "a list of integers");
    result.push_back(item.get<int64_t>());
  }
  return result;
}

std::optional<Settings> Settings::find_object(const char* key) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_object()) refuse(key, "an object");
  return Settings(*value, path_ + "." + key);
}

std::vector<std::pair<std::string, Settings>> Settings::objects() const {
  std::vector<std::pair<std::string, Settings>> result;
  for (const auto& [key, value] : json_.items()) {
    if (!value.is_object()) refuse(key.c_str(), "an object");
    result.emplace_back(key, Settings(value, path_ + "." + printable(key)));
  }
  return result;
}

int64_t Settings::integer(const char* key) const {
  const auto value = find_integer(key);
  if (!value) refuse_absent(key);
  return *value;
}

double Settings::number(const char* key) const {
  const Json* value = find(key);
  if (!value) refuse_absent(key);
  if (!value->is_number()) refuse(key, "a number");
  return value->get<double>();
}

std::string Settings::text(const char* key) const {
  auto value = find_text(key);
  if (!value) refuse_absent(key);
  return *std::move(value);
}

Settings Settings::merged(const Settings& other) const {
  Json json = json_;
  json.update(other.json_);
  return Settings(std::move(json), path_);
}

Json with_stated(Json config, const StatedFields& fields) {
  for (const auto& [path, text] : fields) {
    Json* target = &config;
    size_t begin = 0;
    for (size_t dot; (dot = path.find('.', begin)) != std::string::npos; begin = dot + 1) {
      target = &(*target)[path.substr(begin, dot - begin)];
      if (!target->is_null() && !target->is_object()) fail("'" + printable(path) + "' leads into no object");
    }
    Json value = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    (*target)[path.substr(begin)] = value.is_discarded() ? Json(text) : std::move(value);
  }
  return config;
}

}  // namespace quantfuse::checkpoint
