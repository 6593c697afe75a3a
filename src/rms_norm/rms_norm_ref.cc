// SPDX-License-Identifier: Apache-2.0
//
// The formula as written, one number at a time, in double.
#include <cmath>
#include <vector>

#include "cpu/scalar.h"
#include "rms_norm/rms_norm.h"

namespace quantfuse::rms_norm_ref {
using rms_norm::Problem;
namespace {

Verdict accepts(const Problem&) { return kYes; }

void launch(const Problem& p, const Launch&) {
  std::vector<float> y(p.n);
  for (int64_t r = 0; r < p.m; ++r) {
    if (p.residual) {
      for (int64_t c = 0; c < p.n; ++c) {
        set_float(p.residual, r, c, float_at(p.x, r, c) + float_at(p.residual, r, c));
      }
    }
    const Matrix& h = p.residual ? p.residual : p.x;
    double sum = 0;
    for (int64_t c = 0; c < p.n; ++c) sum += static_cast<double>(float_at(h, r, c)) * float_at(h, r, c);
    const double root = std::sqrt(sum / static_cast<double>(p.n) + p.eps);
    for (int64_t c = 0; c < p.n; ++c) {
      const double gain = p.gain ? float_at(p.gain, c) : 1.0;
      y[c] = static_cast<float>(float_at(h, r, c) * gain / root);
    }
    store_output_scalar(p.out, r, y.data());
  }
}

}  // namespace

extern const Kernel<Problem> entry = {"rms_norm_ref", Target::reference, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::rms_norm_ref
