// SPDX-License-Identifier: Apache-2.0
//
// The formula as written, from the canonical weight, accumulated in double. The oracle of every other linear
// kernel.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/dot_products.h"
#include "cpu/scalar.h"
#include "linear/linear.h"

namespace quantfuse::linear_ref {
using linear::Problem;
namespace {

void input_row(const Problem& p, int64_t r, double* x) {
  const char* row = p.x.row_bytes_at(r);
  for (int64_t k0 = 0; k0 < p.k; k0 += p.act_group) {
    const int64_t k1 = std::min(k0 + p.act_group, p.k);
    if (p.x_scale) {
      const double scale = p.x_scale.row<const float>(r)[k0 / p.act_group];
      for (int64_t k = k0; k < k1; ++k) x[k] = decode_at(p.act_format, row, k) * scale;
    } else if (p.has_act_quant()) {
      float amax = 0;
      for (int64_t k = k0; k < k1; ++k) {
        const float a = std::fabs(float_at(row, p.x.dtype, k));
        if (a > amax) amax = a;
      }
      const float scale = scale_from_amax(amax, code_range(p.act_format).symmetric_max);
      for (int64_t k = k0; k < k1; ++k) {
        const uint8_t code = encode_value(p.act_format, float_at(row, p.x.dtype, k) * (1.0f / scale), 0);
        x[k] = decode_at(p.act_format, &code, 0) * static_cast<double>(scale);
      }
    } else {
      for (int64_t k = k0; k < k1; ++k) x[k] = float_at(row, p.x.dtype, k);
    }
  }
  if (p.x_gain) {
    double squares = 0;
    for (int64_t k = 0; k < p.k; ++k) squares += x[k] * x[k];
    const double inverse = 1 / std::sqrt(squares / static_cast<double>(p.k) + p.x_eps);
    for (int64_t k = 0; k < p.k; ++k) x[k] *= inverse * float_at(p.x_gain, k);
  }
}

std::vector<double> weight_row(const Weight& w, int64_t n) {
  std::vector<double> row(w.k);
  const char* codes = w.codes.row_bytes_at(n);
  for (int64_t k = 0; k < w.k; ++k) {
    const int64_t g = w.group_of(k);
    const double code = is_plain(w.format) ? float_at(w.codes, n, k) : decode_at(w.format, codes, k);
    row[k] = (code - w.zero_at(n, g)) * w.scale_at(n, g) + w.offset_at(n, g);
  }
  return row;
}

Verdict accepts(const Problem& p) {
  return Requirements().require(static_cast<bool>(p.weight.codes),
                                "reads the canonical weight, and only the packed one is given");
}

void launch(const Problem& p, const Launch&) {
  check_weight_values(Arguments("linear", true), p.weight);
  std::vector<double> x(p.m * p.k), sums(p.m);
  for (int64_t m = 0; m < p.m; ++m) input_row(p, m, x.data() + m * p.k);

  std::vector<std::vector<double>> z(p.m, std::vector<double>(p.n));  // x w^T + bias
  for (int64_t n = 0; n < p.n; ++n) {
    dot_products(x.data(), p.m, p.k, weight_row(p.weight, n).data(), sums.data());
    const double bias = p.bias ? float_at(p.bias, n) : 0.0;
    for (int64_t m = 0; m < p.m; ++m) z[m][n] = sums[m] + bias;
  }
  std::vector<float> y(p.n_out);
  for (int64_t m = 0; m < p.m; ++m) {
    for (int64_t n = 0; n < p.n_out; ++n) {
      double v = activate_scalar(p.activation, z[m][n]);
      if (p.weight.is_gated) v *= z[m][p.n_out + n];
      if (p.residual) v += float_at(p.residual, m, n);
      y[n] = static_cast<float>(v);
    }
    store_output_scalar(p.out, m, y.data());
  }
}

}  // namespace

extern const Kernel<Problem> entry = {"linear_ref",
                                      Target::reference,
                                      accepts,
                                      no_workspace<Problem>,
                                      launch,
                                      /*is_batch_invariant=*/true,
                                      /*normalizes_x=*/true};

}  // namespace quantfuse::linear_ref
