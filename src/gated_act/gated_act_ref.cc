// SPDX-License-Identifier: Apache-2.0
//
// The formula as written, one number at a time, in double.
#include <vector>

#include "cpu/scalar.h"
#include "gated_act/gated_act.h"

namespace quantfuse::gated_act_ref {
using gated_act::Problem;
namespace {

Verdict accepts(const Problem&) { return kYes; }

void launch(const Problem& p, const Launch&) {
  std::vector<float> y(p.n);
  for (int64_t r = 0; r < p.m; ++r) {
    for (int64_t c = 0; c < p.n; ++c) {
      const double activated = activate_scalar(p.activation, float_at(p.x, r, c));
      y[c] = static_cast<float>(p.is_gated ? activated * float_at(p.x, r, p.n + c) : activated);
    }
    store_output_scalar(p.out, r, y.data());
  }
}

}  // namespace

extern const Kernel<Problem> entry = {"gated_act_ref", Target::reference, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::gated_act_ref
