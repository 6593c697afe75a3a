// SPDX-License-Identifier: Apache-2.0
//
// gptq_quantize on vectors of AVX-512: the algorithm of gptq_quantize_rows.h.
#include "cpu/simd_avx512.h"
#include "gptq_quantize/gptq_quantize_rows.h"

namespace quantfuse::gptq_quantize_avx512 {
using gptq_quantize::Problem;
namespace {

Verdict accepts(const Problem&) { return kYes; }
size_t workspace_bytes(const Problem& p) { return gptq_quantize::rows_workspace_bytes<Avx512>(p); }
void launch(const Problem& p, const Launch& launch) { gptq_quantize::launch_rows<Avx512>(p, launch); }

}  // namespace

extern const Kernel<Problem> entry = {"gptq_quantize_avx512", Target::avx512, accepts, workspace_bytes,
                                      launch};

}  // namespace quantfuse::gptq_quantize_avx512
