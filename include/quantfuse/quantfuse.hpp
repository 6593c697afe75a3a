// SPDX-License-Identifier: Apache-2.0
//
// QuantFuse for C++17: the C interface with exceptions, tensor views that know their type, and scratch memory
// that looks after itself. Header-only; link with libquantfuse.
//
//   using namespace quantfuse;
//   auto weight = QuantizedWeight::from_float(Tensor(w, {n, k}), Format::int4, per_group(128));
//   weight.pack();
//   LinearOptions options;
//   options.bias = Tensor(bias, {n});
//   options.activation = Activation::silu;
//   linear(Tensor(x, {m, k}), weight.view(), Tensor(y, {m, n}), options);
//
// For every operation OP there are three functions with the same arguments:
//   OP(...)            runs it; throws BadArgument, Unsupported or DeviceError, with nothing written by then
//   OP_workspace(...)  bytes of scratch memory it needs
//   explain_OP(...)    JSON: the kernel that would run, and why each other one would not
// The last two look at shapes and types only: the tensors' data may be null.
//
// What holds for all of them:
//   layout    matrices are row-major with contiguous rows; a row stride larger than the row is fine.
//             Scales, zero points and vectors are contiguous. 4-bit codes are two per byte along a row, the
//             low nibble first.
//   aliasing  an output overlaps no other tensor, except where its comment says so.
//   device    all tensors of a call are on one device. On a CUDA device the work is queued on Call::stream
//             and the call returns at once; on the CPU it is done when the call returns.
//   sizes     m = 0 and n = 0 are no-ops, k = 0 is an empty sum.
// "float" below means f32, f16 or bf16.
#ifndef QUANTFUSE_QUANTFUSE_HPP_
#define QUANTFUSE_QUANTFUSE_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "quantfuse/quantfuse.h"

