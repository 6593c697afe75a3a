// SPDX-License-Identifier: Apache-2.0
//
// Everything quantize writes is defined to the bit (bounds.h, rule 1), but for the MSE search, where a kernel
// sums squared errors in its own order and two scales may be as good as equal. There the kernel's scale is
// judged by the error it leads to, at most 1e-4 above the reference's, and its codes must be exactly those
// that belong to the scale it wrote.
#include <algorithm>
#include <cmath>

#include "cases/describe.h"
#include "cases/operation_case.h"
#include "cases/test_cases.h"
#include "formats/codes.h"
#include "formats/hadamard.h"

namespace quantfuse::cases {
namespace {

constexpr Functions<qf_quantize_args> kFunctions = QF_CASE_FUNCTIONS(quantize);

class QuantizeCase final : public OperationCase<qf_quantize_args> {
 public:
  explicit QuantizeCase(const QuantizeSpec& spec) : OperationCase(kFunctions), spec_(spec) {
    scheme = Words()
                 .add(format_word(spec.format))
                 .add(block_word(spec.block))
                 .add_if(spec.has_e8m0_scale, "e8m0")
                 .add_if(spec.is_asymmetric, "asym")
                 .add(dtype_word(spec.dtype))
                 .text();
    name = !spec.name.empty() ? spec.name
                              : Words()
                                    .add(scheme)
                                    .add(std::to_string(spec.rows) + "x" + std::to_string(spec.cols))
                                    .add_if(spec.mode == QF_SCALE_STATIC, "static")
                                    .add_if(spec.mode == QF_SCALE_MSE, "mse")
                                    .add_if(spec.wants_row_sums, "row_sums")
                                    .add_if(spec.row_padding > 0, "padded")
                                    .add_if(spec.has_transposed_scale, "transposed_scale")
                                    .add_if(spec.hadamard > 0, "hadamard" + std::to_string(spec.hadamard))
                                    .add(data_word(spec.data))
                                    .text();
    m = spec.rows, n = spec.cols;
    flops = static_cast<double>(m) * static_cast<double>(n);

    block_ = resolved(spec.block, m, n);
    row_blocks_ = ceil_div(m, block_.rows), col_blocks_ = ceil_div(n, block_.cols);
    const Role scale_role = spec.mode == QF_SCALE_STATIC ? Role::input : Role::output;
    // An odd view also shows the forms in which tensors may come: bytes for FP8, scales without a dimension
    // of 1.
    const bool is_odd = spec.row_padding > 0;
    const std::vector<int64_t> scale_shape = is_odd && col_blocks_ == 1
                                                 ? std::vector<int64_t>{row_blocks_}
                                                 : std::vector<int64_t>{row_blocks_, col_blocks_};
    x_ = &add("x", Role::input, spec.dtype, {m, n}, spec.row_padding);
    q_ = &add("q", Role::output, code_dtype(spec.format, is_odd), {m, row_bytes(spec.format, n)},
              spec.row_padding);
    const qf_dtype scale_dtype = spec.has_e8m0_scale ? kE8m0 : kF32;
    if (spec.has_transposed_scale) {
      scale_ = &add("scale", scale_role, scale_dtype, {col_blocks_, row_blocks_}, spec.row_padding);
      scale_->show_transposed();
    } else {
      scale_ = &add("scale", scale_role, scale_dtype, scale_shape);
    }
    if (spec.is_asymmetric) zero_ = &add("zero", scale_role, kI8, scale_shape);
    if (spec.wants_row_sums) row_sums_ = &add("row_sums", Role::output, kI32, {m, col_blocks_});
  }

 private:
  void fill(Random& random) override {
    fill_floats(*x_, random, spec_.data);
    if (spec_.mode != QF_SCALE_STATIC) return;
    // Scales for about two deviations, so that some numbers saturate.
    fill_scales(*scale_, random, 2.0 / code_range(spec_.format).symmetric_max);
    if (!zero_) return;
    const CodeRange range = code_range(spec_.format);
    Image& zero = zero_->initial();
    for (int64_t r = 0; r < zero.rows; ++r) {
      for (int64_t c = 0; c < zero.cols; ++c) {
        zero.set(r, c, static_cast<double>(range.lowest + random.below(range.highest - range.lowest + 1)));
      }
    }
  }

  qf_quantize_args args(int set) override {
    qf_quantize_args a = {};
    a.x = view(x_, set);
    a.format = spec_.format;
    a.block = spec_.block;
    a.scale_mode = spec_.mode;
    a.q = view(q_, set);
    a.scale = view(scale_, set);
    a.zero = view(zero_, set);
    a.row_sums = view(row_sums_, set);
    a.hadamard = spec_.hadamard;
    return a;
  }

