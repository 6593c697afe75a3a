// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gguf.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>

#include "checkpoint/error.h"

namespace quantfuse::checkpoint {
namespace {

enum ValueType : uint32_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64
};
constexpr const char* kValueNames[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                       "bool", "string", "array", "u64", "i64", "f64"};
constexpr uint64_t kValueBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};  // 0: of variable length

constexpr uint32_t kOldest = 2, kNewest = 3;  // 3 differs by allowing big-endian files, which are not read
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint32_t kMostDims = 4;       // ggml's own limit
constexpr int kDeepestArray = 8;        // of arrays of arrays, which no tool writes
constexpr uint64_t kLeastKvBytes = 13;  // an empty key, a type and one byte
constexpr uint64_t kLeastTensorBytes = 24;

bool type_from_ggml(uint32_t id, Type& type) {
  static constexpr struct {
    uint32_t id;
    Type type;
  } kIds[] = {
      {0, Type::f32},    {1, Type::f16},    {2, Type::q4_0},    {3, Type::q4_1},    {6, Type::q5_0},
      {7, Type::q5_1},   {8, Type::q8_0},   {10, Type::q2_k},   {11, Type::q3_k},   {12, Type::q4_k},
      {13, Type::q5_k},  {14, Type::q6_k},  {20, Type::iq4_nl}, {23, Type::iq4_xs}, {24, Type::i8},
      {25, Type::i16},   {26, Type::i32},   {27, Type::i64},    {28, Type::f64},    {30, Type::bf16},
      {35, Type::tq2_0}, {39, Type::mxfp4},
  };
  for (const auto& row : kIds) {
    if (row.id == id) return type = row.type, true;
  }
  return false;
}

class Reader {
 public:
  explicit Reader(const MappedFile& file)
      : bytes_(file.bytes()), what_(printable(file.path().filename().string())) {}

  GgufHeader read() {
    constexpr size_t kFixedBytes = 24;
    if (bytes_.size() < kFixedBytes) {
      fail(fmt::format("{}: the file is too small ({} bytes) for a GGUF header", what_, bytes_.size()));
    }
    if (std::memcmp(bytes_.data(), "GGUF", 4) != 0) fail(what_ + ": the magic is not GGUF");
    at_ = 4;
    const auto version = number<uint32_t>("version");
    if (version < kOldest || version > kNewest) {
      fail(fmt::format("{}: version {}, and only {} and {}, little-endian, are read", what_, version, kOldest,
                       kNewest));
    }
    const auto num_tensors = number<uint64_t>("tensor count"), num_kvs = number<uint64_t>("kv count");
    expect_count(num_kvs, kLeastKvBytes, "kv count");
    GgufHeader header;
    header.metadata = Json::object();
    for (uint64_t i = 0; i < num_kvs; ++i) read_kv(header.metadata);
    expect_count(num_tensors, kLeastTensorBytes, "tensor count");
    std::unordered_set<std::string> names;
    std::vector<uint64_t> offsets;
    for (uint64_t i = 0; i < num_tensors; ++i) {
      header.tensors.push_back(read_tensor(offsets));
      const std::string& name = header.tensors.back().name;
      if (!names.insert(name).second) fail(what_ + ": two tensors are named " + printable(name));
    }
    place_data(header, offsets);
    return header;
  }

 private:
  uint64_t left() const { return bytes_.size() - at_; }

  void need(uint64_t count, const std::string& what) const {
    if (count > left()) {
      fail(fmt::format("{}: truncated: {} needs {} bytes at {}, and {} are left", what_, what, count, at_,
                       left()));
    }
  }

  // Every item takes at least `least` bytes, so that a count can be held against the file before any is read.
  void expect_count(uint64_t count, uint64_t least, const std::string& what) const {
    if (count > left() / least) {
      fail(fmt::format("{}: truncated, or {} {} is wrong: it is more than the file can hold", what_, what,
                       count));
    }
  }

