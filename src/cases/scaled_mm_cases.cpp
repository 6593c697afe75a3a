// SPDX-License-Identifier: Apache-2.0
//
// Products into int32 are exact. Products into floats are sums of k terms (|a| + |a_zero|) * (|b| + |b_zero|)
// * scales, and the bias: bounds.h, sum_bound. FP8 products are exact in float32, so only their sum and
// scales round.
#include <algorithm>
#include <cmath>

#include "cases/bounds.h"
#include "cases/describe.h"
#include "cases/operation_case.h"
#include "cases/test_cases.h"
#include "core/dot_products.h"
#include "formats/codes.h"

namespace quantfuse::cases {
namespace {

constexpr Functions<qf_scaled_mm_args> kFunctions = QF_CASE_FUNCTIONS(scaled_mm);

class ScaledMmCase final : public OperationCase<qf_scaled_mm_args> {
 public:
  explicit ScaledMmCase(const ScaledMmSpec& spec) : OperationCase(kFunctions), spec_(spec) {
    const bool is_nk = spec.b_order == QF_NK;
    scheme = Words()
                 .add(format_word(spec.a_format) + "x" + format_word(spec.b_format))
                 .add(is_nk ? "nk" : "kn")
                 .add_if(spec.has_scales, block_word(spec.a_block) + "/" + block_word(spec.b_block))
                 .add("to " + dtype_word(spec.out))
                 .text();
    name =
        !spec.name.empty()
            ? spec.name
            : Words()
                  .add(scheme)
                  .add(std::to_string(spec.m) + "x" + std::to_string(spec.n) + "x" + std::to_string(spec.k))
                  .add_if(spec.has_a_zero, "a_zero")
                  .add_if(spec.has_b_zero, "b_zero")
                  .add_if(spec.has_bias, "bias")
                  .add_if(spec.has_fast_accumulation, "fast_accumulation")
                  .add_if(spec.row_padding > 0, "padded")
                  .add(data_word(spec.data))
                  .text();
    m = spec.m, n = spec.n, k = spec.k;
    flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);

    const bool is_odd = spec.row_padding > 0;
    const int64_t b_rows = is_nk ? n : k, b_cols = is_nk ? k : n;
    a_ = &add("a", Role::input, code_dtype(spec.a_format, is_odd), {m, row_bytes(spec.a_format, k)},
              spec.row_padding);
    b_ = &add("b", Role::input, code_dtype(spec.b_format, is_odd), {b_rows, row_bytes(spec.b_format, b_cols)},
              spec.row_padding);
    c_ = &add("c", Role::output, spec.out, {m, n}, spec.row_padding);
    if (spec.has_scales) {
      a_block_ = resolved(spec.a_block, m, k), b_block_ = resolved(spec.b_block, n, k);
      a_scale_ = &add("a_scale", Role::input, kF32, {ceil_div(m, a_block_.rows), ceil_div(k, a_block_.cols)});
      b_scale_ = &add("b_scale", Role::input, kF32, {ceil_div(n, b_block_.rows), ceil_div(k, b_block_.cols)});
    }
    // One zero point for all where the view is odd, one per row otherwise.
    if (spec.has_a_zero) a_zero_ = &add("a_zero", Role::input, kI32, {is_odd ? 1 : m});
    if (spec.has_b_zero) b_zero_ = &add("b_zero", Role::input, kI32, {is_odd ? 1 : n});
    if (spec.has_bias) bias_ = &add("bias", Role::input, is_exact() ? kF32 : spec.out, {n});
  }

 private:
  bool is_exact() const { return dtype_of(spec_.out) == DType::i32; }

  void fill(Random& random) override {
    fill_codes(*a_, random, spec_.a_format, k, spec_.codes);
    fill_codes(*b_, random, spec_.b_format, spec_.b_order == QF_NK ? k : n, spec_.codes);
    if (spec_.data == Data::constant) {
      fill_lowest(*a_, spec_.a_format), fill_lowest(*b_, spec_.b_format);
    } else if (spec_.data == Data::nan_in_row_1) {
      a_->initial().row(1)[0] = 0x7f;
    }
    const double root = std::sqrt(static_cast<double>(std::max<int64_t>(k, 1)));
    if (a_scale_) fill_scales(*a_scale_, random, 1.0 / code_range(spec_.a_format).symmetric_max);
    if (b_scale_) fill_scales(*b_scale_, random, 1.0 / root / code_range(spec_.b_format).symmetric_max);
    fill_zeros(a_zero_, random, spec_.a_format);
    fill_zeros(b_zero_, random, spec_.b_format);
    if (bias_) fill_floats(*bias_, random, Data::normal);
  }

