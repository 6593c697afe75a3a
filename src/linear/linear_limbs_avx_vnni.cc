// SPDX-License-Identifier: Apache-2.0
//
// INT4, INT8, E2M1 and IQ4_NL weights times 16-bit floats by dot products of bytes: see linear_limbs.h.
#include "cpu/simd_avx_vnni.h"
#include "linear/linear_limbs.h"

namespace quantfuse::linear_limbs_avx_vnni {
using linear::Problem;
namespace {

Verdict accepts(const Problem& p) { return linear::accepts_limbs(p, AvxVnni::kLanes); }

size_t workspace_bytes(const Problem& p) {
  return static_cast<size_t>(linear::make_limb_plan(p).total_bytes);
}

void launch(const Problem& p, const Launch& launch) { linear::launch_limbs<AvxVnni>(p, launch); }

}  // namespace

extern const Kernel<Problem> entry = {
    "linear_limbs_avx_vnni",    Target::avx_vnni, accepts, workspace_bytes, launch,
    /*is_batch_invariant=*/true};

}  // namespace quantfuse::linear_limbs_avx_vnni
