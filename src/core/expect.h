// SPDX-License-Identifier: Apache-2.0
//
// Argument checks. Sizes are symbols: the first tensor that mentions a Dim binds it, every later one is
// compared with it. The only way from a qf_tensor to memory is through a checked view, so an unchecked shape
// cannot reach a kernel.
//
//   Dim m{"m"}, n{"n"}, k{"k"};
//   Arguments arg{"linear"};
//   Matrix x = arg.expect("x", a.x).shape(m, k).dtype(kFloats).matrix();
//   Matrix y = arg.expect("y", a.y).shape(m, n).dtype(kFloats).matrix();
//       // linear: y has shape (8, 4096), expected (m=16, n=4096)
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/error.h"
#include "formats/numbers.h"

namespace quantfuse {

// A named size: unbound (-1) until a tensor or the caller gives it a value.
class Dim {
 public:
  explicit Dim(const char* name, int64_t value = -1) : name_(name), value_(value) {}
  const char* name() const { return name_; }
  bool is_bound() const { return value_ >= 0; }
  int64_t value() const { return value_; }
  operator int64_t() const { return value_; }  // NOLINT: a Dim is its size
  void bind(int64_t value) { value_ = value; }

 private:
  const char* name_;
  int64_t value_;
};

// A checked two-dimensional view whose rows are contiguous.
struct Matrix {
  void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // elements
  DType dtype = DType::other;

  QF_HD explicit operator bool() const { return dtype != DType::other; }
  template <class T>
  QF_HD T* row(int64_t r) const {
    return static_cast<T*>(data) + r * row_stride;
  }
  QF_HD char* row_bytes_at(int64_t r) const {
    return static_cast<char*>(data) + r * row_stride * dtype_bytes(dtype);
  }
};

// A checked contiguous one-dimensional view.
struct Vector {
  void* data = nullptr;
  int64_t size = 0;
  DType dtype = DType::other;

  QF_HD explicit operator bool() const { return dtype != DType::other; }
  template <class T>
  QF_HD T* as() const {
    return static_cast<T*>(data);
  }
};

inline constexpr std::initializer_list<DType> kFloats = {DType::f32, DType::f16, DType::bf16};

class Arguments;

class Expect {
 public:
  Expect(Arguments& owner, const char* name, const qf_tensor* tensor);

  Expect& shape(Dim& size);
  Expect& shape(Dim& rows, Dim& cols);
  // As shape(rows, cols), but a dimension of size 1 may be missing from the tensor: scales per row come as
  // [m] or [m, 1].
  Expect& shape_squeezed(Dim& rows, Dim& cols);
  Expect& dtype(std::initializer_list<DType> allowed);
  // The types that hold codes of `format`.
  Expect& codes(qf_format format);
  Expect& aligned(int64_t bytes);

  Matrix matrix();   // rows contiguous, any row stride >= cols
  Vector vector();   // contiguous
  Matrix compact();  // a matrix with row stride == cols (accepts squeezed shapes)
  // A compact matrix, or one whose columns are contiguous (the transpose of one with any row stride): then
  // col_stride is not 1, and row_stride is.
  Matrix compact_or_transposed(int64_t& col_stride);

 private:
  [[noreturn]] void fail(const std::string& text) const;
  void bind(std::initializer_list<Dim*> dims, bool squeezed);
  void check_memory(int64_t rows, int64_t cols, int64_t row_stride);
  int64_t stride(int dim) const;

  Arguments& owner_;
  const char* name_;
  const qf_tensor* tensor_;
  int64_t rows_ = 1, cols_ = 1;  // the bound shape, once known
  int row_dim_ = -1, col_dim_ = -1;
  DType dtype_ = DType::other;
  bool has_shape_ = false;
};

// The checks of one call: remembers the device all tensors share and the memory each one covers.
class Arguments {
 public:
  // `needs_data` is false where only shapes count (explain, workspace queries): then data may be null.
  Arguments(const char* op, bool needs_data) : op_(op), needs_data_(needs_data) {}

  Expect expect(const char* name, const qf_tensor* tensor) { return Expect(*this, name, tensor); }

  [[noreturn]] void fail(const std::string& text) const;
  void require(bool condition, const char* text) const {
    if (!condition) fail(text);
  }
  const char* op() const { return op_; }
  qf_device device() const { return device_; }
  bool needs_data() const { return needs_data_; }

  // Fails if the memory of output `name` touches that of any tensor seen so far other than itself and
  // `except`.
  void writes(const char* name, const char* except = nullptr) const;

 private:
  friend class Expect;
  struct Range {
    const char* name;
    const char* begin;
    const char* end;
  };
  const char* op_;
  bool needs_data_;
  bool has_device_ = false;
  qf_device device_ = {QF_CPU, 0};
  const char* device_from_ = nullptr;
  int num_ranges_ = 0;
  Range ranges_[16];
};

}  // namespace quantfuse