namespace quantfuse {
inline namespace v0 {

// ---- Errors -----------------------------------------------------------------------------------------------

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
// Names the tensor, the dimension, what was given and what was expected.
class BadArgument : public Error {
 public:
  using Error::Error;
};
// No kernel accepts the problem; has every kernel's reason.
class Unsupported : public Error {
 public:
  using Error::Error;
};
// The device refused; has the kernel's name.
class DeviceError : public Error {
 public:
  using Error::Error;
};

namespace detail {

[[noreturn]] inline void fail(qf_status status) {
  const char* message = qf_last_error();
  if (status == QF_BAD_ARGUMENT) throw BadArgument(message);
  if (status == QF_UNSUPPORTED) throw Unsupported(message);
  throw DeviceError(message);
}

inline void check(qf_status status) {
  if (status != QF_OK) fail(status);
}

}  // namespace detail

// ---- Types ------------------------------------------------------------------------------------------------

enum class Format {
  none = QF_FORMAT_NONE,
  int8 = QF_INT8,
  int4 = QF_INT4,
  fp8_e4m3 = QF_FP8_E4M3,
  fp8_e5m2 = QF_FP8_E5M2,
  fp4_e2m1 = QF_FP4_E2M1,
  nf4 = QF_NF4,
  fp4_bnb = QF_FP4_BNB,
  iq4_nl = QF_IQ4_NL,
  f32 = QF_F32,  // weights that are not quantized
  f16 = QF_F16,
  bf16 = QF_BF16
};

enum class WordLayout { awq = QF_WORDS_AWQ, gptq = QF_WORDS_GPTQ, gptq_v2 = QF_WORDS_GPTQ_V2 };

enum class Activation {
  identity = QF_IDENTITY,
  relu = QF_RELU,
  gelu = QF_GELU,
  gelu_tanh = QF_GELU_TANH,
  silu = QF_SILU
};

enum class ScaleMode { dynamic = QF_SCALE_DYNAMIC, fixed = QF_SCALE_STATIC, mse = QF_SCALE_MSE };

// How the second operand of a product lies in memory: [n, k] or [k, n].
enum class Order { nk = QF_NK, kn = QF_KN };

enum class DType { f32, f16, bf16, i8, u8, i32, fp8_e4m3, fp8_e5m2, e8m0 };

// The rectangle of a matrix that shares one scale; see qf_block. 0 means the whole dimension.
using Block = qf_block;
constexpr Block per_tensor() { return {0, 0}; }
constexpr Block per_row() { return {1, 0}; }  // per token of activations, per output channel of weights
constexpr Block per_column() { return {0, 1}; }
constexpr Block per_group(int64_t columns) { return {1, columns}; }
constexpr Block per_block(int64_t rows, int64_t columns) { return {rows, columns}; }

using Device = qf_device;
constexpr Device cpu() { return {QF_CPU, 0}; }
constexpr Device cuda(int32_t id = 0) { return {QF_CUDA, id}; }

// The DType of a C++ type. Specialise it for your own half-precision types:
//   template <>
//   struct quantfuse::dtype_of<half> : std::integral_constant<quantfuse::DType, quantfuse::DType::f16> {};
template <class T>
struct dtype_of;
template <>
struct dtype_of<float> : std::integral_constant<DType, DType::f32> {};
template <>
struct dtype_of<int8_t> : std::integral_constant<DType, DType::i8> {};
template <>
struct dtype_of<uint8_t> : std::integral_constant<DType, DType::u8> {};
template <>
struct dtype_of<int32_t> : std::integral_constant<DType, DType::i32> {};

namespace detail {

constexpr qf_dtype c_dtype(DType type) {
  switch (type) {
    case DType::f32: return {2, 32, 1};
    case DType::f16: return {2, 16, 1};
    case DType::bf16: return {4, 16, 1};
    case DType::i8: return {0, 8, 1};
    case DType::u8: return {1, 8, 1};
    case DType::i32: return {0, 32, 1};
    case DType::fp8_e4m3: return {10, 8, 1};
    case DType::fp8_e5m2: return {12, 8, 1};
    case DType::e8m0: return {14, 8, 1};
  }
  return {0, 0, 0};
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

}  // namespace detail

// ---- Tensors ----------------------------------------------------------------------------------------------

inline constexpr int kMaxDims = 4;

// A view of memory that is read. Default-constructed it is absent, which optional arguments may be.
class ConstTensor {
 public:
  using Sizes = std::initializer_list<int64_t>;

  ConstTensor() = default;
  // Strides count elements; none given means compact row-major.
  ConstTensor(const void* data, DType type, Sizes shape, Device device = cpu(), Sizes strides = {}) {
    if (shape.size() > kMaxDims || (strides.size() != 0 && strides.size() != shape.size())) {
      throw BadArgument("Tensor: expected at most 4 dimensions, and as many strides as dimensions or none");
    }
    tensor_.data = const_cast<void*>(data);  // the C struct serves inputs and outputs
    tensor_.device = device;
    tensor_.ndim = static_cast<int32_t>(shape.size());
    tensor_.dtype = detail::c_dtype(type);
    size_t i = 0;
    for (const int64_t size : shape) shape_[i++] = size;
    i = 0;
    for (const int64_t stride : strides) strides_[i++] = stride;
    has_strides_ = strides.size() != 0;
    rebind();
  }
  template <class T>
  ConstTensor(const T* data, Sizes shape) : ConstTensor(data, dtype_of<T>::value, shape) {}
  // A vector must hold at least as many elements as the shape says.
  template <class T>
  ConstTensor(const std::vector<T>& data, Sizes shape) : ConstTensor(data.data(), dtype_of<T>::value, shape) {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    if (count > static_cast<int64_t>(data.size())) {
      throw BadArgument("Tensor: the vector has " + std::to_string(data.size()) +
                        " elements, expected at least " + std::to_string(count));
    }
  }

  ConstTensor(const ConstTensor& other)
      : tensor_(other.tensor_),
        shape_(other.shape_),
        strides_(other.strides_),
        has_strides_(other.has_strides_) {
    rebind();
  }
  ConstTensor& operator=(const ConstTensor& other) {
    tensor_ = other.tensor_;
    shape_ = other.shape_;
    strides_ = other.strides_;
    has_strides_ = other.has_strides_;
    rebind();
    return *this;
  }

  explicit operator bool() const { return tensor_.dtype.lanes != 0; }
  int ndim() const { return tensor_.ndim; }
  int64_t size(int dim) const { return shape_.at(static_cast<size_t>(dim)); }
  Device device() const { return tensor_.device; }
  const void* data() const { return tensor_.data; }
  // For the C interface: null where absent. Valid as long as this object is.
  const qf_tensor* get() const { return *this ? &tensor_ : nullptr; }

 private:
  void rebind() {
    tensor_.shape = shape_.data();
    tensor_.strides = has_strides_ ? strides_.data() : nullptr;
  }

  qf_tensor tensor_ = {};
  std::array<int64_t, kMaxDims> shape_ = {};
  std::array<int64_t, kMaxDims> strides_ = {};
  bool has_strides_ = false;
};

// A view of memory that may be written. Converts to ConstTensor.
class Tensor : public ConstTensor {
 public:
  Tensor() = default;
  Tensor(void* data, DType type, Sizes shape, Device device = cpu(), Sizes strides = {})
      : ConstTensor(data, type, shape, device, strides) {}
  template <class T, class = std::enable_if_t<!std::is_const_v<T>>>
  Tensor(T* data, Sizes shape) : ConstTensor(data, shape) {}
  template <class T>
  Tensor(std::vector<T>& data, Sizes shape) : ConstTensor(data, shape) {}

  void* data() const { return get() ? get()->data : nullptr; }
};

// ---- Memory and calls -------------------------------------------------------------------------------------

// Host memory aligned to 64 bytes, as packed weights and workspaces are.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t bytes)
      : data_(bytes ? ::operator new(bytes, std::align_val_t(64)) : nullptr), bytes_(bytes) {}
  void* data() const { return data_.get(); }
  size_t size() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  std::unique_ptr<void, Free> data_;
  size_t bytes_ = 0;
};

// Scratch memory for one call at a time.
class Workspace {
 public:
  // Host memory that grows with what calls ask for.
  Workspace() = default;
  // The caller's memory, aligned to 64 bytes, on any device. It never grows: a call that needs more throws
  // BadArgument.
  Workspace(void* data, size_t bytes) : data_(data), bytes_(bytes), is_borrowed_(true) {}
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void reserve(size_t bytes) {
    if (is_borrowed_ || bytes <= bytes_) return;
    own_ = AlignedBuffer();  // the old one first, so that both never exist at once
    data_ = nullptr, bytes_ = 0;
    own_ = AlignedBuffer(bytes);
    data_ = own_.data(), bytes_ = bytes;
  }
  void* data() const { return data_; }
  size_t size() const { return bytes_; }

  // The one that calls on CPU tensors use where the caller gives none.
  static Workspace& of_this_thread() {
    thread_local Workspace workspace;
    return workspace;
  }

 private:
  AlignedBuffer own_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  bool is_borrowed_ = false;
};

// How to run a call. Everything has a default.
struct Call {
  void* stream = nullptr;          // cudaStream_t, for tensors on a CUDA device
  Workspace* workspace = nullptr;  // null: this thread's own on the CPU, none on a CUDA device
  const char* kernel = nullptr;    // run this kernel and no other
  bool is_strict = false;          // refuse to fall back to the reference kernel
};

namespace detail {

inline qf_call c_call(const Call& call) {
  qf_call c = {};
  c.stream = call.stream;
  c.kernel = call.kernel;
  c.strict = call.is_strict;
  return c;
}

template <class Args>
size_t workspace_bytes(qf_status (*query)(const Args*, const qf_call*, uint64_t*), const Args& args,
                       const Call& call) {
  const qf_call c = c_call(call);
  uint64_t bytes = 0;
  check(query(&args, &c, &bytes));
  return static_cast<size_t>(bytes);
}

template <class Args>
void run(qf_status (*function)(const Args*, const qf_call*),
         qf_status (*query)(const Args*, const qf_call*, uint64_t*), const Args& args, const Call& call,
         Device device) {
  qf_call c = c_call(call);
  Workspace* workspace = call.workspace;
  if (!workspace && device.type == QF_CPU) workspace = &Workspace::of_this_thread();
  if (workspace) {
    workspace->reserve(workspace_bytes(query, args, call));
    c.workspace = workspace->data();
    c.workspace_bytes = workspace->size();
  }
  check(function(&args, &c));
}

template <class Args>
std::string explain(size_t (*function)(const Args*, const qf_call*, char*, size_t), const Args& args,
                    const Call& call) {
  const qf_call c = c_call(call);
  const size_t length = function(&args, &c, nullptr, 0);
  if (length == 0) fail(QF_BAD_ARGUMENT);
  std::string json(length + 1, '\0');
  function(&args, &c, &json[0], json.size());
  json.resize(length);
  return json;
}

inline std::string text(size_t (*function)(char*, size_t)) {
  std::string result(function(nullptr, 0) + 1, '\0');
  function(&result[0], result.size());
  result.pop_back();
  return result;
}

}  // namespace detail

// ---- The library ------------------------------------------------------------------------------------------

inline std::string version() { return qf_version(); }
// JSON: version, instruction set, threads, devices, compiled architectures.
inline std::string info() { return detail::text(qf_info); }
// JSON: every kernel of every operation, and whether it can run here.
inline std::string kernels() { return detail::text(qf_kernels); }

// Threads of the CPU kernels, for the whole process. 0: back to QUANTFUSE_NUM_THREADS or the number of CPUs.
inline void set_num_threads(int n) { detail::check(qf_set_num_threads(n)); }
inline int num_threads() { return qf_get_num_threads(); }

// ---- Quantize ---------------------------------------------------------------------------------------------

struct QuantizeOptions {
  ScaleMode mode = ScaleMode::dynamic;  // fixed: scale (and zero) are inputs
  Tensor zero;                          // i8, shape of scale: asymmetric. Integer formats only
  Tensor row_sums;       // out: i32 [rows, ceil(cols/block.cols)], sums of codes. Integer formats only
  int64_t hadamard = 0;  // columns that are rotated together before they are quantized; 0: none
};

namespace detail {
inline qf_quantize_args args_of_quantize(const ConstTensor& x, const Tensor& q, const ConstTensor& scale,
                                         Format format, Block block, const QuantizeOptions& options) {
  qf_quantize_args a = {};
  a.x = x.get();
  a.format = static_cast<qf_format>(format);
  a.block = block;
  a.scale_mode = static_cast<qf_scale_mode>(options.mode);
  a.q = q.get();
  a.scale = scale.get();
  a.zero = options.zero.get();
  a.row_sums = options.row_sums.get();
  a.hadamard = options.hadamard;
  return a;
}
}  // namespace detail

// q = saturate(round(x / scale) + zero), with each block's scale from the data unless options.mode is fixed.
//   x      in   float [rows, cols]
//   q      out  codes [rows, cols]: i8, fp8_e4m3, fp8_e5m2 or u8; 4-bit codes u8 [rows, ceil(cols/2)]
//   scale  out  f32 or e8m0 [ceil(rows/block.rows), ceil(cols/block.cols)], where a dimension of 1 may be
//               left out; an input where the mode is fixed
inline void quantize(const ConstTensor& x, const Tensor& q, const Tensor& scale, Format format, Block block,
                     const QuantizeOptions& options = {}, const Call& call = {}) {
  const auto a = detail::args_of_quantize(x, q, scale, format, block, options);
  detail::run(qf_quantize, qf_quantize_workspace, a, call, x.device());
}
inline size_t quantize_workspace(const ConstTensor& x, const Tensor& q, const Tensor& scale, Format format,
                                 Block block, const QuantizeOptions& options = {}, const Call& call = {}) {
  const auto a = detail::args_of_quantize(x, q, scale, format, block, options);
  return detail::workspace_bytes(qf_quantize_workspace, a, call);
}
inline std::string explain_quantize(const ConstTensor& x, const Tensor& q, const Tensor& scale, Format format,
                                    Block block, const QuantizeOptions& options = {}, const Call& call = {}) {
  const auto a = detail::args_of_quantize(x, q, scale, format, block, options);
  return detail::explain(qf_quantize_explain, a, call);
}

// INT8 with one scale per row.  x: float [m, k];  q: out, i8 [m, k];  scale: out, f32 [m]
inline void per_token_quant_int8(const ConstTensor& x, const Tensor& q, const Tensor& scale,
                                 const Call& call = {}) {
  quantize(x, q, scale, Format::int8, per_row(), {}, call);
}
// INT8 with one scale per `group` columns of a row.
// x: float [m, k];  q: out, i8 [m, k];  scale: out, f32 [m, ceil(k/group)]
inline void per_token_group_quant_int8(const ConstTensor& x, const Tensor& q, const Tensor& scale,
                                       int64_t group, const Call& call = {}) {
  quantize(x, q, scale, Format::int8, per_group(group), {}, call);
}
// The same to FP8 E4M3.  q: out, fp8_e4m3 or u8 [m, k]
inline void per_token_group_quant_fp8(const ConstTensor& x, const Tensor& q, const Tensor& scale,
                                      int64_t group, const Call& call = {}) {
  quantize(x, q, scale, Format::fp8_e4m3, per_group(group), {}, call);
}
// FP8 E4M3 by a given scale.  x: float [m, k];  q: out, fp8_e4m3 or u8 [m, k];  scale: in, f32 [1]
inline void static_quant_fp8(const ConstTensor& x, const Tensor& q, const ConstTensor& scale,
                             const Call& call = {}) {
  QuantizeOptions options;
  options.mode = ScaleMode::fixed;
  const auto a = detail::args_of_quantize(x, q, scale, Format::fp8_e4m3, per_tensor(), options);
  detail::run(qf_quantize, qf_quantize_workspace, a, call, x.device());
}

struct DequantizeOptions {
  ConstTensor zero;    // i8 or f32, shape of scale
  ConstTensor g_idx;   // i32 [cols]: the scale's column of each column, in place of c / block.cols
  ConstTensor offset;  // f32, shape of scale; integer formats
};

namespace detail {
inline qf_dequantize_args args_of_dequantize(const ConstTensor& q, const ConstTensor& scale, const Tensor& x,
                                             Format format, Block block, const DequantizeOptions& options) {
  qf_dequantize_args a = {};
  a.q = q.get();
  a.format = static_cast<qf_format>(format);
  a.block = block;
  a.scale = scale.get();
  a.zero = options.zero.get();
  a.g_idx = options.g_idx.get();
  a.offset = options.offset.get();
  a.x = x.get();
  return a;
}
}  // namespace detail

// x = (q - zero) * scale + offset.
//   q      in   codes [rows, cols], or u8 [rows, ceil(cols/2)] for 4-bit formats
//   scale  in   f32 or e8m0, by block
//   x      out  float [rows, cols]
inline void dequantize(const ConstTensor& q, const ConstTensor& scale, const Tensor& x, Format format,
                       Block block, const DequantizeOptions& options = {}, const Call& call = {}) {
  const auto a = detail::args_of_dequantize(q, scale, x, format, block, options);
  detail::run(qf_dequantize, qf_dequantize_workspace, a, call, x.device());
}
inline size_t dequantize_workspace(const ConstTensor& q, const ConstTensor& scale, const Tensor& x,
                                   Format format, Block block, const DequantizeOptions& options = {},
                                   const Call& call = {}) {
  const auto a = detail::args_of_dequantize(q, scale, x, format, block, options);
  return detail::workspace_bytes(qf_dequantize_workspace, a, call);
}
inline std::string explain_dequantize(const ConstTensor& q, const ConstTensor& scale, const Tensor& x,
                                      Format format, Block block, const DequantizeOptions& options = {},
                                      const Call& call = {}) {
  const auto a = detail::args_of_dequantize(q, scale, x, format, block, options);
  return detail::explain(qf_dequantize_explain, a, call);
}

// The words of AWQ and GPTQ.
struct WordOptions {
  WordLayout layout = WordLayout::awq;
  int32_t bits = 4;
  int64_t group = 0;  // rows of x that share a scale; 0: all
  ConstTensor g_idx;  // i32 [k]: the group of each row (GPTQ)
};

namespace detail {
inline qf_dequantize_words_args args_of_dequantize_words(const ConstTensor& qweight,
                                                         const ConstTensor& qzeros, const ConstTensor& scales,
                                                         const Tensor& x, const WordOptions& options) {
  qf_dequantize_words_args a = {};
  a.layout = static_cast<qf_word_layout>(options.layout);
  a.bits = options.bits;
  a.group = options.group;
  a.qweight = qweight.get();
  a.qzeros = qzeros.get();
  a.scales = scales.get();
  a.g_idx = options.g_idx.get();
  a.x = x.get();
  return a;
}
}  // namespace detail

// x = (q - zero) * scale.
//   qweight, qzeros  in   i32, by layout
//   scales           in   float [groups, n]
//   x                out  float [k, n]
inline void dequantize_words(const ConstTensor& qweight, const ConstTensor& qzeros, const ConstTensor& scales,
                             const Tensor& x, const WordOptions& options = {}, const Call& call = {}) {
  const auto a = detail::args_of_dequantize_words(qweight, qzeros, scales, x, options);
  detail::run(qf_dequantize_words, qf_dequantize_words_workspace, a, call, x.device());
}
inline size_t dequantize_words_workspace(const ConstTensor& qweight, const ConstTensor& qzeros,
                                         const ConstTensor& scales, const Tensor& x,
                                         const WordOptions& options = {}, const Call& call = {}) {
  const auto a = detail::args_of_dequantize_words(qweight, qzeros, scales, x, options);
  return detail::workspace_bytes(qf_dequantize_words_workspace, a, call);
}
inline std::string explain_dequantize_words(const ConstTensor& qweight, const ConstTensor& qzeros,
                                            const ConstTensor& scales, const Tensor& x,
                                            const WordOptions& options = {}, const Call& call = {}) {
  const auto a = detail::args_of_dequantize_words(qweight, qzeros, scales, x, options);
  return detail::explain(qf_dequantize_words_explain, a, call);
}

// ---- Products ---------------------------------------------------------------------------------------------

struct ScaledMmOptions {
  Format a_format = Format::int8, b_format = Format::int8;  // both integer, or both FP8
  Order b_order = Order::nk;
  bool is_b_constant = false;  // nothing under way on the stream writes b or b_scale: they may be read ahead
  int64_t k = 0;               // needed for INT4, where the shape has only ceil(k/2); 0: from a
  ConstTensor a_scale;         // f32, by a_block over [m, k]; absent: 1
  ConstTensor b_scale;         // f32, by b_block over [n, k]; absent: 1
  Block a_block = {1, 0};      // per row of a
  Block b_block = {1, 0};      // per column of the product
  ConstTensor a_zero;          // i32 [m] or [1]; integer formats
  ConstTensor b_zero;          // i32 [n] or [1]; integer formats
  ConstTensor bias;            // float [n]
  bool has_fast_accumulation = false;  // FP8 sums may stay in the tensor cores, which keep about 14 bits
};

namespace detail {
inline qf_scaled_mm_args args_of_scaled_mm(const ConstTensor& a, const ConstTensor& b, const Tensor& c,
                                           const ScaledMmOptions& options) {
  qf_scaled_mm_args s = {};
  s.a = a.get();
  s.b = b.get();
  s.c = c.get();
  s.a_format = static_cast<qf_format>(options.a_format);
  s.b_format = static_cast<qf_format>(options.b_format);
  s.b_order = static_cast<qf_order>(options.b_order);
  s.is_b_constant = options.is_b_constant;
  s.k = options.k;
  s.a_scale = options.a_scale.get();
  s.b_scale = options.b_scale.get();
  s.a_block = options.a_block;
  s.b_block = options.b_block;
  s.a_zero = options.a_zero.get();
  s.b_zero = options.b_zero.get();
  s.fast_accumulation = options.has_fast_accumulation;
  s.bias = options.bias.get();
  return s;
}
}  // namespace detail

// c[m,n] = sum over k of (a - a_zero) * a_scale * (b - b_zero) * b_scale, plus bias.
//   a  in   codes [m, k], or u8 [m, ceil(k/2)] for INT4
//   b  in   codes as options.b_order says
//   c  out  float [m, n]; or i32, exact (modulo 2^32), without scales and bias
inline void scaled_mm(const ConstTensor& a, const ConstTensor& b, const Tensor& c,
                      const ScaledMmOptions& options = {}, const Call& call = {}) {
  const auto s = detail::args_of_scaled_mm(a, b, c, options);
  detail::run(qf_scaled_mm, qf_scaled_mm_workspace, s, call, c.device());
}
inline size_t scaled_mm_workspace(const ConstTensor& a, const ConstTensor& b, const Tensor& c,
                                  const ScaledMmOptions& options = {}, const Call& call = {}) {
  const auto s = detail::args_of_scaled_mm(a, b, c, options);
  return detail::workspace_bytes(qf_scaled_mm_workspace, s, call);
}
inline std::string explain_scaled_mm(const ConstTensor& a, const ConstTensor& b, const Tensor& c,
                                     const ScaledMmOptions& options = {}, const Call& call = {}) {
  const auto s = detail::args_of_scaled_mm(a, b, c, options);
  return detail::explain(qf_scaled_mm_explain, s, call);
}

// c = a b, exact.  a: i8 [m, k];  b: i8 [n, k] or [k, n];  c: out, i32 [m, n]
inline void int8_matmul(const ConstTensor& a, const ConstTensor& b, const Tensor& c,
                        Order b_order = Order::nk, const Call& call = {}) {
  ScaledMmOptions options;
  options.b_order = b_order;
  scaled_mm(a, b, c, options, call);
}
// c = a b, exact.  a: u8 [m, ceil(k/2)];  b: u8 [n, ceil(k/2)] or [k, ceil(n/2)];  c: out, i32 [m, n]
inline void int4_matmul(const ConstTensor& a, const ConstTensor& b, const Tensor& c, int64_t k,
                        Order b_order = Order::nk, const Call& call = {}) {
  ScaledMmOptions options;
  options.a_format = options.b_format = Format::int4;
  options.b_order = b_order;
  options.k = k;
  scaled_mm(a, b, c, options, call);
}

namespace detail {
inline void w8a8_block_matmul(Format format, const ConstTensor& a, const ConstTensor& b,
                              const ConstTensor& a_scale, const ConstTensor& b_scale, const Tensor& c,
                              Block block, const Call& call) {
  ScaledMmOptions options;
  options.a_format = options.b_format = format;
  options.a_scale = a_scale;
  options.b_scale = b_scale;
  options.a_block = per_group(block.cols);
  options.b_block = block;
  scaled_mm(a, b, c, options, call);
}
}  // namespace detail

// Activations scaled per token and group, weights per 2-D block {rows of b, columns}.
//   a, a_scale  in   i8 [m, k], f32 [m, ceil(k/block.cols)]
//   b, b_scale  in   i8 [n, k], f32 [ceil(n/block.rows), ceil(k/block.cols)]
//   c           out  float [m, n]
inline void w8a8_block_int8_matmul(const ConstTensor& a, const ConstTensor& b, const ConstTensor& a_scale,
                                   const ConstTensor& b_scale, const Tensor& c, Block block = {128, 128},
                                   const Call& call = {}) {
  detail::w8a8_block_matmul(Format::int8, a, b, a_scale, b_scale, c, block, call);
}
// The same on FP8 E4M3 codes.
inline void w8a8_block_fp8_matmul(const ConstTensor& a, const ConstTensor& b, const ConstTensor& a_scale,
                                  const ConstTensor& b_scale, const Tensor& c, Block block = {128, 128},
                                  const Call& call = {}) {
  detail::w8a8_block_matmul(Format::fp8_e4m3, a, b, a_scale, b_scale, c, block, call);
}

// ---- Weights ----------------------------------------------------------------------------------------------

// A view of a quantized weight matrix w[n,k] = (codes - zero) * scale + offset: canonical, packed, or both.
struct Weight {
  Format format = Format::none;
  int64_t n = 0, k = 0;
  Block block = {};          // over [n, k]
  ConstTensor codes;         // [n, k], or u8 [n, ceil(k/2)] for 4-bit formats
  ConstTensor scale;         // f32 or e8m0, by block; with g_idx [ceil(n/block.rows), groups]
  ConstTensor zero;          // i8 or f32, shape of scale
  ConstTensor g_idx;         // i32 [k]: the group of each k (act-order)
  bool is_gated = false;     // rows [0, n/2) are the gate and [n/2, n) the up projection: y = act(gate) * up
  bool is_constant = false;  // nothing under way on the stream writes codes or scale: they may be read ahead
  ConstTensor packed;        // u8 [bytes], 64-byte aligned, from pack()
  ConstTensor offset;        // f32, shape of scale; integer formats

  // For the C interface. Valid as long as this object is.
  qf_weight get() const {
    qf_weight w = {};
    w.format = static_cast<qf_format>(format);
    w.n = n, w.k = k;
    w.block = block;
    w.codes = codes.get();
    w.scale = scale.get();
    w.zero = zero.get();
    w.g_idx = g_idx.get();
    w.is_gated = is_gated;
    w.is_constant = is_constant;
    w.packed = packed.get();
    w.offset = offset.get();
    return w;
  }
};

// Bytes of the packed form of a weight for `device`.
inline size_t packed_bytes(const Weight& weight, Device device = cpu()) {
  const qf_weight w = weight.get();
  uint64_t bytes = 0;
  detail::check(qf_weight_packed_bytes(&w, device, &bytes));
  return static_cast<size_t>(bytes);
}

// Packs into the caller's memory on the codes' device.
// packed: out, u8 [packed_bytes(weight, device)], 64-byte aligned
inline void pack(const Weight& weight, const Tensor& packed, const Call& call = {}) {
  qf_weight w = weight.get();
  w.packed = packed.get();
  const qf_call c = detail::c_call(call);
  detail::check(qf_weight_pack(&w, &c));
}

// A packed weight that owns its memory, on the CPU. The weight it was made from may be freed. Throws
// Unsupported where no kernel of this machine reads a packed form.
class PackedWeight {
 public:
  explicit PackedWeight(const Weight& weight) : buffer_(packed_bytes(weight)) {
    const Tensor packed(buffer_.data(), DType::u8, {static_cast<int64_t>(buffer_.size())});
    pack(weight, packed);
    view_.format = weight.format;
    view_.n = weight.n, view_.k = weight.k;
    view_.block = weight.block;
    view_.is_gated = weight.is_gated;
    view_.packed = packed;
  }
  const Weight& view() const { return view_; }
  size_t nbytes() const { return buffer_.size(); }

 private:
  AlignedBuffer buffer_;
  Weight view_;
};

struct WeightOptions {
  ScaleMode mode = ScaleMode::dynamic;  // or mse: the scales of least squared error
  bool is_asymmetric = false;           // with zero points; integer formats
  bool has_e8m0_scale = false;          // with per_group(32): MXFP8, MXFP4
  bool is_gated = false;
};

// A weight that owns its memory, on the CPU: canonical, and once packed also as the fast kernels read it.
class QuantizedWeight {
 public:
  // w: float [n, k] on the CPU
  static QuantizedWeight from_float(const ConstTensor& w, Format format, Block block,
                                    const WeightOptions& options = {}) {
    if (w.ndim() != 2)
      throw BadArgument("QuantizedWeight: w has " + std::to_string(w.ndim()) + " dimensions, expected 2");
    QuantizedWeight result;
    result.format_ = format;
    result.n_ = w.size(0), result.k_ = w.size(1);
    result.block_ = block;
    result.options_ = options;
    const bool is_4bit = format == Format::int4 || format == Format::fp4_e2m1 || format == Format::nf4;
    result.code_cols_ = is_4bit ? (result.k_ + 1) / 2 : result.k_;
    result.codes_.resize(static_cast<size_t>(result.n_ * result.code_cols_));
    const int64_t rows = block.rows > 0 ? block.rows : result.n_,
                  cols = block.cols > 0 ? block.cols : result.k_;
    result.scale_rows_ = rows > 0 ? detail::ceil_div(result.n_, rows) : 0;
    result.scale_cols_ = cols > 0 ? detail::ceil_div(result.k_, cols) : 0;
    const auto num_scales = static_cast<size_t>(result.scale_rows_ * result.scale_cols_);
    result.scale_.resize(num_scales * (options.has_e8m0_scale ? 1 : sizeof(float)));
    if (options.is_asymmetric) result.zero_.resize(num_scales);

    QuantizeOptions how;
    how.mode = options.mode;
    how.zero = result.zero_tensor();
    quantize(w, result.code_tensor(), result.scale_tensor(), format, block, how);
    return result;
  }

  // Valid as long as this object is.
  Weight view() const {
    Weight w;
    w.format = format_;
    w.n = n_, w.k = k_;
    w.block = block_;
    if (has_canonical_) {
      w.codes = code_tensor();
      w.scale = scale_tensor();
      w.zero = zero_tensor();
    }
    w.is_gated = options_.is_gated;
    if (packed_) w.packed = packed_->view().packed;
    return w;
  }
  // w: out, float [n, k] on the CPU
  void dequantize_to(const Tensor& w) const {
    if (!has_canonical_) throw BadArgument("QuantizedWeight: the canonical form was dropped");
    DequantizeOptions how;
    how.zero = zero_tensor();
    dequantize(code_tensor(), scale_tensor(), w, format_, block_, how);
  }
  // Makes the form that this machine's kernels read. Where none of them reads one, nothing changes. Dropping
  // the canonical form then leaves enough for linear(), but not for dequantize_to() and linear_backward().
  void pack(bool drop_canonical = false) {
    size_t bytes = 0;
    try {
      bytes = packed_bytes(view());
    } catch (const Unsupported&) {
    }
    if (bytes == 0) return;
    packed_ = std::make_unique<PackedWeight>(view());
    if (drop_canonical) codes_ = {}, scale_ = {}, zero_ = {}, has_canonical_ = false;
  }
  size_t nbytes() const {
    return codes_.size() + scale_.size() + zero_.size() + (packed_ ? packed_->nbytes() : 0);
  }

 private:
  QuantizedWeight() = default;
  Tensor code_tensor() const {
    const DType type = format_ == Format::int8 ? DType::i8 : DType::u8;
    return Tensor(const_cast<uint8_t*>(codes_.data()), type, {n_, code_cols_});
  }
  Tensor scale_tensor() const {
    const DType type = options_.has_e8m0_scale ? DType::e8m0 : DType::f32;
    return Tensor(const_cast<uint8_t*>(scale_.data()), type, {scale_rows_, scale_cols_});
  }
  Tensor zero_tensor() const {
    if (!options_.is_asymmetric) return Tensor();
    return Tensor(const_cast<int8_t*>(zero_.data()), {scale_rows_, scale_cols_});
  }

  Format format_ = Format::none;
  int64_t n_ = 0, k_ = 0, code_cols_ = 0, scale_rows_ = 0, scale_cols_ = 0;
  Block block_ = {};
  WeightOptions options_;
  std::vector<uint8_t> codes_;
  std::vector<uint8_t> scale_;  // floats or E8M0; operator new aligns it for both
  std::vector<int8_t> zero_;
  bool has_canonical_ = true;
  std::unique_ptr<PackedWeight> packed_;
};

// ---- Linear layers ----------------------------------------------------------------------------------------

struct LinearOptions {
  ConstTensor bias;  // float [n]
  Activation activation = Activation::identity;
  ConstTensor residual;  // float [m, n_out]; may be y itself

  // none: arithmetic on x as it is; int8 or FP8: x is quantized on the way in, unless it comes as codes.
  Format act_format = Format::none;
  int64_t act_group = 0;  // columns of x that share a scale; 0: the whole row
  ConstTensor x_scale;    // f32 [m, ceil(k/act_group)], where x holds codes of act_format

  // int8 or FP8: y is quantized on the way out.
  Format out_format = Format::none;
  ScaleMode out_mode = ScaleMode::dynamic;
  int64_t out_group = 0;  // columns of y that share a scale where dynamic; 0: the whole row
  Tensor out_scale;       // fixed: in, f32 [1]; dynamic: out, f32 [m, ceil(n_out/out_group)]

  bool is_batch_invariant = false;  // the bits of a row of y do not depend on m

  ConstTensor
      x_gain;  // float [k]: x is first x * x_gain / sqrt(mean(x^2) + x_eps); not where it is quantized
  double x_eps = 0;

  bool has_fast_accumulation = false;  // as in ScaledMmOptions, where x and the weight are FP8 codes
};

namespace detail {
inline qf_linear_args args_of_linear(const ConstTensor& x, const Weight& weight, const Tensor& y,
                                     const LinearOptions& options) {
  qf_linear_args a = {};
  a.x = x.get();
  a.x_scale = options.x_scale.get();
  a.act_format = static_cast<qf_format>(options.act_format);
  a.act_group = options.act_group;
  a.weight = weight.get();
  a.bias = options.bias.get();
  a.activation = static_cast<qf_activation>(options.activation);
  a.residual = options.residual.get();
  a.y = y.get();
  a.out_format = static_cast<qf_format>(options.out_format);
  a.out_mode = static_cast<qf_scale_mode>(options.out_mode);
  a.out_group = options.out_group;
  a.out_scale = options.out_scale.get();
  a.batch_invariant = options.is_batch_invariant;
  a.x_gain = options.x_gain.get();
  a.x_eps = options.x_eps;
  a.fast_accumulation = options.has_fast_accumulation;
  return a;
}
}  // namespace detail

// y = quantize( act(x w^T + bias) [* up] + residual ).  n_out = n, or n / 2 where the weight is gated.
//   x  in   float [m, k]; or codes of options.act_format, with options.x_scale
//   y  out  float [m, n_out], or codes of options.out_format; may be options.residual itself
inline void linear(const ConstTensor& x, const Weight& weight, const Tensor& y,
                   const LinearOptions& options = {}, const Call& call = {}) {
  const auto a = detail::args_of_linear(x, weight, y, options);
  detail::run(qf_linear, qf_linear_workspace, a, call, y.device());
}
inline size_t linear_workspace(const ConstTensor& x, const Weight& weight, const Tensor& y,
                               const LinearOptions& options = {}, const Call& call = {}) {
  const auto a = detail::args_of_linear(x, weight, y, options);
  return detail::workspace_bytes(qf_linear_workspace, a, call);
}
inline std::string explain_linear(const ConstTensor& x, const Weight& weight, const Tensor& y,
                                  const LinearOptions& options = {}, const Call& call = {}) {
  const auto a = detail::args_of_linear(x, weight, y, options);
  return detail::explain(qf_linear_explain, a, call);
}

namespace detail {
inline qf_linear_backward_args args_of_linear_backward(const ConstTensor& dy, const Weight& weight,
                                                       const Tensor& dx) {
  qf_linear_backward_args a = {};
  a.dy = dy.get();
  a.weight = weight.get();
  a.dx = dx.get();
  return a;
}
}  // namespace detail

// dx = dy w, the gradient with respect to the input. The weight is canonical.
//   dy  in   float [m, n]
//   dx  out  float [m, k]
inline void linear_backward(const ConstTensor& dy, const Weight& weight, const Tensor& dx,
                            const Call& call = {}) {
  const auto a = detail::args_of_linear_backward(dy, weight, dx);
  detail::run(qf_linear_backward, qf_linear_backward_workspace, a, call, dx.device());
}
inline size_t linear_backward_workspace(const ConstTensor& dy, const Weight& weight, const Tensor& dx,
                                        const Call& call = {}) {
  const auto a = detail::args_of_linear_backward(dy, weight, dx);
  return detail::workspace_bytes(qf_linear_backward_workspace, a, call);
}
inline std::string explain_linear_backward(const ConstTensor& dy, const Weight& weight, const Tensor& dx,
                                           const Call& call = {}) {
  const auto a = detail::args_of_linear_backward(dy, weight, dx);
  return detail::explain(qf_linear_backward_explain, a, call);
}

// ---- Producers of quantized activations -------------------------------------------------------------------

// How y leaves a producer: as it is, or quantized.
struct OutputOptions {
  Format format = Format::none;  // none, int8 or FP8
  ScaleMode mode = ScaleMode::dynamic;
  int64_t group = 0;     // columns that share a scale where dynamic; 0: the whole row
  Tensor scale;          // fixed: in, f32 [1]; dynamic: out, f32 [m, ceil(n/group)], or a transposed view
  int64_t hadamard = 0;  // columns that are rotated together before they are quantized; 0: none
};

struct RmsNormOptions {
  ConstTensor gain;  // float [n]; absent: 1
  Tensor residual;   // in and out, [m, n] of x's type: h = x + residual is written back to it
  double eps = 1e-6;
  OutputOptions out;
};

namespace detail {
inline qf_rms_norm_args args_of_rms_norm(const ConstTensor& x, const Tensor& y,
                                         const RmsNormOptions& options) {
  qf_rms_norm_args a = {};
  a.x = x.get();
  a.residual = options.residual.get();
  a.gain = options.gain.get();
  a.eps = options.eps;
  a.y = y.get();
  a.out_format = static_cast<qf_format>(options.out.format);
  a.out_mode = static_cast<qf_scale_mode>(options.out.mode);
  a.out_group = options.out.group;
  a.out_scale = options.out.scale.get();
  a.hadamard = options.out.hadamard;
  return a;
}
}  // namespace detail

// y = quantize( h * gain / sqrt(mean(h^2) + eps) ),  h = x + residual.
//   x  in   float [m, n]
//   y  out  float [m, n], or codes of options.out.format
inline void rms_norm(const ConstTensor& x, const Tensor& y, const RmsNormOptions& options = {},
                     const Call& call = {}) {
  const auto a = detail::args_of_rms_norm(x, y, options);
  detail::run(qf_rms_norm, qf_rms_norm_workspace, a, call, y.device());
}
inline size_t rms_norm_workspace(const ConstTensor& x, const Tensor& y, const RmsNormOptions& options = {},
                                 const Call& call = {}) {
  const auto a = detail::args_of_rms_norm(x, y, options);
  return detail::workspace_bytes(qf_rms_norm_workspace, a, call);
}
inline std::string explain_rms_norm(const ConstTensor& x, const Tensor& y, const RmsNormOptions& options = {},
                                    const Call& call = {}) {
  const auto a = detail::args_of_rms_norm(x, y, options);
  return detail::explain(qf_rms_norm_explain, a, call);
}

namespace detail {
inline qf_gated_act_args args_of_gated_act(const ConstTensor& x, const Tensor& y, Activation activation,
                                           const OutputOptions& out) {
  qf_gated_act_args a = {};
  a.x = x.get();
  a.activation = static_cast<qf_activation>(activation);
  a.y = y.get();
  a.out_format = static_cast<qf_format>(out.format);
  a.out_mode = static_cast<qf_scale_mode>(out.mode);
  a.out_group = out.group;
  a.out_scale = out.scale.get();
  a.hadamard = out.hadamard;
  return a;
}
}  // namespace detail

// y = quantize( act(x) ).
//   x  in   float [m, n]
//   y  out  float [m, n], or codes of out.format
inline void activate(const ConstTensor& x, const Tensor& y, Activation activation = Activation::gelu,
                     const OutputOptions& out = {}, const Call& call = {}) {
  auto a = detail::args_of_gated_act(x, y, activation, out);
  a.is_ungated = 1;
  detail::run(qf_gated_act, qf_gated_act_workspace, a, call, y.device());
}

// y = quantize( act(x[:, :n]) * x[:, n:] ).
//   x  in   float [m, 2n]: gate, then up
//   y  out  float [m, n], or codes of out.format
inline void gated_act(const ConstTensor& x, const Tensor& y, Activation activation = Activation::silu,
                      const OutputOptions& out = {}, const Call& call = {}) {
  const auto a = detail::args_of_gated_act(x, y, activation, out);
  detail::run(qf_gated_act, qf_gated_act_workspace, a, call, y.device());
}
inline size_t gated_act_workspace(const ConstTensor& x, const Tensor& y,
                                  Activation activation = Activation::silu, const OutputOptions& out = {},
                                  const Call& call = {}) {
  const auto a = detail::args_of_gated_act(x, y, activation, out);
  return detail::workspace_bytes(qf_gated_act_workspace, a, call);
}
inline std::string explain_gated_act(const ConstTensor& x, const Tensor& y,
                                     Activation activation = Activation::silu, const OutputOptions& out = {},
                                     const Call& call = {}) {
  const auto a = detail::args_of_gated_act(x, y, activation, out);
  return detail::explain(qf_gated_act_explain, a, call);
}

// ---- Quantization with calibration data -------------------------------------------------------------------

struct GptqOptions {
  int32_t bits = 0;                     // fewer than the format has; 0: all
  int64_t group = 128;                  // columns that share a scale; 0: the whole row
  ScaleMode mode = ScaleMode::dynamic;  // or mse
  qf_act_order act_order = QF_ACT_ORDER_NONE;
  double damping = 0.01;
  Tensor zero;   // out: i8, shape of scale: asymmetric
  Tensor g_idx;  // out: i32 [k], with QF_ACT_ORDER_GROUP alone
  Tensor loss;   // out: f32 [n]
};

namespace detail {
inline qf_gptq_quantize_args args_of_gptq_quantize(const ConstTensor& weight, const ConstTensor& hessian,
                                                   const Tensor& q, const Tensor& scale, Format format,
                                                   const GptqOptions& options) {
  qf_gptq_quantize_args a = {};
  a.weight = weight.get();
  a.hessian = hessian.get();
  a.format = static_cast<qf_format>(format);
  a.bits = options.bits;
  a.group = options.group;
  a.scale_mode = static_cast<qf_scale_mode>(options.mode);
  a.act_order = options.act_order;
  a.damping = options.damping;
  a.q = q.get();
  a.scale = scale.get();
  a.zero = options.zero.get();
  a.g_idx = options.g_idx.get();
  a.loss = options.loss.get();
  return a;
}
}  // namespace detail

// GPTQ: codes whose layer's outputs change least on the inputs that the hessian sums up. CPU only.
//   weight   in   float [n, k]
//   hessian  in   f32 [k, k]: the sum of x^T x
//   q        out  codes [n, k]: i8, or u8 [n, ceil(k/2)] for INT4
//   scale    out  f32 [n, ceil(k/group)]
inline void gptq_quantize(const ConstTensor& weight, const ConstTensor& hessian, const Tensor& q,
                          const Tensor& scale, Format format, const GptqOptions& options = {},
                          const Call& call = {}) {
  const auto a = detail::args_of_gptq_quantize(weight, hessian, q, scale, format, options);
  detail::run(qf_gptq_quantize, qf_gptq_quantize_workspace, a, call, q.device());
}
inline size_t gptq_quantize_workspace(const ConstTensor& weight, const ConstTensor& hessian, const Tensor& q,
                                      const Tensor& scale, Format format, const GptqOptions& options = {},
                                      const Call& call = {}) {
  const auto a = detail::args_of_gptq_quantize(weight, hessian, q, scale, format, options);
  return detail::workspace_bytes(qf_gptq_quantize_workspace, a, call);
}
inline std::string explain_gptq_quantize(const ConstTensor& weight, const ConstTensor& hessian,
                                         const Tensor& q, const Tensor& scale, Format format,
                                         const GptqOptions& options = {}, const Call& call = {}) {
  const auto a = detail::args_of_gptq_quantize(weight, hessian, q, scale, format, options);
  return detail::explain(qf_gptq_quantize_explain, a, call);
}

struct AwqOptions {
  int32_t bits = 0;     // fewer than the format has; 0: all
  int64_t group = 128;  // columns that share a scale; 0: the whole row
  bool is_asymmetric = false;
  int32_t grid = 20;      // exponents tried are i / grid
  ConstTensor act_scale;  // f32 [k]: mean |x| of each channel; absent: that of x
  Tensor clip;            // out: f32 [n, ceil(k/group)]
  Tensor loss;            // out: f32 [grid + 1]
};

namespace detail {
inline qf_awq_search_args args_of_awq_search(const ConstTensor& weight, const ConstTensor& x,
                                             const Tensor& channel_scale, Format format,
                                             const AwqOptions& options) {
  qf_awq_search_args a = {};
  a.weight = weight.get();
  a.x = x.get();
  a.act_scale = options.act_scale.get();
  a.format = static_cast<qf_format>(format);
  a.bits = options.bits;
  a.group = options.group;
  a.is_asymmetric = options.is_asymmetric;
  a.grid = options.grid;
  a.channel_scale = channel_scale.get();
  a.clip = options.clip.get();
  a.loss = options.loss.get();
  return a;
}
}  // namespace detail

// AWQ: factors of the input channels with which weight * channel_scale loses least when it is quantized. CPU
// only.
//   weight         in   float [n, k]
//   x              in   float [t, k]: sampled inputs
//   channel_scale  out  f32 [k]
inline void awq_search(const ConstTensor& weight, const ConstTensor& x, const Tensor& channel_scale,
                       Format format, const AwqOptions& options = {}, const Call& call = {}) {
  const auto a = detail::args_of_awq_search(weight, x, channel_scale, format, options);
  detail::run(qf_awq_search, qf_awq_search_workspace, a, call, channel_scale.device());
}
inline size_t awq_search_workspace(const ConstTensor& weight, const ConstTensor& x,
                                   const Tensor& channel_scale, Format format, const AwqOptions& options = {},
                                   const Call& call = {}) {
  const auto a = detail::args_of_awq_search(weight, x, channel_scale, format, options);
  return detail::workspace_bytes(qf_awq_search_workspace, a, call);
}
inline std::string explain_awq_search(const ConstTensor& weight, const ConstTensor& x,
                                      const Tensor& channel_scale, Format format,
                                      const AwqOptions& options = {}, const Call& call = {}) {
  const auto a = detail::args_of_awq_search(weight, x, channel_scale, format, options);
  return detail::explain(qf_awq_search_explain, a, call);
}

}  // namespace v0
}  // namespace quantfuse

#endif  // QUANTFUSE_QUANTFUSE_HPP_
