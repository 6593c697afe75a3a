// SPDX-License-Identifier: Apache-2.0
//
// y = epilogue( x w^T ), a weight that is not quantized, by cuBLASLt where the machine has it.
//
//   x, w --cuBLASLt--> y                             where cuBLASLt has the epilogue: a bias, ReLU, the tanh
//                                                    form of GELU, a residual without activation
//   x, w --cuBLASLt--> z [m, n] f32 --finish--> y    otherwise: SiLU, GELU by the error function, gates,
//                                                    activations with a residual, quantized outputs
//
// Sums are float32 to the end, split ones too.
#include "cuda/cublaslt.h"
#include "linear/finish_unit.h"
#include "linear/linear_canonical.h"
#include "linear/plain_epilogue.h"

#if defined(QF_HAS_CUBLASLT_HEADER)
#include <array>
#include <map>
#include <memory>
#include <mutex>
#endif

namespace quantfuse::linear_cublaslt_sm75 {
using linear::Problem;

#if defined(QF_HAS_CUBLASLT_HEADER)
namespace {

constexpr size_t kScratchBytes = size_t{32} << 20;  // what PyTorch gives it on Hopper

// ---- The second step ----

constexpr int kThreads = 128, kUnit = linear::kUnit;

struct Sums {
  const float* data;
  int64_t stride;  // a multiple of 8

  __device__ void load(int64_t row, int64_t col, int count, float (&v)[kUnit]) const {
    const float* from = data + row * stride + col;
    if (count == kUnit && col % 4 == 0) {
      const float4 low = reinterpret_cast<const float4*>(from)[0],
                   high = reinterpret_cast<const float4*>(from)[1];
      v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
      v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    } else {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) v[i] = i < count ? from[i] : 0.0f;
    }
  }
};

// A thread has 8 columns of every gridDim.y-th row.
__global__ void __launch_bounds__(kThreads)
    finish(const __grid_constant__ Problem p, const Sums sums, float* staged) {
  const int64_t col = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kUnit;
  if (col >= p.n_out) return;
  const int count = static_cast<int>(min(p.n_out - col, int64_t{kUnit}));
#pragma unroll 1
  for (int64_t row = blockIdx.y; row < p.m; row += gridDim.y) {
    float v[kUnit], up[kUnit] = {};
    sums.load(row, col, count, v);
    if (p.weight.is_gated) sums.load(row, p.n_out + col, count, up);
    linear::finish_unit(p, staged, row, col, v, up);
  }
}

// ---- The product ----

cudaDataType_t type_of(DType t) {
  return t == DType::f32 ? CUDA_R_32F : t == DType::f16 ? CUDA_R_16F : CUDA_R_16BF;
}

int64_t sums_stride(const Problem& p) { return round_up(p.n, kUnit); }

// What a product is made of, in cuBLASLt's column-major terms: d[n, m] = w^T[n, k] x[k, m] + c. One that is
// not direct has no c, and d are the sums.
struct Product {
  Matrix w, x, c, d;
  const void* bias;
  uint32_t epilogue;

  Product(const Problem& p, float* sums) : w(p.weight.codes), x(p.x) {
    if (!linear::has_cublaslt_epilogue(p)) {
      d = {sums, p.m, p.n, sums_stride(p), DType::f32};
      c = d, bias = nullptr, epilogue = CUBLASLT_EPILOGUE_DEFAULT;
      return;
    }
    d = p.out.y;
    c = p.residual ? p.residual : d;
    bias = p.bias.data;
    const uint32_t activation = p.activation == QF_RELU        ? CUBLASLT_EPILOGUE_RELU
                                : p.activation == QF_GELU_TANH ? CUBLASLT_EPILOGUE_GELU
                                                               : 0;
    const uint32_t with_bias = p.bias ? CUBLASLT_EPILOGUE_BIAS : 0;
    epilogue = activation | with_bias ? activation | with_bias : CUBLASLT_EPILOGUE_DEFAULT;
  }
};

uint32_t alignment_of(const void* data) {
  uint32_t bytes = 256;
  while (reinterpret_cast<uint64_t>(data) % bytes != 0) bytes /= 2;
  return bytes;
}

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    fail_device(std::string("linear_cublaslt_sm75: ") + what + " failed with " +
                std::to_string(static_cast<int>(status)));
}

