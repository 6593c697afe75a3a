// SPDX-License-Identifier: Apache-2.0
#include "core/expect.h"

#include <cstring>
#include <limits>

namespace quantfuse {
namespace {

std::string shape_text(const qf_tensor& t) {
  std::string s = "(";
  for (int i = 0; i < t.ndim; ++i) s += (i ? ", " : "") + std::to_string(t.shape[i]);
  return s + (t.ndim == 1 ? ",)" : ")");
}

constexpr int64_t kAddressSpace = int64_t{1} << 57;  // of today's 64-bit processors

std::string device_text(qf_device d) {
  if (d.type == QF_CPU) return "cpu";
  if (d.type == QF_CUDA) return "cuda:" + std::to_string(d.id);
  return "device type " + std::to_string(d.type);
}

std::string dims_text(std::initializer_list<Dim*> dims) {
  std::string s = "(";
  for (const Dim* d : dims) {
    if (s.size() > 1) s += ", ";
    s += d->name();
    if (d->is_bound()) s += "=" + std::to_string(d->value());
  }
  return s + ")";
}

}  // namespace

void Arguments::fail(const std::string& text) const { fail_argument(std::string(op_) + ": " + text); }

void Expect::fail(const std::string& text) const { owner_.fail(std::string(name_) + " " + text); }

Expect::Expect(Arguments& owner, const char* name, const qf_tensor* tensor)
    : owner_(owner), name_(name), tensor_(tensor) {
  if (!tensor) fail("is missing");
  if (tensor->ndim < 0 || tensor->ndim > 8) fail("has a bad rank: " + std::to_string(tensor->ndim));
  if (tensor->ndim > 0 && !tensor->shape) fail("has no shape");
  for (int i = 0; i < tensor->ndim; ++i) {
    if (tensor->shape[i] < 0) fail("has shape " + shape_text(*tensor) + ", and a size cannot be negative");
  }
  dtype_ = dtype_of(tensor->dtype);

  const qf_device device = tensor->device;
  if (device.type != QF_CPU && device.type != QF_CUDA) {
    fail("is on " + device_text(device) + ", expected cpu or cuda");
  }
  if (!owner_.has_device_) {
    owner_.has_device_ = true;
    owner_.device_ = device;
    owner_.device_from_ = name;
  } else if (device.type != owner_.device_.type ||
             (device.type == QF_CUDA && device.id != owner_.device_.id)) {
    fail("is on " + device_text(device) + ", but " + owner_.device_from_ + " is on " +
         device_text(owner_.device_));
  }
}

void Expect::bind(std::initializer_list<Dim*> dims, bool squeezed) {
  const qf_tensor& t = *tensor_;
  auto mismatch = [&] { fail("has shape " + shape_text(t) + ", expected " + dims_text(dims)); };
  const int rank = static_cast<int>(dims.size());

  // Which tensor dimension carries each Dim: all of them, or only those whose size is not 1.
  int carried[2] = {-1, -1};
  if (t.ndim == rank) {
    for (int i = 0; i < rank; ++i) carried[i] = i;
  } else if (squeezed && t.ndim < rank) {
    int next = 0;
    for (int i = 0; i < rank; ++i) {
      Dim& d = *dims.begin()[i];
      if (d.is_bound() && d.value() == 1 && t.ndim - next < rank - i) continue;
      if (next == t.ndim) mismatch();
      carried[i] = next++;
    }
    if (next != t.ndim) mismatch();
  } else {
    mismatch();
  }

  int64_t sizes[2] = {1, 1};
  for (int i = 0; i < rank; ++i) {
    Dim& d = *dims.begin()[i];
    const int64_t given = carried[i] < 0 ? 1 : t.shape[carried[i]];
    if (!d.is_bound()) d.bind(given);
    if (d.value() != given) mismatch();
    sizes[i] = given;
  }
  if (rank == 1) {
    cols_ = sizes[0];
    col_dim_ = carried[0];
  } else {
    rows_ = sizes[0], cols_ = sizes[1];
    row_dim_ = carried[0], col_dim_ = carried[1];
  }
  has_shape_ = true;
}

Expect& Expect::shape(Dim& size) {
  bind({&size}, true);
  return *this;
}
Expect& Expect::shape(Dim& rows, Dim& cols) {
  bind({&rows, &cols}, false);
  return *this;
}
Expect& Expect::shape_squeezed(Dim& rows, Dim& cols) {
  bind({&rows, &cols}, true);
  return *this;
}

Expect& Expect::dtype(std::initializer_list<DType> allowed) {
  for (DType d : allowed) {
    if (d == dtype_) return *this;
  }
  std::string names;
  for (DType d : allowed) names += (names.empty() ? "" : " or ") + std::string(dtype_name(d));
  const qf_dtype raw = tensor_->dtype;
  fail("has type " +
       (dtype_ == DType::other
            ? "code " + std::to_string(raw.code) + " with " + std::to_string(raw.bits) + " bits"
            : std::string(dtype_name(dtype_))) +
       ", expected " + names);
}

Expect& Expect::codes(qf_format format) {
  switch (format) {
    case QF_INT8: return dtype({DType::i8});
    case QF_INT4:
    case QF_FP4_E2M1:
    case QF_NF4:
    case QF_FP4_BNB:
    case QF_IQ4_NL: return dtype({DType::u8});
    case QF_FP8_E4M3: return dtype({DType::e4m3, DType::u8});
    case QF_FP8_E5M2: return dtype({DType::e5m2, DType::u8});
    case QF_F32:
    case QF_F16:
    case QF_BF16: return dtype({plain_dtype(format)});
    case QF_FORMAT_NONE: break;
  }
  owner_.fail("unknown format " + std::to_string(static_cast<int>(format)) + " for " + name_);
}

Expect& Expect::aligned(int64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(tensor_->data) + tensor_->byte_offset;
  if (tensor_->data && address % bytes != 0) fail("is not aligned to " + std::to_string(bytes) + " bytes");
  return *this;
}

int64_t Expect::stride(int dim) const {
  if (tensor_->strides) return tensor_->strides[dim];
  int64_t s = 1;
  for (int i = tensor_->ndim - 1; i > dim; --i) s *= tensor_->shape[i];
  return s;
}

void Expect::check_memory(int64_t rows, int64_t cols, int64_t row_stride) {
  const int64_t bytes_each = dtype_bytes(dtype_);
  int64_t extent = 0, total = 0;
  if (rows > 0 && cols > 0) {
    const bool overflow = __builtin_mul_overflow(rows - 1, row_stride, &extent) ||
                          __builtin_add_overflow(extent, cols, &extent) ||
                          __builtin_mul_overflow(extent, bytes_each, &total);
    if (overflow || total > kAddressSpace)
      fail("has shape " + shape_text(*tensor_) + ", more than memory can hold");
    if (tensor_->byte_offset > static_cast<uint64_t>(kAddressSpace))
      fail("has a byte_offset of " + std::to_string(tensor_->byte_offset) + ", more than memory can hold");
    if (!tensor_->data && owner_.needs_data_) fail("has no data");
  }
  if (!tensor_->data) return;
  const char* begin = static_cast<const char*>(tensor_->data) + tensor_->byte_offset;
  if (reinterpret_cast<uintptr_t>(begin) % bytes_each != 0) {
    fail("is not aligned to its element size of " + std::to_string(bytes_each) + " bytes");
  }
  if (owner_.num_ranges_ < static_cast<int>(std::size(owner_.ranges_))) {
    owner_.ranges_[owner_.num_ranges_++] = {name_, begin, begin + total};
  }
}

Matrix Expect::matrix() {
  // A view of one row, or of nothing, has no meaningful stride.
  const int64_t row_stride = row_dim_ < 0 || rows_ <= 1 || cols_ == 0 ? cols_ : stride(row_dim_);
  if (rows_ > 0 && cols_ > 1 && col_dim_ >= 0 && stride(col_dim_) != 1) {
    fail("has stride " + std::to_string(stride(col_dim_)) +
         " along its last dimension, expected contiguous rows");
  }
  if (row_stride < cols_) {
    fail("has row stride " + std::to_string(row_stride) + ", less than its " + std::to_string(cols_) +
         " columns");
  }
  check_memory(rows_, cols_, row_stride);
  char* data = tensor_->data ? static_cast<char*>(tensor_->data) + tensor_->byte_offset : nullptr;
  return {data, rows_, cols_, row_stride, dtype_};
}

Vector Expect::vector() {
  const Matrix m = matrix();
  return {m.data, m.cols, m.dtype};
}

Matrix Expect::compact() {
  const Matrix m = matrix();
  if (m.rows > 1 && m.row_stride != m.cols) fail("is not contiguous");
  return m;
}

Matrix Expect::compact_or_transposed(int64_t& col_stride) {
  col_stride = 1;
  const bool is_matrix = row_dim_ >= 0 && col_dim_ >= 0 && rows_ > 0 && cols_ > 1;
  const bool is_transposed = is_matrix && stride(col_dim_) != 1 && (rows_ == 1 || stride(row_dim_) == 1);
  if (!is_transposed) return compact();
  col_stride = stride(col_dim_);
  if (col_stride < rows_) {
    fail("has stride " + std::to_string(col_stride) + " from column to column, less than its " +
         std::to_string(rows_) + " rows");
  }
  check_memory(cols_, rows_, col_stride);
  char* data = tensor_->data ? static_cast<char*>(tensor_->data) + tensor_->byte_offset : nullptr;
  return {data, rows_, cols_, 1, dtype_};
}

void Arguments::writes(const char* name, const char* except) const {
  const Range* out = nullptr;
  for (int i = 0; i < num_ranges_; ++i) {
    if (std::strcmp(ranges_[i].name, name) == 0) out = &ranges_[i];
  }
  if (!out) return;
  for (int i = 0; i < num_ranges_; ++i) {
    const Range& other = ranges_[i];
    if (&other == out) continue;
    if (except && std::strcmp(other.name, except) == 0 && other.begin == out->begin) continue;
    if (out->begin < other.end && other.begin < out->end) {
      fail(std::string(name) + " overlaps " + other.name + ", expected separate memory");
    }
  }
}

}  // namespace quantfuse
