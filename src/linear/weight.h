// SPDX-License-Identifier: Apache-2.0
//
// A weight w[n,k] = (codes[n,k] - zero[n,k]) * scale[n,k] + offset[n,k], checked. Canonical, packed, or both.
// One that is not quantized has neither scale nor zero nor offset.
#pragma once

#include "core/block.h"
#include "core/expect.h"
#include "formats/codes.h"

namespace quantfuse {

struct Weight {
  qf_format format = QF_FORMAT_NONE;
  int64_t n = 0, k = 0;
  qf_block block = {1, 1};  // resolved
  int64_t num_groups = 0;   // columns of scale
  bool is_gated = false;
  bool is_constant = false;  // may be read before the work ahead on the stream has ended
  Matrix codes;              // absent where only the packed form was kept, as are the five below
  Matrix scale;              // [ceil(n / block.rows), num_groups] f32 | e8m0
  Matrix zero;               // i8 | f32, like scale; absent: symmetric
  Matrix offset;             // f32, like scale; absent: none
  Vector g_idx;              // [k] i32; absent: k / block.cols
  Vector packed;             // u8 [bytes]; absent: not packed

  QF_HD int64_t n_out() const { return is_gated ? n / 2 : n; }
  QF_HD int64_t group_of(int64_t col) const {
    return g_idx ? g_idx.as<const int32_t>()[col] : col / block.cols;
  }
  QF_HD int64_t scale_index(int64_t row, int64_t group) const {
    return row / block.rows * num_groups + group;
  }
  QF_HD float scale_at(int64_t row, int64_t group) const { return scale_value(scale_index(row, group)); }
  QF_HD float zero_at(int64_t row, int64_t group) const { return zero_value(scale_index(row, group)); }
  QF_HD float offset_at(int64_t row, int64_t group) const { return offset_value(scale_index(row, group)); }
  // Zero points that are not integers, once the offset has become part of them.
  bool has_float_zeros() const { return offset || (zero && zero.dtype == DType::f32); }
  // By scale_index.
  QF_HD float scale_value(int64_t i) const {
    if (!scale) return 1.0f;
    return scale.dtype == DType::f32 ? static_cast<const float*>(scale.data)[i]
                                     : E8m0::decode(static_cast<const uint8_t*>(scale.data)[i]);
  }
  QF_HD float zero_value(int64_t i) const {
    if (!zero) return 0.0f;
    return zero.dtype == DType::f32 ? static_cast<const float*>(zero.data)[i]
                                    : static_cast<float>(static_cast<const int8_t*>(zero.data)[i]);
  }
  // Where there is none, -0: what can be added to any number and leaves its bits.
  QF_HD float offset_value(int64_t i) const {
    return offset ? static_cast<const float*>(offset.data)[i] : -0.0f;
  }
};

// Shapes and types. At least one of the canonical and the packed form must be there.
Weight parse_weight(Arguments& arg, const qf_weight& w,
                    std::initializer_list<qf_format> formats = kLinearWeightFormats);

// What parse_weight cannot afford on every call, because it reads whole tensors: scales finite and
// positive (of a codebook: finite), zeros and offsets finite, g_idx within the groups. Done by pack() and by
// the kernels that read the canonical form. CPU memory only.
void check_weight_values(const Arguments& arg, const Weight& w);

}  // namespace quantfuse
