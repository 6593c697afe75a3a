// SPDX-License-Identifier: Apache-2.0
//
// A tensor of a checkpoint: its name, type and shape, and its bytes where they lie in the mapped file.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "formats/numbers.h"

namespace quantfuse::checkpoint {

// Element types of safetensors, then those that only GGUF has.
enum class Type : uint8_t {
  f64,
  f32,
  f16,
  bf16,
  e4m3,
  e5m2,
  e8m0,
  e4m3fnuz,
  e5m2fnuz,
  f6_e2m3,
  f6_e3m2,
  f4,
  c64,  //
  i64,
  i32,
  i16,
  i8,
  u64,
  u32,
  u16,
  u8,
  boolean,  //
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q8_0,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  iq4_nl,
  iq4_xs,
  tq2_0,
  mxfp4,
};

// Numbers come in blocks of `count` that take `bytes`; an ordinary type has blocks of one.
struct TypeInfo {
  const char* name;
  int64_t count, bytes;
};
const TypeInfo& type_info(Type type);
inline const char* type_name(Type type) { return type_info(type).name; }
// Blocks that carry their own scales, which GGUF's quantized types are.
inline bool is_block_quantized(Type type) { return type >= Type::q4_0; }

// The type that a safetensors header calls `name`; false where there is none.
bool type_from_name(const std::string& name, Type& type);

// The type that PyTorch calls `name`: float32, float16 or bfloat16; false for any other.
bool float_type_from_name(const std::string& name, Type& type);

struct Tensor {
  std::string name;
  Type type = Type::u8;
  std::vector<int64_t> shape;
  std::span<const uint8_t> bytes;

  int64_t rank() const { return static_cast<int64_t>(shape.size()); }
  int64_t size(size_t dim) const { return shape[dim]; }
  int64_t numel() const;
};

// Bytes of a tensor as its header declares it; fails, naming the tensor, where a dimension is negative or
// beyond reason, where the product overflows, and where a row is no whole number of blocks.
int64_t declared_bytes(const std::string& name, Type type, const std::vector<int64_t>& shape);

// Checks that name the tensor, what it has and what was expected. `why` says where the expectation is from.
void expect_type(const Tensor& tensor, std::initializer_list<Type> types);
void expect_rank(const Tensor& tensor, int64_t rank);
void expect_shape(const Tensor& tensor, const std::vector<int64_t>& shape, const std::string& why);

// Element i of type T. Tensors in a file need not be aligned.
template <class T>
T load(const Tensor& tensor, int64_t i) {
  T value;
  std::memcpy(&value, tensor.bytes.data() + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// Element i of a tensor of type f32, f16, bf16, e4m3, e8m0, or of u8 that stands for e8m0.
float load_float(const Tensor& tensor, int64_t i);

// The nearest number of type f32, f16 or bf16.
float round_to(Type type, float value);
// All of `values` as numbers of such a type, one after the other.
void store_floats(std::span<const float> values, Type type, uint8_t* out);

}  // namespace quantfuse::checkpoint
