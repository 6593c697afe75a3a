// SPDX-License-Identifier: Apache-2.0
#include "cases/weight.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "formats/codes.h"

namespace quantfuse::cases {
namespace {

template <class Change>
void change_each(Tensor& tensor, const Change& change) {
  Image& image = tensor.initial();
  for (int64_t r = 0; r < image.rows; ++r) {
    for (int64_t c = 0; c < image.cols; ++c) image.set(r, c, change(image.value(r, c)));
  }
}

// After 251 rows they come again: large matrices for a bench are then made in no time.
void fill_numbers(Tensor& numbers, Random& random, double magnitude) {
  constexpr int64_t kDrawnRows = 251;
  Image& image = numbers.initial();
  for (int64_t r = 0; r < image.rows; ++r) {
    if (r >= kDrawnRows) {
      std::memcpy(image.row(r), image.row(r - kDrawnRows),
                  static_cast<size_t>(image.cols * dtype_bytes(image.dtype)));
      continue;
    }
    for (int64_t c = 0; c < image.cols; ++c) image.set(r, c, random.uniform(-1, 1) * magnitude);
  }
}

// Codebooks may have negative scales, and 0 for a block of zeros.
void flip_signs(Tensor& scale, Random& random) {
  change_each(scale, [&](double value) {
    return random.chance(5) ? 0.0 : random.chance(30) ? -value : value;
  });
}

// As large as the rest of the weight, here and there much larger, so that the codes hardly count, and none.
void fill_offsets(Tensor& offset, Random& random, double magnitude) {
  change_each(offset, [&](double) {
    const double value = random.uniform(-1, 1) * magnitude;
    return random.chance(5) ? value * 1e6 : random.chance(10) ? 0.0 : value;
  });
}

}  // namespace

CanonicalWeight::CanonicalWeight(const WeightSpec& spec, int64_t n, int64_t k, int64_t row_padding,
                                 const Declare& declare)
    : spec_(spec), n_(n), k_(k) {
  block_ = resolved(spec.block, n, k);
  num_groups_ = ceil_div(k, block_.cols);
  const std::vector<int64_t> shape = {ceil_div(n, block_.rows), num_groups_};
  codes_ = &declare("codes", Role::input, code_dtype(spec.format, row_padding > 0),
                    {n, is_plain(spec.format) ? k : row_bytes(spec.format, k)}, row_padding);
  if (is_plain(spec.format)) return;
  scale_ = &declare("scale", Role::input, spec.has_e8m0_scale ? kE8m0 : kF32, shape, 0);
  if (spec.is_asymmetric) zero_ = &declare("zero", Role::input, spec.has_float_zero ? kF32 : kI8, shape, 0);
  if (spec.has_offset) offset_ = &declare("offset", Role::input, kF32, shape, 0);
  if (spec.has_g_idx) g_idx_ = &declare("g_idx", Role::input, kI32, {k}, 0);
}

void CanonicalWeight::fill(Random& random, double magnitude) {
  if (is_plain(spec_.format)) return fill_numbers(*codes_, random, magnitude);
  const CodeRange range = code_range(spec_.format);
  fill_codes(*codes_, random, spec_.format, k_, spec_.codes);
  fill_scales(*scale_, random, magnitude / range.symmetric_max);
  if (is_codebook(spec_.format) && !spec_.has_e8m0_scale) flip_signs(*scale_, random);
  if (offset_) fill_offsets(*offset_, random, magnitude);
  if (zero_) {
    Image& zero = zero_->initial();
    for (int64_t r = 0; r < zero.rows; ++r) {
      for (int64_t c = 0; c < zero.cols; ++c) {
        zero.set(r, c,
                 spec_.has_float_zero
                     ? random.uniform(range.lowest, range.highest)
                     : static_cast<double>(range.lowest + random.below(range.highest - range.lowest + 1)));
      }
    }
  }
  if (g_idx_) {  // the groups of act-order: as large as without it, but shuffled
    Image& g_idx = g_idx_->initial();
    std::vector<int64_t> groups(static_cast<size_t>(k_));
    for (int64_t i = 0; i < k_; ++i) groups[static_cast<size_t>(i)] = i / block_.cols;
    for (int64_t i = k_ - 1; i > 0; --i) {
      std::swap(groups[static_cast<size_t>(i)], groups[static_cast<size_t>(random.below(i + 1))]);
    }
    for (int64_t i = 0; i < k_; ++i) g_idx.set(0, i, static_cast<double>(groups[static_cast<size_t>(i)]));
  }
}

qf_weight CanonicalWeight::view(int set, qf_device device) const {
  qf_weight w = {};
  w.format = spec_.format;
  w.n = n_, w.k = k_;
  w.block = is_plain(spec_.format) ? qf_block{} : spec_.block;
  w.codes = codes_->view(set, device);
  w.scale = scale_ ? scale_->view(set, device) : nullptr;
  w.zero = zero_ ? zero_->view(set, device) : nullptr;
  w.offset = offset_ ? offset_->view(set, device) : nullptr;
  w.g_idx = g_idx_ ? g_idx_->view(set, device) : nullptr;
  w.is_gated = spec_.is_gated;
  return w;
}

std::vector<double> CanonicalWeight::magnitudes() const {
  std::vector<double> w(static_cast<size_t>(n_ * k_));
  for (int64_t n = 0; n < n_; ++n) {
    for (int64_t k = 0; k < k_; ++k) {
      const int64_t g = g_idx_ ? static_cast<int64_t>(g_idx_->initial().value(0, k)) : k / block_.cols;
      const int64_t i = n / block_.rows * num_groups_ + g;
      const double zero = zero_ ? std::abs(zero_->initial().value(i)) : 0;
      const Image& codes = codes_->initial();
      const double code =
          std::abs(is_plain(spec_.format) ? codes.value(n, k) : decode_at(spec_.format, codes.row(n), k));
      const double offset = offset_ ? std::abs(offset_->initial().value(i)) : 0;
      const double scale = scale_ ? std::abs(scale_->initial().value(i)) : 1;
      w[static_cast<size_t>(n * k_ + k)] = (code + zero) * scale + offset;
    }
  }
  return w;
}

WeightSpec random_weight(Random& random) {
  WeightSpec w;
  w.format = random.pick({QF_INT4, QF_INT4, QF_INT4, QF_INT8, QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2, QF_FP4_E2M1,
                          QF_NF4, QF_FP4_BNB, QF_IQ4_NL});
  const int64_t group = random.pick<int64_t>({1, 3, 5, 16, 32, 33, 64, 100, 128});
  w.block = random.pick<qf_block>(
      {{1, 0}, {1, 0}, {1, group}, {1, group}, {1, group}, {1, group}, {0, 0}, {128, 128}, {3, 40}});
  w.is_asymmetric = is_integer(w.format) && random.chance(45);
  w.has_float_zero = w.is_asymmetric && random.chance(35);
  w.has_e8m0_scale = !w.is_asymmetric && random.chance(30);
  w.has_g_idx = random.chance(20);
  w.has_offset = is_integer(w.format) && random.chance(30);
  return w;
}

}  // namespace quantfuse::cases
