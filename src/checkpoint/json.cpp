// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/json.h"

#include <vector>

#include "checkpoint/error.h"
#include "checkpoint/mapped_file.h"

namespace quantfuse::checkpoint {
namespace {

// A safetensors header is 2 deep, a quantization_config about 8.
constexpr size_t kDeepest = 64;
// What the safetensors library allows a header; the largest index.json so far is a tenth of it.
constexpr size_t kLongest = 100'000'000;

// Builds the document, watching depth and keys. The library's own parser takes the last of two equal keys in
// silence, and with a callback to watch it takes time quadratic in the number of keys.
class Builder final : public nlohmann::json_sax<Json> {
 public:
  explicit Builder(const std::string& what) : what_(what) {}
  Json take() { return std::move(root_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return false; }  // not in JSON text

  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& key) override {
    if (open_.back().json->contains(key)) {
      const std::string& parent = open_.back().name;
      fail(what_ + ": duplicate key '" + printable(key) + "'" +
           (parent.empty() ? "" : " in '" + printable(parent) + "'"));
    }
    key_ = std::move(key);
    return true;
  }

  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& e) override {
    const std::string_view message = e.what();  // begins with the exception's own name in brackets
    fail(what_ + ": not valid JSON:" + printable(message.substr(message.find(']') + 1)));
  }

 private:
  struct Open {
    Json* json;
    std::string name;  // the key that it stands under
  };

  bool add(Json value) { return place(std::move(value)) != nullptr; }

  Json* place(Json value) {
    if (open_.empty()) return &(root_ = std::move(value));
    Json& parent = *open_.back().json;
    if (parent.is_object()) return &(parent[key_] = std::move(value));
    parent.push_back(std::move(value));
    return &parent.back();
  }

  bool open(Json value) {
    if (open_.size() >= kDeepest) fail(what_ + ": JSON nested more than 64 deep");
    Json* placed = place(std::move(value));
    open_.push_back({placed, key_});
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  const std::string& what_;
  Json root_;
  std::vector<Open> open_;
  std::string key_;
};

}  // namespace

Json parse_json(std::string_view text, const std::string& what) {
  if (text.size() > kLongest) fail(what + ": more than 100 MB of JSON");
  if (!is_utf8(text)) fail(what + ": not UTF-8");
  Builder builder(what);
  try {
    if (!Json::sax_parse(text.begin(), text.end(), &builder)) fail(what + ": not valid JSON");
  } catch (const Json::exception& e) {
    fail(what + ": not valid JSON: " + printable(e.what()));
  }
  return builder.take();
}

Json read_json_file(const std::filesystem::path& path) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  return parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, printable(path.string()));
}

}  // namespace quantfuse::checkpoint
