// SPDX-License-Identifier: Apache-2.0
//
// Maps for ptx::box_copy and ptx::store_box. Made anew for each call, on the host: no allocation, no
// synchronisation.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <cstring>

#include "core/expect.h"

namespace quantfuse {

inline CUtensorMapDataType map_type(DType dtype) {
  return dtype == DType::bf16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
         : dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                               : CU_TENSOR_MAP_DATA_TYPE_UINT8;  // codes
}

// Boxes of a tensor, first dimension contiguous, the others at `strides` bytes. Their rows are at most 128
// bytes and come swizzled, as wgmma wants them; or 64 bytes with a swizzle of their own, or up to 256 numbers
// as they are. The tensor begins, and so do its rows, at multiples of 16 bytes.
template <size_t kRank>
CUtensorMap tensor_map(CUtensorMapDataType type, const void* data, const std::array<int64_t, kRank>& sizes,
                       const std::array<int64_t, kRank - 1>& strides, const std::array<int, kRank>& box,
                       CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  // From the driver that is there: the library is not linked to one, or it would not load without.
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                           cudaEnableDefault, &result);
    return e == cudaSuccess ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function) : nullptr;
  }();
  if (!encode) fail_device("this driver has no cuTensorMapEncodeTiled");
  cuuint64_t size[kRank], stride[kRank];
  cuuint32_t extent[kRank], steps[kRank];
  for (size_t i = 0; i < kRank; ++i) {
    size[i] = static_cast<cuuint64_t>(sizes[i]);
    if (i > 0) stride[i - 1] = static_cast<cuuint64_t>(strides[i - 1]);
    extent[i] = static_cast<cuuint32_t>(box[i]), steps[i] = 1;
  }
  // Made in a variable of our own: what is returned is made in its final place, which GCC 12 has put at no
  // multiple of 64 bytes, where the driver wants it, for all that the type says.
  alignas(128) cuuint64_t words[CU_TENSOR_MAP_NUM_QWORDS];
  const CUresult result = encode(reinterpret_cast<CUtensorMap*>(words), type, kRank, const_cast<void*>(data),
                                 size, stride, extent, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) fail_device("cuTensorMapEncodeTiled failed with " + std::to_string(result));
  CUtensorMap map;
  static_assert(sizeof map == sizeof words);
  std::memcpy(&map, words, sizeof map);
  return map;
}

// Boxes of `rows` x 128 bytes of a matrix of 16-bit floats or of codes.
inline CUtensorMap row_boxes(const Matrix& x, int rows) {
  const int bytes = static_cast<int>(dtype_bytes(x.dtype));
  return tensor_map<2>(map_type(x.dtype), x.data, {x.cols, x.rows}, {x.row_stride * bytes},
                       {128 / bytes, rows});
}

// Whether there are maps of a matrix: it and its rows begin at multiples of 16 bytes.
inline bool has_boxes(const Matrix& x) {
  return reinterpret_cast<uint64_t>(x.data) % 16 == 0 && x.row_stride * dtype_bytes(x.dtype) % 16 == 0;
}

}  // namespace quantfuse
