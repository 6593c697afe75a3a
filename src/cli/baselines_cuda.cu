// SPDX-License-Identifier: Apache-2.0
//
// cuBLASLt as the baseline of a 16-bit product on a GPU. Loaded at run time, so that the command starts
// without it; its header is all that the build needs.
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <stdexcept>

#include "baselines.h"

namespace quantfuse::cli {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;  // what PyTorch gives it on this generation

struct Api {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtMatmulDescCreate) create_description;
  decltype(&cublasLtMatmulDescSetAttribute) set_attribute;
  decltype(&cublasLtMatrixLayoutCreate) create_layout;
  decltype(&cublasLtMatmulPreferenceCreate) create_preference;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;
  decltype(&cublasLtMatmulAlgoGetHeuristic) get_heuristic;
  decltype(&cublasLtMatmul) matmul;
};

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// Null where there is no cuBLASLt of the header's version.
const Api* api() {
  static const Api* loaded = []() -> const Api* {
    const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
    void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    static Api api;
    const bool is_whole = library && find(library, "cublasLtCreate", api.create) &&
                          find(library, "cublasLtMatmulDescCreate", api.create_description) &&
                          find(library, "cublasLtMatmulDescSetAttribute", api.set_attribute) &&
                          find(library, "cublasLtMatrixLayoutCreate", api.create_layout) &&
                          find(library, "cublasLtMatmulPreferenceCreate", api.create_preference) &&
                          find(library, "cublasLtMatmulPreferenceSetAttribute", api.set_preference) &&
                          find(library, "cublasLtMatmulAlgoGetHeuristic", api.get_heuristic) &&
                          find(library, "cublasLtMatmul", api.matmul);
    return is_whole ? &api : nullptr;
  }();
  return loaded;
}

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string(what) + " failed with " + std::to_string(static_cast<int>(status)));
}
void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

class Memory {
 public:
  explicit Memory(size_t bytes) {
    check(cudaMalloc(&data_, bytes));
    check(cudaMemset(data_, 0x3c, bytes));  // small numbers: a GPU draws less power for zeros
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* at(size_t offset) const { return static_cast<char*>(data_) + offset; }

 private:
  void* data_ = nullptr;
};

// y^T[n, m] = w x^T in cuBLAS's column-major terms.
class CublasLt final : public GpuBaseline {
 public:
  CublasLt(const Shape& shape, cudaDataType_t type, int copies)
      : x_bytes_(static_cast<size_t>(shape.m * shape.k) * 2),
        w_bytes_(static_cast<size_t>(shape.n * shape.k) * 2),
        y_bytes_(static_cast<size_t>(shape.m * shape.n) * 2),
        x_(x_bytes_ * static_cast<size_t>(copies)),
        w_(w_bytes_ * static_cast<size_t>(copies)),
        y_(y_bytes_ * static_cast<size_t>(copies)),
        workspace_(kWorkspaceBytes) {
    const auto m = static_cast<uint64_t>(shape.m), n = static_cast<uint64_t>(shape.n),
               k = static_cast<uint64_t>(shape.k);
    check(api()->create(&handle_), "cublasLtCreate");
    check(api()->create_description(&description_, CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "cublasLtMatmulDescCreate");
    const cublasOperation_t transposed = CUBLAS_OP_T;
    check(api()->set_attribute(description_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
          "cublasLtMatmulDescSetAttribute");
    check(api()->create_layout(&w_layout_, type, k, n, shape.k), "cublasLtMatrixLayoutCreate");
    check(api()->create_layout(&x_layout_, type, k, m, shape.k), "cublasLtMatrixLayoutCreate");
    check(api()->create_layout(&y_layout_, type, n, m, shape.n), "cublasLtMatrixLayoutCreate");
    cublasLtMatmulPreference_t preference;
    check(api()->create_preference(&preference), "cublasLtMatmulPreferenceCreate");
    check(api()->set_preference(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspaceBytes,
                                sizeof kWorkspaceBytes),
          "cublasLtMatmulPreferenceSetAttribute");
    int found = 0;
    check(api()->get_heuristic(handle_, description_, w_layout_, x_layout_, y_layout_, y_layout_, preference,
                               1, &chosen_, &found),
          "cublasLtMatmulAlgoGetHeuristic");
    if (found == 0) throw std::runtime_error("cuBLASLt has no algorithm for this product");
  }

  void run(int copy, void* stream) override {
    const float one = 1, zero = 0;
    const auto i = static_cast<size_t>(copy);
    char* y = y_.at(i * y_bytes_);
    check(api()->matmul(handle_, description_, &one, w_.at(i * w_bytes_), w_layout_, x_.at(i * x_bytes_),
                        x_layout_, &zero, y, y_layout_, y, y_layout_, &chosen_.algo, workspace_.at(0),
                        kWorkspaceBytes, static_cast<cudaStream_t>(stream)),
          "cublasLtMatmul");
  }

 private:
  size_t x_bytes_, w_bytes_, y_bytes_;
  Memory x_, w_, y_, workspace_;
  cublasLtHandle_t handle_ = nullptr;  // these live as long as the command
  cublasLtMatmulDesc_t description_ = nullptr;
  cublasLtMatrixLayout_t w_layout_ = nullptr, x_layout_ = nullptr, y_layout_ = nullptr;
  cublasLtMatmulHeuristicResult_t chosen_ = {};
};

}  // namespace

std::unique_ptr<GpuBaseline> make_gpu_baseline(int id, const Shape& shape, qf_dtype dtype,
                                               double cache_bytes) {
  if (!api() || dtype.bits != 16) return nullptr;
  check(cudaSetDevice(id));
  const double bytes = 2.0 * static_cast<double>(shape.m * shape.k + shape.n * shape.k + shape.m * shape.n);
  const int copies = copies_beyond_cache(bytes, cache_bytes);
  const bool is_bf16 = dtype.code == 4;
  auto baseline = std::make_unique<CublasLt>(shape, is_bf16 ? CUDA_R_16BF : CUDA_R_16F, copies);
  baseline->name = is_bf16 ? "cuBLASLt bf16" : "cuBLASLt f16";
  baseline->copies = copies;
  return baseline;
}

}  // namespace quantfuse::cli
