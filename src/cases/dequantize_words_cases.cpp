// SPDX-License-Identifier: Apache-2.0
//
// (q - zero) * scale in float32, rounded to the type of x: defined to the bit (bounds.h, rule 1).
#include "cases/describe.h"
#include "cases/operation_case.h"
#include "cases/test_cases.h"

namespace quantfuse::cases {
namespace {

constexpr Functions<qf_dequantize_words_args> kFunctions = QF_CASE_FUNCTIONS(dequantize_words);

class DequantizeWordsCase final : public OperationCase<qf_dequantize_words_args> {
 public:
  explicit DequantizeWordsCase(const DequantizeWordsSpec& spec) : OperationCase(kFunctions), spec_(spec) {
    const bool is_awq = spec.layout == QF_WORDS_AWQ;
    scheme = Words()
                 .add(is_awq                         ? "awq"
                      : spec.layout == QF_WORDS_GPTQ ? "gptq"
                                                     : "gptq_v2")
                 .add("int" + std::to_string(spec.bits))
                 .add(group_word(spec.group))
                 .add_if(spec.has_g_idx, "g_idx")
                 .add(dtype_word(spec.scale_dtype) + " to " + dtype_word(spec.dtype))
                 .text();
    name = !spec.name.empty() ? spec.name
                              : Words()
                                    .add(scheme)
                                    .add(std::to_string(spec.k) + "x" + std::to_string(spec.n))
                                    .add_if(spec.row_padding > 0, "padded")
                                    .text();
    k = spec.k, n = spec.n;
    flops = static_cast<double>(k) * static_cast<double>(n);
    groups_ = ceil_div(k, resolved(spec.group, k));
    const int64_t packed_n = ceil_div(n * spec.bits, 32);
    const std::vector<int64_t> words =
        is_awq ? std::vector<int64_t>{k, packed_n} : std::vector<int64_t>{ceil_div(k * spec.bits, 32), n};
    qweight_ = &add("qweight", Role::input, kI32, words, spec.row_padding);
    qzeros_ = &add("qzeros", Role::input, kI32, {groups_, packed_n}, spec.row_padding);
    scales_ = &add("scales", Role::input, spec.scale_dtype, {groups_, n}, spec.row_padding);
    if (spec.has_g_idx) g_idx_ = &add("g_idx", Role::input, kI32, {k});
    x_ = &add("x", Role::output, spec.dtype, {k, n}, spec.row_padding);
  }

 private:
  void fill(Random& random) override {
    for (Tensor* words : {qweight_, qzeros_}) {
      Image& image = words->initial();
      for (int64_t r = 0; r < image.rows; ++r) {
        for (int64_t c = 0; c < image.cols * 4; ++c) image.row(r)[c] = static_cast<uint8_t>(random.next());
      }
    }
    Image& scales = scales_->initial();
    for (int64_t r = 0; r < scales.rows; ++r) {
      for (int64_t c = 0; c < scales.cols; ++c) scales.set(r, c, random.uniform(-0.1, 0.1));
    }
    for (int64_t i = 0; g_idx_ && i < k; ++i) {
      g_idx_->initial().set(0, i, static_cast<double>(random.below(groups_)));
    }
  }

  qf_dequantize_words_args args(int set) override {
    qf_dequantize_words_args a = {};
    a.layout = spec_.layout;
    a.bits = spec_.bits;
    a.group = spec_.group;
    a.qweight = view(qweight_, set);
    a.qzeros = view(qzeros_, set);
    a.scales = view(scales_, set);
    a.g_idx = view(g_idx_, set);
    a.x = view(x_, set);
    return a;
  }

  void forget_oracle() override { has_oracle_ = false; }

  std::string compare() override {
    if (!has_oracle_) run_reference(args(kReferenceSet));
    has_oracle_ = true;
    return compare_exactly(*x_, x_->reference_result());
  }

  DequantizeWordsSpec spec_;
  int64_t groups_ = 0;
  Tensor *qweight_ = nullptr, *qzeros_ = nullptr, *scales_ = nullptr, *g_idx_ = nullptr, *x_ = nullptr;
  bool has_oracle_ = false;
};

DequantizeWordsSpec random_spec(Random& random) {
  DequantizeWordsSpec s;
  s.layout = random.pick({QF_WORDS_AWQ, QF_WORDS_GPTQ, QF_WORDS_GPTQ_V2});
  const bool is_awq = s.layout == QF_WORDS_AWQ;
  s.bits = is_awq ? 4 : random.pick({2, 3, 4, 8});
  s.group = random.pick<int64_t>({0, 1, 32, 33, 64, 128});
  s.has_g_idx = !is_awq && random.chance(30);
  s.scale_dtype = random.pick({kF16, kF16, kBf16, kF32});
  s.dtype = random.pick({s.scale_dtype, kF32, kF16, kBf16});
  s.k = random.pick<int64_t>({1, 7, 8, 31, 32, 33, 64, 100, 128, 130, 300});
  s.n = random.pick<int64_t>({1, 3, 8, 15, 32, 33, 64, 100, 515}) * (is_awq ? 8 : 1);
  s.row_padding = random.pick<int64_t>({0, 0, 0, 3});
  return s;
}

}  // namespace

CasePtr make_case(const DequantizeWordsSpec& spec) { return std::make_unique<DequantizeWordsCase>(spec); }

std::vector<CasePtr> dequantize_words_test_cases() {
  CaseList list;
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{0, 64}, {32, 0}}) {
    DequantizeWordsSpec s;
    s.k = rows, s.n = cols;
    list.add(s);
  }
  Random random(31);
  list.fill_up(150, [&] { return random_spec(random); });
  return list.take();
}

}  // namespace quantfuse::cases
