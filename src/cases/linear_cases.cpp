// SPDX-License-Identifier: Apache-2.0
//
// The sum x w^T + bias has k terms and the bound of bounds.h, sum_bound. Where x is quantized on the way in,
// its codes are defined to the bit, so the terms are those of the quantized x, which may exceed |x| by half a
// step. The epilogue carries the bound on: through the activation (its slope and its approximation), the
// product of a gated weight, the residual.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "cases/bounds.h"
#include "cases/describe.h"
#include "cases/operation_case.h"
#include "cases/test_cases.h"
#include "cases/weight.h"
#include "core/dot_products.h"
#include "formats/integer_bytes.h"

namespace quantfuse::cases {
namespace {

constexpr Functions<qf_linear_args> kFunctions = QF_CASE_FUNCTIONS(linear);
constexpr double kEps = 1e-5;

class LinearCase final : public OperationCase<qf_linear_args> {
 public:
  explicit LinearCase(const LinearSpec& spec) : OperationCase(kFunctions), spec_(spec) {
    scheme = Words()
                 .add(weight_word(spec.weight))
                 .add_if(spec.act_format != QF_FORMAT_NONE,
                         "act " + format_word(spec.act_format) + " " + group_word(spec.act_group))
                 .add(dtype_word(spec.dtype))
                 .text();
    name = !spec.name.empty() ? spec.name : generated_name();
    m = spec.m, n = spec.n, k = spec.k;
    n_out_ = spec.weight.is_gated ? n / 2 : n;
    flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
    act_group_ = resolved(spec.act_group, k);

    const bool is_odd = spec.row_padding > 0;
    if (spec.has_quantized_x) {
      x_ = &add("x", Role::input, code_dtype(spec.act_format, is_odd), {m, k}, spec.row_padding);
      x_scale_ = &add("x_scale", Role::input, kF32, {m, ceil_div(k, act_group_)});
    } else {
      x_ = &add("x", Role::input, spec.dtype, {m, k}, spec.row_padding);
    }
    weight_ = CanonicalWeight(spec.weight, n, k, spec.row_padding, [this](auto&&... arguments) -> Tensor& {
      return add(std::forward<decltype(arguments)>(arguments)...);
    });
    if (spec.has_x_gain) x_gain_ = &add("x_gain", Role::input, is_odd ? kF32 : spec.dtype, {k});
    if (spec.has_bias) bias_ = &add("bias", Role::input, is_odd ? kF32 : spec.dtype, {n});
    if (spec.has_residual)
      residual_ = &add("residual", Role::input, spec.dtype, {m, n_out_}, spec.row_padding);
    out_ = add_output(spec, spec.has_residual_in_y ? Role::in_out : Role::output, m, n_out_);
    if (spec.has_residual_in_y) residual_ = out_.y;
  }

 private:
  std::string generated_name() const {
    return Words()
        .add(scheme)
        .add(std::to_string(spec_.m) + "x" + std::to_string(spec_.n) + "x" + std::to_string(spec_.k))
        .add_if(spec_.has_quantized_x, "codes")
        .add_if(spec_.has_x_gain, "normalized")
        .add(activation_word(spec_.activation))
        .add_if(spec_.has_bias, "bias")
        .add_if(spec_.has_residual, "residual")
        .add_if(spec_.has_residual_in_y, "residual_in_y")
        .add_if(spec_.is_batch_invariant, "batch_invariant")
        .add_if(spec_.has_fast_accumulation, "fast_accumulation")
        .add(out_word(spec_.out_format, spec_.out_mode, spec_.out_group))
        .add_if(spec_.row_padding > 0, "padded")
        .add(data_word(spec_.data))
        .text();
  }

  void fill(Random& random) override {
    if (spec_.has_quantized_x) {
      fill_codes(*x_, random, spec_.act_format, k);
      fill_scales(*x_scale_, random, 2.0 / code_range(spec_.act_format).symmetric_max);
    } else {
      fill_floats(*x_, random, spec_.data);
    }
    weight_.fill(random, 1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(k, 1))));
    if (x_gain_) fill_floats(*x_gain_, random, Data::normal);
    if (bias_) fill_floats(*bias_, random, Data::normal);
    if (residual_) fill_floats(*residual_, random, Data::normal);
    fill_static_scale(out_, 2.0);
  }

  // The packed form, as a user makes it once from the canonical one. A target without one runs on the
  // canonical.
  void place_extra(int copies) override {
    packed_.clear();
    packed_views_.clear();
    for (int i = 0; i < copies; ++i) {
      qf_weight w = weight_.view(i, device);
      uint64_t packed_bytes = 0;
      qf_status status = qf_weight_packed_bytes(&w, device, &packed_bytes);
      if (status == QF_UNSUPPORTED) return;
      if (status == QF_OK) {
        packed_.emplace_back(device, packed_bytes);
        packed_shape_ = static_cast<int64_t>(packed_bytes);
        w.packed = &packed_views_.emplace_back(
            qf_tensor{packed_.back().data(), device, 1, kU8, &packed_shape_, nullptr, 0});
        status = qf_weight_pack(&w, nullptr);
      }
      if (status == QF_UNSUPPORTED) {  // these values have none
        packed_.clear(), packed_views_.clear();
        return;
      }
      if (status != QF_OK) throw std::runtime_error(qf_last_error());
    }
  }

