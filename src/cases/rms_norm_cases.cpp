// SPDX-License-Identifier: Apache-2.0
//
// h = x + residual is one rounding to the type of x, defined to the bit. y = h * gain / sqrt(mean(h^2) +
// eps): the sum of squares has n positive terms, so its relative error is that of bounds.h with a sum of
// magnitudes equal to the sum itself; the root halves it. Reciprocal, root and the two products round once
// each. All of it is relative to |y|.
#include <cmath>

#include "cases/bounds.h"
#include "cases/describe.h"
#include "cases/operation_case.h"
#include "cases/test_cases.h"
#include "formats/hadamard.h"

namespace quantfuse::cases {
namespace {

constexpr Functions<qf_rms_norm_args> kFunctions = QF_CASE_FUNCTIONS(rms_norm);
constexpr double kEps = 1e-5;

class RmsNormCase final : public OperationCase<qf_rms_norm_args> {
 public:
  explicit RmsNormCase(const RmsNormSpec& spec) : OperationCase(kFunctions), spec_(spec) {
    const std::string out = out_word(spec.out_format, spec.out_mode, spec.out_group);
    scheme = Words().add(dtype_word(spec.dtype)).add(out).text();
    name = !spec.name.empty() ? spec.name
                              : Words()
                                    .add(scheme)
                                    .add(std::to_string(spec.m) + "x" + std::to_string(spec.n))
                                    .add_if(spec.has_residual, "residual")
                                    .add_if(!spec.has_gain, "no_gain")
                                    .add_if(spec.row_padding > 0, "padded")
                                    .add_if(spec.has_transposed_scale, "transposed_scale")
                                    .add_if(spec.hadamard > 0, "hadamard" + std::to_string(spec.hadamard))
                                    .add(data_word(spec.data))
                                    .text();
    m = spec.m, n = spec.n;
    flops = static_cast<double>(m) * static_cast<double>(n);

    const bool is_odd = spec.row_padding > 0;
    x_ = &add("x", Role::input, spec.dtype, {m, n}, spec.row_padding);
    if (spec.has_residual) residual_ = &add("residual", Role::in_out, spec.dtype, {m, n}, spec.row_padding);
    if (spec.has_gain) gain_ = &add("gain", Role::input, is_odd ? kF32 : spec.dtype, {n});
    out_ = add_output(spec, Role::output, m, n);
  }

 private:
  void fill(Random& random) override {
    fill_floats(*x_, random, spec_.data);
    if (residual_) fill_floats(*residual_, random, spec_.data == Data::huge ? Data::normal : spec_.data);
    if (gain_) fill_floats(*gain_, random, Data::normal);
    fill_static_scale(out_, 2.0);
  }

  qf_rms_norm_args args(int set) override {
    qf_rms_norm_args a = {};
    a.x = view(x_, set);
    a.residual = view(residual_, set);
    a.gain = view(gain_, set);
    a.eps = kEps;
    set_output(a, out_, set);
    a.hadamard = spec_.hadamard;
    return a;
  }

  void forget_oracle() override { has_oracle_ = false; }

  std::string compare() override {
    if (!has_oracle_) expect();
    has_oracle_ = true;
    if (residual_) {
      if (std::string wrong = compare_exactly(*residual_, residual_->reference_result()); !wrong.empty())
        return wrong;
    }
    return compare_output(out_, expected_);
  }

  void expect() {
    FloatMatrix y(m, n);
    run_reference_into(y, args(kReferenceSet));
    expected_ = {};
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        expected_.values.push_back(y.at(i, j));
        expected_.bounds.push_back(std::abs(y.at(i, j)) * (sum_bound(n, 1.0) / 2 + 5 * kUnitRoundoff) +
                                   0x1p-149);
      }
    }
    if (spec_.hadamard > 0) rotate_expected(expected_, spec_.hadamard);
  }

  RmsNormSpec spec_;
  Tensor *x_ = nullptr, *residual_ = nullptr, *gain_ = nullptr;
  Output out_;
  bool has_oracle_ = false;
  Expected expected_;
};

RmsNormSpec random_spec(Random& random) {
  RmsNormSpec s;
  s.dtype = random.pick({kF32, kF16, kBf16});
  s.has_residual = random.chance(50);
  s.has_gain = random.chance(75);
  s.out_format = random.pick({QF_FORMAT_NONE, QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2});
  s.out_mode = random.pick({QF_SCALE_DYNAMIC, QF_SCALE_DYNAMIC, QF_SCALE_STATIC});
  if (s.out_mode == QF_SCALE_DYNAMIC) s.out_group = random.pick<int64_t>({0, 0, 1, 5, 32, 33, 64, 128});
  s.m = random.pick<int64_t>({1, 2, 3, 17});
  s.n = random.pick<int64_t>(
      {1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 511, 512, 513, 1100});
  s.row_padding = random.pick<int64_t>({0, 0, 1, 5});
  s.data = random.pick({Data::normal, Data::normal, Data::outliers, Data::tiny, Data::huge, Data::zeros,
                        Data::constant, Data::with_nan_inf, Data::nan_in_row_1});
  // A NaN makes its row NaN: some rows without one must be left, or it would do to write nothing.
  if (s.data == Data::with_nan_inf && s.out_format == QF_FORMAT_NONE) s.data = Data::nan_in_row_1;
  s.has_transposed_scale = s.out_mode == QF_SCALE_DYNAMIC && random.chance(20);
  if (s.out_format != QF_FORMAT_NONE && random.chance(25)) s.hadamard = largest_hadamard(s.n);
  return s;
}

}  // namespace

CasePtr make_case(const RmsNormSpec& spec) { return std::make_unique<RmsNormCase>(spec); }

std::vector<CasePtr> rms_norm_test_cases() {
  CaseList list;
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>{0, 64}, {3, 0}, {1, 1}, {70, 4099}}) {
    RmsNormSpec s;
    s.m = m, s.n = n, s.has_residual = true;
    list.add(s);
    s.out_format = QF_INT8;
    list.add(s);
  }
  // Short rows, many to a block; rows in the registers of a block; rows that are longer than those.
  for (const int64_t n : {8, 64, 128, 512, 520, 1024, 4096, 8192, 14336, 16384, 20480, 32768, 40000, 70000}) {
    for (const qf_dtype dtype : {kBf16, kF32}) {
      RmsNormSpec s;
      s.m = n < 1000 ? 67 : 3, s.n = n, s.dtype = dtype, s.has_residual = true;
      list.add(s);
      s.out_format = QF_INT8;
      list.add(s);
      s.out_format = QF_FP8_E4M3, s.out_group = 128, s.has_residual = false;
      list.add(s);
      s.out_format = QF_FP8_E5M2, s.out_group = 0, s.hadamard = largest_hadamard(n);
      list.add(s);
    }
  }
  Random random(16);
  list.fill_up(500, [&] { return random_spec(random); });
  return list.take();
}

}  // namespace quantfuse::cases
