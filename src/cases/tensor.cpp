// SPDX-License-Identifier: Apache-2.0
#include "cases/tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "formats/codes.h"

namespace quantfuse::cases {
namespace {

constexpr int64_t rows_of(const std::vector<int64_t>& shape) { return shape.size() == 2 ? shape[0] : 1; }

// What an output holds before it is written: NaN in every float type, an unlikely number in the others (in
// FP8 -448 or NaN, which no case's results are).
constexpr uint8_t unwritten_byte(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16 ? 0xff : 0xfe;
}

template <class T>
T load(const uint8_t* row, int64_t i) {
  T value;
  std::memcpy(&value, row + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}
template <class T>
void store(uint8_t* row, int64_t i, T value) {
  std::memcpy(row + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

}  // namespace

qf_dtype code_dtype(qf_format format, bool as_bytes) {
  switch (format) {
    case QF_INT8: return kI8;
    case QF_FP8_E4M3: return as_bytes ? kU8 : kE4m3;
    case QF_FP8_E5M2: return as_bytes ? kU8 : kE5m2;
    case QF_F32: return kF32;
    case QF_F16: return kF16;
    case QF_BF16: return kBf16;
    default: return kU8;
  }
}

int64_t resolved(int64_t group, int64_t whole) {
  return std::max<int64_t>(1, group == 0 ? whole : std::min(group, whole));
}
qf_block resolved(qf_block block, int64_t rows, int64_t cols) {
  return {resolved(block.rows, rows), resolved(block.cols, cols)};
}

Image::Image(DType type, int64_t num_rows, int64_t num_cols, int64_t stride, int64_t offset_elements)
    : dtype(type),
      rows(num_rows),
      cols(num_cols),
      row_stride(stride),
      offset(offset_elements * dtype_bytes(type)) {
  const int64_t elements = rows > 0 && cols > 0 ? (rows - 1) * row_stride + cols : 0;
  bytes.assign(static_cast<size_t>(offset + elements * dtype_bytes(dtype)), kGuardByte);
}

double Image::value(int64_t r, int64_t c) const {
  const uint8_t* p = row(r);
  switch (dtype) {
    case DType::f32: return load<float>(p, c);
    case DType::f16: return to_float(load<f16>(p, c));
    case DType::bf16: return to_float(load<bf16>(p, c));
    case DType::i8: return load<int8_t>(p, c);
    case DType::i32: return load<int32_t>(p, c);
    case DType::e4m3: return E4m3::decode(p[c]);
    case DType::e5m2: return E5m2::decode(p[c]);
    case DType::e8m0: return E8m0::decode(p[c]);
    default: return p[c];
  }
}

void Image::set(int64_t r, int64_t c, double value) {
  uint8_t* p = row(r);
  const auto x = static_cast<float>(value);
  f16 half;
  bf16 brain;
  switch (dtype) {
    case DType::f32: return store(p, c, x);
    case DType::f16: from_float(x, half); return store(p, c, half);
    case DType::bf16: from_float(x, brain); return store(p, c, brain);
    case DType::i8: return store(p, c, static_cast<int8_t>(value));
    case DType::i32: return store(p, c, static_cast<int32_t>(value));
    default: return store(p, c, static_cast<uint8_t>(value));
  }
}

Tensor::Tensor(std::string name, Role role, qf_dtype dtype, std::vector<int64_t> shape, int64_t row_padding)
    : name_(std::move(name)), role_(role), dtype_(dtype), shape_(std::move(shape)) {
  const DType type = dtype_of(dtype);
  const int64_t cols = shape_.back(), stride = cols + row_padding;
  strides_ = shape_.size() == 2 ? std::vector<int64_t>{stride, 1} : std::vector<int64_t>{1};
  initial_ = Image(type, rows_of(shape_), cols, stride, row_padding > 0 ? 1 : 0);
  const int64_t row_bytes = cols * dtype_bytes(type);
  for (int64_t r = 0; r < initial_.rows && row_bytes > 0; ++r) {
    std::memset(initial_.row(r), unwritten_byte(type), static_cast<size_t>(row_bytes));
  }
}

void Tensor::place(qf_device device, int copies) {
  sets_.clear();
  views_.clear();
  for (int i = 0; i < copies; ++i) {
    sets_.emplace_back(device, initial_.bytes.size());
    sets_.back().write(initial_.bytes.data());
    views_.push_back({sets_.back().data(), device, static_cast<int32_t>(shape_.size()), dtype_, shape_.data(),
                      strides_.data(), static_cast<uint64_t>(initial_.offset)});
  }
  reference_ = Buffer();
}

void Tensor::reset() {
  if (role_ == Role::input) return;
  for (Buffer& set : sets_) set.write(initial_.bytes.data());
}

const qf_tensor* Tensor::view(int set, qf_device device) {
  if (set >= 0) return &views_.at(static_cast<size_t>(set));
  qf_tensor& v = set == kReferenceSet ? reference_view_ : shape_view_;
  v = {nullptr,       device,          static_cast<int32_t>(shape_.size()),   dtype_,
       shape_.data(), strides_.data(), static_cast<uint64_t>(initial_.offset)};
  if (set == kReferenceSet) {
    if (!reference_.data()) {
      reference_ = Buffer({QF_CPU, 0}, initial_.bytes.size());
      reference_.write(initial_.bytes.data());
    }
    v.device = {QF_CPU, 0};
    v.data = reference_.data();
  }
  return &v;
}

std::string Tensor::fetch() {
  if (!sets_.at(0).has_intact_guards()) return "wrote outside " + name_;
  result_ = initial_;
  result_.bytes = sets_[0].read();
  if (role_ == Role::input) return result_.bytes == initial_.bytes ? "" : "wrote to its input " + name_;

  // Outside its rows, an output's memory must be as it was.
  Image masked = result_;
  const int64_t row_bytes = masked.cols * dtype_bytes(masked.dtype);
  for (int64_t r = 0; r < masked.rows && row_bytes > 0; ++r) {
    std::memcpy(masked.row(r), initial_.row(r), static_cast<size_t>(row_bytes));
  }
  return masked.bytes == initial_.bytes ? "" : "wrote between the rows of " + name_;
}

Image Tensor::reference_result() const {
  Image image = initial_;
  if (reference_.data()) image.bytes = reference_.read();
  return image;
}

FloatMatrix::FloatMatrix(int64_t rows, int64_t cols)
    : values(static_cast<size_t>(std::max<int64_t>(rows * cols, 1)), std::numeric_limits<float>::quiet_NaN()),
      shape{rows, cols},
      view{values.data(), {QF_CPU, 0}, 2, kF32, shape, nullptr, 0} {}

void fill_floats(Tensor& tensor, Random& random, Data data, double deviation) {
  Image& x = tensor.initial();
  const bool is_half = x.dtype == DType::f16;
  const double tiny = is_half ? 6e-8 : 1e-38, huge = is_half ? 1.8e4 : 1e38;
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < x.cols; ++c) {
      double v = random.normal() * deviation;
      switch (data) {
        case Data::normal: break;
        case Data::outliers: v *= random.chance(3) ? 1e4 : 1; break;
        case Data::tiny: v *= tiny; break;
        case Data::huge: v = std::clamp(v / deviation * huge, -3.4e38, 3.4e38); break;
        case Data::zeros: v = random.chance(50) ? 0.0 : -0.0; break;
        case Data::constant: v = -1.25 * deviation; break;
        case Data::with_nan_inf:
          if (random.chance(4)) v = random.pick({NAN, -NAN, INFINITY, -INFINITY});
          break;
        case Data::nan_in_row_1: v = r == 1 && c == x.cols / 2 ? NAN : v; break;
      }
      x.set(r, c, v);
    }
  }
}

namespace {

uint8_t any_codes(Random& random, qf_format format) {
  const auto byte = static_cast<uint8_t>(random.next());
  if (format == QF_FP8_E4M3 && (byte & 0x7f) == 0x7f) return 0;
  if (format == QF_FP8_E5M2 && (byte & 0x7f) >= 0x7c) return 0;
  return byte;
}

}  // namespace

std::vector<uint8_t> normal_codes(Random& random, qf_format format, size_t bytes) {
  const float deviation = code_range(format).symmetric_max / 3.5f;
  const auto code = [&] { return encode_value(format, random.normal() * deviation, 0); };
  std::vector<uint8_t> codes(bytes);
  for (uint8_t& byte : codes)
    byte = static_cast<uint8_t>(is_packed_4bit(format) ? code() | code() << 4 : code());
  return codes;
}

void fill_codes(Tensor& tensor, Random& random, qf_format format, int64_t cols, Codes kind) {
  // Drawn from these, because to encode every number of a large weight would take seconds.
  const bool has_normal = kind == Codes::of_normal_numbers && !is_codebook(format);
  const std::vector<uint8_t> normal =
      has_normal ? normal_codes(random, format, 1 << 14) : std::vector<uint8_t>();
  Image& q = tensor.initial();
  for (int64_t r = 0; r < q.rows; ++r) {
    uint8_t* row = q.row(r);
    for (int64_t i = 0; i < q.cols; ++i)
      row[i] = has_normal ? normal[random.next() % normal.size()] : any_codes(random, format);
    if (is_packed_4bit(format) && cols % 2 != 0) row[q.cols - 1] &= 15;
  }
}

void fill_scales(Tensor& tensor, Random& random, double typical) {
  Image& s = tensor.initial();
  for (int64_t r = 0; r < s.rows; ++r) {
    for (int64_t c = 0; c < s.cols; ++c) {
      const double value = typical * random.uniform(0.5, 1.5);
      const bool is_e8m0 = s.dtype != DType::f32;
      s.set(r, c, is_e8m0 ? std::clamp(127 + std::floor(std::log2(value)), 0.0, 254.0) : value);
    }
  }
}

}  // namespace quantfuse::cases