  template <class T>
  T number(const std::string& what) {
    need(sizeof(T), what);
    T value;
    std::memcpy(&value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }

  std::string string(const std::string& what) {
    const auto length = number<uint64_t>(what);
    if (length > left()) {
      fail(fmt::format("{}: {}: string length {} exceeds the file", what_, what, length));
    }
    std::string text(reinterpret_cast<const char*>(bytes_.data()) + at_, length);
    at_ += length;
    return text;
  }

  std::string name(const std::string& what) {
    std::string text = string(what);
    if (!is_utf8(text)) fail(fmt::format("{}: {} is not UTF-8: {}", what_, what, printable(text)));
    return text;
  }

  ValueType value_type(const std::string& key) {
    const auto type = number<uint32_t>(key);
    if (type > kF64) fail(fmt::format("{}: {} has the unknown value type {}", what_, key, type));
    return static_cast<ValueType>(type);
  }

  Json read_array(const std::string& key, int depth) {
    if (depth > kDeepestArray) fail(fmt::format("{}: {}: arrays nested too deep", what_, key));
    const ValueType type = value_type(key);
    const auto count = number<uint64_t>(key);
    const uint64_t size = kValueBytes[type];
    // A string takes at least its length, an array its type and count.
    expect_count(count, size ? size : type == kString ? 8 : 12, key + ": array count");
    if (size) {
      at_ += count * size;
    } else {
      for (uint64_t i = 0; i < count; ++i) {
        if (type == kArray) {
          read_array(key, depth + 1);
        } else {
          const auto length = number<uint64_t>(key);
          need(length, key);
          at_ += length;
        }
      }
    }
    return {{"array", kValueNames[type]}, {"count", count}};
  }

  Json read_value(const std::string& key, ValueType type) {
    switch (type) {
      case kU8: return number<uint8_t>(key);
      case kI8: return number<int8_t>(key);
      case kU16: return number<uint16_t>(key);
      case kI16: return number<int16_t>(key);
      case kU32: return number<uint32_t>(key);
      case kI32: return number<int32_t>(key);
      case kF32: return number<float>(key);
      case kBool: return number<uint8_t>(key) != 0;
      case kString: return string(key);
      case kArray: return read_array(key, 1);
      case kU64: return number<uint64_t>(key);
      case kI64: return number<int64_t>(key);
      case kF64: return number<double>(key);
    }
    return nullptr;
  }

  void read_kv(Json& metadata) {
    const std::string key = name("a key");
    const std::string shown = printable(key);
    if (metadata.contains(key)) fail(what_ + ": the key " + shown + " appears twice");
    metadata[key] = read_value(shown, value_type(shown));
  }

  Tensor read_tensor(std::vector<uint64_t>& offsets) {
    Tensor tensor;
    tensor.name = name("a tensor's name");
    const std::string shown = printable(tensor.name);
    const auto rank = number<uint32_t>(shown);
    if (rank > kMostDims) {
      fail(fmt::format("{}: {} has {} dimensions, expected at most {}", what_, shown, rank, kMostDims));
    }
    for (uint32_t i = 0; i < rank; ++i) {
      const auto dim = number<uint64_t>(shown);
      if (dim > INT64_MAX) fail(fmt::format("{}: {}: dimension {}: size overflow", what_, shown, dim));
      tensor.shape.push_back(static_cast<int64_t>(dim));
    }
    std::reverse(tensor.shape.begin(), tensor.shape.end());
    const auto id = number<uint32_t>(shown);
    if (!type_from_ggml(id, tensor.type)) {
      fail(fmt::format("{}: {} has ggml type {}, which is unknown or not read", what_, shown, id));
    }
    offsets.push_back(number<uint64_t>(shown));
    return tensor;
  }

  uint64_t alignment(const Json& metadata) const {
    const auto found = metadata.find("general.alignment");
    if (found == metadata.end()) return kDefaultAlignment;
    const uint64_t value = found->is_number_unsigned() ? found->get<uint64_t>() : 0;
    if (value == 0 || (value & (value - 1)) != 0 || value > UINT32_MAX) {
      const std::string shown = found->dump(-1, ' ', false, Json::error_handler_t::replace);
      fail(fmt::format("{}: general.alignment is {}, expected a power of two", what_, printable(shown)));
    }
    return value;
  }

  // Holds every tensor's place against the file, and against the places of the others.
  void place_data(GgufHeader& header, const std::vector<uint64_t>& offsets) const {
    const uint64_t align = alignment(header.metadata);
    const uint64_t start = (at_ + align - 1) / align * align;
    const uint64_t data_bytes = bytes_.size() > start ? bytes_.size() - start : 0;
    std::vector<std::pair<uint64_t, size_t>> order;
    for (size_t i = 0; i < offsets.size(); ++i) {
      Tensor& tensor = header.tensors[i];
      const auto refuse = [&](const std::string& why) {
        fail(fmt::format("{}: {}: {}", what_, printable(tensor.name), why));
      };
      const auto size =
          static_cast<uint64_t>(declared_bytes(what_ + ": " + tensor.name, tensor.type, tensor.shape));
      if (offsets[i] % align != 0) {
        refuse(fmt::format("its offset {} is not a multiple of the alignment {}", offsets[i], align));
      }
      if (size == 0) continue;
      if (offsets[i] > data_bytes || size > data_bytes - offsets[i]) {
        refuse(
            fmt::format("its {} bytes at offset {} go past the end of the file, which has {} bytes of data",
                        size, offsets[i], data_bytes));
      }
      tensor.bytes = bytes_.subspan(start + offsets[i], size);
      order.emplace_back(offsets[i], i);
    }
    std::sort(order.begin(), order.end());
    for (size_t i = 1; i < order.size(); ++i) {
      const Tensor &before = header.tensors[order[i - 1].second], &tensor = header.tensors[order[i].second];
      if (order[i - 1].first + before.bytes.size() > order[i].first) {
        fail(fmt::format("{}: the data of {} and {} overlap", what_, printable(before.name),
                         printable(tensor.name)));
      }
    }
  }

  std::span<const uint8_t> bytes_;
  uint64_t at_ = 0;
  std::string what_;
};

}  // namespace

GgufHeader read_gguf(const MappedFile& file) { return Reader(file).read(); }

}  // namespace quantfuse::checkpoint
