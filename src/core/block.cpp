// SPDX-License-Identifier: Apache-2.0
#include "core/block.h"

#include <algorithm>

#include "formats/hadamard.h"
#include "formats/numbers.h"

namespace quantfuse {
namespace {

// Whether every scale is finite and positive. Without a branch per value, because calls do this every time.
bool are_scales_good(const Matrix& scale) {
  const int64_t count = scale.rows * scale.cols;
  uint32_t is_bad = 0;
  if (scale.dtype == DType::f32) {
    const auto* values = static_cast<const float*>(scale.data);
    for (int64_t i = 0; i < count; ++i) {
      is_bad |= float_bits(values[i]) - 1u >= 0x7f7fffffu;  // as integers, the good ones are 1 to 0x7f7fffff
    }
  } else {
    const auto* exponents = static_cast<const uint8_t*>(scale.data);
    for (int64_t i = 0; i < count; ++i) is_bad |= exponents[i] == E8m0::kNan;
  }
  return is_bad == 0;
}

// Blocks along a dimension. Where it is empty there may be none, or the one of a whole dimension.
int64_t num_blocks(int64_t size, int64_t block, const qf_tensor* scale) {
  if (size > 0) return ceil_div(size, block);
  for (int32_t i = 0; scale && scale->shape && i < scale->ndim; ++i) {
    if (scale->shape[i] == 0) return 0;
  }
  return 1;
}

}  // namespace

qf_block resolve_block(const Arguments& arg, const char* name, qf_block block, int64_t rows, int64_t cols) {
  if (block.rows < 0 || block.cols < 0) {
    arg.fail(std::string(name) + " is {" + std::to_string(block.rows) + ", " + std::to_string(block.cols) +
             "}, expected sizes of 0 (the whole dimension) or more");
  }
  auto resolve = [](int64_t size, int64_t whole) {
    return std::max<int64_t>(1, size == 0 ? whole : std::min(size, whole));
  };
  return {resolve(block.rows, rows), resolve(block.cols, cols)};
}

Matrix expect_scale(Arguments& arg, const char* name, const qf_tensor* tensor, qf_block block, int64_t rows,
                    int64_t cols, std::initializer_list<DType> allowed) {
  Dim row_blocks{"row blocks", num_blocks(rows, block.rows, tensor)},
      col_blocks{"column blocks", num_blocks(cols, block.cols, tensor)};
  return arg.expect(name, tensor).shape_squeezed(row_blocks, col_blocks).dtype(allowed).compact();
}

Matrix expect_scale_or_transposed(Arguments& arg, const char* name, const qf_tensor* tensor, qf_block block,
                                  int64_t rows, int64_t cols, std::initializer_list<DType> allowed,
                                  int64_t& col_stride) {
  Dim row_blocks{"row blocks", num_blocks(rows, block.rows, tensor)},
      col_blocks{"column blocks", num_blocks(cols, block.cols, tensor)};
  return arg.expect(name, tensor)
      .shape_squeezed(row_blocks, col_blocks)
      .dtype(allowed)
      .compact_or_transposed(col_stride);
}

int64_t check_hadamard(const Arguments& arg, const char* name, int64_t size, int64_t cols) {
  if (size != 0 && (!is_hadamard_size(size) || cols % size != 0)) {
    arg.fail(std::string(name) + " is " + std::to_string(size) +
             ", expected 0 (no rotation) or a power of two that divides the " + std::to_string(cols) +
             " columns");
  }
  return size == 1 ? 0 : size;  // the rotation of one number is that number
}

void check_scale_values(const Arguments& arg, const char* name, const Matrix& scale) {
  if (arg.device().type != QF_CPU || !scale.data || are_scales_good(scale)) return;
  const int64_t count = scale.rows * scale.cols;
  for (int64_t i = 0; i < count; ++i) {
    const bool is_float = scale.dtype == DType::f32;
    const float value = is_float ? static_cast<const float*>(scale.data)[i]
                                 : E8m0::decode(static_cast<const uint8_t*>(scale.data)[i]);
    if (is_finite(value) && value > 0 && is_finite(1.0f / value)) continue;
    arg.fail(std::string(name) + " has the value " + std::to_string(value) + " at index " +
             std::to_string(i) + ", expected finite and positive scales");
  }
}

void check_finite(const Arguments& arg, const char* name, const Matrix& values) {
  if (arg.device().type != QF_CPU || !values.data || values.dtype != DType::f32) return;
  const auto* numbers = static_cast<const float*>(values.data);
  for (int64_t i = 0; i < values.rows * values.cols; ++i) {
    if (!is_finite(numbers[i])) arg.fail(std::string(name) + " is not finite at index " + std::to_string(i));
  }
}

void check_scales_of(const Arguments& arg, const char* name, qf_format format, const Matrix& scale) {
  // An E8M0 scale that is not positive is NaN.
  if (is_codebook(format) && scale.dtype == DType::f32) return check_finite(arg, name, scale);
  check_scale_values(arg, name, scale);
}

void check_format(const Arguments& arg, const char* name, qf_format format,
                  std::initializer_list<qf_format> allowed) {
  std::string names;
  for (const qf_format f : allowed) {
    if (f == format) return;
    names += (names.empty() ? "" : ", ") + std::string(format_name(f));
  }
  arg.fail(std::string(name) + " is " + format_name(format) + " (" +
           std::to_string(static_cast<int>(format)) + "), expected one of: " + names);
}

void check_groups(const Arguments& arg, const char* name, const Vector& g_idx, int64_t groups) {
  if (arg.device().type != QF_CPU || !g_idx.data) return;
  const auto* values = g_idx.as<const int32_t>();
  for (int64_t i = 0; i < g_idx.size; ++i) {
    if (values[i] >= 0 && values[i] < groups) continue;
    arg.fail(std::string(name) + " has the value " + std::to_string(values[i]) + " at index " +
             std::to_string(i) + ", expected 0 to " + std::to_string(groups - 1));
  }
}

}  // namespace quantfuse
