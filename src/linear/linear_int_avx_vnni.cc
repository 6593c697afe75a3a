// SPDX-License-Identifier: Apache-2.0
//
// INT4, INT8, E2M1 or IQ4_NL weights times INT8 activations, in integers: see linear_int.h.
#include "cpu/simd_avx_vnni.h"
#include "linear/linear_int.h"

namespace quantfuse::linear_int_avx_vnni {
using linear::Problem;
namespace {

Verdict accepts(const Problem& p) { return linear::accepts_int(p, AvxVnni::kLanes); }

size_t workspace_bytes(const Problem& p) { return static_cast<size_t>(linear::make_int_plan(p).total_bytes); }

void launch(const Problem& p, const Launch& launch) { linear::launch_int<AvxVnni>(p, launch); }

}  // namespace

extern const Kernel<Problem> entry = {
    "linear_int_avx_vnni",      Target::avx_vnni, accepts, workspace_bytes, launch,
    /*is_batch_invariant=*/true};

}  // namespace quantfuse::linear_int_avx_vnni
