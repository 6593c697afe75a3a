// SPDX-License-Identifier: Apache-2.0
//
// The output that linear, rms_norm and gated_act share: numbers rounded to a float type, or quantized once
// more, with a static scale or with one per row and group of columns.
#pragma once

#include "core/expect.h"

namespace quantfuse {

struct Output {
  Matrix y;                           // [m, n] f32 | f16 | bf16, or codes
  qf_format format = QF_FORMAT_NONE;  // NONE, INT8, E4M3, E5M2
  bool is_static = false;
  int64_t group = 1;             // columns that share a dynamic scale; resolved, at least 1
  Matrix scale;                  // static: [1, 1], read; dynamic: [m, ceil(n / group)], written
  int64_t scale_col_stride = 1;  // not 1: the scales are written as [ceil(n / group), m]
  int64_t hadamard = 0;          // columns that are rotated together before they are quantized; 0: none

  QF_HD bool is_quantized() const { return format != QF_FORMAT_NONE; }
  // The dynamic scale of group `g` of a row.
  QF_HD float& scale_at(int64_t row, int64_t g) const {
    return static_cast<float*>(scale.data)[row * scale.row_stride + g * scale_col_stride];
  }
};

struct OutputArgs {
  const qf_tensor* y;
  qf_format format;
  qf_scale_mode mode;
  int64_t group;
  const qf_tensor* scale;
};

// `y_may_be` names an input that y may share its memory with, or null.
Output parse_output(Arguments& arg, const OutputArgs& a, Dim& m, Dim& n, const char* y_may_be = nullptr);
// The same for kernels that store through scale_at() and rotate: dynamic scales may be a transposed view.
Output parse_rotated_output(Arguments& arg, const OutputArgs& a, int64_t hadamard, Dim& m, Dim& n);

}  // namespace quantfuse
