// SPDX-License-Identifier: Apache-2.0
//
// The binding: each exported function reads its arguments by position into an args struct and makes the C
// call. What a Python caller sees (names, defaults, allocation of outputs) is in python/quantfuse; the order
// of arguments here and there is that of the struct's fields, after `kernel` and `strict` of qf_call.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "quantfuse/quantfuse.h"

namespace ffi = tvm::ffi;

// A DLTensor* is passed on as a qf_tensor*.
static_assert(sizeof(qf_tensor) == sizeof(DLTensor) && alignof(qf_tensor) == alignof(DLTensor));
static_assert(offsetof(qf_tensor, data) == offsetof(DLTensor, data));
static_assert(offsetof(qf_tensor, device) == offsetof(DLTensor, device) &&
              sizeof(qf_device) == sizeof(DLDevice));
static_assert(offsetof(qf_tensor, ndim) == offsetof(DLTensor, ndim));
static_assert(offsetof(qf_tensor, dtype) == offsetof(DLTensor, dtype) &&
              sizeof(qf_dtype) == sizeof(DLDataType));
static_assert(offsetof(qf_tensor, shape) == offsetof(DLTensor, shape));
static_assert(offsetof(qf_tensor, strides) == offsetof(DLTensor, strides));
static_assert(offsetof(qf_tensor, byte_offset) == offsetof(DLTensor, byte_offset));
static_assert(static_cast<int>(QF_CPU) == kDLCPU && static_cast<int>(QF_CUDA) == kDLCUDA);

namespace {

[[noreturn]] void raise(const char* python_type, const std::string& message) {
  throw ffi::Error(python_type, message, /*backtrace=*/"");
}

void check(qf_status status) {
  switch (status) {
    case QF_OK: return;
    case QF_BAD_ARGUMENT: raise("ValueError", qf_last_error());
    case QF_UNSUPPORTED: raise("NotImplementedError", qf_last_error());
    case QF_DEVICE_ERROR: break;
  }
  raise("RuntimeError", qf_last_error());
}

// The positional arguments of one call, read in order.
class Reader {
 public:
  Reader(const TVMFFIAny* args, int32_t count) : args_(args), count_(count) {}

  // None gives null.
  const qf_tensor* tensor() {
    const TVMFFIAny& arg = next();
    const DLTensor* tensor = nullptr;
    if (arg.type_index == kTVMFFITensor) {
      tensor = TVMFFITensorGetDLTensorPtr(arg.v_obj);
    } else if (arg.type_index == kTVMFFIDLTensorPtr) {
      tensor = static_cast<const DLTensor*>(arg.v_ptr);
    } else if (arg.type_index != kTVMFFINone) {
      wrong_type("a tensor");
    }
    if (tensor && tensor->device.device_type != kDLCPU) device_ = tensor->device;
    return reinterpret_cast<const qf_tensor*>(tensor);
  }

  // A matrix of a tensor without gaps, whose leading dimensions are counted as rows: a view of Python's takes
  // longer than a call. What is no such tensor stays as it is, for the operation to refuse.
  const qf_tensor* rows() {
    const qf_tensor* given = tensor();
    if (!given || given->ndim == 0 || given->ndim == 2 || !is_row_major(*given)) return given;
    Matrix& matrix = matrices_[num_matrices_++];
    matrix.shape[0] = 1;
    for (int32_t i = 0; i + 1 < given->ndim; ++i) matrix.shape[0] *= given->shape[i];
    matrix.shape[1] = given->shape[given->ndim - 1];
    matrix.view = *given;
    matrix.view.ndim = 2, matrix.view.shape = matrix.shape, matrix.view.strides = nullptr;
    return &matrix.view;
  }

  int64_t integer() {
    const TVMFFIAny& arg = next();
    if (arg.type_index != kTVMFFIInt && arg.type_index != kTVMFFIBool) wrong_type("a 64-bit integer");
    return arg.v_int64;
  }

  int32_t small_integer() {
    const int64_t value = integer();
    if (value != static_cast<int32_t>(value)) wrong_type("a 32-bit integer");
    return static_cast<int32_t>(value);
  }

