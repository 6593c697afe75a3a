// SPDX-License-Identifier: Apache-2.0
//
// A target that lies on the boundary between two codes may go either way, and every column after it then has
// another target. So codes are not compared with the reference's: they are judged by what GPTQ minimises,
// which is computed here from the codes themselves.
#include <cmath>

#include "cases/describe.h"
#include "cases/operation_case.h"
#include "cases/test_cases.h"

namespace quantfuse::cases {
namespace {

constexpr Functions<qf_gptq_quantize_args> kFunctions = QF_CASE_FUNCTIONS(gptq_quantize);

// A row that goes another way may end somewhat worse; all of them together do not.
constexpr double kWorseRow = 1.5, kWorseLayer = 1.1;
// Of float32 sums of up to k terms, squared and summed again: relative; and, where codes hit their targets
// exactly, of the squares of the weights' own rounding.
constexpr double kLossRounding = 1e-3, kWeightRounding = 1e-11;

std::string order_word(qf_act_order order) {
  return order == QF_ACT_ORDER_GROUP ? "act-order" : order == QF_ACT_ORDER_STATIC ? "static act-order" : "";
}

class GptqQuantizeCase final : public OperationCase<qf_gptq_quantize_args> {
 public:
  explicit GptqQuantizeCase(const GptqQuantizeSpec& spec) : OperationCase(kFunctions), spec_(spec) {
    scheme = Words()
                 .add(format_word(spec.format))
                 .add_if(spec.bits > 0, std::to_string(spec.bits) + " bits")
                 .add(group_word(spec.group))
                 .add_if(spec.is_asymmetric, "asym")
                 .add_if(spec.mode == QF_SCALE_MSE, "mse")
                 .add(order_word(spec.act_order))
                 .add(dtype_word(spec.dtype))
                 .text();
    name = Words()
               .add(scheme)
               .add(std::to_string(spec.n) + "x" + std::to_string(spec.k))
               .add_if(spec.damping > 0, "damping " + std::to_string(spec.damping))
               .add_if(spec.has_unseen_columns, "unseen columns")
               .add_if(spec.row_padding > 0, "padded")
               .text();
    m = spec.n, n = spec.k, k = spec.k;
    flops = static_cast<double>(m) * static_cast<double>(k) * static_cast<double>(k);
    const int64_t groups = k == 0 ? 0 : ceil_div(k, resolved(spec.group, k));
    const int64_t code_cols = row_bytes(spec.format, k);
    weight_ = &add("weight", Role::input, spec.dtype, {m, k}, spec.row_padding);
    hessian_ = &add("hessian", Role::input, kF32, {k, k}, spec.row_padding);
    q_ = &add("q", Role::output, code_dtype(spec.format), {m, code_cols}, spec.row_padding);
    scale_ = &add("scale", Role::output, kF32, {m, groups});
    if (spec.is_asymmetric) zero_ = &add("zero", Role::output, kI8, {m, groups});
    if (spec.act_order == QF_ACT_ORDER_GROUP) g_idx_ = &add("g_idx", Role::output, kI32, {k});
    loss_ = &add("loss", Role::output, kF32, {m});
  }

 private:
  // Inputs that share a few causes: half of their variance is common to all columns.
  void fill(Random& random) override {
    fill_floats(*weight_, random, Data::normal, 0.1);
    const int64_t inputs = 2 * k + 8;
    std::vector<double> sums(static_cast<size_t>(k * k));
    std::vector<double> x(static_cast<size_t>(k)), size(static_cast<size_t>(k));
    for (int64_t c = 0; c < k; ++c) size[c] = std::exp(random.normal());
    for (int64_t c = 0; c < k; ++c) {
      if (spec_.has_unseen_columns && c % 5 == 2) size[c] = 0;
    }
    for (int64_t t = 0; t < inputs; ++t) {
      const double common = random.normal();
      for (int64_t c = 0; c < k; ++c) x[c] = size[c] * (common + random.normal());
      for (int64_t a = 0; a < k; ++a) {
        for (int64_t b = 0; b <= a; ++b) sums[a * k + b] += x[a] * x[b];
      }
    }
    for (int64_t a = 0; a < k; ++a) {
      for (int64_t b = 0; b < k; ++b) hessian_->initial().set(a, b, sums[a >= b ? a * k + b : b * k + a]);
    }
  }

  qf_gptq_quantize_args args(int set) override {
    qf_gptq_quantize_args a = {};
    a.weight = view(weight_, set);
    a.hessian = view(hessian_, set);
    a.format = spec_.format;
    a.bits = spec_.bits;
    a.group = spec_.group;
    a.scale_mode = spec_.mode;
    a.act_order = spec_.act_order;
    a.damping = spec_.damping;
    a.q = view(q_, set);
    a.scale = view(scale_, set);
    a.zero = view(zero_, set);
    a.g_idx = view(g_idx_, set);
    a.loss = view(loss_, set);
    return a;
  }

  void forget_oracle() override { has_oracle_ = false; }

