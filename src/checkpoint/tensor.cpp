// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/tensor.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "checkpoint/error.h"

namespace quantfuse::checkpoint {
namespace {

// In the order of `Type`.
constexpr TypeInfo kTypes[] = {
    {"F64", 1, 8},         {"F32", 1, 4},      {"F16", 1, 2},      {"BF16", 1, 2},         //
    {"F8_E4M3", 1, 1},     {"F8_E5M2", 1, 1},  {"F8_E8M0", 1, 1},  {"F8_E4M3FNUZ", 1, 1},  //
    {"F8_E5M2FNUZ", 1, 1}, {"F6_E2M3", 4, 3},  {"F6_E3M2", 4, 3},  {"F4", 2, 1},           //
    {"C64", 1, 8},         {"I64", 1, 8},      {"I32", 1, 4},      {"I16", 1, 2},          //
    {"I8", 1, 1},          {"U64", 1, 8},      {"U32", 1, 4},      {"U16", 1, 2},          //
    {"U8", 1, 1},          {"BOOL", 1, 1},                                                 //
    {"Q4_0", 32, 18},      {"Q4_1", 32, 20},   {"Q5_0", 32, 22},   {"Q5_1", 32, 24},       //
    {"Q8_0", 32, 34},      {"Q2_K", 256, 84},  {"Q3_K", 256, 110}, {"Q4_K", 256, 144},     //
    {"Q5_K", 256, 176},    {"Q6_K", 256, 210}, {"IQ4_NL", 32, 18}, {"IQ4_XS", 256, 136},   //
    {"TQ2_0", 256, 66},    {"MXFP4", 32, 17},
};
static_assert(std::size(kTypes) == static_cast<size_t>(Type::mxfp4) + 1);

// Far beyond any tensor, and small enough that a dimension times the bits of a code cannot overflow.
constexpr int64_t kLargestDim = int64_t{1} << 40;

}  // namespace

const TypeInfo& type_info(Type type) { return kTypes[static_cast<size_t>(type)]; }

bool type_from_name(const std::string& name, Type& type) {
  for (size_t i = 0; i < std::size(kTypes); ++i) {
    type = static_cast<Type>(i);
    if (is_block_quantized(type)) return false;
    if (name == kTypes[i].name) return true;
  }
  return false;
}

bool float_type_from_name(const std::string& name, Type& type) {
  if (name == "float32") return type = Type::f32, true;
  if (name == "float16") return type = Type::f16, true;
  if (name == "bfloat16") return type = Type::bf16, true;
  return false;
}

int64_t Tensor::numel() const {
  int64_t product = 1;
  for (const int64_t dim : shape) product *= dim;
  return product;
}

int64_t declared_bytes(const std::string& name, Type type, const std::vector<int64_t>& shape) {
  const auto refuse = [&](const std::string& why) {
    fail(fmt::format("{}: shape {} {}", printable(name), shape_text(shape), why));
  };
  const TypeInfo& info = type_info(type);
  for (const int64_t dim : shape) {
    if (dim < 0) refuse("has a negative dimension");
    if (dim > kLargestDim) refuse("has a dimension beyond 2^40: a size overflow");
  }
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t product = 1;
  for (const int64_t dim : shape) {
    if (__builtin_mul_overflow(product, dim, &product)) refuse("overflows 64 bits");
  }
  const int64_t row = shape.empty() ? 1 : shape.back();
  if (is_block_quantized(type) && row % info.count != 0) {
    refuse(fmt::format("has rows of {}, which is not a multiple of {}'s block of {}", row, info.name,
                       info.count));
  }
  if (product % info.count != 0) refuse(fmt::format("is no whole number of {} bytes", info.name));
  int64_t bytes;
  if (__builtin_mul_overflow(product / info.count, info.bytes, &bytes)) refuse("overflows 64 bits");
  return bytes;
}

void expect_type(const Tensor& tensor, std::initializer_list<Type> types) {
  if (std::find(types.begin(), types.end(), tensor.type) != types.end()) return;
  std::string names;
  for (const Type type : types) names += (names.empty() ? "" : " or ") + std::string(type_name(type));
  fail(fmt::format("{} has type {}, expected {}", printable(tensor.name), type_name(tensor.type), names));
}

void expect_rank(const Tensor& tensor, int64_t rank) {
  if (tensor.rank() == rank) return;
  fail(fmt::format("{} has shape {}, expected {} dimensions", printable(tensor.name),
                   shape_text(tensor.shape), rank));
}

void expect_shape(const Tensor& tensor, const std::vector<int64_t>& shape, const std::string& why) {
  if (tensor.shape == shape) return;
  fail(fmt::format("{} has shape {}, expected {}: {}", printable(tensor.name), shape_text(tensor.shape),
                   shape_text(shape), why));
}

float load_float(const Tensor& tensor, int64_t i) {
  switch (tensor.type) {
    case Type::f32: return load<float>(tensor, i);
    case Type::f16: return to_float(load<f16>(tensor, i));
    case Type::bf16: return to_float(load<bf16>(tensor, i));
    case Type::e4m3: return E4m3::decode(load<uint8_t>(tensor, i));
    default: return E8m0::decode(load<uint8_t>(tensor, i));
  }
}

void store_floats(std::span<const float> values, Type type, uint8_t* out) {
  const auto store_as = [&](auto rounded) {
    for (size_t i = 0; i < values.size(); ++i) {
      from_float(values[i], rounded);
      std::memcpy(out + i * sizeof(rounded), &rounded, sizeof(rounded));
    }
  };
  if (type == Type::f16) store_as(f16());
  else if (type == Type::bf16) store_as(bf16());
  else store_as(float());
}

float round_to(Type type, float value) {
  if (type == Type::f16) {
    f16 rounded;
    from_float(value, rounded);
    return to_float(rounded);
  }
  if (type == Type::bf16) {
    bf16 rounded;
    from_float(value, rounded);
    return to_float(rounded);
  }
  return value;
}

}  // namespace quantfuse::checkpoint
