// SPDX-License-Identifier: Apache-2.0
//
// awq_search on vectors of AVX-512: the algorithm of awq_search_rows.h.
#include "awq_search/awq_search_rows.h"
#include "cpu/simd_avx512.h"

namespace quantfuse::awq_search_avx512 {
using awq_search::Problem;
namespace {

Verdict accepts(const Problem&) { return kYes; }
size_t workspace_bytes(const Problem& p) { return awq_search::rows_workspace_bytes<Avx512>(p); }
void launch(const Problem& p, const Launch& launch) { awq_search::launch_rows<Avx512>(p, launch); }

}  // namespace

extern const Kernel<Problem> entry = {"awq_search_avx512", Target::avx512, accepts, workspace_bytes, launch};

}  // namespace quantfuse::awq_search_avx512
