// SPDX-License-Identifier: Apache-2.0
//
// Which epilogues of a weight that is not quantized cuBLASLt has.
#pragma once

#include "cuda/cublaslt.h"
#include "linear/linear.h"

namespace quantfuse::linear {

// A bias of y's type, ReLU, the tanh form of GELU, a residual of y's type without an activation.
inline bool has_cublaslt_epilogue(const Problem& p) {
  const DType y = p.out.y.dtype;
  const bool has_activation = p.activation != QF_IDENTITY;
  return !p.out.is_quantized() && !p.weight.is_gated && (y == p.x.dtype || y == DType::f32) &&
         (!p.bias || p.bias.dtype == y) && (!p.residual || (p.residual.dtype == y && !has_activation)) &&
         (!has_activation || p.activation == QF_RELU || p.activation == QF_GELU_TANH);
}

// Whether there is a cuBLASLt that needs no second kernel.
inline bool cublaslt_writes_y([[maybe_unused]] const Problem& p) {
#if defined(QF_HAS_CUBLASLT_HEADER)
  return cublaslt() != nullptr && has_cublaslt_epilogue(p);
#else
  return false;
#endif
}

}  // namespace quantfuse::linear
