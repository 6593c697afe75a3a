// SPDX-License-Identifier: Apache-2.0
//
// Any weight format times the true activations (or FP8 ones, by conversion), in float32: see linear_float.h.
#include "cpu/simd_avx2.h"
#include "linear/linear_float.h"

namespace quantfuse::linear_float_avx2 {
using linear::Problem;
namespace {

using Arithmetic = linear::FloatArithmetic<Avx2>;

Verdict accepts(const Problem& p) { return linear::packed_for(p, Avx2::kLanes); }

size_t workspace_bytes(const Problem& p) {
  return static_cast<size_t>(linear::make_float_plan<Arithmetic>(p).total_bytes);
}

void launch(const Problem& p, const Launch& launch) { linear::launch_float<Arithmetic>(p, launch); }

}  // namespace

extern const Kernel<Problem> entry = {
    "linear_float_avx2",        Target::avx2, accepts, workspace_bytes, launch,
    /*is_batch_invariant=*/true};

}  // namespace quantfuse::linear_float_avx2
