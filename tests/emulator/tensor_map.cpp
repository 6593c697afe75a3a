// SPDX-License-Identifier: Apache-2.0
//
// The driver's rules for tensor maps (CUDA Driver API, cuTensorMapEncodeTiled): what it refuses is refused
// here.
#include "tensor_map.h"

#include <cstring>

namespace emulator {
namespace {

int bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
    default: return 0;
  }
}

}  // namespace

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  const int bytes = bytes_of(type);
  if (!map || !bytes || rank < 1 || rank > 5 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || reinterpret_cast<uint64_t>(data) % 16 != 0 ||
      reinterpret_cast<uint64_t>(map) % 64 != 0)
    return CUDA_ERROR_INVALID_VALUE;
  TensorMap m = {};
  m.magic = kTensorMapMagic;
  m.data = static_cast<uint8_t*>(data);
  m.rank = static_cast<uint8_t>(rank), m.element_bytes = static_cast<uint8_t>(bytes),
  m.swizzle = static_cast<uint8_t>(swizzle);
  for (cuuint32_t d = 0; d < rank; ++d) {
    if (sizes[d] < 1 || sizes[d] > 1ull << 32 || box[d] < 1 || box[d] > 256 || element_strides[d] != 1)
      return CUDA_ERROR_INVALID_VALUE;
    m.sizes[d] = sizes[d];
    m.box[d] = static_cast<uint8_t>(box[d] - 1);
    if (d == 0) continue;
    if (strides[d - 1] % 16 != 0 || strides[d - 1] >= 1ull << 40) return CUDA_ERROR_INVALID_VALUE;
    m.strides[d - 1] = strides[d - 1];
  }
  const uint64_t row = uint64_t{box[0]} * static_cast<uint64_t>(bytes);
  const uint64_t most = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
                        : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                        : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                                               : 1ull << 32;
  if (row % 16 != 0 || row > most) return CUDA_ERROR_INVALID_VALUE;
  std::memset(map, 0, sizeof *map);
  std::memcpy(map, &m, sizeof m);
  return CUDA_SUCCESS;
}

}  // namespace emulator