  qf_linear_args args(int set) override {
    qf_linear_args a = {};
    a.x = view(x_, set);
    a.x_scale = view(x_scale_, set);
    a.act_format = spec_.act_format;
    a.act_group = spec_.act_group;
    a.weight = weight_.view(set, device);
    a.weight.is_constant = !spec_.has_residual_in_y;  // either way is run
    if (set >= 0 && !packed_views_.empty()) a.weight.packed = &packed_views_[static_cast<size_t>(set)];
    if (set == kNoData) a.weight.packed = undescribed_packed();
    a.bias = view(bias_, set);
    a.activation = spec_.activation;
    a.residual = view(residual_, set);
    set_output(a, out_, set);
    a.batch_invariant = spec_.is_batch_invariant;
    a.x_gain = view(x_gain_, set);
    a.x_eps = kEps;
    a.fast_accumulation = spec_.has_fast_accumulation;
    return a;
  }

  // For explain() without data: a packed form of unknown content, where this target has one at all. On the
  // CPU its size depends on the values of g_idx, so that any size must do.
  const qf_tensor* undescribed_packed() {
    qf_weight w = weight_.view(kNoData, device);
    if (device.type == QF_CPU) w.g_idx = nullptr;
    uint64_t packed_bytes = 0;
    if (qf_weight_packed_bytes(&w, device, &packed_bytes) != QF_OK) return nullptr;
    packed_shape_ = static_cast<int64_t>(packed_bytes);
    shape_view_ = {nullptr, device, 1, kU8, &packed_shape_, nullptr, 0};
    return &shape_view_;
  }

  void forget_oracle() override { has_oracle_ = false; }

  std::string compare() override {
    for (const Buffer& packed : packed_) {
      if (!packed.has_intact_guards()) return "wrote outside the packed weight";
    }
    if (!has_oracle_) expect();
    has_oracle_ = true;
    return compare_output(out_, expected_);
  }

  void expect() {
    // The result before the output's rounding, and the sum before the epilogue.
    qf_linear_args a = args(kReferenceSet);
    FloatMatrix result(m, n_out_), sum(m, n);
    run_reference_into(result, a);
    a.weight.is_gated = 0;
    a.activation = QF_IDENTITY;
    a.residual = nullptr;
    run_reference_into(sum, a);

    const std::vector<double> w = weight_.magnitudes();
    std::vector<double> x;  // magnitudes
    for (int64_t i = 0; i < m; ++i) append_magnitudes(i, x);
    const std::vector<double> sums = sums_of_magnitudes(x, w), of_input = bounds_of_input(x, w);
    const bool is_fp8_product = is_fp8(spec_.act_format) && is_fp8(spec_.weight.format);
    // Of x normalized: the mean of the squares, and the rounding to x's type, before or after the factor.
    const DType dtype = dtype_of(spec_.dtype);
    const double rounding = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : kUnitRoundoff;
    const double of_norm = x_gain_ ? sum_bound(k, 1.0) / 2 + 5 * kUnitRoundoff + rounding : 0;
    const bool is_packed = !packed_.empty() && spec_.act_format == QF_FORMAT_NONE;
    const double of_codebook = is_packed ? codebook_rounding(device, spec_.weight.format, dtype) : 0;
    auto bound_of_sum = [&](int64_t i, int64_t j) {
      const auto at = static_cast<size_t>(i * n + j);
      return sum_bound(k, sums[at]) + of_input[at] + (of_norm + of_codebook) * sums[at] +
             (is_fp8_product ? fp8_sum_bound(device, spec_.has_fast_accumulation ? k : 0, sums[at]) : 0);
    };
    expected_ = {};
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n_out_; ++j) {
        double bound = activation_bound(spec_.activation, sum.at(i, j), bound_of_sum(i, j));
        double value = activate(spec_.activation, sum.at(i, j));
        if (spec_.weight.is_gated) {
          bound = product_bound(value, bound, sum.at(i, n_out_ + j), bound_of_sum(i, n_out_ + j));
          value *= sum.at(i, n_out_ + j);
        }
        const double residual = residual_ ? std::abs(residual_->initial().value(i, j)) : 0;
        expected_.values.push_back(result.at(i, j));
        expected_.bounds.push_back(bound + 2 * kUnitRoundoff * (std::abs(value) + residual));
      }
    }
  }

  // sum_k |x[m,k]| |w[n,k]| + |bias[n]|, [m, n].
  std::vector<double> sums_of_magnitudes(const std::vector<double>& x, const std::vector<double>& w) const {
    std::vector<double> sums(static_cast<size_t>(m * n));
    for (int64_t i = 0; i < m; ++i) {
      double* row = sums.data() + i * n;
      dot_products(w.data(), n, k, x.data() + i * k, row);
      for (int64_t j = 0; bias_ && j < n; ++j) row[j] += std::abs(bias_->initial().value(0, j));
    }
    return sums;
  }

  // What x in fixed point adds to the error of a sum, and x that was normalized to numbers which f16 has no
  // finer steps for, [m, n].
  std::vector<double> bounds_of_input(const std::vector<double>& x, const std::vector<double>& w) const {
    std::vector<double> bounds(static_cast<size_t>(m * n));
    if (x_gain_ && dtype_of(spec_.dtype) == DType::f16) {
      for (size_t at = 0; at < bounds.size(); ++at) {
        const auto row = w.begin() + static_cast<int64_t>(at) % n * k;
        bounds[at] = 0x1p-25 * std::accumulate(row, row + k, 0.0);
      }
    }
    const bool may_be_fixed_point = spec_.act_format == QF_FORMAT_NONE && spec_.dtype.bits == 16 &&
                                    has_integer_numbers(spec_.weight.format);
    for (int64_t t = 0; may_be_fixed_point && t < k; t += kFixedPointTile) {
      const int64_t end = std::min(t + kFixedPointTile, k);
      std::vector<double> of_weight(static_cast<size_t>(n));
      for (int64_t j = 0; j < n; ++j) {
        const auto row = w.begin() + j * k;
        of_weight[static_cast<size_t>(j)] = std::accumulate(row + t, row + end, 0.0);
      }
      for (int64_t i = 0; i < m; ++i) {
        const auto row = x.begin() + i * k;
        const double error = fixed_point_error(*std::max_element(row + t, row + end));
        for (int64_t j = 0; j < n; ++j)
          bounds[static_cast<size_t>(i * n + j)] += error * of_weight[static_cast<size_t>(j)];
      }
    }
    return bounds;
  }

  // Those of row i of x, as it is multiplied.
  void append_magnitudes(int64_t i, std::vector<double>& sizes) const {
    const Image& x = x_->initial();
    const double norm = inverse_rms(i);
    for (int64_t begin = 0; begin < k; begin += act_group_) {
      const int64_t end = std::min(begin + act_group_, k);
      double amax = 0;
      for (int64_t t = begin; t < end && !spec_.has_quantized_x; ++t)
        amax = std::max(amax, std::abs(x.value(i, t)));
      for (int64_t t = begin; t < end; ++t) {
        if (spec_.has_quantized_x) {
          sizes.push_back(std::abs(decode_at(spec_.act_format, x.row(i), t)) *
                          x_scale_->initial().value(i, t / act_group_));
        } else if (spec_.act_format == QF_FORMAT_NONE) {
          const double gain = x_gain_ ? std::abs(x_gain_->initial().value(0, t)) : 1;
          sizes.push_back(norm * std::abs(x.value(i, t)) * gain);
        } else {
          // Half a step more: of the largest in the group for integers, an eighth of the number for FP8.
          sizes.push_back(std::abs(x.value(i, t)) * 1.125 + amax / 254);
        }
      }
    }
  }

  // What the norm multiplies row i with, besides the gain.
  double inverse_rms(int64_t i) const {
    if (!x_gain_) return 1;
    double squares = 0;
    for (int64_t t = 0; t < k; ++t) squares += std::pow(x_->initial().value(i, t), 2);
    return 1 / std::sqrt(squares / static_cast<double>(k) + kEps);
  }

  LinearSpec spec_;
  int64_t n_out_ = 0, act_group_ = 1;
  CanonicalWeight weight_;
  Tensor *x_ = nullptr, *x_scale_ = nullptr, *x_gain_ = nullptr, *bias_ = nullptr, *residual_ = nullptr;
  Output out_;
  std::vector<Buffer> packed_;
  std::deque<qf_tensor> packed_views_;
  qf_tensor shape_view_ = {};
  int64_t packed_shape_ = 0;
  bool has_oracle_ = false;
  Expected expected_;
};