  double real() {
    const TVMFFIAny& arg = next();
    if (arg.type_index == kTVMFFIInt) return static_cast<double>(arg.v_int64);
    if (arg.type_index != kTVMFFIFloat) wrong_type("a number");
    return arg.v_float64;
  }

  template <class Enum>
  Enum choice() {
    return static_cast<Enum>(small_integer());
  }

  qf_block block() {
    const int64_t rows = integer();
    return {rows, integer()};
  }

  qf_weight weight() {
    qf_weight w = {};
    w.format = choice<qf_format>();
    w.n = integer();
    w.k = integer();
    w.block = block();
    w.codes = tensor();
    w.scale = tensor();
    w.zero = tensor();
    w.offset = tensor();
    w.g_idx = tensor();
    w.is_gated = small_integer();
    w.packed = tensor();
    return w;
  }

  // `kernel` and `strict`; the stream follows from the tensors, once they are read.
  qf_call call() {
    qf_call c = {};
    const TVMFFIAny& arg = next();
    if (arg.type_index != kTVMFFINone) {
      const auto name = reinterpret_cast<const ffi::AnyView&>(arg).as<ffi::String>();
      if (!name) wrong_type("a kernel's name");
      kernel_ = *name;
      c.kernel = kernel_.c_str();
    }
    c.strict = integer() != 0;
    return c;
  }

  void finish() const {
    if (position_ != count_) raise("TypeError", "quantfuse_ffi: a call has too many arguments");
  }

  DLDevice device() const { return device_; }

 private:
  struct Matrix {
    qf_tensor view;
    int64_t shape[2];
  };

  static bool is_row_major(const qf_tensor& t) {
    if (!t.strides || std::find(t.shape, t.shape + t.ndim, 0) != t.shape + t.ndim) return true;
    int64_t stride = 1;
    for (int32_t i = t.ndim - 1; i >= 0; stride *= t.shape[i--]) {
      if (t.shape[i] != 1 && t.strides[i] != stride) return false;
    }
    return true;
  }

  const TVMFFIAny& next() {
    if (position_ == count_) raise("TypeError", "quantfuse_ffi: a call has too few arguments");
    return args_[position_++];
  }
  [[noreturn]] void wrong_type(const char* expected) const {
    raise("TypeError", "quantfuse_ffi: argument " + std::to_string(position_ - 1) + " is not " + expected);
  }

  const TVMFFIAny* args_;
  int32_t count_;
  int32_t position_ = 0;
  std::string kernel_;
  DLDevice device_ = {kDLCPU, 0};
  Matrix matrices_[3];  // x, residual and y
  int num_matrices_ = 0;
};

// ---- Workspaces ----

constexpr size_t kAlignment = 64;

struct Buffer {
  void* data = nullptr;
  uint64_t bytes = 0;
};

// Of the calling thread: a CPU call has returned before the same thread makes the next.
class CpuWorkspace {
 public:
  Buffer get() const { return {data_.get(), bytes_}; }
  Buffer grow(uint64_t needed) {
    bytes_ = 0;
    data_.reset(std::aligned_alloc(kAlignment, (needed + kAlignment - 1) / kAlignment * kAlignment));
    if (!data_) raise("MemoryError", "no memory for a workspace of " + std::to_string(needed) + " bytes");
    bytes_ = needed;
    return get();
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> data_;
  uint64_t bytes_ = 0;
};

// One per device and stream, whose order makes sharing it safe; from the framework's own allocator. What it
// outgrows is kept, because a captured CUDA graph may hold its address; it doubles, so that all of it is less
// than twice the largest.
class CudaWorkspaces {
 public:
  Buffer get(DLDevice device, void* stream) {
    std::lock_guard lock(mutex_);
    const auto& tensors = tensors_[{device.device_id, stream}];
    return tensors.empty() ? Buffer{} : buffer_of(tensors.back());
  }
  Buffer grow(DLDevice device, void* stream, uint64_t needed) {
    std::lock_guard lock(mutex_);
    auto& tensors = tensors_[{device.device_id, stream}];
    const uint64_t doubled = tensors.empty() ? 0 : 2 * buffer_of(tensors.back()).bytes;
    const int64_t bytes = static_cast<int64_t>(needed > doubled ? needed : doubled);
    tensors.push_back(
        ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, ffi::ShapeView(&bytes, 1), {kDLUInt, 8, 1}, device));
    return buffer_of(tensors.back());
  }

