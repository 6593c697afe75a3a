// SPDX-License-Identifier: Apache-2.0
//
// Fields of a quantization_config, or of an object inside it, by type. A field of another type is an error
// that names it; null counts as absent, because that is how the tools write a default.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/json.h"

namespace quantfuse::checkpoint {

class Settings {
 public:
  // `path` is how messages call the object: "quantization_config".
  Settings(Json json, std::string path);

  bool has(const char* key) const;
  std::optional<int64_t> find_integer(const char* key) const;
  std::optional<bool> find_flag(const char* key) const;
  std::optional<std::string> find_text(const char* key) const;
  std::vector<std::string> texts(const char* key) const;  // empty where absent
  std::optional<std::vector<int64_t>> find_integers(const char* key) const;
  std::optional<Settings> find_object(const char* key) const;
  std::vector<std::pair<std::string, Settings>> objects() const;  // every field, each of which is an object

  int64_t integer(const char* key) const;  // fails where absent
  double number(const char* key) const;
  std::string text(const char* key) const;

  // This object with the fields of `other` on top.
  Settings merged(const Settings& other) const;

  // "quantization_config.KEY is VALUE, expected ..."
  [[noreturn]] void refuse(const char* key, const std::string& expected) const;

 private:
  const Json* find(const char* key) const;
  [[noreturn]] void refuse_absent(const char* key) const;
  Json json_;
  std::string path_;
};

// What the user states over what the file says: fields by dotted path, and JSON or plain text as the value.
using StatedFields = std::vector<std::pair<std::string, std::string>>;
Json with_stated(Json config, const StatedFields& fields);

}  // namespace quantfuse::checkpoint