LinearSpec random_spec(Random& random) {
  LinearSpec s;
  s.weight = random_weight(random);
  s.weight.is_gated = random.chance(30);
  s.act_format = random.pick({QF_FORMAT_NONE, QF_FORMAT_NONE, QF_INT8, QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2});
  const bool has_act = s.act_format != QF_FORMAT_NONE;
  if (has_act) s.act_group = random.pick<int64_t>({0, 0, 16, 32, 33, 64, 128});
  s.has_quantized_x = has_act && random.chance(30);
  s.dtype = random.pick({kF32, kF16, kBf16});
  s.activation = random.pick({QF_IDENTITY, QF_RELU, QF_GELU, QF_GELU_TANH, QF_SILU});
  s.has_bias = random.chance(50);
  s.out_format = random.pick({QF_FORMAT_NONE, QF_FORMAT_NONE, QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2});
  s.out_mode = random.pick({QF_SCALE_DYNAMIC, QF_SCALE_STATIC});
  if (s.out_mode == QF_SCALE_DYNAMIC) s.out_group = random.pick<int64_t>({0, 1, 5, 16, 32, 33, 64, 128});
  s.has_residual = random.chance(40);
  s.has_residual_in_y = !s.has_residual && s.out_format == QF_FORMAT_NONE && random.chance(25);
  s.m = random.pick<int64_t>({1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33});
  s.n = random.pick<int64_t>({1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 129});
  if (s.weight.is_gated) s.n *= 2;
  s.k = random.pick<int64_t>(
      {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 256, 300});
  s.row_padding = random.pick<int64_t>({0, 0, 1, 5});
  s.data = random.pick(
      {Data::normal, Data::normal, Data::normal, Data::outliers, Data::tiny, Data::zeros, Data::constant});
  if (s.has_residual_in_y) s.data = Data::normal;  // or y might rightly stay as it is
  return s;
}

