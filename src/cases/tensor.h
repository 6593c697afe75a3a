// SPDX-License-Identifier: Apache-2.0
//
// A tensor of a case: its contents before a run, and the sets of memory that hold it.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "cases/buffer.h"
#include "cases/case.h"
#include "cases/random.h"
#include "core/dtype.h"

namespace quantfuse::cases {

inline constexpr qf_dtype kF32 = {2, 32, 1}, kF16 = {2, 16, 1}, kBf16 = {4, 16, 1};
inline constexpr qf_dtype kI8 = {0, 8, 1}, kU8 = {1, 8, 1}, kI32 = {0, 32, 1};
inline constexpr qf_dtype kE4m3 = {10, 8, 1}, kE5m2 = {12, 8, 1}, kE8m0 = {14, 8, 1};

// The type that holds codes of `format`. FP8 codes have their own type, and may also come as plain bytes.
qf_dtype code_dtype(qf_format format, bool as_bytes = false);

// A group or block with whole dimensions (0) resolved to their size; at least 1, so that it can divide.
int64_t resolved(int64_t group, int64_t whole);
qf_block resolved(qf_block block, int64_t rows, int64_t cols);

// The bytes of a [rows, cols] tensor on the host as they lie in memory, padding included. A vector is one
// row.
class Image {
 public:
  Image() = default;
  Image(DType dtype, int64_t rows, int64_t cols, int64_t row_stride, int64_t offset_elements);

  DType dtype = DType::f32;
  int64_t rows = 0, cols = 0;
  int64_t row_stride = 0;  // elements
  int64_t offset = 0;      // bytes before the first element
  std::vector<uint8_t> bytes;

  uint8_t* row(int64_t r) { return bytes.data() + offset + r * row_stride * dtype_bytes(dtype); }
  const uint8_t* row(int64_t r) const { return const_cast<Image*>(this)->row(r); }
  // One number, floats and integers alike; E8M0 codes as the power of two they stand for. Indices count from
  // 0.
  double value(int64_t r, int64_t c) const;
  double value(int64_t i) const { return value(i / cols, i % cols); }  // in row-major order
  void set(int64_t r, int64_t c, double value);  // rounded to the type; E8M0: the code itself
};

enum class Role { input, output, in_out };

// Which memory a view is of: 0, 1, ... are the sets of make().
inline constexpr int kReferenceSet = -1;  // a copy on the CPU, for the reference kernel
inline constexpr int kNoData = -2;        // shape and type alone

class Tensor {
 public:
  // With row_padding > 0 rows lie that many elements apart, and the first one starts an element behind an
  // aligned address: an odd view into somebody's larger matrix.
  Tensor(std::string name, Role role, qf_dtype dtype, std::vector<int64_t> shape, int64_t row_padding = 0);
  Tensor(const Tensor&) = delete;

  const std::string& name() const { return name_; }
  Role role() const { return role_; }
  const Image& initial() const { return initial_; }
  Image& initial() { return initial_; }
  const Image& result() const { return result_; }  // set 0 as fetch() found it
  int64_t data_bytes() const { return initial_.rows * initial_.cols * dtype_bytes(initial_.dtype); }

  // Views of a matrix have its rows as columns from now on; the memory stays as it is.
  void show_transposed() {
    std::swap(shape_[0], shape_[1]);
    std::swap(strides_[0], strides_[1]);
  }

  void place(qf_device device, int copies);  // makes the sets, each with the initial contents
  void reset();                              // initial contents again, where a kernel may have written
  const qf_tensor* view(int set, qf_device device = {QF_CPU, 0});
  // Reads set 0 back into result(). "" or what was written where nothing should be.
  std::string fetch();
  std::vector<uint8_t> read(int set) const { return sets_.at(static_cast<size_t>(set)).read(); }
  Image reference_result() const;  // the reference set after the reference kernel ran on it

 private:
  std::string name_;
  Role role_;
  qf_dtype dtype_;
  std::vector<int64_t> shape_, strides_;
  Image initial_, result_;
  std::vector<Buffer> sets_;
  Buffer reference_;
  std::deque<qf_tensor> views_;  // of each set, at stable addresses
  qf_tensor reference_view_ = {}, shape_view_ = {};
};

// A compact float32 matrix on the CPU: what the reference kernel writes its unquantized results to.
struct FloatMatrix {
  FloatMatrix(int64_t rows, int64_t cols);
  FloatMatrix(const FloatMatrix&) = delete;
  double at(int64_t r, int64_t c) const { return values[static_cast<size_t>(r * shape[1] + c)]; }

  std::vector<float> values;
  int64_t shape[2];
  qf_tensor view;
};

// Fills a float tensor with numbers of the given kind; `normal` ones have deviation `deviation`.
void fill_floats(Tensor& tensor, Random& random, Data data, double deviation = 1.0);
// Random codes of [rows, cols] numbers: every code that stands for a finite number, zero behind an odd row of
// nibbles.
void fill_codes(Tensor& tensor, Random& random, qf_format format, int64_t cols, Codes kind = Codes::all);
// Codes of normal numbers, whose largest are 3.5 deviations; no codebook's.
std::vector<uint8_t> normal_codes(Random& random, qf_format format, size_t bytes);
// Positive scales between half and one and a half of `typical`; E8M0 ones are powers of two about there.
void fill_scales(Tensor& tensor, Random& random, double typical);

}  // namespace quantfuse::cases
