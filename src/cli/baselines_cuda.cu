// SPDX-License-Identifier: Apache-2.0
//
// cuBLASLt as the baseline of a product on a GPU.
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "baselines.h"
#include "cases/tensor.h"
#include "core/element.h"
#include "cuda/cublaslt.h"

namespace quantfuse::cli {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;  // what PyTorch gives it on this generation

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string(what) + " failed with " + std::to_string(static_cast<int>(status)));
}
void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// How cuBLASLt names a product.
struct Kind {
  const char* name;
  cudaDataType_t in, out, scale;
  cublasComputeType_t compute;
  bool has_block_scales = false;

  size_t in_bytes() const { return in == CUDA_R_16BF || in == CUDA_R_16F ? 2 : 1; }
  size_t out_bytes() const { return out == CUDA_R_32I ? 4 : 2; }
};
Kind kind_of(GpuNumbers numbers) {
  switch (numbers) {
    case GpuNumbers::f16: return {"cuBLASLt f16", CUDA_R_16F, CUDA_R_16F, CUDA_R_32F, CUBLAS_COMPUTE_32F};
    case GpuNumbers::bf16: return {"cuBLASLt bf16", CUDA_R_16BF, CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F};
    case GpuNumbers::int8: return {"cuBLASLt int8", CUDA_R_8I, CUDA_R_32I, CUDA_R_32I, CUBLAS_COMPUTE_32I};
    default: {
      const bool has_blocks = numbers == GpuNumbers::e4m3_blocks;
      return {has_blocks ? "cuBLASLt e4m3 blocks" : "cuBLASLt e4m3",
              CUDA_R_8F_E4M3,
              CUDA_R_16BF,
              CUDA_R_32F,
              CUBLAS_COMPUTE_32F,
              has_blocks};
    }
  }
}

// Normal numbers, as those of the calls that are compared are: a GPU draws less power, and runs faster, where
// fewer bits change.
std::vector<uint8_t> random_data(const Kind& kind) {
  constexpr size_t kBytes = size_t{2} << 20;
  cases::Random random(1);
  if (kind.in == CUDA_R_8I) return cases::normal_codes(random, QF_INT8, kBytes);
  if (kind.in == CUDA_R_8F_E4M3) return cases::normal_codes(random, QF_FP8_E4M3, kBytes);
  std::vector<uint8_t> bytes(kBytes);
  for (size_t i = 0; i < kBytes; i += 2) {
    const float number = random.normal();
    if (kind.in == CUDA_R_16F) from_float(number, *reinterpret_cast<f16*>(&bytes[i]));
    else from_float(number, *reinterpret_cast<bf16*>(&bytes[i]));
  }
  return bytes;
}

