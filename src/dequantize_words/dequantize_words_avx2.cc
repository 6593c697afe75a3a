// SPDX-License-Identifier: Apache-2.0
//
// dequantize_words on vectors of AVX2: the algorithm of dequantize_words_rows.h.
#include "cpu/simd_avx2.h"
#include "dequantize_words/dequantize_words_rows.h"

namespace quantfuse::dequantize_words_avx2 {
using dequantize_words::Problem;
namespace {

Verdict accepts(const Problem&) { return kYes; }
void launch(const Problem& p, const Launch&) { dequantize_words::dequantize_words_rows<Avx2>(p); }

}  // namespace

extern const Kernel<Problem> entry = {"dequantize_words_avx2", Target::avx2, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::dequantize_words_avx2