  std::string compare() override {
    if (!has_oracle_) run_reference(args(kReferenceSet));
    has_oracle_ = true;
    if (g_idx_) {
      if (std::string wrong = compare_exactly(*g_idx_, g_idx_->reference_result()); !wrong.empty())
        return wrong;
    }
    const Image expected = loss_->reference_result();
    double total = 0, expected_total = 0, noise = 0;
    for (int64_t r = 0; r < m; ++r) {
      const double loss = loss_of_row(r), reported = loss_->result().value(r), best = expected.value(r);
      const double rounding = kLossRounding * best + kWeightRounding * weight_of_row(r);
      if (!(std::abs(loss - reported) <= rounding + kLossRounding * loss)) {
        return "row " + std::to_string(r) + " reports a loss of " + std::to_string(reported) +
               ", and its codes have " + std::to_string(loss);
      }
      if (!(loss <= kWorseRow * best + rounding)) {
        return "row " + std::to_string(r) + " has a loss of " + std::to_string(loss) + ", the reference " +
               std::to_string(best);
      }
      total += loss, expected_total += best, noise += rounding;
    }
    if (!(total <= kWorseLayer * expected_total + noise)) {
      return "the loss is " + std::to_string(total) + ", the reference's " + std::to_string(expected_total);
    }
    return "";
  }

  // The squares of a row's weights, each times its hessian[c,c].
  double weight_of_row(int64_t r) const {
    double sum = 0;
    for (int64_t c = 0; c < k; ++c)
      sum += hessian_->initial().value(c, c) * std::pow(weight_->initial().value(r, c), 2);
    return sum;
  }

  // (w - v) H (w - v)^T with the damping that the kernel adds.
  double loss_of_row(int64_t r) const {
    double mean = 0;
    for (int64_t c = 0; c < k; ++c) mean += hessian_->initial().value(c, c) / static_cast<double>(k);
    const double damping = (spec_.damping > 0 ? spec_.damping : 0.01) * mean;
    std::vector<double> d(static_cast<size_t>(k));
    for (int64_t c = 0; c < k; ++c) {
      const int64_t g =
          g_idx_ ? static_cast<int64_t>(g_idx_->result().value(c)) : c / resolved(spec_.group, k);
      const double zero = zero_ ? zero_->result().value(r, g) : 0;
      const double code = decode_at(spec_.format, q_->result().row(r), c);
      d[c] = weight_->initial().value(r, c) - (code - zero) * scale_->result().value(r, g);
    }
    double loss = 0;
    for (int64_t a = 0; a < k; ++a) {
      const double diagonal = hessian_->initial().value(a, a);
      double sum = (diagonal == 0 ? mean : damping) * d[a];
      for (int64_t b = 0; b < k; ++b) sum += hessian_->initial().value(a, b) * d[b];
      loss += sum * d[a];
    }
    return loss;
  }

  GptqQuantizeSpec spec_;
  Tensor *weight_ = nullptr, *hessian_ = nullptr, *q_ = nullptr, *scale_ = nullptr, *zero_ = nullptr;
  Tensor *g_idx_ = nullptr, *loss_ = nullptr;
  bool has_oracle_ = false;
};

GptqQuantizeSpec random_spec(Random& random) {
  GptqQuantizeSpec s;
  s.format = random.pick({QF_INT4, QF_INT4, QF_INT8});
  s.bits = random.pick({0, 0, 2, 3, s.format == QF_INT8 ? 6 : 4});
  s.group = random.pick<int64_t>({0, 1, 3, 16, 32, 33, 64, 100, 128, 129, 200});
  s.mode = random.pick({QF_SCALE_DYNAMIC, QF_SCALE_DYNAMIC, QF_SCALE_MSE});
  s.act_order = random.pick({QF_ACT_ORDER_NONE, QF_ACT_ORDER_NONE, QF_ACT_ORDER_GROUP, QF_ACT_ORDER_STATIC});
  s.damping = random.pick({0.0, 0.0, 0.1, 1e-4});
  s.is_asymmetric = random.chance(40);
  s.has_unseen_columns = random.chance(20);
  s.dtype = random.pick({kF32, kF16, kBf16});
  s.n = random.pick<int64_t>({1, 2, 5, 6, 7, 13, 33});
  s.k = random.pick<int64_t>({1, 2, 3, 16, 31, 32, 33, 64, 100, 127, 128, 129, 150});
  s.row_padding = random.pick<int64_t>({0, 0, 1, 5});
  return s;
}

}  // namespace

CasePtr make_case(const GptqQuantizeSpec& spec) { return std::make_unique<GptqQuantizeCase>(spec); }

std::vector<CasePtr> gptq_quantize_test_cases() {
  CaseList list;
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{0, 64}, {3, 0}, {0, 0}}) {
    GptqQuantizeSpec s;
    s.n = n, s.k = k, s.group = 32;
    list.add(s);
  }
  // More columns than the blocks of the factorisation and of the sums hold, groups wider than a block.
  for (const int64_t group : {128, 256, 260, 0}) {
    GptqQuantizeSpec s;
    s.n = 9, s.k = 390, s.group = group;
    list.add(s);
    s.act_order = QF_ACT_ORDER_GROUP;
    list.add(s);
  }
  Random random(21);
  list.fill_up(200, [&] { return random_spec(random); });
  return list.take();
}

}  // namespace quantfuse::cases