 private:
  static Buffer buffer_of(const ffi::Tensor& t) {
    return {t.data_ptr(), static_cast<uint64_t>(t.shape()[0])};
  }
  std::mutex mutex_;
  std::map<std::pair<int32_t, void*>, std::vector<ffi::Tensor>> tensors_;
};

CpuWorkspace& cpu_workspace() {
  thread_local CpuWorkspace workspace;
  return workspace;
}

// Never destroyed: at exit the framework may be gone before we are.
CudaWorkspaces& cuda_workspaces() {
  static auto& workspaces = *new CudaWorkspaces;
  return workspaces;
}

// ---- Calls ----

template <class Args>
struct Operation {
  void (*read)(Reader&, Args&);
  qf_status (*run)(const Args*, const qf_call*);
  qf_status (*workspace)(const Args*, const qf_call*, uint64_t*);
  size_t (*explain)(const Args*, const qf_call*, char*, size_t);
};

template <class Args>
void run(const Operation<Args>& op, Reader in) {
  qf_call call = in.call();
  Args args = {};
  op.read(in, args);
  in.finish();

  const DLDevice device = in.device();
  const bool is_cpu = device.device_type == kDLCPU;
  if (!is_cpu) call.stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
  const auto use = [&call](Buffer b) { call.workspace = b.data, call.workspace_bytes = b.bytes; };
  use(is_cpu ? cpu_workspace().get() : cuda_workspaces().get(device, call.stream));

  // The workspace at hand is nearly always enough, so it is tried before anyone asks what is needed: a call
  // that fails its checks has written nothing.
  qf_status status = op.run(&args, &call);
  if (status == QF_BAD_ARGUMENT) {
    uint64_t needed = 0;
    check(op.workspace(&args, &call, &needed));
    if (needed > call.workspace_bytes) {
      use(is_cpu ? cpu_workspace().grow(needed) : cuda_workspaces().grow(device, call.stream, needed));
      status = op.run(&args, &call);
    }
  }
  check(status);
}

template <class Get>
ffi::String text_of(Get get) {
  const size_t size = get(nullptr, 0);
  if (size == 0) check(QF_BAD_ARGUMENT);
  std::string text(size, '\0');
  get(text.data(), size + 1);
  return ffi::String(std::move(text));
}

template <class Args>
ffi::String explain(const Operation<Args>& op, Reader in) {
  const qf_call call = in.call();
  Args args = {};
  op.read(in, args);
  in.finish();
  return text_of([&](char* json, size_t capacity) { return op.explain(&args, &call, json, capacity); });
}

// ---- The operations: what each reads ----

template <class Args>
void read_out_quantization(Reader& in, Args& a) {
  a.y = in.rows();
  a.out_format = in.choice<qf_format>();
  a.out_mode = in.choice<qf_scale_mode>();
  a.out_group = in.integer();
  a.out_scale = in.tensor();
}

const Operation<qf_quantize_args> quantize_op = {[](Reader& in, qf_quantize_args& a) {
                                                   a.x = in.tensor();
                                                   a.format = in.choice<qf_format>();
                                                   a.block = in.block();
                                                   a.scale_mode = in.choice<qf_scale_mode>();
                                                   a.q = in.tensor();
                                                   a.scale = in.tensor();
                                                   a.zero = in.tensor();
                                                   a.row_sums = in.tensor();
                                                   a.hadamard = in.integer();
                                                 },
                                                 qf_quantize, qf_quantize_workspace, qf_quantize_explain};

const Operation<qf_dequantize_args> dequantize_op = {[](Reader& in, qf_dequantize_args& a) {
                                                       a.q = in.tensor();
                                                       a.format = in.choice<qf_format>();
                                                       a.block = in.block();
                                                       a.scale = in.tensor();
                                                       a.zero = in.tensor();
                                                       a.offset = in.tensor();
                                                       a.g_idx = in.tensor();
                                                       a.x = in.tensor();
                                                     },
                                                     qf_dequantize, qf_dequantize_workspace,
                                                     qf_dequantize_explain};

const Operation<qf_dequantize_words_args> dequantize_words_op = {
    [](Reader& in, qf_dequantize_words_args& a) {
      a.layout = in.choice<qf_word_layout>();
      a.bits = in.small_integer();
      a.group = in.integer();
      a.qweight = in.tensor();
      a.qzeros = in.tensor();
      a.scales = in.tensor();
      a.g_idx = in.tensor();
      a.x = in.tensor();
    },
    qf_dequantize_words, qf_dequantize_words_workspace, qf_dequantize_words_explain};

const Operation<qf_scaled_mm_args> scaled_mm_op = {[](Reader& in, qf_scaled_mm_args& a) {
                                                     a.a = in.tensor();
                                                     a.b = in.tensor();
                                                     a.c = in.tensor();
                                                     a.a_format = in.choice<qf_format>();
                                                     a.b_format = in.choice<qf_format>();
                                                     a.b_order = in.choice<qf_order>();
                                                     a.k = in.integer();
                                                     a.a_scale = in.tensor();
                                                     a.b_scale = in.tensor();
                                                     a.a_block = in.block();
                                                     a.b_block = in.block();
                                                     a.a_zero = in.tensor();
                                                     a.b_zero = in.tensor();
                                                     a.bias = in.tensor();
                                                     a.is_b_constant = in.small_integer();
                                                     a.fast_accumulation = in.small_integer();
                                                   },
                                                   qf_scaled_mm, qf_scaled_mm_workspace,
                                                   qf_scaled_mm_explain};

const Operation<qf_linear_args> linear_op = {[](Reader& in, qf_linear_args& a) {
                                               a.x = in.rows();
                                               a.x_scale = in.tensor();
                                               a.act_format = in.choice<qf_format>();
                                               a.act_group = in.integer();
                                               a.weight = in.weight();
                                               a.bias = in.tensor();
                                               a.activation = in.choice<qf_activation>();
                                               a.residual = in.rows();
                                               read_out_quantization(in, a);
                                               a.batch_invariant = in.small_integer();
                                               a.x_gain = in.tensor();
                                               a.x_eps = in.real();
                                               a.fast_accumulation = in.small_integer();
                                             },
                                             qf_linear, qf_linear_workspace, qf_linear_explain};

const Operation<qf_linear_backward_args> linear_backward_op = {
    [](Reader& in, qf_linear_backward_args& a) {
      a.dy = in.tensor();
      a.weight = in.weight();
      a.dx = in.tensor();
    },
    qf_linear_backward, qf_linear_backward_workspace, qf_linear_backward_explain};

const Operation<qf_rms_norm_args> rms_norm_op = {[](Reader& in, qf_rms_norm_args& a) {
                                                   a.x = in.rows();
                                                   a.residual = in.rows();
                                                   a.gain = in.tensor();
                                                   a.eps = in.real();
                                                   read_out_quantization(in, a);
                                                   a.hadamard = in.integer();
                                                 },
                                                 qf_rms_norm, qf_rms_norm_workspace, qf_rms_norm_explain};

const Operation<qf_gated_act_args> gated_act_op = {[](Reader& in, qf_gated_act_args& a) {
                                                     a.x = in.rows();
                                                     a.activation = in.choice<qf_activation>();
                                                     read_out_quantization(in, a);
                                                     a.is_ungated = in.small_integer();
                                                     a.hadamard = in.integer();
                                                   },
                                                   qf_gated_act, qf_gated_act_workspace,
                                                   qf_gated_act_explain};

const Operation<qf_gptq_quantize_args> gptq_quantize_op = {[](Reader& in, qf_gptq_quantize_args& a) {
                                                             a.weight = in.tensor();
                                                             a.hessian = in.tensor();
                                                             a.format = in.choice<qf_format>();
                                                             a.bits = in.small_integer();
                                                             a.group = in.integer();
                                                             a.scale_mode = in.choice<qf_scale_mode>();
                                                             a.act_order = in.choice<qf_act_order>();
                                                             a.damping = in.real();
                                                             a.q = in.tensor();
                                                             a.scale = in.tensor();
                                                             a.zero = in.tensor();
                                                             a.g_idx = in.tensor();
                                                             a.loss = in.tensor();
                                                           },
                                                           qf_gptq_quantize, qf_gptq_quantize_workspace,
                                                           qf_gptq_quantize_explain};

const Operation<qf_awq_search_args> awq_search_op = {[](Reader& in, qf_awq_search_args& a) {
                                                       a.weight = in.tensor();
                                                       a.x = in.tensor();
                                                       a.act_scale = in.tensor();
                                                       a.format = in.choice<qf_format>();
                                                       a.bits = in.small_integer();
                                                       a.group = in.integer();
                                                       a.is_asymmetric = in.small_integer();
                                                       a.grid = in.small_integer();
                                                       a.channel_scale = in.tensor();
                                                       a.clip = in.tensor();
                                                       a.loss = in.tensor();
                                                     },
                                                     qf_awq_search, qf_awq_search_workspace,
                                                     qf_awq_search_explain};

// ---- Weights and tensors ----

int64_t weight_packed_bytes(Reader in) {
  const qf_weight weight = in.weight();
  in.finish();
  const DLDevice device = in.device();
  uint64_t bytes = 0;
  check(qf_weight_packed_bytes(&weight, {device.device_type, device.device_id}, &bytes));
  return static_cast<int64_t>(bytes);
}

void weight_pack(Reader in) {
  const qf_weight weight = in.weight();
  in.finish();
  qf_call call = {};
  const DLDevice device = in.device();
  if (device.device_type != kDLCPU) call.stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
  check(qf_weight_pack(&weight, &call));
}

// The same memory under another element type of the same size: NumPy cannot say bfloat16 or FP8 through
// DLPack.
ffi::Tensor with_dtype(const ffi::Tensor& source, int64_t code) {
  struct Alias {
    ffi::Tensor source;
    DLManagedTensor managed;
  };
  auto* alias = new Alias{source, {}};
  alias->managed.dl_tensor = *source.GetDLTensorPtr();
  alias->managed.dl_tensor.dtype.code = static_cast<uint8_t>(code);
  alias->managed.manager_ctx = alias;
  alias->managed.deleter = [](DLManagedTensor* self) { delete static_cast<Alias*>(self->manager_ctx); };
  return ffi::Tensor::FromDLPack(&alias->managed);
}

}  // namespace

