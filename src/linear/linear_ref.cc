// SPDX-License-Identifier: Apache-2.0
//
// The formula as written, from the canonical weight, accumulated in double. The oracle of every other linear
// kernel.
#include <algorithm>
#include <cmath>
#include <vector>

#include "linear/linear.h"

namespace quantfuse::linear_ref {
using linear::Problem;
namespace {

float float_at(DType dtype, const void* row, int64_t i) {
  switch (dtype) {
    case DType::f32: return static_cast<const float*>(row)[i];
    case DType::f16: return to_float(static_cast<const f16*>(row)[i]);
    default: return to_float(static_cast<const bf16*>(row)[i]);
  }
}

void store_float(DType dtype, void* row, int64_t i, float v) {
  switch (dtype) {
    case DType::f32: static_cast<float*>(row)[i] = v; break;
    case DType::f16: from_float(v, static_cast<f16*>(row)[i]); break;
    default: from_float(v, static_cast<bf16*>(row)[i]);
  }
}

// Row r of x as the product sees it: after quantization, where there is any.
std::vector<double> input_row(const Problem& p, int64_t r) {
  std::vector<double> x(p.k);
  const char* row = p.x.row_bytes_at(r);
  for (int64_t k0 = 0; k0 < p.k; k0 += p.act_group) {
    const int64_t k1 = std::min(k0 + p.act_group, p.k);
    if (p.x_scale) {
      const double scale = p.x_scale.row<const float>(r)[k0 / p.act_group];
      for (int64_t k = k0; k < k1; ++k) x[k] = decode_at(p.act_format, row, k) * scale;
    } else if (p.has_act_quant()) {
      float amax = 0;
      for (int64_t k = k0; k < k1; ++k) {
        const float a = std::fabs(float_at(p.x.dtype, row, k));
        if (a > amax) amax = a;
      }
      const float scale = scale_from_amax(amax, code_range(p.act_format).symmetric_max);
      for (int64_t k = k0; k < k1; ++k) {
        const uint8_t code = encode_value(p.act_format, float_at(p.x.dtype, row, k) * (1.0f / scale), 0);
        x[k] = decode_at(p.act_format, &code, 0) * static_cast<double>(scale);
      }
    } else {
      for (int64_t k = k0; k < k1; ++k) x[k] = float_at(p.x.dtype, row, k);
    }
  }
  return x;
}

std::vector<double> weight_row(const Weight& w, int64_t n) {
  std::vector<double> row(w.k);
  const char* codes = w.codes.row_bytes_at(n);
  for (int64_t k = 0; k < w.k; ++k) {
    const int64_t g = w.group_of(k);
    row[k] = (static_cast<double>(decode_at(w.format, codes, k)) - w.zero_at(n, g)) * w.scale_at(n, g);
  }
  return row;
}

double activate(qf_activation kind, double x) {
  switch (kind) {
    case QF_RELU: return x < 0 ? 0 : x;
    case QF_GELU: return 0.5 * x * (1 + std::erf(x * 0.70710678118654752));
    case QF_GELU_TANH: return 0.5 * x * (1 + std::tanh(0.79788456080286536 * (x + 0.044715 * x * x * x)));
    case QF_SILU: return x / (1 + std::exp(-x));
    default: return x;
  }
}

void store_row(const Problem& p, int64_t r, const std::vector<double>& values) {
  const Output& out = p.out;
  if (!out.is_quantized()) {
    for (int64_t n = 0; n < p.n_out; ++n)
      store_float(out.y.dtype, out.y.row_bytes_at(r), n, static_cast<float>(values[n]));
    return;
  }
  for (int64_t n0 = 0; n0 < p.n_out; n0 += out.group) {
    const int64_t n1 = std::min(n0 + out.group, p.n_out);
    float scale = *static_cast<const float*>(out.scale.data);
    if (!out.is_static) {
      float amax = 0;
      for (int64_t n = n0; n < n1; ++n) amax = std::max(amax, std::fabs(static_cast<float>(values[n])));
      scale = scale_from_amax(amax, code_range(out.format).symmetric_max);
      out.scale.row<float>(r)[n0 / out.group] = scale;
    }
    for (int64_t n = n0; n < n1; ++n) {
      store_code(out.format, out.y.row_bytes_at(r), n,
                 encode_value(out.format, static_cast<float>(values[n]) * (1.0f / scale), 0));
    }
  }
}

Verdict accepts(const Problem& p) {
  return Requirements().require(static_cast<bool>(p.weight.codes),
                                "reads the canonical weight, and only the packed one is given");
}

void launch(const Problem& p, const Launch&) {
  check_weight_values(Arguments("linear", true), p.weight);
  std::vector<std::vector<double>> x(p.m);
  for (int64_t m = 0; m < p.m; ++m) x[m] = input_row(p, m);

  std::vector<std::vector<double>> z(p.m, std::vector<double>(p.n));  // x w^T + bias
  for (int64_t n = 0; n < p.n; ++n) {
    const std::vector<double> w = weight_row(p.weight, n);
    const double bias = p.bias ? float_at(p.bias.dtype, p.bias.data, n) : 0.0;
    for (int64_t m = 0; m < p.m; ++m) {
      double sum = 0;
      for (int64_t k = 0; k < p.k; ++k) sum += x[m][k] * w[k];
      z[m][n] = sum + bias;
    }
  }
  std::vector<double> y(p.n_out);
  for (int64_t m = 0; m < p.m; ++m) {
    for (int64_t n = 0; n < p.n_out; ++n) {
      y[n] = activate(p.activation, z[m][n]);
      if (p.weight.is_gated) y[n] *= z[m][p.n_out + n];
      if (p.residual) y[n] += float_at(p.residual.dtype, p.residual.row_bytes_at(m), n);
    }
    store_row(p, m, y);
  }
}

}  // namespace

extern const Kernel<Problem> entry = {"linear_ref", Target::reference, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::linear_ref
