// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/weight_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "checkpoint/error.h"
#include "checkpoint/scale_grid.h"
#include "checkpoint/vectors.h"
#include "formats/codes.h"
#include "formats/quantizer.h"

namespace quantfuse::checkpoint {
namespace {

constexpr int64_t kPieceBytes = 1 << 18;  // leaves room for codes and decoded numbers in a second-level cache
constexpr int64_t kPackedRows = 32;  // zero points of that many rows fill whole words, at any number of bits

constexpr qf_dtype kF32 = {2, 32, 1}, kF16 = {2, 16, 1}, kBf16 = {4, 16, 1}, kI8 = {0, 8, 1}, kU8 = {1, 8, 1};

qf_dtype float_dtype(Type type) { return type == Type::f32 ? kF32 : type == Type::f16 ? kF16 : kBf16; }

// A matrix for a call of the C interface.
struct View {
  View(const void* data, qf_dtype dtype, int64_t rows, int64_t cols) : shape{rows, cols} {
    tensor = {const_cast<void*>(data), {QF_CPU, 0}, 2, dtype, shape, nullptr, 0};
  }
  View(const View&) = delete;  // `tensor` points to `shape`
  View& operator=(const View&) = delete;
  int64_t shape[2];
  qf_tensor tensor;
};

void expect_ok(qf_status status, const Tensor& weight) {
  if (status != QF_OK) fail(printable(weight.name) + ": " + qf_last_error());
}

// What float16 and bfloat16 can hold: above 0, and such that the largest code times the scale is still
// finite.
struct ScaleRange {
  float smallest, largest;
};

ScaleRange scale_range(Type type, const Scheme& scheme) {
  const CodeRange codes = code_range(scheme.format);
  const float steps =
      scheme.is_asymmetric ? static_cast<float>(codes.highest - codes.lowest) : codes.symmetric_max;
  const float largest_number = type == Type::f16 ? 65504.0f : 0x1.fep127f;
  float largest = round_to(type, largest_number / steps);
  if (!is_finite(round_to(type, largest * steps))) largest = round_to(type, largest * (1 - 0x1p-7f));
  return {type == Type::f16 ? 0x1p-24f : 0x1p-126f, largest};
}

void round_scales(std::vector<float>& scales, Type type, const Scheme& scheme) {
  const auto [smallest, largest] = scale_range(type, scheme);
  // NaN, which only numbers that are not finite bring, becomes the smallest: the error then names the number.
  for (float& scale : scales) scale = std::min(std::max(smallest, round_to(type, scale)), largest);
}

// ---- Numbers, in loops that compilers make vectors of ----

QF_VECTORIZED inline float number_of(float x) { return x; }
QF_VECTORIZED inline float number_of(bf16 x) { return to_float(x); }
// to_float without its branches. What is not finite stays so, whichever it was.
QF_VECTORIZED inline float number_of(f16 x) {
  const uint32_t code = x.bits & 0x7fffu, sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const float magnitude = float_from_bits(code << 13) * 0x1p112f;  // from an exponent's bias of 15 to 127
  const uint32_t is_beyond = (0x7bffu - code) >> 31;
  return float_from_bits(float_bits(magnitude) | sign | is_beyond * 0x7f800000u);
}

// ---- Scales ----

struct Range {
  float low = 0, high = 0;
};

// Of numbers of 16 bits the largest magnitude is that of the largest bits, without their sign.
template <class T>
QF_VECTORIZED inline Range range_of_bits(const T* numbers, int64_t count) {
  uint16_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) {
    const auto magnitude = static_cast<uint16_t>(numbers[i].bits & 0x7fff);
    largest = magnitude > largest ? magnitude : largest;
  }
  return {0, to_float(T{largest})};
}

template <class T>
QF_VECTORIZED inline Range range_of_floats(const T* numbers, int64_t count) {
  float low = 0, high = 0;
#pragma omp simd reduction(min : low) reduction(max : high)
  for (int64_t i = 0; i < count; ++i) {
    const float x = number_of(numbers[i]);
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  return {low, high};
}

// The scales that hold the largest number of each block, by the rule of the quantize kernels, rounded to
// `type`. The kernels would find them too, but compute codes for the scales before they are rounded on the
// way.
template <class T>
void choose_scales(const T* numbers, const Scheme& scheme, Type type, WeightRows& rows) {
  const ScaleGrid grid = scale_grid(rows.count, rows.k, scheme.block);
  const int64_t block_rows = scheme.block.rows ? scheme.block.rows : rows.count;
  const int64_t block_cols = scheme.block.cols ? scheme.block.cols : rows.k;
  std::vector<Range> ranges(static_cast<size_t>(grid.rows * grid.cols));
  with_vectors([&]() QF_VECTORIZED {
    for (int64_t row = 0; row < rows.count; ++row) {
      Range* band = ranges.data() + row / block_rows * grid.cols;
      for (int64_t col = 0; col < rows.k; col += block_cols) {
        const T* begin = numbers + row * rows.k + col;
        const int64_t count = rows.k - col < block_cols ? rows.k - col : block_cols;
        Range found;
        if constexpr (sizeof(T) == 2) {
          found = scheme.is_asymmetric ? range_of_floats(begin, count) : range_of_bits(begin, count);
        } else {
          found = range_of_floats(begin, count);
        }
        Range& range = band[col / block_cols];
        range = {found.low < range.low ? found.low : range.low,
                 found.high < range.high ? range.high : found.high};
      }
    }
  });
  const auto kind = scheme.is_asymmetric ? quantize::ScaleKind::asymmetric : quantize::ScaleKind::symmetric;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const auto [low, high] = ranges[i];
    const quantize::Quantizer found = quantizer_from_range(kind, code_range(scheme.format), low, high);
    rows.scale[i] = found.scale;
    if (scheme.is_asymmetric) rows.zero[i] = static_cast<int8_t>(found.zero);
  }
  round_scales(rows.scale, type, scheme);
}

// ---- Errors ----

// The squares in float32: of a row, so that no sum is so long that what it loses would show.
template <class T, class D>
QF_VECTORIZED inline SquaredError float_error(const T* numbers, const D* decoded, int64_t count) {
  float error = 0, norm = 0;
#pragma omp simd reduction(+ : error, norm)
  for (int64_t i = 0; i < count; ++i) {
    const float x = number_of(numbers[i]), difference = number_of(decoded[i]) - x;
    error += difference * difference;
    norm += x * x;
  }
  return {error, norm};
}

// Numbers whose squares leave the range of float.
template <class T, class D>
SquaredError double_error(const T* numbers, const D* decoded, int64_t count) {
  SquaredError sum;
  for (int64_t i = 0; i < count; ++i) {
    const double x = to_float(numbers[i]), difference = to_float(decoded[i]) - x;
    sum.add({difference * difference, x * x});
  }
  return sum;
}

// Rows [first, first + count) of a weight.
struct Slice {
  int64_t first, count, k;
};

template <class T>
void expect_finite(const Tensor& weight, const T* numbers, const Slice& slice) {
  for (int64_t i = 0; i < slice.count * slice.k; ++i) {
    if (is_finite(to_float(numbers[i]))) continue;
    const int64_t row = slice.first + i / slice.k, col = i % slice.k;
    fail(fmt::format("{} has {} at [{}, {}]: only finite numbers can be quantized", printable(weight.name),
                     to_float(numbers[i]), row, col));
  }
}

template <class T, class D>
SquaredError error_of(const Tensor& weight, const T* numbers, const D* decoded, const Slice& slice) {
  SquaredError sum = with_vectors([&]() QF_VECTORIZED {
    SquaredError of_rows;
    for (int64_t row = 0; row < slice.count; ++row) {
      of_rows.add(float_error(numbers + row * slice.k, decoded + row * slice.k, slice.k));
    }
    return of_rows;
  });
  if (!std::isfinite(sum.norm) || !std::isfinite(sum.error)) {
    expect_finite(weight, numbers, slice);
    sum = double_error(numbers, decoded, slice.count * slice.k);
  }
  return sum;
}

// Calls visit with `data` as what it holds.
template <class Visit>
auto as_floats(Type type, const void* data, const Visit& visit) {
  switch (type) {
    case Type::f32: return visit(static_cast<const float*>(data));
    case Type::f16: return visit(static_cast<const f16*>(data));
    default: return visit(static_cast<const bf16*>(data));
  }
}

// ---- Calls ----

// The rows where they lie, or a copy where a file has them unaligned.
const void* aligned_input(const Tensor& weight, WeightRows& rows) {
  const int64_t each = type_info(weight.type).bytes, row_bytes = rows.k * each;
  const uint8_t* data = weight.bytes.data() + rows.first * row_bytes;
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(each) == 0) return data;
  rows.input.assign(data, data + rows.count * row_bytes);
  return rows.input.data();
}