class Memory {
 public:
  explicit Memory(size_t bytes) { check(cudaMalloc(&data_, bytes)); }
  Memory(size_t bytes, const Kind& kind) : Memory(bytes) {
    const std::vector<uint8_t> data = random_data(kind);
    for (size_t at = 0; at < bytes; at += data.size()) {
      check(cudaMemcpy(this->at(at), data.data(), std::min(data.size(), bytes - at), cudaMemcpyHostToDevice));
    }
  }
  Memory(size_t bytes, float value) : Memory(bytes) {
    const std::vector<float> values(bytes / sizeof value, value);
    check(cudaMemcpy(data_, values.data(), bytes, cudaMemcpyHostToDevice));
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* at(size_t offset) const { return static_cast<char*>(data_) + offset; }

 private:
  void* data_ = nullptr;
};

// y^T[n, m] = w x^T in cuBLAS's column-major terms.
class CublasLtProduct final : public GpuBaseline {
 public:
  CublasLtProduct(const Shape& shape, const Kind& kind, int copies)
      : x_bytes_(static_cast<size_t>(shape.m * shape.k) * kind.in_bytes()),
        w_bytes_(static_cast<size_t>(shape.n * shape.k) * kind.in_bytes()),
        y_bytes_(static_cast<size_t>(shape.m * shape.n) * kind.out_bytes()),
        x_(x_bytes_ * static_cast<size_t>(copies), kind),
        w_(w_bytes_ * static_cast<size_t>(copies), kind),
        y_(y_bytes_ * static_cast<size_t>(copies)),
        workspace_(kWorkspaceBytes),
        scales_(kind.has_block_scales ? scale_bytes(shape) : 4, 1.0f),
        has_integer_scale_(kind.scale == CUDA_R_32I) {
    const auto m = static_cast<uint64_t>(shape.m), n = static_cast<uint64_t>(shape.n),
               k = static_cast<uint64_t>(shape.k);
    check(cublaslt()->create(&handle_), "cublasLtCreate");
    check(cublaslt()->create_description(&description_, kind.compute, kind.scale),
          "cublasLtMatmulDescCreate");
    const cublasOperation_t transposed = CUBLAS_OP_T;
    check(
        cublaslt()->set_attribute(description_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
        "cublasLtMatmulDescSetAttribute");
    if (kind.has_block_scales) {
      set_block_scales();
    } else if (kind.in == CUDA_R_8F_E4M3) {  // its fastest: sums in the tensor cores' own precision
      const int8_t yes = 1;
      check(cublaslt()->set_attribute(description_, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &yes, sizeof yes),
            "cublasLtMatmulDescSetAttribute");
    }
    check(cublaslt()->create_layout(&w_layout_, kind.in, k, n, shape.k), "cublasLtMatrixLayoutCreate");
    check(cublaslt()->create_layout(&x_layout_, kind.in, k, m, shape.k), "cublasLtMatrixLayoutCreate");
    check(cublaslt()->create_layout(&y_layout_, kind.out, n, m, shape.n), "cublasLtMatrixLayoutCreate");
    cublasLtMatmulPreference_t preference;
    check(cublaslt()->create_preference(&preference), "cublasLtMatmulPreferenceCreate");
    check(cublaslt()->set_preference(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspaceBytes,
                                     sizeof kWorkspaceBytes),
          "cublasLtMatmulPreferenceSetAttribute");
    int found = 0;
    const cublasStatus_t status = cublaslt()->get_heuristic(
        handle_, description_, w_layout_, x_layout_, y_layout_, y_layout_, preference, 1, &chosen_, &found);
    has_algorithm = status == CUBLAS_STATUS_SUCCESS && found > 0;
  }
  bool has_algorithm = false;  // for this product

  void run(int copy, void* stream) override {
    const float one = 1, zero = 0;
    const int32_t integer_one = 1, integer_zero = 0;
    const void* alpha = has_integer_scale_ ? static_cast<const void*>(&integer_one) : &one;
    const void* beta = has_integer_scale_ ? static_cast<const void*>(&integer_zero) : &zero;
    const auto i = static_cast<size_t>(copy);
    char* y = y_.at(i * y_bytes_);
    check(cublaslt()->matmul(handle_, description_, alpha, w_.at(i * w_bytes_), w_layout_,
                             x_.at(i * x_bytes_), x_layout_, beta, y, y_layout_, y, y_layout_, &chosen_.algo,
                             workspace_.at(0), kWorkspaceBytes, static_cast<cudaStream_t>(stream)),
          "cublasLtMatmul");
  }

 private:
  // All scales are 1, so that one array does for both operands, however they lie in it.
  static size_t scale_bytes(const Shape& shape) {
    const auto blocks = [](int64_t size, int64_t block) { return (size / block + 4) / 4 * 4 + 4; };
    return static_cast<size_t>(std::max(blocks(shape.m, 1), blocks(shape.n, 128)) * blocks(shape.k, 128)) * 4;
  }
#if CUBLAS_VERSION >= 120900
  void set_block_scales() {
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
      check(cublaslt()->set_attribute(description_, attribute, &value, sizeof value),
            "cublasLtMatmulDescSetAttribute");
    };
    const cublasLtMatmulMatrixScale_t of_w = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
                                      of_x = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    const void* scales = scales_.at(0);
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, of_w);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, of_x);
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scales);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scales);
  }
#else
  void set_block_scales() { throw std::runtime_error("cuBLASLt has no block scales before CUDA 12.9"); }
#endif

  size_t x_bytes_, w_bytes_, y_bytes_;
  Memory x_, w_, y_, workspace_, scales_;
  bool has_integer_scale_;
  cublasLtHandle_t handle_ = nullptr;  // these live as long as the command
  cublasLtMatmulDesc_t description_ = nullptr;
  cublasLtMatrixLayout_t w_layout_ = nullptr, x_layout_ = nullptr, y_layout_ = nullptr;
  cublasLtMatmulHeuristicResult_t chosen_ = {};
};

}  // namespace

std::unique_ptr<GpuBaseline> make_gpu_baseline(int id, const Shape& shape, GpuNumbers numbers,
                                               double cache_bytes) {
  if (!cublaslt()) return nullptr;
  check(cudaSetDevice(id));
  const Kind kind = kind_of(numbers);
  const double bytes =
      static_cast<double>(kind.in_bytes()) * static_cast<double>((shape.m + shape.n) * shape.k) +
      static_cast<double>(kind.out_bytes()) * static_cast<double>(shape.m * shape.n);
  const int copies = copies_beyond_cache(bytes, cache_bytes);
  std::unique_ptr<CublasLtProduct> baseline;
  try {
    baseline = std::make_unique<CublasLtProduct>(shape, kind, copies);
  } catch (const std::runtime_error&) {
    return nullptr;  // this version has no such product: one baseline fewer
  }
  if (!baseline->has_algorithm) return nullptr;
  baseline->name = kind.name;
  baseline->copies = copies;
  return baseline;
}

}  // namespace quantfuse::cli
