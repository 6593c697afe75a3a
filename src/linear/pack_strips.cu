// SPDX-License-Identifier: Apache-2.0
//
// pack_strips(): from the canonical weight to the strips of packed_strips.h, a thread for each 32-bit word.
#include <algorithm>
#include <cstring>

#include "cuda/launch.h"
#include "linear/device_weight.h"
#include "linear/mxfp4_strips.h"
#include "linear/packed_strips.h"

namespace quantfuse::linear {
namespace {

constexpr int kThreads = 256;
constexpr unsigned long long kNone = ~0ull;

// The first index of each kind that a packed weight does not have.
struct Findings {
  unsigned long long scale, byte_scale, zero, not_finite_zero, not_finite_offset, offset, code, column, group;
};

// The kernels decode FP8 as if every code were a number, and INT4 less its zero point in 8 bits.
__device__ bool is_number(qf_format format, uint8_t code) {
  if (format == QF_FP8_E4M3) return (code & 0x7f) != 0x7f;
  return format != QF_FP8_E5M2 || (code & 0x7f) < 0x7c;
}
constexpr float kLargestInt4Zero = 120;

// w = q scale + this, rounded once.
__device__ float offset_of(const Weight& w, int64_t i) {
  const double zero = w.zero_value(i), scale = w.scale_value(i), offset = w.offset ? w.offset_value(i) : 0.0f;
  return static_cast<float>(offset - zero * scale);
}

__global__ void check_values(const __grid_constant__ Weight w, const StripLayout layout, Findings* findings) {
  const bool has_bytes = has_byte_scales(layout);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = first; i < w.scale.rows * w.scale.cols; i += step) {
    const float s = w.scale_value(i);
    if (is_codebook(w.format) ? !is_finite(s) : !(s > 0 && is_finite(s) && is_finite(1.0f / s)))
      atomicMin(&findings->scale, static_cast<unsigned long long>(i));
    if (has_bytes && !(s >= kSmallestByteScale && s <= kLargestByteScale))
      atomicMin(&findings->byte_scale, static_cast<unsigned long long>(i));
    if (w.format == QF_INT4 && layout.has_zeros && w.zero_value(i) > kLargestInt4Zero)
      atomicMin(&findings->zero, static_cast<unsigned long long>(i));
    if (!layout.has_offsets) continue;
    if (!is_finite(w.zero_value(i)))
      atomicMin(&findings->not_finite_zero, static_cast<unsigned long long>(i));
    if (!is_finite(w.offset_value(i)))
      atomicMin(&findings->not_finite_offset, static_cast<unsigned long long>(i));
    if (!is_finite(offset_of(w, i))) atomicMin(&findings->offset, static_cast<unsigned long long>(i));
  }
  for (int64_t k = first; w.g_idx && k < w.k; k += step) {
    const int64_t group = w.group_of(k);
    if (group < 0 || group >= w.num_groups) atomicMin(&findings->column, static_cast<unsigned long long>(k));
  }
  if (!is_fp8(w.format)) return;
  for (int64_t i = first; i < w.n * w.k; i += step) {
    if (!is_number(w.format, w.codes.row<const uint8_t>(i / w.k)[i % w.k]))
      atomicMin(&findings->code, static_cast<unsigned long long>(i));
  }
}

// k_map[i]: the column that is the i-th once they are sorted by group, those of a group in their order. A
// warp for each group, which is to be as large as without g_idx.
__global__ void sort_columns(const __grid_constant__ Weight w, int32_t* k_map, int64_t words,
                             Findings* findings) {
  const int64_t group = blockIdx.x, begin = group * w.block.cols, end = min(begin + w.block.cols, w.k);
  int64_t next = begin;
  for (int64_t k0 = 0; k0 < w.k; k0 += 32) {
    const int64_t k = k0 + threadIdx.x;
    const bool is_member = k < w.k && w.group_of(k) == group;
    const unsigned members = __ballot_sync(~0u, is_member);
    const int64_t place = next + __popc(members & ((1u << threadIdx.x) - 1));
    if (is_member && place < end) k_map[place] = static_cast<int32_t>(k);
    next += __popc(members);
  }
  if (next != end && threadIdx.x == 0) atomicMin(&findings->group, static_cast<unsigned long long>(group));
  if (group == 0 && w.k + threadIdx.x < words) k_map[w.k + threadIdx.x] = 0;
}

// The code of (row, place of a column), or beyond the matrix that of the value 0 (of a codebook: code 0).
__device__ uint32_t code_at(const Weight& w, const int32_t* k_map, int64_t row, int64_t place) {
  const bool exists = row >= 0 && place < w.k;
  const int64_t k = exists && k_map ? k_map[place] : place;
  if (is_packed_4bit(w.format)) {
    const uint32_t code = exists ? nibble_at(w.codes.row<const uint8_t>(row), k) : 0;
    return w.format == QF_INT4 ? code ^ 8 : code;
  }
  return exists ? w.codes.row<const uint8_t>(row)[k] : 0;
}

__device__ uint32_t code_word(const Weight& w, const StripLayout& s, const int32_t* k_map, int64_t strip,
                              int64_t tile, int word) {
  const int lane = word / 4 % 32, g = lane / 4, q = lane % 4, j = word % 4, vector = word / 128;
  const int columns[4] = {2 * q, 2 * q + 8, 2 * q + 1, 2 * q + 9};
  uint32_t out = 0;
  if (is_packed_4bit(w.format)) {
    const int64_t k = tile * s.kCols + (4 * vector + j) * s.kStepCols;
    for (int i = 0; i < 8; ++i) {
      const uint32_t code = code_at(w, k_map, s.source_row(strip, g + i % 2 * 8), k + columns[i / 2]);
      const E2m1Place at = e2m1_place(i);
      if (w.format == QF_FP4_E2M1)
        out |= ((code & 7) << at.magnitude | (code >> 3) << at.sign) << (i / 4 * 16);
      else out |= code << (4 * (is_codebook(w.format) ? i % 4 * 2 + i / 4 : i));
    }
  } else {
    const int64_t k = tile * s.kCols + (2 * vector + j / 2) * s.kStepCols;
    for (int i = 0; i < 4; ++i)
      out |= code_at(w, k_map, s.source_row(strip, g + j % 2 * 8), k + columns[i]) << (8 * i);
  }
  return out;
}

__global__ void pack(const __grid_constant__ Weight w, const StripLayout s, uint32_t* out) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t words = s.tile_bytes / 4;
  const int64_t tile_index = index / words, strip = tile_index / s.tiles, tile = tile_index % s.tiles;
  if (strip >= s.strips) return;
  const int32_t* k_map = s.has_k_map ? reinterpret_cast<const int32_t*>(out) + s.strip_bytes() / 4 : nullptr;
  const int byte = static_cast<int>(index % words) * 4;
  // Of row `row` and group `group` of the tile, or -1 beyond the matrix.
  const auto scale_index = [&](int place) -> int64_t {
    const int64_t row = s.source_row(strip, place % s.kRows);
    const int64_t k = tile * s.kCols + place / s.kRows * s.group_cols();
    return row >= 0 && k < w.k ? w.scale_index(row, k / w.block.cols) : -1;
  };
  if (byte < s.code_bytes) {
    out[index] = code_word(w, s, k_map, strip, tile, byte / 4);
  } else if (has_byte_scales(s)) {
    const int row = (byte - s.code_bytes) / 4;  // of rows 0, 8, 1, 9, ...
    uint32_t scales = 0;
    for (int group = 0; group < 4; ++group) {
      const int64_t i = scale_index(group * s.kRows + row / 2 + row % 2 * 8);
      const uint32_t e = i < 0 ? 127 : __float_as_uint(w.scale_value(i)) >> 23;
      scales |= (e - 127 + kByteScaleBias) << (8 * group);
    }
    out[index] = scales;
  } else if (byte < s.zero_offset()) {
    const int64_t i = scale_index((byte - s.code_bytes) / 4);
    out[index] = i < 0 ? 0 : __float_as_uint(w.scale_value(i) * codebook_unit(w.format));
  } else if (s.has_offsets) {
    const int64_t i = scale_index((byte - s.zero_offset()) / 4);
    out[index] = i < 0 ? 0 : __float_as_uint(offset_of(w, i));
  } else {
    uint32_t zeros = 0;
    for (int b = 0; b < 4; ++b) {
      const int64_t i = scale_index(byte - s.zero_offset() + b);
      zeros |= (i < 0 ? 0u : static_cast<uint32_t>(static_cast<int>(w.zero_value(i))) & 255u) << (8 * b);
    }
    out[index] = zeros;
  }
}

