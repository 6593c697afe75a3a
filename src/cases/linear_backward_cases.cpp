// SPDX-License-Identifier: Apache-2.0
//
// dx[m,k] is a sum of n products: bounds.h, sum_bound.
#include <algorithm>
#include <cmath>

#include "cases/bounds.h"
#include "cases/describe.h"
#include "cases/operation_case.h"
#include "cases/test_cases.h"
#include "cases/weight.h"

namespace quantfuse::cases {
namespace {

constexpr Functions<qf_linear_backward_args> kFunctions = QF_CASE_FUNCTIONS(linear_backward);

class LinearBackwardCase final : public OperationCase<qf_linear_backward_args> {
 public:
  explicit LinearBackwardCase(const LinearBackwardSpec& spec) : OperationCase(kFunctions), spec_(spec) {
    scheme = Words().add(weight_word(spec.weight)).add(dtype_word(spec.dtype)).text();
    const std::string size =
        std::to_string(spec.m) + "x" + std::to_string(spec.n) + "x" + std::to_string(spec.k);
    name = !spec.name.empty() ? spec.name : Words().add(scheme).add(size).text();
    m = spec.m, n = spec.n, k = spec.k;
    flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
    // Odd sizes get odd views.
    const int64_t row_padding = k % 2 != 0 ? 3 : 0;
    dy_ = &add("dy", Role::input, spec.dtype, {m, n}, row_padding);
    weight_ = CanonicalWeight(spec.weight, n, k, row_padding, [this](auto&&... arguments) -> Tensor& {
      return add(std::forward<decltype(arguments)>(arguments)...);
    });
    dx_ = &add("dx", Role::output, spec.dtype, {m, k}, row_padding);
  }

 private:
  void fill(Random& random) override {
    fill_floats(*dy_, random, Data::normal);
    weight_.fill(random, 1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(n, 1))));
  }

  qf_linear_backward_args args(int set) override {
    qf_linear_backward_args a = {};
    a.dy = view(dy_, set);
    a.weight = weight_.view(set, device);
    a.dx = view(dx_, set);
    return a;
  }

  void forget_oracle() override { has_oracle_ = false; }

  std::string compare() override {
    if (!has_oracle_) expect();
    has_oracle_ = true;
    return compare_floats(*dx_, expected_);
  }

  void expect() {
    FloatMatrix dx(m, k);
    qf_linear_backward_args a = args(kReferenceSet);
    a.dx = &dx.view;
    run_reference(a);
    const std::vector<double> w = weight_.magnitudes();
    expected_ = {};
    for (int64_t i = 0; i < m; ++i) {
      std::vector<double> sums(static_cast<size_t>(k));
      for (int64_t j = 0; j < n; ++j) {
        const double size = std::abs(dy_->initial().value(i, j));
        for (int64_t t = 0; t < k; ++t)
          sums[static_cast<size_t>(t)] += size * w[static_cast<size_t>(j * k + t)];
      }
      for (int64_t t = 0; t < k; ++t) {
        expected_.values.push_back(dx.at(i, t));
        expected_.bounds.push_back(sum_bound(n, sums[static_cast<size_t>(t)]));
      }
    }
  }

  LinearBackwardSpec spec_;
  CanonicalWeight weight_;
  Tensor *dy_ = nullptr, *dx_ = nullptr;
  bool has_oracle_ = false;
  Expected expected_;
};

LinearBackwardSpec random_spec(Random& random) {
  LinearBackwardSpec s;
  s.weight = random_weight(random);
  s.dtype = random.pick({kF32, kF16, kBf16});
  s.m = random.pick<int64_t>({1, 2, 3, 5, 8, 17});
  s.n = random.pick<int64_t>({1, 2, 3, 7, 16, 17, 32, 33, 64, 65, 129});
  s.k = random.pick<int64_t>({1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 300});
  return s;
}

}  // namespace

CasePtr make_case(const LinearBackwardSpec& spec) { return std::make_unique<LinearBackwardCase>(spec); }

std::vector<CasePtr> linear_backward_test_cases() {
  CaseList list;
  for (const auto& size :
       std::vector<std::vector<int64_t>>{{0, 8, 8}, {3, 0, 8}, {3, 8, 0}, {1, 1, 1}, {40, 200, 520}}) {
    LinearBackwardSpec s;
    s.m = size[0], s.n = size[1], s.k = size[2];
    list.add(s);
  }
  Random random(15);
  list.fill_up(150, [&] { return random_spec(random); });
  return list.take();
}

}  // namespace quantfuse::cases
