// SPDX-License-Identifier: Apache-2.0
//
// Whether there is a cuBLASLt, and which epilogues of a weight that is not quantized it has.
#pragma once

#include "cuda/cublaslt.h"
#include "linear/linear.h"

namespace quantfuse::linear {

// A bias, ReLU, the tanh form of GELU, a residual without an activation, all of x's type; or y in float32
// with nothing to it. A bias is read 16 bytes at a time, and the heuristic is not asked whether it may be.
// Where rows do not begin at multiples of 16 bytes, GELU is of sums that were rounded to y's type before
// (seen of version 13 on an H200).
inline bool has_cublaslt_epilogue(const Problem& p) {
  const DType y = p.out.y.dtype;
  const bool has_activation = p.activation != QF_IDENTITY;
  if (p.out.is_quantized() || p.weight.is_gated) return false;
  if (y != p.x.dtype) return y == DType::f32 && !has_activation && !p.bias && !p.residual;
  const bool is_bias_aligned = reinterpret_cast<uint64_t>(p.bias.data) % 16 == 0;
  const auto has_aligned_rows = [](const Matrix& m) {
    return reinterpret_cast<uint64_t>(m.data) % 16 == 0 && m.row_stride * dtype_bytes(m.dtype) % 16 == 0;
  };
  const bool has_exact_gelu =
      has_aligned_rows(p.x) && has_aligned_rows(p.weight.codes) && has_aligned_rows(p.out.y);
  return (!p.bias || (p.bias.dtype == y && is_bias_aligned)) &&
         (!p.residual || (p.residual.dtype == y && !has_activation)) &&
         (!has_activation || p.activation == QF_RELU || (p.activation == QF_GELU_TANH && has_exact_gelu));
}

inline bool has_cublaslt() {
#if defined(QF_HAS_CUBLASLT_HEADER)
  return cublaslt() != nullptr;
#else
  return false;
#endif
}

}  // namespace quantfuse::linear
