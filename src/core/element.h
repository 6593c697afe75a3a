// SPDX-License-Identifier: Apache-2.0
//
// One number of a checked view at a time, as float32. Host and device.
#pragma once

#include "core/expect.h"

namespace quantfuse {

// Element i of a row or a vector of type f32, f16 or bf16.
QF_HD float float_at(const void* row, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::f32: return static_cast<const float*>(row)[i];
    case DType::f16: return to_float(static_cast<const f16*>(row)[i]);
    default: return to_float(static_cast<const bf16*>(row)[i]);
  }
}
QF_HD float float_at(const Matrix& x, int64_t r, int64_t c) {
  return float_at(x.row_bytes_at(r), x.dtype, c);
}
QF_HD float float_at(const Vector& x, int64_t i) { return float_at(x.data, x.dtype, i); }

// Rounds `value` to the matrix's type.
QF_HD void set_float(const Matrix& x, int64_t r, int64_t c, float value) {
  switch (x.dtype) {
    case DType::f32: return from_float(value, x.row<float>(r)[c]);
    case DType::f16: return from_float(value, x.row<f16>(r)[c]);
    default: return from_float(value, x.row<bf16>(r)[c]);
  }
}

}  // namespace quantfuse
