// SPDX-License-Identifier: Apache-2.0
//
// Runs of a canonical weight as float32 numbers, on a CUDA device: any format, group, zero
// point, offset and g_idx; and weights that are not quantized.
#pragma once

#include "linear/weight.h"

namespace quantfuse {

inline constexpr int kCodeRun = 8;  // codes that a thread decodes at once: 4 to 32 bytes

// Whether runs that begin at a multiple of 8 can be loaded as words.
inline bool has_aligned_runs(const Weight& w) {
  const auto element = static_cast<uint64_t>(dtype_bytes(w.codes.dtype));
  const uint64_t run = static_cast<uint64_t>(code_bits(w.format)), bytes = run < 16 ? run : 16;
  return reinterpret_cast<uint64_t>(w.codes.data) % bytes == 0 &&
         static_cast<uint64_t>(w.codes.row_stride) * element % bytes == 0;
}

__device__ inline float codebook_number(qf_format format, uint32_t code) {
  constexpr Values16 kTables[] = {values_of(QF_NF4), values_of(QF_FP4_BNB), values_of(QF_IQ4_NL)};
  static_assert(QF_FP4_BNB == QF_NF4 + 1 && QF_IQ4_NL == QF_NF4 + 2);
  return kTables[format - QF_NF4].values[code];
}

template <qf_format Format>
__device__ float decode_code(uint32_t code, [[maybe_unused]] qf_format format) {
  if constexpr (Format == QF_INT4) return static_cast<float>(static_cast<int32_t>(code << 28) >> 28);
  else if constexpr (Format == QF_FP4_E2M1) return E2m1::decode(static_cast<uint8_t>(code & 15));
  else if constexpr (Format == QF_NF4) return codebook_number(format, code & 15);
  else if constexpr (Format == QF_INT8) return static_cast<float>(static_cast<int8_t>(code));
  else if constexpr (Format == QF_FP8_E4M3) return E4m3::decode(static_cast<uint8_t>(code));
  else if constexpr (Format == QF_F32) return float_from_bits(code);
  else if constexpr (Format == QF_F16) return to_float(f16{static_cast<uint16_t>(code)});
  else if constexpr (Format == QF_BF16) return to_float(bf16{static_cast<uint16_t>(code)});
  else return E5m2::decode(static_cast<uint8_t>(code));
}

// A row of the weight: its codes, and where its scales and zero points begin.
struct WeightRow {
  const uint8_t* codes;
  int64_t first_scale;
};
__device__ inline WeightRow row_of(const Weight& w, int64_t row) {
  return {reinterpret_cast<const uint8_t*>(w.codes.row_bytes_at(row)),
          (w.block.rows == 1 ? row : row / w.block.rows) * w.num_groups};
}

// 64-bit divisions cost a hundred instructions, and k fits 32 bits.
__device__ inline int64_t group_on_device(const Weight& w, int64_t k) {
  if (w.g_idx) return w.g_idx.as<const int32_t>()[k];
  return static_cast<uint32_t>(k) / static_cast<uint32_t>(w.block.cols);
}
// out[i] = w[row, k + i] for the `count` columns that there are (1 to 8), else 0. k is a multiple of 8.
template <qf_format Format, bool kIsAligned>
__device__ void load_weights(const Weight& w, const WeightRow& row, int64_t k, int count,
                             float (&out)[kCodeRun]) {
  constexpr int kBits = code_bits(Format);
  const uint8_t* codes = row.codes + k * kBits / 8;
  uint32_t words[kBits / 4] = {};
  if (kIsAligned && count == kCodeRun) {
    if constexpr (kBits == 4) {
      words[0] = *reinterpret_cast<const uint32_t*>(codes);
    } else if constexpr (kBits >= 16) {
#pragma unroll
      for (int i = 0; i < kBits / 16; ++i) {
        const uint4 four = reinterpret_cast<const uint4*>(codes)[i];
        words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z,
                  words[4 * i + 3] = four.w;
      }
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
#pragma unroll
  for (int i = 0; i < kCodeRun; ++i) {
    out[i] = decode_code<Format>(words[i * kBits / 32] >> (i * kBits % 32), w.format);
  }
  if constexpr (is_plain(Format)) return;  // what is not there was loaded as 0
  if (!w.g_idx && w.block.cols % kCodeRun == 0) {
    const int64_t index = row.first_scale + group_on_device(w, k);
    const float scale = w.scale_value(index), zero = w.zero_value(index), offset = w.offset_value(index);
#pragma unroll
    for (int i = 0; i < kCodeRun; ++i) out[i] = i < count ? (out[i] - zero) * scale + offset : 0.0f;
  } else {
#pragma unroll 1
    for (int i = 0; i < kCodeRun; ++i) {
      const int64_t index = row.first_scale + (i < count ? group_on_device(w, k + i) : 0);
      const float scaled = (out[i] - w.zero_value(index)) * w.scale_value(index);
      out[i] = i < count ? scaled + w.offset_value(index) : 0.0f;
    }
  }
}

}  // namespace quantfuse
