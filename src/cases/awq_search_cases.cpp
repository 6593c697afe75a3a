// SPDX-License-Identifier: Apache-2.0
//
// The losses of all alphas are compared with the reference's. Two alphas, or two clips, whose losses differ
// by rounding alone may be chosen either way: what is chosen is judged by the reference's loss of it.
#include <array>
#include <cmath>

#include "cases/describe.h"
#include "cases/operation_case.h"
#include "cases/test_cases.h"

namespace quantfuse::cases {
namespace {

constexpr Functions<qf_awq_search_args> kFunctions = QF_CASE_FUNCTIONS(awq_search);

// Losses are sums of squares of float32 sums. A weight near the boundary of two codes may round either way,
// which changes a loss of many errors little.
constexpr double kLossRounding = 0.02;

class AwqSearchCase final : public OperationCase<qf_awq_search_args> {
 public:
  explicit AwqSearchCase(const AwqSearchSpec& spec) : OperationCase(kFunctions), spec_(spec) {
    scheme = Words()
                 .add(format_word(spec.format))
                 .add_if(spec.bits > 0, std::to_string(spec.bits) + " bits")
                 .add(group_word(spec.group))
                 .add_if(spec.is_asymmetric, "asym")
                 .add_if(spec.wants_clip, "clip")
                 .add_if(spec.grid > 0, "grid " + std::to_string(spec.grid))
                 .add(dtype_word(spec.dtype))
                 .text();
    name = Words()
               .add(scheme)
               .add(std::to_string(spec.n) + "x" + std::to_string(spec.k) + " of " + std::to_string(spec.t))
               .add_if(spec.has_act_scale, "act_scale")
               .add_if(spec.row_padding > 0, "padded")
               .text();
    m = spec.n, n = spec.k, k = spec.k;
    num_alphas_ = (spec.grid == 0 ? 20 : spec.grid) + 1;
    flops = 2.0 * static_cast<double>(m * k * spec.t * num_alphas_);
    const int64_t groups = k == 0 ? 0 : ceil_div(k, resolved(spec.group, k));
    weight_ = &add("weight", Role::input, spec.dtype, {m, k}, spec.row_padding);
    x_ = &add("x", Role::input, spec.dtype, {spec.t, k}, spec.row_padding);
    if (spec.has_act_scale) act_scale_ = &add("act_scale", Role::input, kF32, {k});
    channel_scale_ = &add("channel_scale", Role::output, kF32, {k});
    if (spec.wants_clip) clip_ = &add("clip", Role::output, kF32, {m, groups});
    loss_ = &add("loss", Role::output, kF32, {num_alphas_});
  }

 private:
  void fill(Random& random) override {
    fill_floats(*weight_, random, Data::normal, 0.1);
    for (int64_t c = 0; c < k; ++c) {
      const double size = std::exp(1.5 * random.normal());
      for (int64_t t = 0; t < spec_.t; ++t) x_->initial().set(t, c, size * random.normal());
      if (act_scale_) act_scale_->initial().set(0, c, c % 7 == 3 ? 0.0 : size * random.uniform(0.5, 1.5));
    }
  }

  qf_awq_search_args args(int set) override {
    qf_awq_search_args a = {};
    a.weight = view(weight_, set);
    a.x = view(x_, set);
    a.act_scale = view(act_scale_, set);
    a.format = spec_.format;
    a.bits = spec_.bits;
    a.group = spec_.group;
    a.is_asymmetric = spec_.is_asymmetric;
    a.grid = spec_.grid;
    a.channel_scale = view(channel_scale_, set);
    a.clip = view(clip_, set);
    a.loss = view(loss_, set);
    return a;
  }

  void forget_oracle() override { has_oracle_ = false; }

  std::string compare() override {
    if (!has_oracle_) run_reference(args(kReferenceSet));
    has_oracle_ = true;
    const Image expected = loss_->reference_result();
    double least = INFINITY;
    for (int64_t i = 0; i < num_alphas_; ++i) least = std::fmin(least, expected.value(i));
    for (int64_t i = 0; i < num_alphas_; ++i) {
      const double loss = loss_->result().value(i);
      if (!(std::abs(loss - expected.value(i)) <= kLossRounding * expected.value(i) + 1e-9)) {
        return "alpha " + std::to_string(i) + " has a loss of " + std::to_string(loss) + ", the reference " +
               std::to_string(expected.value(i));
      }
    }
    if (std::string wrong = compare_scale(expected, least); !wrong.empty()) return wrong;
    return clip_ ? compare_clip() : "";
  }

