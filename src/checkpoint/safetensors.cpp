// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/safetensors.h"

#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/error.h"
#include "checkpoint/json.h"

namespace quantfuse::checkpoint {
namespace {

constexpr size_t kLengthBytes = 8;

struct Entry {
  Tensor tensor;
  int64_t begin = 0, end = 0;  // of the data
};

// Reads the header of one file; every message begins with the file's name.
class Reader {
 public:
  explicit Reader(const MappedFile& file) : file_(file), what_(printable(file.path().filename().string())) {}

  SafetensorsHeader read() {
    const std::string_view text = header_text();
    if (!text.starts_with('{')) fail(what_ + ": the header is not a JSON object: it does not begin with {");
    const Json json = parse_json(text, what_ + ": header");
    SafetensorsHeader header;
    std::vector<Entry> entries;
    for (const auto& [name, value] : json.items()) {
      if (name == "__metadata__") {
        header.metadata = metadata(value);
      } else {
        entries.push_back(entry(name, value));
      }
    }
    header.tensors = placed(std::move(entries));
    std::stable_sort(header.tensors.begin(), header.tensors.end(), [](const Tensor& a, const Tensor& b) {
      return std::pair(a.bytes.data(), a.bytes.size()) < std::pair(b.bytes.data(), b.bytes.size());
    });
    check_coverage(header.tensors);
    return header;
  }

 private:
  std::string_view header_text() {
    const auto bytes = file_.bytes();
    if (bytes.size() < kLengthBytes) {
      fail(fmt::format("{}: the file is too small ({} bytes): no header", what_, bytes.size()));
    }
    uint64_t length;
    std::memcpy(&length, bytes.data(), sizeof(length));
    if (length > bytes.size() - kLengthBytes) {
      fail(fmt::format("{}: the header length {} exceeds the file of {} bytes", what_, length, bytes.size()));
    }
    prefetch_pages(bytes.first(kLengthBytes + length));
    data_ = bytes.subspan(kLengthBytes + length);
    return {reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, length};
  }

  std::map<std::string, std::string> metadata(const Json& json) const {
    if (!json.is_object()) fail(what_ + ": __metadata__ is not an object");
    std::map<std::string, std::string> result;
    for (const auto& [key, value] : json.items()) {
      if (!value.is_string()) fail(what_ + ": __metadata__." + printable(key) + " is not a string");
      result[key] = value.get<std::string>();
    }
    return result;
  }

  [[noreturn]] void refuse(const std::string& name, const std::string& why) const {
    fail(fmt::format("{}: {}: {}", what_, printable(name), why));
  }

  const Json& field(const std::string& name, const Json& json, const char* key) const {
    const auto found = json.find(key);
    if (found == json.end()) refuse(name, fmt::format("{} missing", key));
    return *found;
  }

  int64_t integer(const std::string& name, const Json& json, const char* key) const {
    if (json.is_number_integer() && !json.is_number_unsigned()) {
      const auto value = json.get<int64_t>();
      if (value < 0) refuse(name, fmt::format("{} has the negative dimension or offset {}", key, value));
    }
    if (!json.is_number_unsigned()) refuse(name, fmt::format("{} holds what is not an integer", key));
    const auto value = json.get<uint64_t>();
    if (value > INT64_MAX) refuse(name, fmt::format("{} has the number {}: overflow", key, value));
    return static_cast<int64_t>(value);
  }

  Entry entry(const std::string& name, const Json& json) const {
    if (!json.is_object()) refuse(name, "its header entry is not an object");
    Entry entry;
    Tensor& tensor = entry.tensor;
    tensor.name = name;
    const Json& dtype = field(name, json, "dtype");
    if (!dtype.is_string()) refuse(name, "dtype is not a string");
    if (!type_from_name(dtype.get<std::string>(), tensor.type)) {
      refuse(name, "unknown dtype " + printable(dtype.get<std::string>()));
    }
    const Json& shape = field(name, json, "shape");
    if (!shape.is_array()) refuse(name, "shape is not a list");
    for (const Json& dim : shape) tensor.shape.push_back(integer(name, dim, "shape"));

    const Json& offsets = field(name, json, "data_offsets");
    if (!offsets.is_array() || offsets.size() != 2) refuse(name, "data_offsets is not a pair");
    const int64_t begin = integer(name, offsets[0], "data_offsets");
    const int64_t end = integer(name, offsets[1], "data_offsets");
    if (begin > end) refuse(name, fmt::format("data_offsets [{}, {}] run backwards", begin, end));
    const int64_t expected = declared_bytes(what_ + ": " + name, tensor.type, tensor.shape);
    if (end - begin != expected) {
      refuse(name, fmt::format("{} of shape {} takes {} bytes, but data_offsets span {}",
                               type_name(tensor.type), shape_text(tensor.shape), expected, end - begin));
    }
    entry.begin = begin, entry.end = end;
    return entry;
  }

  // Gives every tensor its bytes. Where the file is cut, the tensor that reaches farthest is named.
  std::vector<Tensor> placed(std::vector<Entry> entries) const {
    const auto last = std::max_element(entries.begin(), entries.end(),
                                       [](const Entry& a, const Entry& b) { return a.end < b.end; });
    if (last != entries.end() && last->end > static_cast<int64_t>(data_.size())) {
      refuse(last->tensor.name,
             fmt::format("data_offsets [{}, {}] go past the end of the file: incomplete data, {} bytes",
                         last->begin, last->end, data_.size()));
    }
    std::vector<Tensor> tensors;
    for (Entry& entry : entries) {
      entry.tensor.bytes =
          data_.subspan(static_cast<size_t>(entry.begin), static_cast<size_t>(entry.end - entry.begin));
      tensors.push_back(std::move(entry.tensor));
    }
    return tensors;
  }

  void check_coverage(const std::vector<Tensor>& tensors) const {
    int64_t covered = 0;
    for (const Tensor& tensor : tensors) {
      const int64_t begin = tensor.bytes.data() - data_.data();
      if (begin < covered) {
        refuse(tensor.name, fmt::format("its data at {} overlaps the tensor before it", begin));
      }
      if (begin > covered) {
        refuse(tensor.name,
               fmt::format("bytes {} to {} before its data belong to no tensor", covered, begin));
      }
      covered = begin + static_cast<int64_t>(tensor.bytes.size());
    }
    if (covered != static_cast<int64_t>(data_.size())) {
      fail(fmt::format("{}: the data is longer than the header says: {} bytes, of which tensors cover {}",
                       what_, data_.size(), covered));
    }
  }

  const MappedFile& file_;
  std::string what_;
  std::span<const uint8_t> data_;
};

}  // namespace

SafetensorsHeader read_safetensors(const MappedFile& file) { return Reader(file).read(); }

}  // namespace quantfuse::checkpoint
