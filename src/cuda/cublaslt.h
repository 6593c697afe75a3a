// SPDX-License-Identifier: Apache-2.0
//
// cuBLASLt, loaded at its first use: nothing is linked to it, and a machine may do without. What the build
// needs is its header, where there is one.
#pragma once

#if __has_include(<cublasLt.h>) && !defined(QF_WITHOUT_CUBLASLT)
#define QF_HAS_CUBLASLT_HEADER 1
#include <cublasLt.h>

namespace quantfuse {

struct CublasLt {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtMatmulDescCreate) create_description;
  decltype(&cublasLtMatmulDescDestroy) destroy_description;
  decltype(&cublasLtMatmulDescSetAttribute) set_attribute;
  decltype(&cublasLtMatrixLayoutCreate) create_layout;
  decltype(&cublasLtMatrixLayoutDestroy) destroy_layout;
  decltype(&cublasLtMatmulPreferenceCreate) create_preference;
  decltype(&cublasLtMatmulPreferenceDestroy) destroy_preference;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;
  decltype(&cublasLtMatmulAlgoGetHeuristic) get_heuristic;
  decltype(&cublasLtMatmul) matmul;
};

// Null where no libcublasLt.so of major version 12 or 13 is found (by the loader's rules, or in the process
// already, as PyTorch's is).
const CublasLt* cublaslt();

}  // namespace quantfuse
#endif