LinearSpec random_tensor_core_spec(Random& random, int64_t tokens) {
  LinearSpec s;
  s.m = tokens;
  s.dtype = random.pick({kF16, kBf16});
  s.weight.format = random.pick({QF_INT4, QF_INT4, QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2, QF_FP4_E2M1});
  s.weight.block =
      random.pick<qf_block>({{1, 32}, {1, 64}, {1, 128}, {1, 128}, {1, 256}, {1, 0}, {128, 128}});
  s.weight.is_asymmetric = is_integer(s.weight.format) && random.chance(40);
  s.weight.is_gated = random.chance(30);
  s.n = 2 * random.pick<int64_t>({1, 8, 33, 64, 65, 132, 200});
  s.k = 8 * random.pick<int64_t>({1, 15, 16, 17, 48, 65, 130, 256});
  s.activation = random.pick({QF_IDENTITY, QF_SILU, QF_GELU, QF_GELU_TANH});
  s.has_bias = random.chance(40);
  s.has_residual = random.chance(30);
  s.out_format = random.pick({QF_FORMAT_NONE, QF_FORMAT_NONE, QF_FORMAT_NONE, QF_INT8, QF_FP8_E4M3});
  s.out_mode = random.pick({QF_SCALE_DYNAMIC, QF_SCALE_STATIC});
  if (s.out_mode == QF_SCALE_DYNAMIC) s.out_group = random.pick<int64_t>({0, 128});
  s.data = random.pick({Data::normal, Data::normal, Data::outliers});
  return s;
}

// Weight-only layers of 9 to 32 tokens and long rows, which are divided among warpgroups and blocks.
LinearSpec random_divided_spec(Random& random, int64_t tokens, int64_t n) {
  LinearSpec s = random_tensor_core_spec(random, tokens);
  s.weight.format = random.pick({QF_INT4, QF_INT4, QF_INT8, QF_FP8_E4M3});
  s.weight.is_asymmetric = is_integer(s.weight.format) && random.chance(40);
  s.n = n;
  s.k = 8 * (tokens <= 16 ? random.pick<int64_t>({2048, 2401}) : random.pick<int64_t>({1136, 1205}));
  return s;
}

// MXFP4 weights, whose scales are powers of two: rows and columns about the tiles of 16 and 128.
LinearSpec random_mxfp4_spec(Random& random, int64_t tokens) {
  LinearSpec s = random_tensor_core_spec(random, tokens);
  s.weight.format = QF_FP4_E2M1, s.weight.block = {1, 32}, s.weight.has_e8m0_scale = true;
  s.weight.is_asymmetric = false;
  s.dtype = random.pick({kF16, kBf16, kBf16});
  s.n = random.pick<int64_t>({1, 15, 17, 64, 100, 130, 264}) * (s.weight.is_gated ? 2 : 1);
  s.k = random.pick<int64_t>({33, 65, 128, 129, 383, 1040, 2056});
  s.row_padding = (8 - s.k % 8) % 8;  // rows of x at multiples of 16 bytes
  return s;
}

// Weights that are not quantized, of the input's type or another.
LinearSpec random_plain_spec(Random& random, int64_t tokens) {
  LinearSpec s = random_spec(random);
  s.m = tokens;
  s.weight = {random.pick({QF_F32, QF_F16, QF_BF16, QF_BF16}), {}};
  s.weight.is_gated = random.chance(30);
  s.act_format = QF_FORMAT_NONE, s.act_group = 0, s.has_quantized_x = false;
  const qf_dtype own = code_dtype(s.weight.format, false);
  s.dtype = random.chance(70) ? own : random.pick({kF32, kF16, kBf16});
  s.n = 2 * random.pick<int64_t>({1, 4, 7, 16, 33, 64, 65, 132});
  s.k = random.pick<int64_t>({1, 7, 8, 31, 64, 127, 128, 129, 256, 333, 1031});
  return s;
}

// Of them what the kernel for many tokens takes: rows at multiples of 16 bytes, of a length that need not be
// one. Tiles are of 128 tokens by 256 rows, 64 columns at a time.
LinearSpec random_plain_many_tokens_spec(Random& random) {
  LinearSpec s = random_plain_spec(random, random.pick<int64_t>({65, 127, 128, 129, 255, 257, 300}));
  s.weight.format = random.pick({QF_F16, QF_BF16});
  s.dtype = code_dtype(s.weight.format, false);
  s.is_batch_invariant = random.chance(30);
  s.n = 8 * random.pick<int64_t>({2, 8, 32, 34});
  s.k = 8 * random.pick<int64_t>({1, 7, 8, 9, 24, 41});
  s.row_padding = random.pick<int64_t>({0, 0, 8});
  if (!s.weight.is_gated && random.chance(30)) ++s.n, ++s.k, s.row_padding = 7;
  return s;
}

// Quantized activations and weights that are a product of codes on a GPU.
LinearSpec random_product_spec(Random& random, int64_t tokens) {
  LinearSpec s = random_tensor_core_spec(random, tokens);
  s.act_format = random.pick({QF_INT8, QF_INT8, QF_FP8_E4M3, QF_FP8_E4M3, QF_FP8_E5M2});
  s.act_group = random.pick<int64_t>({0, 0, 32, 64, 100, 128});
  s.has_quantized_x = random.chance(40);
  if (random.chance(20)) s.weight.block.cols = 100;
  s.weight.has_e8m0_scale = !is_integer(s.weight.format) && random.chance(30);
  s.k = random.pick<int64_t>({8, 120, 127, 128, 129, 256, 384, 513});
  s.row_padding = random.pick<int64_t>({0, 0, 0, 3});
  return s;
}