  static void fill_lowest(Tensor& tensor, qf_format format) {
    const uint8_t byte = format == QF_INT8       ? 0x80
                         : format == QF_INT4     ? 0x88
                         : format == QF_FP8_E4M3 ? 0xfe
                                                 : 0xfb;
    Image& q = tensor.initial();
    for (int64_t r = 0; r < q.rows; ++r) std::fill_n(q.row(r), q.cols, byte);
  }

  // The ends of the range first.
  static void fill_zeros(Tensor* zero, Random& random, qf_format format) {
    if (!zero) return;
    const CodeRange range = code_range(format);
    for (int64_t i = 0; i < zero->initial().cols; ++i) {
      const int64_t drawn = range.lowest + random.below(range.highest - range.lowest + 1);
      zero->initial().set(0, i, static_cast<double>(i == 0 ? range.highest : i == 1 ? range.lowest : drawn));
    }
  }

  qf_scaled_mm_args args(int set) override {
    qf_scaled_mm_args a = {};
    a.a = view(a_, set);
    a.b = view(b_, set);
    a.c = view(c_, set);
    a.a_format = spec_.a_format;
    a.b_format = spec_.b_format;
    a.b_order = spec_.b_order;
    a.is_b_constant = !spec_.has_bias;  // either way is run
    a.k = k;
    a.a_scale = view(a_scale_, set);
    a.b_scale = view(b_scale_, set);
    if (spec_.has_scales) a.a_block = spec_.a_block, a.b_block = spec_.b_block;
    a.a_zero = view(a_zero_, set);
    a.b_zero = view(b_zero_, set);
    a.bias = view(bias_, set);
    a.fast_accumulation = spec_.has_fast_accumulation;
    return a;
  }

  void forget_oracle() override { has_oracle_ = false; }

  std::string compare() override {
    if (!has_oracle_) {
      if (is_exact()) {
        run_reference(args(kReferenceSet));
      } else {
        expect_floats();
      }
      has_oracle_ = true;
    }
    return is_exact() ? compare_exactly(*c_, c_->reference_result()) : compare_floats(*c_, expected_);
  }

  void expect_floats() {
    FloatMatrix c(m, n);
    qf_scaled_mm_args a = args(kReferenceSet);
    a.c = &c.view;
    run_reference(a);

    const std::vector<double> size_a = magnitudes_a(), size_b = magnitudes_b();
    expected_ = {};
    std::vector<double> sums(static_cast<size_t>(n));
    for (int64_t i = 0; i < m; ++i) {
      dot_products(size_b.data(), n, k, size_a.data() + i * k, sums.data());
      for (int64_t j = 0; j < n; ++j) {
        const double sum =
            sums[static_cast<size_t>(j)] + (bias_ ? std::abs(bias_->initial().value(0, j)) : 0);
        expected_.values.push_back(c.at(i, j));
        const double of_fp8 =
            is_fp8(spec_.a_format) ? fp8_sum_bound(device, spec_.has_fast_accumulation ? k : 0, sum) : 0;
        expected_.bounds.push_back(sum_bound(k, sum) + of_fp8);
      }
    }
  }

  static double zero_size(const Tensor* zero, int64_t i) {
    if (!zero) return 0;
    return std::abs(zero->initial().value(0, zero->initial().cols == 1 ? 0 : i));
  }

  std::vector<double> magnitudes_a() const {  // [m, k]
    std::vector<double> sizes;
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t t = 0; t < k; ++t) {
        const double scale = a_scale_ ? a_scale_->initial().value(i / a_block_.rows, t / a_block_.cols) : 1;
        sizes.push_back(
            (std::abs(decode_at(spec_.a_format, a_->initial().row(i), t)) + zero_size(a_zero_, i)) * scale);
      }
    }
    return sizes;
  }

  std::vector<double> magnitudes_b() const {  // [n, k]
    std::vector<double> sizes;
    const bool is_nk = spec_.b_order == QF_NK;
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t t = 0; t < k; ++t) {
        const double scale = b_scale_ ? b_scale_->initial().value(j / b_block_.rows, t / b_block_.cols) : 1;
        const double code = decode_at(spec_.b_format, b_->initial().row(is_nk ? j : t), is_nk ? t : j);
        sizes.push_back((std::abs(code) + zero_size(b_zero_, j)) * scale);
      }
    }
    return sizes;
  }

  ScaledMmSpec spec_;
  qf_block a_block_ = {1, 1}, b_block_ = {1, 1};  // resolved
  Tensor *a_ = nullptr, *b_ = nullptr, *c_ = nullptr, *a_scale_ = nullptr, *b_scale_ = nullptr;
  Tensor *a_zero_ = nullptr, *b_zero_ = nullptr, *bias_ = nullptr;
  bool has_oracle_ = false;
  Expected expected_;
};

