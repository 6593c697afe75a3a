// SPDX-License-Identifier: Apache-2.0
//
// Maps for ptx::box_copy. Made anew for each call, on the host: no allocation, no synchronisation.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "core/expect.h"

namespace quantfuse {

// Boxes of `rows` x 64 numbers of a matrix of 16-bit floats, whose 128-byte rows come swizzled, as wgmma
// wants them. The matrix begins, and so do its rows, at multiples of 16 bytes.
inline CUtensorMap row_boxes(const Matrix& x, int rows) {
  // From the driver that is there: the library is not linked to one, or it would not load without.
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                           cudaEnableDefault, &result);
    return e == cudaSuccess ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function) : nullptr;
  }();
  if (!encode) fail_device("this driver has no cuTensorMapEncodeTiled");
  const auto type =
      x.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(x.cols), static_cast<cuuint64_t>(x.rows)};
  const cuuint64_t stride = static_cast<cuuint64_t>(x.row_stride) * 2;
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(rows)}, steps[2] = {1, 1};
  CUtensorMap map;
  const CUresult result = encode(&map, type, 2, x.data, sizes, &stride, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) fail_device("cuTensorMapEncodeTiled failed with " + std::to_string(result));
  return map;
}

}  // namespace quantfuse
