// SPDX-License-Identifier: Apache-2.0
//
// (q - zero) * scale + offset in float32, rounded to the type of x: defined to the bit (bounds.h, rule 1).
#include "cases/describe.h"
#include "cases/operation_case.h"
#include "cases/test_cases.h"
#include "cases/weight.h"

namespace quantfuse::cases {
namespace {

constexpr std::initializer_list<qf_format> kFormats = {QF_INT8,     QF_INT4, QF_FP8_E4M3, QF_FP8_E5M2,
                                                       QF_FP4_E2M1, QF_NF4,  QF_FP4_BNB,  QF_IQ4_NL};
constexpr Functions<qf_dequantize_args> kFunctions = QF_CASE_FUNCTIONS(dequantize);

class DequantizeCase final : public OperationCase<qf_dequantize_args> {
 public:
  explicit DequantizeCase(const DequantizeSpec& spec) : OperationCase(kFunctions), spec_(spec) {
    const WeightSpec weight = {
        spec.format,    spec.block, spec.has_e8m0_scale, spec.is_asymmetric, spec.has_float_zero,
        spec.has_g_idx, false,      spec.has_offset};
    scheme = Words().add(weight_word(weight)).add(dtype_word(spec.dtype)).text();
    name = !spec.name.empty() ? spec.name
                              : Words()
                                    .add(scheme)
                                    .add(std::to_string(spec.rows) + "x" + std::to_string(spec.cols))
                                    .add_if(spec.row_padding > 0, "padded")
                                    .text();
    m = spec.rows, n = spec.cols;
    flops = static_cast<double>(m) * static_cast<double>(n);
    codes_ = CanonicalWeight(weight, m, n, spec.row_padding, [this](auto&&... arguments) -> Tensor& {
      return add(std::forward<decltype(arguments)>(arguments)...);
    });
    x_ = &add("x", Role::output, spec.dtype, {m, n}, spec.row_padding);
  }

 private:
  void fill(Random& random) override { codes_.fill(random, 1.0); }

  qf_dequantize_args args(int set) override {
    const qf_weight w = codes_.view(set, device);
    qf_dequantize_args a = {};
    a.q = w.codes;
    a.format = w.format;
    a.block = w.block;
    a.scale = w.scale;
    a.zero = w.zero;
    a.offset = w.offset;
    a.g_idx = w.g_idx;
    a.x = view(x_, set);
    return a;
  }

  void forget_oracle() override { has_oracle_ = false; }

  std::string compare() override {
    if (!has_oracle_) run_reference(args(kReferenceSet));
    has_oracle_ = true;
    return compare_exactly(*x_, x_->reference_result());
  }

  DequantizeSpec spec_;
  CanonicalWeight codes_;
  Tensor* x_ = nullptr;
  bool has_oracle_ = false;
};

DequantizeSpec random_spec(Random& random) {
  DequantizeSpec s;
  s.format = random.pick(kFormats);
  const int64_t group = random.pick<int64_t>({1, 3, 5, 16, 32, 33, 64, 100, 128});
  s.block = random.pick<qf_block>(
      {{1, 0}, {1, group}, {1, group}, {1, group}, {0, 0}, {0, 1}, {128, 128}, {2, 7}, {0, group}});
  s.dtype = random.pick({kF32, kF16, kBf16});
  s.rows = random.pick<int64_t>({1, 2, 3, 5, 8, 17, 33, 130});
  s.cols = random.pick<int64_t>(
      {1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 255, 300});
  s.has_e8m0_scale = random.chance(25);
  s.is_asymmetric = is_integer(s.format) && random.chance(50);
  s.has_float_zero = s.is_asymmetric && random.chance(40);
  s.has_g_idx = random.chance(25);
  s.has_offset = is_integer(s.format) && random.chance(35);
  s.row_padding = random.pick<int64_t>({0, 0, 1, 5});
  return s;
}

}  // namespace

CasePtr make_case(const DequantizeSpec& spec) { return std::make_unique<DequantizeCase>(spec); }

std::vector<CasePtr> dequantize_test_cases() {
  CaseList list;
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{0, 64}, {3, 0}, {0, 0}}) {
    DequantizeSpec s;
    s.rows = rows, s.cols = cols, s.block = {1, 32};
    list.add(s);
  }
  for (const qf_format format : kFormats) {
    DequantizeSpec s;
    s.format = format, s.rows = 37, s.cols = 4099, s.dtype = kBf16;
    list.add(s);
    s.block = {1, 128}, s.rows = 300, s.cols = 512;
    list.add(s);
  }
  Random random(12);
  list.fill_up(400, [&] { return random_spec(random); });
  return list.take();
}

}  // namespace quantfuse::cases
