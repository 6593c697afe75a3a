// SPDX-License-Identifier: Apache-2.0
//
// Which epilogues of a weight that is not quantized cuBLASLt has.
#pragma once

#include "cuda/cublaslt.h"
#include "linear/linear.h"

namespace quantfuse::linear {

// A bias, ReLU, the tanh form of GELU, a residual without an activation, all of x's type; or y in float32
// with nothing to it.
inline bool has_cublaslt_epilogue(const Problem& p) {
  const DType y = p.out.y.dtype;
  const bool has_activation = p.activation != QF_IDENTITY;
  if (p.out.is_quantized() || p.weight.is_gated) return false;
  if (y != p.x.dtype) return y == DType::f32 && !has_activation && !p.bias && !p.residual;
  return (!p.bias || p.bias.dtype == y) && (!p.residual || (p.residual.dtype == y && !has_activation)) &&
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
