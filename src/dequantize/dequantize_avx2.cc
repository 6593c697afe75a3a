// SPDX-License-Identifier: Apache-2.0
//
// dequantize on vectors of AVX2: the algorithm of dequantize_rows.h.
#include "cpu/simd_avx2.h"
#include "dequantize/dequantize_rows.h"

namespace quantfuse::dequantize_avx2 {
using dequantize::Problem;
namespace {

Verdict accepts(const Problem&) { return kYes; }
void launch(const Problem& p, const Launch&) { dequantize::dequantize_rows<Avx2>(p); }

}  // namespace

extern const Kernel<Problem> entry = {"dequantize_avx2", Target::avx2, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::dequantize_avx2