View scale_view(const WeightRows& rows, const Scheme& scheme) {
  const ScaleGrid grid = scale_grid(rows.count, rows.k, scheme.block);
  if (scheme.has_e8m0_scale) return View(rows.scale_e8m0.data(), kU8, grid.rows, grid.cols);
  return View(rows.scale.data(), kF32, grid.rows, grid.cols);
}

View zero_view(const WeightRows& rows, const Scheme& scheme) {
  const ScaleGrid grid = scale_grid(rows.count, rows.k, scheme.block);
  return View(rows.zero.data(), kI8, grid.rows, grid.cols);
}

// Codes of `slice`, whose first row is that many rows behind the first of `rows`.
View code_view(const WeightRows& rows, const Scheme& scheme, const Slice& slice) {
  const int64_t cols = row_bytes(scheme.format, rows.k);
  return View(rows.codes.data() + (slice.first - rows.first) * cols, scheme.format == QF_INT8 ? kI8 : kU8,
              slice.count, cols);
}

void compute_codes(const Tensor& weight, const void* input, const Scheme& scheme, Method method,
                   Type scale_type, WeightRows& rows) {
  const View x(input, float_dtype(weight.type), rows.count, rows.k);
  const View q = code_view(rows, scheme, {rows.first, rows.count, rows.k});
  const View scale = scale_view(rows, scheme), zero = zero_view(rows, scheme);
  qf_quantize_args args = {};
  args.x = &x.tensor, args.q = &q.tensor, args.scale = &scale.tensor;
  args.format = scheme.format;
  args.block = scheme.block;
  if (scheme.is_asymmetric) args.zero = &zero.tensor;
  const bool rounds_scales = !scheme.has_e8m0_scale && scale_type != Type::f32;
  if (!rounds_scales || method == Method::mse) {
    args.scale_mode = method == Method::mse ? QF_SCALE_MSE : QF_SCALE_DYNAMIC;
    expect_ok(qf_quantize(&args, nullptr), weight);
    if (rounds_scales) round_scales(rows.scale, scale_type, scheme);
  } else {
    as_floats(weight.type, input,
              [&](const auto* numbers) { choose_scales(numbers, scheme, scale_type, rows); });
  }
  if (rounds_scales) {
    args.scale_mode = QF_SCALE_STATIC;
    expect_ok(qf_quantize(&args, nullptr), weight);
  }
}