void check(cudaError_t e) {
  if (e == cudaSuccess) return;
  cudaGetLastError();
  fail_device(std::string("weight_pack: ") + cudaGetErrorString(e));
}

}  // namespace

void pack_strips(const Arguments& arg, const Weight& w, const StripLayout& layout, void* out, void* stream) {
  const Launch launch = {stream};
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  // The findings are in the output's memory, which is larger than they are: no memory of our own.
  Findings found;
  std::memset(&found, 0xff, sizeof found);  // kNone everywhere
  check(cudaMemcpyAsync(out, &found, sizeof found, cudaMemcpyHostToDevice, cuda_stream));
  const int64_t numbers = std::max({w.scale.rows * w.scale.cols, w.k, is_fp8(w.format) ? w.n * w.k : 0});
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(ceil_div(numbers, kThreads), 4096));
  launch_kernel("weight_pack", check_values, {dim3(blocks), dim3(kThreads)}, launch, w, layout,
                static_cast<Findings*>(out));
  if (layout.has_k_map) {
    launch_kernel("weight_pack", sort_columns, {dim3(static_cast<unsigned>(w.num_groups)), dim3(32)}, launch,
                  w, reinterpret_cast<int32_t*>(static_cast<char*>(out) + layout.strip_bytes()),
                  layout.k_map_words(), static_cast<Findings*>(out));
  }
  check(cudaMemcpyAsync(&found, out, sizeof found, cudaMemcpyDeviceToHost, cuda_stream));
  check(cudaStreamSynchronize(cuda_stream));
  if (found.scale != kNone)
    arg.fail(std::string("weight.scale is not finite") + (is_codebook(w.format) ? "" : " and positive") +
             " at index " + std::to_string(found.scale));
  if (found.not_finite_zero != kNone)
    arg.fail("weight.zero is not finite at index " + std::to_string(found.not_finite_zero));
  if (found.not_finite_offset != kNone)
    arg.fail("weight.offset is not finite at index " + std::to_string(found.not_finite_offset));
  if (found.column != kNone)
    arg.fail("weight.g_idx is out of range at index " + std::to_string(found.column));
  const auto no_packed_form = [&](const std::string& what, unsigned long long index) {
    fail_unsupported("weight_pack: " + what + " at index " + std::to_string(index) +
                     ": only the kernels of the canonical weight take that");
  };
  if (found.byte_scale != kNone) no_packed_form("weight.scale is not 2^-100 to 2^17", found.byte_scale);
  if (found.zero != kNone) no_packed_form("weight.zero is beyond 120", found.zero);
  if (found.offset != kNone) no_packed_form("weight.zero times weight.scale is infinite", found.offset);
  if (found.code != kNone) no_packed_form("weight.codes is infinite or NaN", found.code);
  if (found.group != kNone) no_packed_form("weight.g_idx has a group that is not whole", found.group);

  const int64_t pack_blocks = ceil_div(layout.strip_bytes() / 4, kThreads);
  if (pack_blocks >= 1ll << 31) fail_unsupported("weight_pack: the weight is too large");
  launch_kernel("weight_pack", pack, {dim3(static_cast<unsigned>(pack_blocks)), dim3(kThreads)}, launch, w,
                layout, static_cast<uint32_t*>(out));
  check(cudaStreamSynchronize(cuda_stream));
}

}  // namespace quantfuse::linear
