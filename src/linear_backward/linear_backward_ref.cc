// SPDX-License-Identifier: Apache-2.0
//
// The formula as written, one number at a time, accumulated in double.
#include <vector>

#include "cpu/scalar.h"
#include "linear_backward/linear_backward.h"

namespace quantfuse::linear_backward_ref {
using linear_backward::Problem;
namespace {

double weight_at(const Weight& w, int64_t n, int64_t k) {
  const int64_t group = w.group_of(k);
  const double code = decode_at(w.format, w.codes.row_bytes_at(n), k);
  return (code - w.zero_at(n, group)) * w.scale_at(n, group) + w.offset_at(n, group);
}

Verdict accepts(const Problem&) { return kYes; }

void launch(const Problem& p, const Launch&) {
  std::vector<double> column(p.n);
  for (int64_t k = 0; k < p.k; ++k) {
    for (int64_t n = 0; n < p.n; ++n) column[n] = weight_at(p.weight, n, k);
    for (int64_t m = 0; m < p.m; ++m) {
      double sum = 0;
      for (int64_t n = 0; n < p.n; ++n) sum += float_at(p.dy, m, n) * column[n];
      set_float(p.dx, m, k, static_cast<float>(sum));
    }
  }
}

}  // namespace

extern const Kernel<Problem> entry = {"linear_backward_ref", Target::reference, accepts,
                                      no_workspace<Problem>, launch};

}  // namespace quantfuse::linear_backward_ref
