// SPDX-License-Identifier: Apache-2.0
//
// dequantize_words on vectors of AVX-512: the algorithm of dequantize_words_rows.h.
#include "cpu/simd_avx512.h"
#include "dequantize_words/dequantize_words_rows.h"

namespace quantfuse::dequantize_words_avx512 {
using dequantize_words::Problem;
namespace {

Verdict accepts(const Problem&) { return kYes; }
void launch(const Problem& p, const Launch&) { dequantize_words::dequantize_words_rows<Avx512>(p); }

}  // namespace

extern const Kernel<Problem> entry = {"dequantize_words_avx512", Target::avx512, accepts,
                                      no_workspace<Problem>, launch};

}  // namespace quantfuse::dequantize_words_avx512