ScaledMmSpec random_spec(Random& random) {
  ScaledMmSpec s;
  const bool is_integer_product = random.chance(60);
  s.a_format =
      is_integer_product ? random.pick({QF_INT8, QF_INT8, QF_INT4}) : random.pick({QF_FP8_E4M3, QF_FP8_E5M2});
  s.b_format =
      is_integer_product ? random.pick({QF_INT8, QF_INT8, QF_INT4}) : random.pick({QF_FP8_E4M3, QF_FP8_E5M2});
  s.b_order = random.pick({QF_NK, QF_NK, QF_KN});
  s.out = is_integer_product ? random.pick({kI32, kF32, kF16, kBf16}) : random.pick({kF32, kF16, kBf16});
  const int64_t group = random.pick<int64_t>({16, 32, 33, 64, 128});
  s.has_scales = s.out.code != kI32.code;
  s.a_block = random.pick<qf_block>({{1, 0}, {1, 0}, {0, 0}, {1, group}});
  s.b_block = random.pick<qf_block>({{1, 0}, {1, 0}, {0, 0}, {1, group}, {group, group}, {128, 128}});
  s.has_a_zero = is_integer_product && random.chance(30);
  s.has_b_zero = is_integer_product && random.chance(30);
  s.has_bias = s.has_scales && random.chance(40);
  s.m = random.pick<int64_t>({1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 65});
  s.n = random.pick<int64_t>({1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 129});
  s.k = random.pick<int64_t>({1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 257});
  s.row_padding = random.pick<int64_t>({0, 0, 1, 5});
  return s;
}

}  // namespace

CasePtr make_case(const ScaledMmSpec& spec) { return std::make_unique<ScaledMmCase>(spec); }

