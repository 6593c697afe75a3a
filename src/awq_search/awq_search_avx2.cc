// SPDX-License-Identifier: Apache-2.0
//
// awq_search on vectors of AVX2: the algorithm of awq_search_rows.h.
#include "awq_search/awq_search_rows.h"
#include "cpu/simd_avx2.h"

namespace quantfuse::awq_search_avx2 {
using awq_search::Problem;
namespace {

Verdict accepts(const Problem&) { return kYes; }
size_t workspace_bytes(const Problem& p) { return awq_search::rows_workspace_bytes<Avx2>(p); }
void launch(const Problem& p, const Launch& launch) { awq_search::launch_rows<Avx2>(p, launch); }

}  // namespace

extern const Kernel<Problem> entry = {"awq_search_avx2", Target::avx2, accepts, workspace_bytes, launch};

}  // namespace quantfuse::awq_search_avx2