  void forget_oracle() override { has_oracle_ = false; }

  std::string compare() override {
    if (!has_oracle_) run_reference(args(kReferenceSet));
    has_oracle_ = true;
    if (spec_.mode == QF_SCALE_MSE) return compare_search();
    for (const Tensor* tensor : {scale_, zero_, q_, row_sums_}) {
      if (!tensor) continue;
      if (std::string wrong = compare_exactly(*tensor, tensor->reference_result()); !wrong.empty())
        return wrong;
    }
    return "";
  }

  // Squared error of the codes of one block, with the scale and zero point beside them.
  double squared_error(const Image& q, const Image& scale, const Image& zero, int64_t R, int64_t C) const {
    const double s = scale.value(R * col_blocks_ + C), z = zero_ ? zero.value(R * col_blocks_ + C) : 0;
    double sum = 0;
    for (int64_t r = R * block_.rows; r < std::min((R + 1) * block_.rows, m); ++r) {
      for (int64_t c = C * block_.cols; c < std::min((C + 1) * block_.cols, n); ++c) {
        const double x = x_->initial().value(r, c);
        if (!std::isfinite(x)) continue;
        const double error = (decode_at(spec_.format, q.row(r), c) - z) * s - x;
        sum += error * error;
      }
    }
    return sum;
  }

  std::string compare_search() const {
    const Image none, &q = q_->result(), &scale = scale_->result(), &zero = zero_ ? zero_->result() : none;
    const Image ref_q = q_->reference_result(), ref_scale = scale_->reference_result();
    const Image ref_zero = zero_ ? zero_->reference_result() : none;

    Differences scales("scale"), codes("q"), sums("row_sums");
    for (int64_t R = 0; R < row_blocks_; ++R) {
      for (int64_t C = 0; C < col_blocks_; ++C) {
        const double got = squared_error(q, scale, zero, R, C),
                     want = squared_error(ref_q, ref_scale, ref_zero, R, C);
        if (!(got <= want * (1 + 1e-4))) {
          scales.add(R, C, [&] {
            return "leads to squared error " + std::to_string(got) + ", the reference's to " +
                   std::to_string(want);
          });
        }
      }
    }
    for (int64_t r = 0; r < m; ++r) {
      std::vector<int64_t> sum(static_cast<size_t>(col_blocks_));
      for (int64_t c = 0; c < n; ++c) {
        const int64_t C = c / block_.cols, i = r / block_.rows * col_blocks_ + C;
        const auto x = static_cast<float>(x_->initial().value(r, c));
        const uint8_t code = encode_value(spec_.format, x * (1.0f / static_cast<float>(scale.value(i))),
                                          zero_ ? static_cast<int>(zero.value(i)) : 0);
        const float want = decode_at(spec_.format, &code, 0), got = decode_at(spec_.format, q.row(r), c);
        if (!(got == want || (std::isnan(got) && std::isnan(want)))) {
          codes.add(r, c, [&] {
            return "is " + std::to_string(got) + ", expected " + std::to_string(want) +
                   " for the scale written";
          });
        }
        if (row_sums_) sum[static_cast<size_t>(C)] += static_cast<int64_t>(got);
      }
      for (int64_t C = 0; row_sums_ && C < col_blocks_; ++C) {
        const auto got = static_cast<int64_t>(row_sums_->result().value(r, C));
        if (got != sum[static_cast<size_t>(C)])
          sums.add(r, C, [] { return "is not the sum of the codes written"; });
      }
    }
    for (const Differences* d : {&scales, &codes, &sums}) {
      if (!d->text().empty()) return d->text();
    }
    return "";
  }