// One per device, the current one, for the life of the process: to destroy one would synchronise. Made in the
// middle of a capture too, which the memory that it takes is no part of.
cublasLtHandle_t handle_of(int device) {
  static std::mutex mutex;
  static auto& handles = *new std::map<int, cublasLtHandle_t>;
  const std::lock_guard lock(mutex);
  cublasLtHandle_t& handle = handles[device];
  if (!handle) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    const cublasStatus_t status = cublaslt()->create(&handle);
    cudaThreadExchangeStreamCaptureMode(&mode);
    check(status, "cublasLtCreate");
  }
  return handle;
}

struct DestroyDescription {
  void operator()(cublasLtMatmulDesc_t d) const { cublaslt()->destroy_description(d); }
};
struct DestroyLayout {
  void operator()(cublasLtMatrixLayout_t l) const { cublaslt()->destroy_layout(l); }
};
struct DestroyPreference {
  void operator()(cublasLtMatmulPreference_t p) const { cublaslt()->destroy_preference(p); }
};
template <class Handle, class Destroy>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy>;

class Description {
 public:
  explicit Description(const Product& p) : w(layout(p.w)), x(layout(p.x)), c(layout(p.c)), d(layout(p.d)) {
    cublasLtMatmulDesc_t made;
    check(cublaslt()->create_description(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    matmul.reset(made);
    const cublasOperation_t transposed = CUBLAS_OP_T;
    set(CUBLASLT_MATMUL_DESC_TRANSA, transposed);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, p.epilogue);
    if (p.epilogue & CUBLASLT_EPILOGUE_BIAS) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  }
  Owned<cublasLtMatmulDesc_t, DestroyDescription> matmul;
  Owned<cublasLtMatrixLayout_t, DestroyLayout> w, x, c, d;

 private:
  static Owned<cublasLtMatrixLayout_t, DestroyLayout> layout(const Matrix& m) {
    cublasLtMatrixLayout_t made;
    check(cublaslt()->create_layout(&made, type_of(m.dtype), static_cast<uint64_t>(m.cols),
                                    static_cast<uint64_t>(m.rows), m.row_stride),
          "cublasLtMatrixLayoutCreate");
    return Owned<cublasLtMatrixLayout_t, DestroyLayout>(made);
  }
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check(cublaslt()->set_attribute(matmul.get(), attribute, &value, sizeof value),
          "cublasLtMatmulDescSetAttribute");
  }
};

struct Algorithm {
  cublasLtMatmulAlgo_t algorithm;
  bool exists;
};

// Asks cuBLASLt's heuristic.
Algorithm ask(cublasLtHandle_t handle, const Product& p, const Description& description) {
  cublasLtMatmulPreference_t made;
  check(cublaslt()->create_preference(&made), "cublasLtMatmulPreferenceCreate");
  const Owned<cublasLtMatmulPreference_t, DestroyPreference> preference(made);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(cublaslt()->set_preference(made, attribute, &value, sizeof value),
          "cublasLtMatmulPreferenceSetAttribute");
  };
  const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;  // parts of a sum are float32
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kScratchBytes});
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.w.data));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.x.data));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(p.c.data));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p.d.data));
  cublasLtMatmulHeuristicResult_t result = {};
  int found = 0;
  const cublasStatus_t status =
      cublaslt()->get_heuristic(handle, description.matmul.get(), description.w.get(), description.x.get(),
                                description.c.get(), description.d.get(), made, 1, &result, &found);
  return {result.algo, status == CUBLAS_STATUS_SUCCESS && found > 0};
}