// Of them what the kernel for many tokens takes: tiles of 128 tokens by 256 rows, 128 columns at a time.
LinearSpec random_many_tokens_spec(Random& random) {
  LinearSpec s = random_product_spec(random, random.pick<int64_t>({65, 127, 128, 129, 255, 257, 300}));
  const bool is_blocks = random.chance(50);
  s.dtype = random.pick({kF16, kBf16, kF32});
  s.act_format = random.pick({QF_INT8, QF_INT8, QF_FP8_E4M3, QF_FP8_E4M3, QF_FP8_E5M2});
  s.act_group = is_blocks ? 128 : 0;
  s.weight.format = is_integer(s.act_format) ? QF_INT8 : random.pick({QF_FP8_E4M3, QF_FP8_E4M3, QF_FP8_E5M2});
  s.weight.block = is_blocks ? qf_block{128, 128} : random.pick<qf_block>({{1, 0}, {0, 0}});
  s.weight.is_asymmetric = s.weight.has_e8m0_scale = false;
  s.n = s.weight.is_gated ? 128 * random.pick<int64_t>({1, 2, 3, 5})
                          : 8 * random.pick<int64_t>({1, 8, 31, 33, 70});
  s.k = 16 * random.pick<int64_t>({1, 7, 8, 9, 24, 41});
  s.row_padding = 0;
  s.has_fast_accumulation = is_fp8(s.act_format) && s.n % 3 != 0;  // some of each
  s.has_residual_in_y = !s.has_residual && s.out_format == QF_FORMAT_NONE && random.chance(30);
  if (s.has_residual_in_y) s.data = Data::normal;
  return s;
}

// The same formats for few tokens: blocks that divide k, or rows that are shared out among all SMs of a large
// GPU.
LinearSpec random_few_tokens_spec(Random& random, int64_t tokens, int64_t n) {
  LinearSpec s = random_many_tokens_spec(random);
  s.m = tokens, s.n = n;
  if (n > 2000) s.k = 16 * random.pick<int64_t>({1, 7, 9, 17});
  else s.k = 16 * random.pick<int64_t>({9, 33, 64, 65, 130});
  if (n % 128 != 0) s.weight.is_gated = false;
  return s;
}

// INT4 weights by INT8 activations in tiles of 64 or 128 rows, 256 columns at a time.
LinearSpec random_w4a8_spec(Random& random, int64_t tokens) {
  LinearSpec s = random_product_spec(random, tokens);
  s.dtype = random.pick({kF16, kBf16, kF32});
  s.act_format = QF_INT8, s.act_group = 0;
  s.weight.format = QF_INT4, s.weight.block = {1, random.pick<int64_t>({0, 128, 128, 128})};
  s.weight.is_asymmetric = s.weight.has_e8m0_scale = false;
  s.n = s.weight.is_gated ? 16 * random.pick<int64_t>({1, 4, 9, 21})
                          : random.pick<int64_t>({1, 8, 63, 64, 65, 128, 200, 520});
  s.k = 32 * random.pick<int64_t>({1, 3, 4, 5, 8, 12, 33, 64});
  s.row_padding = 0;
  return s;
}

// Offsets and zero points that are no integers, in groups that pack for CUDA.
LinearSpec random_offset_spec(Random& random, int64_t tokens) {
  LinearSpec s = random_tensor_core_spec(random, tokens);
  s.weight.format = random.pick({QF_INT4, QF_INT4, QF_INT8});
  s.weight.block = {1, random.pick<int64_t>({0, 32, 32, 64, 128, 128, 256})};
  s.weight.has_e8m0_scale = false;
  s.weight.has_offset = random.chance(60);
  s.weight.is_asymmetric = !s.weight.has_offset || random.chance(40);
  s.weight.has_float_zero = !s.weight.has_offset || random.chance(50);
  s.weight.has_g_idx = random.chance(20);
  return s;
}

// Codebooks, at the sizes and numbers of tokens of the tensor cores' kernels.
LinearSpec random_codebook_spec(Random& random, int64_t tokens) {
  LinearSpec s = random_tensor_core_spec(random, tokens);
  s.weight.format = random.pick({QF_NF4, QF_NF4, QF_FP4_BNB, QF_IQ4_NL});
  s.weight.block = {1, random.pick<int64_t>({0, 16, 32, 32, 64, 64, 64, 128, 256})};
  s.weight.is_asymmetric = false;
  s.weight.has_e8m0_scale = random.chance(15);
  s.weight.has_g_idx = random.chance(15);
  s.is_batch_invariant = random.chance(15);
  return s;
}

// Groups of 16 columns (Q6_K, NVFP4), and those that tiles of 128 are made of in pieces.
LinearSpec random_small_groups_spec(Random& random, int64_t tokens) {
  LinearSpec s = random_tensor_core_spec(random, tokens);
  s.weight.format = random.pick({QF_INT4, QF_INT8, QF_INT8, QF_FP8_E4M3, QF_FP4_E2M1, QF_FP4_E2M1});
  s.weight.block = {1, random.pick<int64_t>({16, 16, 16, 48, 80, 96, 192})};
  s.weight.is_asymmetric = is_integer(s.weight.format) && random.chance(60);
  s.weight.has_float_zero = s.weight.is_asymmetric && random.chance(30);
  s.weight.has_offset = is_integer(s.weight.format) && random.chance(30);
  s.weight.has_g_idx = random.chance(15);
  return s;
}

}  // namespace

CasePtr make_case(const LinearSpec& spec) { return std::make_unique<LinearCase>(spec); }

