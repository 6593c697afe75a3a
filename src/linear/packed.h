// SPDX-License-Identifier: Apache-2.0
//
// The packed weight of the CPU kernels: one layout per vector width, for every m and every arithmetic.
//
// Rows of w are taken in panels of 2 * lanes (a gated weight: lanes of the gate, then the same lanes of the
// up half), so that a vector holds one k of `lanes` output columns. Columns of w are taken in groups that
// share a scale, each padded to a multiple of 8 (with g_idx, sorted by group), which gives k_padded. x is
// brought into the same order when it is prepared, with zeros in the padding, so that no kernel has an edge
// along k:
//
//   codes   panel [k_padded / 8][2][lanes] words of 32 bits = 8 nibbles, or [k_padded / 4][2][lanes] = 4
//           bytes, or [k_padded / 2] = 2 halves, or [k_padded] = 1 number
//             a word holds consecutive k of one row. Nibble 2i is k = i and nibble 2i + 1 is k = 4 + i, so
//             that the low nibbles, and then the high ones, are 4 consecutive k in 4 bytes: what an 8-bit dot
//             product reads INT4 is stored as code + 8 and INT8 as code + 128: the dot products want an
//             unsigned operand
//   scales  panel [groups][2][lanes] f32
//   zeros   panel [groups][2][lanes] f32, where the weight is asymmetric; offsets are part of them
//   k_map   [k_padded] i32: the column of w, or -1 for padding; only where it is not simply k
//   bounds  [groups + 1] i32: where each group begins
#pragma once

#include <cstdint>

#include "linear/weight.h"

namespace quantfuse::linear {

struct PackedHeader {
  static constexpr uint64_t kMagic = 0x314B434150465151;  // "QQFPACK1"
  uint64_t magic;
  int32_t lanes;
  int32_t format;
  int32_t is_gated;
  int32_t has_zeros;        // any zero points or offsets
  int32_t has_float_zeros;  // they are not integers
  int32_t has_k_map;
  int64_t n, k, k_padded;
  int64_t num_panels, num_groups;
  int64_t codes, scales, zeros, k_map, bounds;  // offsets in bytes from the start
  int64_t total_bytes;
  int64_t reserved;
};
static_assert(sizeof(PackedHeader) == 128);

struct PackedView {
  const PackedHeader* header = nullptr;

  const char* base() const { return reinterpret_cast<const char*>(header); }
  int64_t panel_code_bytes() const {
    return header->k_padded * 2 * header->lanes * code_bits(static_cast<qf_format>(header->format)) / 8;
  }
  const uint8_t* codes(int64_t panel) const {
    return reinterpret_cast<const uint8_t*>(base() + header->codes) + panel * panel_code_bytes();
  }
  const float* scales(int64_t panel) const { return panel_floats(header->scales, panel); }
  const float* zeros(int64_t panel) const {
    return header->has_zeros ? panel_floats(header->zeros, panel) : nullptr;
  }
  const int32_t* k_map() const {
    return header->has_k_map ? reinterpret_cast<const int32_t*>(base() + header->k_map) : nullptr;
  }
  const int32_t* bounds() const { return reinterpret_cast<const int32_t*>(base() + header->bounds); }

 private:
  const float* panel_floats(int64_t offset, int64_t panel) const {
    return reinterpret_cast<const float*>(base() + offset) + panel * header->num_groups * 2 * header->lanes;
  }
};

// Lanes of the CPU kernels that run here, or 0 where only the reference does.
int packed_lanes_of_cpu();

// The sizes and offsets of the packed form of a canonical weight. Needs shapes only, but for the values of
// g_idx.
PackedHeader plan_packed(const Weight& w, int lanes);
void pack_cpu(const Weight& w, const PackedHeader& plan, void* out);

// A view of packed bytes that fit `w`, or null with the reason. Never reads beyond the given bytes.
struct PackedCheck {
  PackedView view;
  const char* reason = nullptr;
};
PackedCheck view_packed(const Weight& w);

}  // namespace quantfuse::linear