// The slice is all of `rows`, or some of them under a scale that all rows share.
SquaredError decode_and_compare(const Tensor& weight, const void* input, const Scheme& scheme, Type type,
                                const Slice& slice, WeightRows& rows) {
  rows.decoded.resize(static_cast<size_t>(slice.count * rows.k * type_info(type).bytes));
  const View q = code_view(rows, scheme, slice);
  const View scale = scale_view(rows, scheme), zero = zero_view(rows, scheme);
  const View decoded(rows.decoded.data(), float_dtype(type), slice.count, rows.k);
  qf_dequantize_args args = {};
  args.q = &q.tensor, args.scale = &scale.tensor, args.x = &decoded.tensor;
  args.format = scheme.format;
  args.block = scheme.block;
  if (scheme.is_asymmetric) args.zero = &zero.tensor;
  expect_ok(qf_dequantize(&args, nullptr), weight);
  return as_floats(weight.type, input, [&](const auto* numbers) {
    const auto* of_slice = numbers + (slice.first - rows.first) * rows.k;
    return as_floats(type, rows.decoded.data(),
                     [&](const auto* back) { return error_of(weight, of_slice, back, slice); });
  });
}

int64_t rows_in_cache(const Tensor& weight) {
  return kPieceBytes / std::max<int64_t>(weight.size(1) * type_info(weight.type).bytes, 1);
}

}  // namespace

double SquaredError::relative() const { return norm > 0 ? std::sqrt(error / norm) : 0; }

int64_t rows_of_piece(const Scheme& scheme, const Tensor& weight) {
  if (scheme.block.rows == 0) return std::max<int64_t>(weight.size(0), 1);
  const int64_t step = std::max(kPackedRows, scheme.block.rows);
  return std::max(step, rows_in_cache(weight) / step * step);
}

SquaredError quantize_rows(const Tensor& weight, const Scheme& scheme, Method method, Type scale_type,
                           WeightRows& rows) {
  const ScaleGrid grid = scale_grid(rows.count, rows.k, scheme.block);
  const auto num_scales = static_cast<size_t>(grid.rows * grid.cols);
  rows.codes.resize(static_cast<size_t>(rows.count * row_bytes(scheme.format, rows.k)));
  (scheme.has_e8m0_scale ? rows.scale_e8m0.resize(num_scales) : rows.scale.resize(num_scales));
  if (scheme.is_asymmetric) rows.zero.resize(num_scales);

  const void* input = aligned_input(weight, rows);
  compute_codes(weight, input, scheme, method, scale_type, rows);
  // Under one scale for all rows, which are a whole tensor then, the decoded numbers need not be there at
  // once.
  const int64_t step = scheme.block.rows == 0 ? std::max<int64_t>(rows_in_cache(weight), 1) : rows.count;
  SquaredError sum;
  for (int64_t first = 0; first < rows.count; first += step) {
    const Slice slice{rows.first + first, std::min(step, rows.count - first), rows.k};
    sum.add(decode_and_compare(weight, input, scheme, scale_type, slice, rows));
  }
  return sum;
}

}  // namespace quantfuse::checkpoint