// ---- Exports ----

#define QF_EXPORT(name, expression)                                                               \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t count, \
                                                     TVMFFIAny* out) {                            \
    TVM_FFI_SAFE_CALL_BEGIN();                                                                    \
    [[maybe_unused]] Reader in(args, count);                                                      \
    [[maybe_unused]] ffi::Any& result = *reinterpret_cast<ffi::Any*>(out);                        \
    expression;                                                                                   \
    TVM_FFI_SAFE_CALL_END();                                                                      \
  }

#define QF_EXPORT_OPERATION(name)     \
  QF_EXPORT(name, run(name##_op, in)) \
  QF_EXPORT(name##_explain, result = explain(name##_op, in))

QF_EXPORT_OPERATION(quantize)
QF_EXPORT_OPERATION(dequantize)
QF_EXPORT_OPERATION(dequantize_words)
QF_EXPORT_OPERATION(scaled_mm)
QF_EXPORT_OPERATION(linear)
QF_EXPORT_OPERATION(linear_backward)
QF_EXPORT_OPERATION(rms_norm)
QF_EXPORT_OPERATION(gated_act)
QF_EXPORT_OPERATION(gptq_quantize)
QF_EXPORT_OPERATION(awq_search)

QF_EXPORT(weight_packed_bytes, result = weight_packed_bytes(in))
QF_EXPORT(weight_pack, weight_pack(in))
TVM_FFI_DLL_EXPORT_TYPED_FUNC(with_dtype, with_dtype)

QF_EXPORT(version, result = ffi::String(qf_version()))
QF_EXPORT(info, result = text_of(qf_info))
QF_EXPORT(kernels, result = text_of(qf_kernels))
QF_EXPORT(set_num_threads, check(qf_set_num_threads(in.small_integer())))
QF_EXPORT(get_num_threads, result = static_cast<int64_t>(qf_get_num_threads()))