std::vector<CasePtr> linear_test_cases() {
  CaseList list;
  // The schemes that people use, at one row and at several tiles of them, in every type.
  for (const qf_dtype dtype : {kF32, kF16, kBf16}) {
    for (const qf_format act : {QF_FORMAT_NONE, QF_INT8, QF_FP8_E4M3}) {
      for (const int64_t m : {1, 6, 70}) {
        LinearSpec s;
        s.dtype = dtype, s.act_format = act, s.m = m, s.n = 72, s.k = 384;
        list.add(s);
        s.weight.is_asymmetric = true;
        list.add(s);
        s.weight = {QF_INT8, {1, 0}};
        list.add(s);
        s.weight = {QF_FP8_E4M3, {128, 128}};
        list.add(s);
        s.weight = {QF_FP4_E2M1, {1, 32}, true};
        list.add(s);
        s.weight = {QF_NF4, {1, 64}};
        list.add(s);
        s.weight = {QF_INT4, {1, 32}}, s.weight.has_offset = true;  // as Q4_K
        list.add(s);
      }
    }
  }
  // Nothing to do; no columns to sum over, which leaves the epilogue of the bias; single numbers.
  for (const qf_format act : {QF_FORMAT_NONE, QF_INT8}) {
    for (const auto& size : std::vector<std::vector<int64_t>>{{0, 8, 8}, {3, 0, 8}, {3, 10, 0}, {1, 2, 1}}) {
      LinearSpec s;
      s.act_format = act, s.m = size[0], s.n = size[1], s.k = size[2];
      s.has_bias = true, s.activation = QF_SILU;
      list.add(s);
      s.weight.is_gated = true, s.weight.format = QF_INT8, s.weight.block = {1, 0};
      list.add(s);
    }
  }
  // Few rows, in tiles of which the last may be smaller.
  for (const int64_t tokens : {5, 6, 10, 11, 12, 13, 23, 25, 48, 49}) {
    LinearSpec s;
    s.m = tokens, s.n = 70, s.k = 328, s.act_format = QF_INT8;
    s.weight.is_asymmetric = tokens % 2 == 0;
    list.add(s);
    s.weight.format = QF_INT8, s.weight.block = {1, 0};
    list.add(s);
    s.weight = {QF_FP4_E2M1, {1, 32}, true}, s.act_group = 64;
    list.add(s);
    s.act_format = QF_FORMAT_NONE, s.act_group = 0, s.dtype = kBf16;
    s.weight = {QF_INT4, {1, 128}, false, true};
    list.add(s);
  }
  // x that is normalized on its way in.
  for (const qf_dtype dtype : {kBf16, kF16, kF32}) {
    for (const int64_t tokens : {1, 2, 3, 20}) {
      for (const auto& [columns, padding] :
           {std::pair<int64_t, int64_t>{1, 0}, {129, 3}, {1000, 0}, {2048, 0}}) {
        LinearSpec s;
        s.dtype = dtype, s.m = tokens, s.n = 70, s.k = columns, s.row_padding = padding;
        s.has_x_gain = s.has_bias = true;
        s.weight.is_asymmetric = tokens == 2;
        list.add(s);
        s.weight = {QF_INT8, {1, 64}}, s.weight.is_gated = true, s.activation = QF_SILU;
        s.has_residual = true, s.data = Data::outliers;
        list.add(s);
      }
    }
  }
  LinearSpec normalized;
  normalized.m = 2, normalized.n = 40, normalized.k = 14336, normalized.has_x_gain = true;
  list.add(normalized);
  normalized.data = Data::tiny, normalized.weight = {QF_FP8_E4M3, {128, 128}};
  list.add(normalized);
  normalized.data = Data::zeros, normalized.weight = {QF_BF16, {}}, normalized.k = 200;
  list.add(normalized);
  // What tensor-core kernels are for: 16-bit x, groups that fill their tiles, every number of tokens.
  Random random(14);
  for (const int64_t tokens : {9, 16, 17, 31, 33, 64, 65, 127, 129, 257}) {
    for (int i = 0; i < 8; ++i) list.add(random_tensor_core_spec(random, tokens));
  }
  list.fill_up(630, [&] { return random_spec(random); });
  // Integer arithmetic throughout: few of the combinations above allow it.
  list.fill_up(830, [&] {
    LinearSpec s = random_spec(random);
    s.weight.format = random.pick({QF_INT4, QF_INT8});
    s.weight.has_float_zero = s.weight.has_offset = false;
    s.act_format = QF_INT8;
    s.act_group = random.pick<int64_t>({0, 0, 8, 32, 64, 128});
    return s;
  });
  // Few tokens of a 16-bit type and weights that pack for CUDA: rows and columns about the tiles of 16 and
  // 128.
  list.fill_up(950, [&] {
    LinearSpec s = random_spec(random);
    s.weight.format = random.pick({QF_INT4, QF_INT4, QF_INT8});
    s.weight.block = {1, random.pick<int64_t>({0, 32, 64, 128, 256})};
    s.weight.has_float_zero = s.weight.has_g_idx = s.weight.has_e8m0_scale = s.weight.has_offset = false;
    s.act_format = QF_FORMAT_NONE, s.act_group = 0, s.has_quantized_x = false;
    s.dtype = random.pick({kF16, kBf16});
    s.m = 1 + random.below(8);
    s.n = random.pick<int64_t>({1, 3, 8, 9, 15, 16, 17, 31, 47, 97, 193}) * (s.weight.is_gated ? 2 : 1);
    s.k = random.pick<int64_t>({1, 31, 97, 127, 128, 129, 255, 257, 509, 1023, 1024, 1031, 2047, 2049, 2311});
    return s;
  });
  // x that is larger than shared memory, and more rows than the GPU has places for.
  const std::vector<std::vector<int64_t>> large = {
      {1, 40, 14336}, {2, 33, 28672}, {4, 17, 14411},  {5, 24, 20000}, {8, 34, 8192},
      {8, 18, 14336}, {8, 10, 28800}, {3, 2190, 130},  {1, 9001, 129}, {2, 4300, 128},
      {8, 17001, 40}, {1, 34000, 64}, {20, 9001, 130}, {70, 9001, 130}};
  for (const auto& size : large) {
    LinearSpec s;
    s.m = size[0], s.n = size[1], s.k = size[2];
    s.weight.is_gated = size[0] == 5;
    list.add(s);
    if (s.n > 1000) continue;
    s.weight = {QF_INT8, {1, 64}}, s.weight.is_asymmetric = true;
    s.dtype = kF16, s.data = Data::outliers;
    list.add(s);
  }
  for (const int64_t tokens : {1, 15, 16, 17, 63, 64, 65, 128, 129, 130}) {
    for (int i = 0; i < 7; ++i) list.add(random_product_spec(random, tokens));
  }
  // A tile for every SM of a large GPU.
  for (int i = 0; i < 8; ++i) {
    LinearSpec s = random_product_spec(random, 130);
    s.n = 6400, s.k = 72;
    list.add(s);
  }
  for (int i = 0; i < 40; ++i) list.add(random_many_tokens_spec(random));
  for (const qf_format format : {QF_INT8, QF_FP8_E4M3}) {  // several tiles for every pair of blocks
    LinearSpec s;
    s.act_format = s.weight.format = format, s.weight.block = {1, 0};
    s.m = 1030, s.n = 4104, s.k = 80;
    list.add(s);
    s.weight.block = {128, 128}, s.act_group = 128;
    list.add(s);
  }
  for (const int64_t tokens : {1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 70, 130}) {
    for (int i = 0; i < 8; ++i) list.add(random_plain_spec(random, tokens));
  }
  for (int i = 0; i < 48; ++i) list.add(random_plain_many_tokens_spec(random));
  for (const bool is_gated : {false, true}) {  // several tiles for every pair of blocks
    LinearSpec s;
    s.weight = {QF_BF16, {}}, s.weight.is_gated = is_gated;
    s.activation = QF_SILU;
    s.m = 1030, s.n = 4112, s.k = 40;
    list.add(s);
  }
  for (const int64_t tokens : {1, 9, 33, 70}) {  // the order of summation that every m has
    for (int i = 0; i < 6; ++i) {
      LinearSpec s = i < 3   ? random_tensor_core_spec(random, tokens)
                     : i < 5 ? random_product_spec(random, tokens)
                             : random_plain_spec(random, tokens);
      s.is_batch_invariant = true;
      list.add(s);
    }
  }
  for (const int64_t tokens : {1, 15, 16, 17, 32, 33, 64, 65, 127, 128, 129, 300}) {
    for (int i = 0; i < 4; ++i) list.add(random_w4a8_spec(random, tokens));
  }
  for (const int64_t tokens : {9, 40, 130}) {  // more tiles than places
    LinearSpec s = random_w4a8_spec(random, tokens);
    s.n = 17024, s.k = 96;
    list.add(s);
  }
  Random few(15);
  for (const int64_t tokens : {1, 8, 16, 17, 32, 33, 64}) {
    for (const int64_t n : {128, 520, 1024}) list.add(random_few_tokens_spec(few, tokens, n));
  }
  for (const int64_t n : {4240, 4352, 6144, 6144, 8448, 8448, 11001, 12800, 17024, 28672, 28672, 34048}) {
    list.add(random_few_tokens_spec(few, few.pick<int64_t>({1, 7, 9, 16}), n));
    list.add(random_few_tokens_spec(few, few.pick<int64_t>({31, 33, 64}), n));
  }
  for (const int64_t n : {4352, 17024, 28672}) {
    for (const int64_t tokens : {3, 20}) {
      LinearSpec s = random_w4a8_spec(few, tokens);
      s.n = n, s.k = 352;
      list.add(s);
    }
  }
  Random offsets(22);
  for (const int64_t tokens : {1, 1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 65, 129, 257, 300}) {
    for (int i = 0; i < 5; ++i) list.add(random_offset_spec(offsets, tokens));
  }
  for (const int64_t tokens : {1, 2, 7, 16, 20, 70}) {  // x larger than shared memory; more rows than places
    LinearSpec s = random_offset_spec(offsets, tokens);
    s.n = 24, s.k = 20000;
    list.add(s);
    s = random_offset_spec(offsets, tokens);
    s.n = 9002, s.k = 130;
    list.add(s);
  }
  // INT4 weights by INT8 activations in tiles of 256 tokens by 128 rows, several for every pair of blocks.
  Random many(16);
  for (const int64_t k : {32, 96, 128, 160, 256, 288, 416, 544}) {
    for (const bool is_gated : {false, true}) {
      LinearSpec s = random_w4a8_spec(many, k == 288 ? 1030 : 2300);
      s.weight.is_gated = is_gated;
      s.n = is_gated ? 1040 : many.pick<int64_t>({1025, 1032, 1200});
      if (k == 288) s.n = 4112;
      s.k = k;
      list.add(s);
    }
  }
  Random divided(17);
  for (const int64_t n : {34, 70, 520, 1030}) {
    for (const int64_t tokens : {10, 16, 17, 32, 48, 64}) list.add(random_divided_spec(divided, tokens, n));
  }
  // Act-order, where x is brought into the order of the groups first.
  Random act_order(18);
  for (const int64_t tokens : {1, 2, 7, 16, 17, 40, 70, 130}) {
    for (int i = 0; i < 3; ++i) {
      LinearSpec s = random_tensor_core_spec(act_order, tokens);
      s.weight.has_g_idx = true;
      s.is_batch_invariant = act_order.chance(20);
      s.row_padding = act_order.pick<int64_t>({0, 0, 1});
      list.add(s);
    }
  }
  // Weight-only layers of many tokens: rows that blocks divide among them along k, then as many tiles of 256
  // tokens as two for every SM of 132, and a gated weight.
  Random weight_only(19);
  for (const int64_t n : {70, 520}) {
    for (const int64_t tokens : {70, 130, 250}) {
      LinearSpec s = random_tensor_core_spec(weight_only, tokens);
      s.n = n, s.k = 8 * weight_only.pick<int64_t>({130, 301});
      list.add(s);
    }
  }
  LinearSpec plain = random_tensor_core_spec(weight_only, 2040);
  plain.weight.format = QF_INT4, plain.weight.block = {1, 128};
  plain.weight.is_asymmetric = plain.weight.is_gated = false;
  plain.n = 4200, plain.k = 40;
  list.add(plain);
  LinearSpec gated = random_tensor_core_spec(weight_only, 510);
  gated.weight.format = QF_INT4, gated.weight.block = {1, 128};
  gated.weight.is_asymmetric = gated.weight.is_gated = true;
  gated.n = 4200, gated.k = 136;
  list.add(gated);
  // MXFP4: every number of tokens that a kernel ends at, then rows that blocks divide among them along k, and
  // more tiles than the GPU has places for.
  Random mxfp4(20);
  for (const int64_t tokens : {1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 257}) {
    for (int i = 0; i < 3; ++i) {
      LinearSpec s = random_mxfp4_spec(mxfp4, tokens);
      if (i == 2) s.is_batch_invariant = mxfp4.chance(40);
      if (i == 2 && mxfp4.chance(40)) ++s.row_padding;
      list.add(s);
      if (i > 0 || tokens > 3) continue;
      s.dtype = kBf16, s.has_x_gain = true;
      list.add(s);
      s.k = 1040, s.row_padding = 0;
      list.add(s);
    }
  }
  for (const auto& size : std::vector<std::vector<int64_t>>{{2, 40, 14336},
                                                            {16, 34, 14336},
                                                            {32, 70, 9088},
                                                            {64, 130, 9088},
                                                            {20, 9001, 130},
                                                            {300, 9001, 72}}) {
    LinearSpec s = random_mxfp4_spec(mxfp4, size[0]);
    s.dtype = kBf16, s.weight.is_gated = false;
    s.n = size[1], s.k = size[2], s.row_padding = (8 - s.k % 8) % 8;
    list.add(s);
  }
  // Residuals of many tokens: about the edges of tiles, in place, gated, at rows that boxes do not take; k in
  // one block or several; then more tiles than SMs, of 128 and of 256 tokens, and the same of W4A8.
  Random residuals(21);
  for (const int64_t tokens : {65, 128, 130, 257}) {
    for (const int64_t n : {8, 132, 136, 272}) {
      LinearSpec s = random_tensor_core_spec(residuals, tokens);
      s.weight.is_gated = n == 272 && tokens != 130;
      s.out_format = QF_FORMAT_NONE;
      s.n = n, s.k = 8 * residuals.pick<int64_t>({17, 48, 97});
      s.has_residual = residuals.chance(60), s.has_residual_in_y = !s.has_residual;
      if (s.has_residual_in_y) s.data = Data::normal;
      s.row_padding = residuals.pick<int64_t>({0, 0, 8, 3});
      list.add(s);
    }
  }
  for (const bool is_in_y : {false, true}) {
    LinearSpec s;
    s.has_residual = !is_in_y, s.has_residual_in_y = is_in_y, s.has_bias = true;
    s.m = 1030, s.n = 2176, s.k = 72, s.weight.block = {1, 64};
    list.add(s);
    s.m = 1000, s.n = 6400, s.k = 8, s.weight.block = {1, 128}, s.activation = QF_SILU;
    s.weight.is_gated = is_in_y;
    list.add(s);
    s.m = 2300, s.n = 1040, s.k = 160, s.act_format = QF_INT8;
    list.add(s);
    s.m = 1030, s.n = 4112, s.k = 32, s.weight.block = {1, 0}, s.activation = QF_IDENTITY;
    list.add(s);
  }
  Random others(23);
  for (const int64_t tokens : {1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 65, 129, 257}) {
    for (int i = 0; i < 3; ++i) {
      list.add(random_codebook_spec(others, tokens));
      list.add(random_small_groups_spec(others, tokens));
    }
  }
  for (const int64_t tokens : {7, 16, 20, 40, 70}) {  // x larger than shared memory; more rows than places
    for (const bool is_codebook : {false, true}) {
      LinearSpec s =
          is_codebook ? random_codebook_spec(others, tokens) : random_small_groups_spec(others, tokens);
      s.n = 24, s.k = 14336;
      list.add(s);
      s.n = tokens == 40 ? 25400 : 9002, s.k = 136;
      list.add(s);
    }
  }
  // A NaN is its own token's alone.
  for (const int64_t m : {2, 3}) {
    LinearSpec s;
    s.m = m, s.n = 50, s.k = 300, s.data = Data::nan_in_row_1;
    list.add(s);
    s.weight = {QF_INT8, {1, 0}}, s.weight.is_asymmetric = true;
    list.add(s);
  }
  return list.take();
}

}  // namespace quantfuse::cases
