// SPDX-License-Identifier: Apache-2.0
//
// act(gate) * up: the approximation of the activation (bounds.h, activation_bound) and the rounding of the
// product.
#include <cmath>

#include "cases/bounds.h"
#include "cases/describe.h"
#include "cases/operation_case.h"
#include "cases/test_cases.h"
#include "formats/hadamard.h"

namespace quantfuse::cases {
namespace {

constexpr Functions<qf_gated_act_args> kFunctions = QF_CASE_FUNCTIONS(gated_act);

class GatedActCase final : public OperationCase<qf_gated_act_args> {
 public:
  explicit GatedActCase(const GatedActSpec& spec) : OperationCase(kFunctions), spec_(spec) {
    const std::string out = out_word(spec.out_format, spec.out_mode, spec.out_group);
    const std::string activation =
        spec.activation == QF_IDENTITY ? "identity" : activation_word(spec.activation);
    scheme = Words()
                 .add(activation)
                 .add_if(spec.is_ungated, "ungated")
                 .add(dtype_word(spec.dtype))
                 .add(out)
                 .text();
    name = !spec.name.empty() ? spec.name
                              : Words()
                                    .add(scheme)
                                    .add(std::to_string(spec.m) + "x" + std::to_string(spec.n))
                                    .add_if(spec.row_padding > 0, "padded")
                                    .add_if(spec.has_transposed_scale, "transposed_scale")
                                    .add_if(spec.hadamard > 0, "hadamard" + std::to_string(spec.hadamard))
                                    .add(data_word(spec.data))
                                    .text();
    m = spec.m, n = spec.n;
    flops = static_cast<double>(m) * static_cast<double>(n);

    x_ = &add("x", Role::input, spec.dtype, {m, spec.is_ungated ? n : 2 * n}, spec.row_padding);
    out_ = add_output(spec, Role::output, m, n);
  }

 private:
  void fill(Random& random) override {
    fill_floats(*x_, random, spec_.data, 2.0);
    fill_static_scale(out_, 4.0);
  }

  qf_gated_act_args args(int set) override {
    qf_gated_act_args a = {};
    a.x = view(x_, set);
    a.activation = spec_.activation;
    set_output(a, out_, set);
    a.is_ungated = spec_.is_ungated;
    a.hadamard = spec_.hadamard;
    return a;
  }

  void forget_oracle() override { has_oracle_ = false; }

  std::string compare() override {
    if (!has_oracle_) expect();
    has_oracle_ = true;
    return compare_output(out_, expected_);
  }

  void expect() {
    FloatMatrix y(m, n);
    run_reference_into(y, args(kReferenceSet));
    expected_ = {};
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const double gate = x_->initial().value(i, j);
        const double up = spec_.is_ungated ? 1.0 : x_->initial().value(i, n + j);
        const double bound = activation_bound(spec_.activation, gate, 0);
        expected_.values.push_back(y.at(i, j));
        // The last part: a factor below 2^-126 may lose all its bits.
        expected_.bounds.push_back(product_bound(activate(spec_.activation, gate), bound, up, 0) +
                                   0x1p-126 * std::abs(up) + 0x1p-149);
      }
    }
    if (spec_.hadamard > 0) rotate_expected(expected_, spec_.hadamard);
  }

  GatedActSpec spec_;
  Tensor* x_ = nullptr;
  Output out_;
  bool has_oracle_ = false;
  Expected expected_;
};

GatedActSpec random_spec(Random& random) {
  GatedActSpec s;
  s.dtype = random.pick({kF32, kF16, kBf16});
  s.activation = random.pick({QF_IDENTITY, QF_RELU, QF_GELU, QF_GELU_TANH, QF_SILU, QF_SILU});
  s.out_format = random.pick({QF_FORMAT_NONE, QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2});
  s.out_mode = random.pick({QF_SCALE_DYNAMIC, QF_SCALE_DYNAMIC, QF_SCALE_STATIC});
  if (s.out_mode == QF_SCALE_DYNAMIC) s.out_group = random.pick<int64_t>({0, 0, 1, 5, 32, 33, 64, 128});
  s.m = random.pick<int64_t>({1, 2, 3, 17});
  s.n = random.pick<int64_t>(
      {1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 513, 1100});
  s.row_padding = random.pick<int64_t>({0, 0, 1, 5});
  s.data = random.pick({Data::normal, Data::normal, Data::outliers, Data::tiny, Data::zeros, Data::constant,
                        Data::with_nan_inf, Data::nan_in_row_1});
  s.is_ungated = random.chance(30);
  s.has_transposed_scale = s.out_mode == QF_SCALE_DYNAMIC && random.chance(20);
  if (s.out_format != QF_FORMAT_NONE && random.chance(25)) s.hadamard = largest_hadamard(s.n);
  return s;
}

}  // namespace

CasePtr make_case(const GatedActSpec& spec) { return std::make_unique<GatedActCase>(spec); }

std::vector<CasePtr> gated_act_test_cases() {
  CaseList list;
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>{0, 64}, {3, 0}, {1, 1}, {70, 4099}}) {
    GatedActSpec s;
    s.m = m, s.n = n;
    list.add(s);
    s.out_format = QF_INT8;
    list.add(s);
  }
  // Numbers whose product leaves the type: to infinity where the output is a float.
  for (const qf_dtype dtype : {kF32, kF16, kBf16}) {
    GatedActSpec s;
    s.dtype = dtype, s.data = Data::huge, s.m = 3, s.n = 77;
    list.add(s);
  }
  // Short rows, many to a block; pieces of rows; whole rows in registers; rows that are longer than those.
  for (const int64_t n : {8, 64, 128, 512, 520, 1024, 4096, 8192, 14336, 16384, 32768, 40000, 70000}) {
    for (const qf_dtype dtype : {kBf16, kF32}) {
      GatedActSpec s;
      s.m = n < 1000 ? 67 : 3, s.n = n, s.dtype = dtype;
      list.add(s);
      s.out_format = QF_FP8_E4M3, s.out_mode = QF_SCALE_STATIC;
      list.add(s);
      s.out_mode = QF_SCALE_DYNAMIC;
      list.add(s);
      s.out_group = 128;
      list.add(s);
      s.out_format = QF_INT8, s.is_ungated = true, s.activation = QF_GELU;
      list.add(s);
      s.out_group = 0, s.hadamard = largest_hadamard(n);
      list.add(s);
    }
  }
  Random random(17);
  list.fill_up(500, [&] { return random_spec(random); });
  return list.take();
}

}  // namespace quantfuse::cases
