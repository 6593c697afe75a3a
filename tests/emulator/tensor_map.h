// SPDX-License-Identifier: Apache-2.0
//
// What cuTensorMapEncodeTiled makes here: the arguments themselves, in the 128 bytes of a CUtensorMap.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace emulator {

struct TensorMap {
  uint64_t magic;
  uint8_t* data;
  uint64_t sizes[5];
  uint64_t strides[4];  // bytes, of all dimensions but the first
  uint8_t box[5];       // less 1
  uint8_t rank, element_bytes, swizzle;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));
constexpr uint64_t kTensorMapMagic = 0x70616d726f736e74;

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                      CUtensorMapFloatOOBfill fill);

// Where a byte of a box lies: 16-byte pieces change places with the row they are in, by address.
inline uint64_t swizzled(uint64_t address, int swizzle) {
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_128B: return address ^ (address >> 3 & 0x70);
    case CU_TENSOR_MAP_SWIZZLE_64B: return address ^ (address >> 3 & 0x30);
    case CU_TENSOR_MAP_SWIZZLE_32B: return address ^ (address >> 3 & 0x10);
    default: return address;
  }
}

}  // namespace emulator