std::vector<CasePtr> scaled_mm_test_cases() {
  CaseList list;
  for (const auto& [a, b] : {std::pair{QF_INT8, QF_INT8}, {QF_INT4, QF_INT4}, {QF_FP8_E4M3, QF_FP8_E4M3}}) {
    for (const qf_order order : {QF_NK, QF_KN}) {
      ScaledMmSpec s;
      s.a_format = a, s.b_format = b, s.b_order = order;
      s.has_scales = is_fp8(a);
      s.out = is_fp8(a) ? kF32 : kI32;
      // Sizes of nothing, of one, and about the tiles.
      for (const auto& size : std::vector<std::vector<int64_t>>{{0, 5, 7},
                                                                {5, 0, 7},
                                                                {3, 4, 0},
                                                                {1, 1, 1},
                                                                {4, 16, 64},
                                                                {5, 17, 65},
                                                                {3, 15, 63},
                                                                {1, 129, 513},
                                                                {48, 96, 1025}}) {
        s.m = size[0], s.n = size[1], s.k = size[2];
        list.add(s);
      }
    }
  }
  Random random(13);
  list.fill_up(320, [&] { return random_spec(random); });
  // A few rows of INT8, where a dot product per number is the way.
  list.fill_up(380, [&] {
    ScaledMmSpec s = random_spec(random);
    s.a_format = s.b_format = QF_INT8;
    s.b_order = QF_NK;
    s.m = random.pick<int64_t>({1, 2, 3, 4, 5});
    return s;
  });
  // About the tiles of the CUDA kernels, and enough of them for every SM of a large GPU.
  list.fill_up(440, [&] {
    ScaledMmSpec s = random_spec(random);
    s.m = random.pick<int64_t>({15, 16, 17, 63, 64, 65, 127, 128, 129, 200});
    s.n = random.pick<int64_t>({31, 32, 33, 64, 65, 127, 128, 130, 200});
    s.k = random.pick<int64_t>({96, 127, 128, 129, 255, 256, 384, 400, 513});
    return s;
  });
  list.fill_up(452, [&] {
    ScaledMmSpec s = random_spec(random);
    s.m = 130, s.n = random.pick<int64_t>({6400, 6337, 6342}), s.k = random.pick<int64_t>({33, 64, 100});
    return s;
  });
  // What the kernel for many rows takes: tiles of 128 by 256, 128 of k at a time.
  list.fill_up(516, [&] {
    ScaledMmSpec s = random_spec(random);
    s.a_format = random.pick({QF_INT8, QF_INT8, QF_FP8_E4M3, QF_FP8_E4M3, QF_FP8_E5M2});
    s.b_format = is_integer(s.a_format) ? QF_INT8 : random.pick({QF_FP8_E4M3, QF_FP8_E4M3, QF_FP8_E5M2});
    s.out =
        is_integer(s.a_format) ? random.pick({kI32, kF32, kF16, kBf16}) : random.pick({kF32, kF16, kBf16});
    s.has_scales = s.out.code != kI32.code;
    s.b_order = QF_NK;
    s.a_block = random.pick<qf_block>({{1, 0}, {0, 0}, {1, 128}});
    s.b_block =
        s.a_block.cols == 128 ? qf_block{128, 128} : random.pick<qf_block>({{1, 0}, {0, 0}, {128, 0}});
    s.has_a_zero = s.has_b_zero = false;
    s.has_bias = s.has_scales && random.chance(40);
    s.m = random.pick<int64_t>({65, 127, 128, 129, 255, 256, 257});
    s.n = 8 * random.pick<int64_t>({1, 8, 31, 32, 33, 65});
    s.k = 16 * random.pick<int64_t>({1, 7, 8, 9, 24, 41});
    s.row_padding = 0;
    return s;
  });
  // So many columns that tiles of 192 fill the last round of blocks on 132 SMs better than those of 256; and
  // so many of k that sums which stay in the tensor cores lose more than others may.
  for (const auto& size : std::vector<std::vector<int64_t>>{
           {9, 17160, 144}, {129, 17160, 16}, {130, 72, 4096}, {129, 24, 14336}}) {
    for (const qf_format format : {QF_INT8, QF_FP8_E4M3}) {
      ScaledMmSpec s;
      s.a_format = s.b_format = format;
      s.m = size[0], s.n = size[1], s.k = size[2];
      s.has_scales = s.has_bias = true, s.out = kBf16;
      list.add(s);
      s.out = kF32, s.has_fast_accumulation = is_fp8(format);
      if (is_fp8(format)) list.add(s);
      s.out = kF16, s.a_block = {1, 128}, s.b_block = {128, 128};
      list.add(s);
    }
  }
  // Few rows of a, and so many of b that they are shared out among all SMs of a large GPU.
  for (const auto& size : std::vector<std::vector<int64_t>>{{1, 4231, 272},
                                                            {16, 6144, 400},
                                                            {64, 6150, 144},
                                                            {9, 8448, 160},
                                                            {33, 12672, 144},
                                                            {8, 28672, 272},
                                                            {40, 34001, 64}}) {
    for (const qf_format format : {QF_INT8, QF_FP8_E4M3}) {
      ScaledMmSpec s;
      s.a_format = s.b_format = format;
      s.m = size[0], s.n = size[1], s.k = size[2];
      s.out = is_integer(format) ? kI32 : kF32;
      list.add(s);
      s.out = kBf16, s.has_scales = true, s.a_block = s.b_block = {1, 0}, s.has_bias = true;
      list.add(s);
      s.out = kF16, s.a_block = {1, 128}, s.b_block = {128, 128};
      list.add(s);
    }
  }
  // The largest sums, with zero points at the other end, of more columns than int32 has room for.
  for (const qf_format format : {QF_INT8, QF_INT4, QF_FP8_E4M3, QF_FP8_E5M2}) {
    ScaledMmSpec s;
    s.a_format = s.b_format = format, s.out = kF32, s.has_scales = true, s.data = Data::constant;
    s.m = 3, s.n = 5;
    for (const int64_t k : {300, 131072, 140003}) {
      s.k = k, s.a_block = s.b_block = {1, 0};
      s.has_a_zero = s.has_b_zero = false;
      list.add(s);
      s.has_a_zero = s.has_b_zero = is_integer(format);
      if (is_integer(format)) list.add(s);
      s.b_block = {128, 128};
      list.add(s);
    }
  }
  // A NaN is its own row's alone.
  for (const qf_format format : {QF_FP8_E4M3, QF_FP8_E5M2}) {
    for (const int64_t m : {2, 20, 70}) {
      ScaledMmSpec s;
      s.a_format = format, s.b_format = QF_FP8_E4M3, s.out = kBf16, s.has_scales = true;
      s.m = m, s.n = 40, s.k = 208, s.data = Data::nan_in_row_1;
      list.add(s);
    }
  }
  return list.take();
}

}  // namespace quantfuse::cases
