// SPDX-License-Identifier: Apache-2.0
//
// Runs of a canonical weight as float32 numbers, on a CUDA device: any format, group, zero point and g_idx.
#pragma once

#include "linear/weight.h"

namespace quantfuse {

inline constexpr int kCodeRun = 8;  // codes that a thread decodes at once: 4 or 8 bytes

// Whether runs that begin at a multiple of 8 can be loaded as words.
inline bool has_aligned_runs(const Weight& w) {
  const uint64_t bytes = is_packed_4bit(w.format) ? 4 : 8;
  return reinterpret_cast<uint64_t>(w.codes.data) % bytes == 0 &&
         static_cast<uint64_t>(w.codes.row_stride) % bytes == 0;  // codes are bytes
}

template <qf_format Format>
__device__ float decode_code(uint32_t code) {
  if constexpr (Format == QF_INT4) return static_cast<float>(static_cast<int32_t>(code << 28) >> 28);
  else if constexpr (Format == QF_FP4_E2M1) return E2m1::decode(static_cast<uint8_t>(code & 15));
  else if constexpr (Format == QF_INT8) return static_cast<float>(static_cast<int8_t>(code));
  else if constexpr (Format == QF_FP8_E4M3) return E4m3::decode(static_cast<uint8_t>(code));
  else return E5m2::decode(static_cast<uint8_t>(code));
}

// out[i] = w[row, k + i] for the `count` columns that there are (at most 8), else 0. k is a multiple of 8.
template <qf_format Format, bool kIsAligned>
__device__ void load_weights(const Weight& w, int64_t row, int64_t k, int count, float (&out)[kCodeRun]) {
  constexpr int kBits = is_packed_4bit(Format) ? 4 : 8;
  const auto* codes = reinterpret_cast<const uint8_t*>(w.codes.row_bytes_at(row)) + k * kBits / 8;
  uint32_t words[kBits / 4] = {};
  if (kIsAligned && count == kCodeRun) {
    if constexpr (kBits == 4) {
      words[0] = *reinterpret_cast<const uint32_t*>(codes);
    } else {
      const uint2 pair = *reinterpret_cast<const uint2*>(codes);
      words[0] = pair.x, words[1] = pair.y;
    }
  } else {
    const int bytes = (count * kBits + 7) / 8;
#pragma unroll
    for (int i = 0; i < kBits; ++i) {
      if (i < bytes) words[i / 4] |= static_cast<uint32_t>(codes[i]) << (8 * (i % 4));
    }
  }
  const bool has_one_group = !w.g_idx && w.block.cols % kCodeRun == 0;
  int64_t group = count > 0 ? w.group_of(k) : 0;
  float scale = count > 0 ? w.scale_at(row, group) : 0.0f, zero = count > 0 ? w.zero_at(row, group) : 0.0f;
#pragma unroll
  for (int i = 0; i < kCodeRun; ++i) {
    if (!has_one_group && i > 0 && i < count) {
      group = w.group_of(k + i);
      scale = w.scale_at(row, group), zero = w.zero_at(row, group);
    }
    const uint32_t code = words[i * kBits / 32] >> (i * kBits % 32);
    out[i] = i < count ? (decode_code<Format>(code) - zero) * scale : 0.0f;
  }
}

}  // namespace quantfuse
