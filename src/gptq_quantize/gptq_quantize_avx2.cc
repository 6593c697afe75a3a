// SPDX-License-Identifier: Apache-2.0
//
// gptq_quantize on vectors of AVX2: the algorithm of gptq_quantize_rows.h.
#include "cpu/simd_avx2.h"
#include "gptq_quantize/gptq_quantize_rows.h"

namespace quantfuse::gptq_quantize_avx2 {
using gptq_quantize::Problem;
namespace {

Verdict accepts(const Problem&) { return kYes; }
size_t workspace_bytes(const Problem& p) { return gptq_quantize::rows_workspace_bytes<Avx2>(p); }
void launch(const Problem& p, const Launch& launch) { gptq_quantize::launch_rows<Avx2>(p, launch); }

}  // namespace

extern const Kernel<Problem> entry = {"gptq_quantize_avx2", Target::avx2, accepts, workspace_bytes, launch};

}  // namespace quantfuse::gptq_quantize_avx2