  // The exponent that the channel scale was made with, from its spread; its loss must be among the least.
  std::string compare_scale(const Image& losses, double least) {
    const Image expected = channel_scale_->reference_result();
    bool is_same = true;
    for (int64_t c = 0; c < k; ++c) {
      const double value = channel_scale_->result().value(c);
      if (!(value > 0 && std::isfinite(value))) return "channel_scale is not positive";
      is_same = is_same && std::abs(value - expected.value(c)) <= 1e-5 * expected.value(c);
    }
    if (is_same) return "";
    int64_t near = 0;
    for (int64_t i = 0; i < num_alphas_; ++i)
      near += losses.value(i) <= (1 + 2 * kLossRounding) * least + 1e-9;
    return near > 1 ? "" : "channel_scale is not that of the only least loss";
  }

  // Clips are steps of 5% of a group's range; nearly all must be the reference's own. With another channel
  // scale they cannot be compared.
  std::string compare_clip() {
    const Image expected = clip_->reference_result();
    if (compare_exactly(*channel_scale_, channel_scale_->reference_result()) != "") return "";
    int64_t different = 0;
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t g = 0; g < expected.cols; ++g) {
        const double value = clip_->result().value(r, g), best = expected.value(r, g);
        if (!(value >= 0.49 * best && value <= 2.1 * best))
          return "a clip lies outside the range of its group";
        different += std::abs(value - best) > 1e-5 * best;
      }
    }
    const int64_t allowed = m * expected.cols / 20 + 2;
    return different <= allowed ? "" : std::to_string(different) + " clips differ from the reference's";
  }

  AwqSearchSpec spec_;
  Tensor *weight_ = nullptr, *x_ = nullptr, *act_scale_ = nullptr, *channel_scale_ = nullptr,
         *clip_ = nullptr;
  Tensor* loss_ = nullptr;
  int64_t num_alphas_ = 0;
  bool has_oracle_ = false;
};

AwqSearchSpec random_spec(Random& random) {
  AwqSearchSpec s;
  s.format = random.pick({QF_INT4, QF_INT4, QF_INT8});
  s.bits = random.pick({0, 0, 3});
  s.group = random.pick<int64_t>({0, 3, 16, 32, 33, 64, 100, 128, 150});
  s.is_asymmetric = random.chance(40);
  s.has_act_scale = random.chance(50);
  s.wants_clip = random.chance(60);
  s.grid = random.pick({0, 1, 4, 7});
  s.dtype = random.pick({kF32, kF16, kBf16});
  s.t = random.pick<int64_t>({8, 16, 33, 64, 70});
  s.n = random.pick<int64_t>({5, 6, 7, 24, 25, 49});
  s.k = random.pick<int64_t>({31, 32, 33, 64, 100, 128, 129, 200});
  s.row_padding = random.pick<int64_t>({0, 0, 1, 5});
  return s;
}

}  // namespace

CasePtr make_case(const AwqSearchSpec& spec) { return std::make_unique<AwqSearchCase>(spec); }

std::vector<CasePtr> awq_search_test_cases() {
  CaseList list;
  AwqSearchSpec s;
  s.n = 8, s.k = 300, s.group = 128, s.t = 520, s.wants_clip = true, s.grid = 3;  // inputs in two tiles
  list.add(s);
  for (const auto& [n, k, t] : {std::array<int64_t, 3>{0, 64, 8}, {3, 0, 8}, {5, 64, 0}}) {
    AwqSearchSpec empty;
    empty.n = n, empty.k = k, empty.t = t, empty.wants_clip = true;
    list.add(empty);
  }
  Random random(22);
  list.fill_up(120, [&] { return random_spec(random); });
  return list.take();
}

}  // namespace quantfuse::cases