// What ask() said before. A server has as many products as numbers of tokens times layers.
Algorithm algorithm_for(const Problem& problem, const Product& p, const Description& description) {
  using Key = std::array<int64_t, 15>;
  constexpr size_t kMostKept = 1 << 14;
  static std::mutex mutex;
  static auto& kept = *new std::map<Key, Algorithm>;
  const auto type = [](const Matrix& m) { return static_cast<int64_t>(m.dtype); };
  const Key key = {problem.device.id,
                   p.w.rows,
                   p.x.rows,
                   p.x.cols,
                   p.w.row_stride,
                   p.x.row_stride,
                   p.c.row_stride,
                   p.d.row_stride,
                   type(p.x),
                   type(p.d),
                   int64_t{p.epilogue},
                   alignment_of(p.w.data),
                   alignment_of(p.x.data),
                   alignment_of(p.c.data),
                   alignment_of(p.d.data)};
  {
    const std::lock_guard lock(mutex);
    if (const auto found = kept.find(key); found != kept.end()) return found->second;
  }
  const DeviceScope scope(problem.device);  // explain() has none around it
  const Algorithm algorithm = ask(handle_of(problem.device.id), p, description);
  const std::lock_guard lock(mutex);
  if (kept.size() >= kMostKept) kept.clear();
  kept[key] = algorithm;
  return algorithm;
}

// ---- The host's side ----

// In the workspace, behind what launch_canonical() has: the sums, and cuBLASLt's scratch memory, which it
// wants at a multiple of 256 bytes. A workspace begins at one of 64, so that some bytes may be left out.
constexpr int64_t kAlignment = 256;

int64_t sums_bytes(const Problem& p) {
  return linear::has_cublaslt_epilogue(p) ? 0 : round_up(p.m * sums_stride(p) * 4, kAlignment);
}
char* own_workspace(const Problem& p, const Launch& launch) {
  const auto workspace = reinterpret_cast<int64_t>(launch.workspace);
  return reinterpret_cast<char*>(round_up(workspace + linear::plan_canonical(p).total_bytes, kAlignment));
}

Verdict accepts(const Problem& p) {
  const Verdict v =
      Requirements()
          .require(is_plain(p.weight.format), "the weight is quantized")
          .require(static_cast<bool>(p.weight.codes),
                   "reads the canonical weight, and only the packed one is given")
          .require(p.x.dtype == p.weight.codes.dtype, "the weight is of another type than x")
          .require(p.k > 0, "k is 0")
          .require(p.m < 1ll << 31 && p.n < 1ll << 31 && p.k < 1ll << 31, "m, n or k is 2^31 or more");
  if (!v) return v;
  if (!cublaslt()) return no("there is no libcublasLt.so of version 12 or 13 on this machine");
  const Product product(p, nullptr);
  const Algorithm algorithm = algorithm_for(p, product, Description(product));
  return Requirements().require(algorithm.exists, "cuBLASLt has no kernel for this product");
}

size_t workspace_bytes(const Problem& p) {
  return static_cast<size_t>(linear::plan_canonical(p).total_bytes + kAlignment + sums_bytes(p)) +
         kScratchBytes;
}

void launch(const Problem& problem, const Launch& launch) {
  linear::launch_canonical(problem, launch, [&](const Problem& p, float* staged) {
    char* workspace = own_workspace(p, launch);
    auto* sums = reinterpret_cast<float*>(workspace);
    const Product product(p, sums);
    const Description description(product);
    const Algorithm algorithm = algorithm_for(p, product, description);
    const float one = 1, of_c = linear::has_cublaslt_epilogue(p) && p.residual ? 1.0f : 0.0f;
    check(cublaslt()->matmul(handle_of(p.device.id), description.matmul.get(), &one, product.w.data,
                             description.w.get(), product.x.data, description.x.get(), &of_c, product.c.data,
                             description.c.get(), product.d.data, description.d.get(), &algorithm.algorithm,
                             workspace + sums_bytes(p), kScratchBytes,
                             static_cast<cudaStream_t>(launch.stream)),
          "cublasLtMatmul");
    if (linear::has_cublaslt_epilogue(p)) return;
    const LaunchShape shape = {dim3(static_cast<unsigned>(ceil_div(p.n_out, kThreads * kUnit)),
                                    static_cast<unsigned>(std::min<int64_t>(p.m, 65535))),
                               dim3(kThreads)};
    launch_kernel("linear_cublaslt_sm75", finish, shape, launch, p, Sums{sums, sums_stride(p)}, staged);
  });
}

}  // namespace

extern const Kernel<Problem> entry = {"linear_cublaslt_sm75", Target::sm75, accepts, workspace_bytes, launch};

#else

extern const Kernel<Problem> entry = {"linear_cublaslt_sm75", Target::sm75, nullptr, nullptr, nullptr};

#endif

}  // namespace quantfuse::linear_cublaslt_sm75