  QuantizeSpec spec_;
  qf_block block_ = {1, 1};  // resolved
  int64_t row_blocks_ = 0, col_blocks_ = 0;
  Tensor *x_ = nullptr, *q_ = nullptr, *scale_ = nullptr, *zero_ = nullptr, *row_sums_ = nullptr;
  bool has_oracle_ = false;
};

QuantizeSpec random_spec(Random& random) {
  QuantizeSpec s;
  s.format = random.pick({QF_INT8, QF_INT4, QF_FP8_E4M3, QF_FP8_E5M2, QF_FP4_E2M1, QF_NF4});
  const int64_t group = random.pick<int64_t>({1, 3, 5, 16, 32, 33, 64, 100, 128});
  s.block = random.pick<qf_block>(
      {{1, 0}, {1, group}, {1, group}, {1, group}, {0, 0}, {0, 1}, {128, 128}, {2, 7}, {0, group}});
  s.mode = random.pick({QF_SCALE_DYNAMIC, QF_SCALE_DYNAMIC, QF_SCALE_STATIC, QF_SCALE_MSE});
  s.dtype = random.pick({kF32, kF16, kBf16});
  s.rows = random.pick<int64_t>({1, 2, 3, 5, 8, 17, 33});
  s.cols = random.pick<int64_t>(
      {1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 255, 300});
  s.has_e8m0_scale = random.chance(25);
  s.is_asymmetric = is_integer(s.format) && !s.has_e8m0_scale && random.chance(40);
  s.wants_row_sums = is_integer(s.format) && random.chance(40);
  s.row_padding = random.pick<int64_t>({0, 0, 1, 5});
  s.data = random.pick({Data::normal, Data::normal, Data::outliers, Data::tiny, Data::huge, Data::zeros,
                        Data::constant, Data::with_nan_inf});
  s.has_transposed_scale = s.mode == QF_SCALE_DYNAMIC && random.chance(20);
  if (s.mode != QF_SCALE_MSE && random.chance(25)) s.hadamard = largest_hadamard(s.cols);
  return s;
}

}  // namespace

CasePtr make_case(const QuantizeSpec& spec) { return std::make_unique<QuantizeCase>(spec); }

std::vector<CasePtr> quantize_test_cases() {
  CaseList list;
  // Every format with every number kind, per row and per group.
  for (const qf_format format : {QF_INT8, QF_INT4, QF_FP8_E4M3, QF_FP8_E5M2, QF_FP4_E2M1, QF_NF4}) {
    for (const Data data :
         {Data::normal, Data::outliers, Data::tiny, Data::huge, Data::zeros, Data::with_nan_inf}) {
      for (const qf_dtype dtype : {kF32, kF16, kBf16}) {
        QuantizeSpec s;
        s.format = format, s.data = data, s.dtype = dtype;
        s.rows = 5, s.cols = 131;
        list.add(s);
        s.block = {1, 32}, s.has_e8m0_scale = true;
        list.add(s);
      }
    }
  }
  // Nothing to do.
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{0, 64}, {3, 0}, {0, 0}}) {
    QuantizeSpec s;
    s.rows = rows, s.cols = cols, s.block = {1, 32};
    list.add(s);
  }
  // Long rows, where a kernel's main loop and its threads are at work.
  for (const qf_format format : {QF_INT8, QF_INT4, QF_FP8_E4M3}) {
    QuantizeSpec s;
    s.format = format, s.rows = 37, s.cols = 4099, s.dtype = kBf16;
    list.add(s);
    s.block = {1, 128}, s.rows = 300, s.cols = 512;
    list.add(s);
    s.block = {0, 0};
    list.add(s);
    s.block = {128, 128};
    list.add(s);
  }
  // Every type of code and number where a vector of 16 bytes is whole, and where it is not; rows that are
  // longer than the registers of a block.
  for (const qf_format format : {QF_INT8, QF_INT4, QF_FP8_E4M3, QF_FP8_E5M2, QF_FP4_E2M1, QF_NF4}) {
    for (const qf_dtype dtype : {kF32, kF16, kBf16}) {
      QuantizeSpec s;
      s.format = format, s.dtype = dtype, s.data = Data::outliers;
      s.rows = 9, s.cols = 1024, s.block = {1, 128};
      list.add(s);
      s.has_transposed_scale = true, s.hadamard = 128;
      list.add(s);
      s.has_transposed_scale = false, s.hadamard = 1024;
      list.add(s);
      s.block = {1, 0};
      list.add(s);
      s.block = {1, 32}, s.hadamard = 0, s.has_e8m0_scale = true;
      list.add(s);
      s.is_asymmetric = is_integer(format), s.has_e8m0_scale = false, s.wants_row_sums = is_integer(format);
      list.add(s);
      s.cols = 1096, s.block = {0, 0};
      list.add(s);
      s.block = {128, 128}, s.rows = 131;
      list.add(s);
    }
    QuantizeSpec s;
    s.format = format, s.rows = 2, s.cols = 70001, s.dtype = kBf16;
    list.add(s);
    s.cols = 65536, s.hadamard = 64;
    list.add(s);
  }
  for (const int64_t hadamard : {2, 4, 8, 16, 32, 64, 256, 512, 2048, 4096, 8192}) {
    QuantizeSpec s;
    s.hadamard = hadamard, s.rows = 3, s.cols = hadamard < 1000 ? 3 * hadamard : hadamard, s.dtype = kBf16;
    list.add(s);
  }
  Random random(11);
  list.fill_up(700, [&] { return random_spec(random); });
  return list.take();
}

}  // namespace quantfuse::cases
