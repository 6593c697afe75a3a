// SPDX-License-Identifier: Apache-2.0
//
// The formulas of gptq_quantize.h as written, in double, one number at a time.
#include <cmath>
#include <vector>

#include "core/element.h"
#include "gptq_quantize/gptq_quantize.h"

namespace quantfuse::gptq_quantize_ref {
using namespace gptq_quantize;
using quantize::Quantizer;
namespace {

class Reference {
 public:
  explicit Reference(const Problem& p) : p_(p), order_(p.k), r_(p.k * p.k), errors_(p.k) {}

  void run() {
    find_order(p_, order_.data());
    factor();
    write_g_idx(p_, order_.data());
    for (int64_t row = 0; row < p_.n; ++row) round_row(row);
  }

 private:
  double& r(int64_t i, int64_t j) { return r_[i * p_.k + j]; }

  // H = R R^T, from the last column to the first.
  void factor() {
    const Diagonal diagonal = diagonal_of(p_);
    for (int64_t j = p_.k - 1; j >= 0; --j) {
      for (int64_t i = j; i >= 0; --i) {
        const int64_t a = order_[i], b = order_[j];
        double sum = i == j ? diagonal.at(p_, a) : p_.hessian.row<const float>(a)[b];
        if (i != j && (diagonal.is_unseen(p_, a) || diagonal.is_unseen(p_, b))) sum = 0;
        for (int64_t m = j + 1; m < p_.k; ++m) sum -= r(i, m) * r(j, m);
        if (i == j && !(sum >= kSmallestPivot * diagonal.at(p_, a))) fail_not_positive_definite(p_, a);
        r(i, j) = i == j ? std::sqrt(sum) : sum / r(j, j);
      }
    }
  }

  double weight(int64_t row, int64_t i) const { return float_at(p_.weight, row, order_[i]); }

  // What column i is rounded from, after the errors of all columns before it.
  double target(int64_t row, int64_t i) {
    double sum = 0;
    for (int64_t j = 0; j < i; ++j) sum += r(j, i) * errors_[j];
    return weight(row, i) + sum / r(i, i);
  }

  Quantizer quantizer_of(const std::vector<float>& values) const {
    float low = 0, high = 0;
    for (const float v : values) low = v < low ? v : low, high = v > high ? v : high;
    Quantizer best;
    double least = INFINITY;
    for (int step = 0; step < (p_.is_mse ? quantize::kSearchSteps : 1); ++step) {
      const float shrink = quantize::shrink_factor(step);
      const Quantizer z = quantizer_from_range(p_.kind(), p_.range, shrink * low, shrink * high);
      double error = 0;
      for (const float v : values) error += std::pow(value_of(z, code_of(z, v)) - v, 2);
      if (error < least) least = error, best = z;
    }
    return best;
  }
  int code_of(const Quantizer& z, double v) const {
    const int code = round_saturate(static_cast<float>(v) * (1.0f / z.scale), -512, 512) + z.zero;
    return code < p_.range.lowest ? p_.range.lowest : code > p_.range.highest ? p_.range.highest : code;
  }
  static float value_of(const Quantizer& z, int code) { return static_cast<float>(code - z.zero) * z.scale; }

  // The columns of a group before any of them is rounded: as given, or as changed by the errors so far.
  std::vector<float> group_values(int64_t row, int64_t first) {
    std::vector<float> values;
    const int64_t last = p_.k - first < p_.group ? p_.k : first + p_.group;
    for (int64_t i = first; i < last; ++i) {
      if (p_.act_order == QF_ACT_ORDER_STATIC) {
        values.push_back(float_at(p_.weight, row, i));
      } else if (p_.has_static_groups()) {
        values.push_back(static_cast<float>(weight(row, i)));
      } else {
        values.push_back(static_cast<float>(target(row, i)));
        errors_[i] = weight(row, i) - target(row, i);
      }
    }
    return values;
  }

  void round_row(int64_t row) {
    std::vector<Quantizer> quantizers(p_.groups);
    if (p_.has_static_groups()) {
      for (int64_t g = 0; g < p_.groups; ++g) quantizers[g] = quantizer_of(group_values(row, g * p_.group));
    }
    std::vector<int> codes(p_.k);
    double loss = 0;
    for (int64_t i = 0; i < p_.k; ++i) {
      Quantizer& z = quantizers[p_.group_of(i, order_.data())];
      if (!p_.has_static_groups() && i % p_.group == 0) z = quantizer_of(group_values(row, i));
      const double t = target(row, i);
      const int code = codes[order_[i]] = code_of(z, t);
      errors_[i] = weight(row, i) - value_of(z, code);
      loss += std::pow(r(i, i) * (t - value_of(z, code)), 2);
    }
    for (int64_t c = 0; c < p_.k; ++c)
      store_code(p_.format, p_.q.row_bytes_at(row), c,
                 static_cast<uint8_t>(p_.format == QF_INT4 ? codes[c] & 15 : codes[c]));
    for (int64_t g = 0; g < p_.groups; ++g) {
      p_.scale.row<float>(row)[g] = quantizers[g].scale;
      if (p_.zero) p_.zero.row<int8_t>(row)[g] = static_cast<int8_t>(quantizers[g].zero);
    }
    if (p_.loss) p_.loss.as<float>()[row] = static_cast<float>(loss);
  }

  const Problem& p_;
  std::vector<int32_t> order_;
  std::vector<double> r_;       // [k, k]
  std::vector<double> errors_;  // [k], of the row at hand
};

Verdict accepts(const Problem&) { return kYes; }
void launch(const Problem& p, const Launch&) { Reference(p).run(); }

}  // namespace

extern const Kernel<Problem> entry = {"gptq_quantize_ref", Target::reference, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::gptq_quantize_ref
