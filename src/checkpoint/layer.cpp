// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/layer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "checkpoint/error.h"
#include "checkpoint/mapped_file.h"
#include "formats/codes.h"

namespace quantfuse::checkpoint {
namespace {

// The value of every code of a format.
std::array<float, 256> decode_table(qf_format format) {
  std::array<float, 256> table;
  const int count = is_packed_4bit(format) ? 16 : 256;
  for (int code = 0; code < count; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    table[static_cast<size_t>(code)] = decode_at(format, &byte, 0);
  }
  return table;
}

uint8_t code_at(const uint8_t* row, bool is_4bit, int64_t i) { return is_4bit ? nibble_at(row, i) : row[i]; }

void set_code(uint8_t* row, bool is_4bit, int64_t i, uint8_t code) {
  if (!is_4bit) {
    row[i] = code;
  } else if (i & 1) {
    row[i / 2] = static_cast<uint8_t>((row[i / 2] & 0x0f) | code << 4);
  } else {
    row[i / 2] = static_cast<uint8_t>((row[i / 2] & 0xf0) | (code & 0x0f));
  }
}

// Calls visit(row, begin, end, scale index) for every run of columns of a row under one scale.
template <class Visit>
void for_each_run(const CanonicalWeight& w, Visit&& visit) {
  for (int64_t row = 0; row < w.n; ++row) {
    const int64_t first = row / w.block_rows() * w.num_groups;
    if (!w.g_idx.empty()) {
      for (int64_t col = 0; col < w.k; ++col) {
        visit(row, col, col + 1, first + w.g_idx[static_cast<size_t>(col)]);
      }
      continue;
    }
    for (int64_t group = 0, begin = 0; begin < w.k; ++group, begin += w.block_cols()) {
      visit(row, begin, std::min(begin + w.block_cols(), w.k), first + group);
    }
  }
}

}  // namespace

int64_t CanonicalWeight::row_bytes() const { return quantfuse::row_bytes(format, k); }

float CanonicalWeight::scale_at(int64_t i) const {
  return scale_e8m0.empty() ? scale[static_cast<size_t>(i)]
                            : E8m0::decode(scale_e8m0[static_cast<size_t>(i)]);
}

int64_t LayerInfo::bytes() const {
  int64_t total = 0;
  for (const Tensor* tensor : tensors) total += static_cast<int64_t>(tensor->bytes.size());
  return total;
}

int64_t LayerInfo::numel() const {
  int64_t product = 1;
  for (const int64_t dim : shape) product *= dim;
  return product;
}

void LayerInfo::prefetch_pages() const {
  for (const Tensor* tensor : tensors) checkpoint::prefetch_pages(tensor->bytes);
}

void LayerInfo::release_pages() const {
  for (const Tensor* tensor : tensors) checkpoint::release_pages(tensor->bytes);
}

void LayerValues::add_scale(float scale) {
  scale_min = has_scale_ ? std::min(scale_min, scale) : scale;
  scale_max = has_scale_ ? std::max(scale_max, scale) : scale;
  has_scale_ = true;
}

std::optional<CanonicalWeight> CanonicalLayer::canonical() const { return load_(); }

void CanonicalLayer::dequantize(std::span<float> out) const {
  if (out.empty()) return;
  const CanonicalWeight w = load_();
  const auto table = decode_table(w.format);
  const bool is_4bit = is_packed_4bit(w.format);
  const Type rounding = info().rounding;
  for_each_run(w, [&](int64_t row, int64_t begin, int64_t end, int64_t i) {
    const uint8_t* codes = w.codes.data() + row * w.row_bytes();
    float* numbers = out.data() + row * w.k;
    const float scale = w.scale_at(i);
    const float zero = w.zero.empty() ? 0.0f : static_cast<float>(w.zero[static_cast<size_t>(i)]);
    const float offset = w.offset_at(i);
    const auto number_of = [&](uint8_t code) {
      return round_to(rounding, (table[code] - zero) * scale + offset);
    };
    // A run has few different numbers: where it is longer than they are many, each is computed once.
    const int num_codes = is_4bit ? 16 : 256;
    if (end - begin <= num_codes) {
      for (int64_t col = begin; col < end; ++col) numbers[col] = number_of(code_at(codes, is_4bit, col));
      return;
    }
    float number[256];
    for (int code = 0; code < num_codes; ++code) number[code] = number_of(static_cast<uint8_t>(code));
    for (int64_t col = begin; col < end; ++col) numbers[col] = number[code_at(codes, is_4bit, col)];
  });
}

LayerValues CanonicalLayer::values() const {
  LayerValues values;
  values.num_codes = info().numel();
  if (values.num_codes == 0) return values;
  const CanonicalWeight w = load_();
  const size_t num_scales = w.scale.size() + w.scale_e8m0.size();
  for (size_t i = 0; i < num_scales; ++i) values.add_scale(w.scale_at(static_cast<int64_t>(i)));

  // The ends are those of the format's own codes: a 3-bit code in an INT4 one saturates at -4 and 3.
  const auto table = decode_table(w.format);
  const bool is_int = is_integer(w.format);
  const float largest =
      is_int ? static_cast<float>((1 << (info().bits - 1)) - 1) : code_range(w.format).symmetric_max;
  const float lowest = is_int ? -largest - 1 : -largest;
  const bool is_4bit = is_packed_4bit(w.format);
  std::array<int64_t, 256> counts{};
  for (int64_t row = 0; row < w.n; ++row) {
    const uint8_t* codes = w.codes.data() + row * w.row_bytes();
    for (int64_t col = 0; col < w.k; ++col) ++counts[code_at(codes, is_4bit, col)];
  }
  for (size_t code = 0; code < (is_4bit ? 16 : 256); ++code) {
    if (table[code] >= largest || table[code] <= lowest) values.num_saturated += counts[code];
  }
  return values;
}

void make_scales_positive(CanonicalWeight& w) {
  const auto is_good = [](float scale) { return scale > 0; };
  if (is_codebook(w.format) || std::all_of(w.scale.begin(), w.scale.end(), is_good)) return;
  const bool is_4bit = is_packed_4bit(w.format);
  const uint8_t flip = is_integer(w.format) ? 0xff : is_4bit ? 0x08 : 0x80;
  const bool has_negative = std::any_of(w.scale.begin(), w.scale.end(), [](float s) { return s < 0; });
  if (is_integer(w.format) && has_negative && w.zero.empty()) w.zero.assign(w.scale.size(), 0);

  for_each_run(w, [&](int64_t row, int64_t begin, int64_t end, int64_t i) {
    const float scale = w.scale[static_cast<size_t>(i)];
    if (is_good(scale)) return;
    uint8_t* codes = w.codes.data() + row * w.row_bytes();
    const uint8_t zero = w.zero.empty() ? 0 : static_cast<uint8_t>(w.zero[static_cast<size_t>(i)]);
    for (int64_t col = begin; col < end; ++col) {
      const uint8_t code = code_at(codes, is_4bit, col);
      set_code(codes, is_4bit, col, scale < 0 ? static_cast<uint8_t>(code ^ flip) : zero);
    }
  });
  for (size_t i = 0; i < w.scale.size(); ++i) {
    if (w.scale[i] < 0 && !w.zero.empty()) w.zero[i] = static_cast<int8_t>(~w.zero[i]);
    w.scale[i] = w.scale[i] == 0 ? 1.0f : std::abs(w.scale[i]);
  }
}

std::vector<float> load_scales(const Tensor& tensor) {
  std::vector<float> scales(static_cast<size_t>(tensor.numel()));
  for (size_t i = 0; i < scales.size(); ++i) {
    scales[i] = load_float(tensor, static_cast<int64_t>(i));
    if (!is_finite(scales[i])) {
      fail(fmt::format("{} is not finite at index {}", printable(tensor.name), i));
    }
  }
  return scales;
}

std::vector<float> load_scales_transposed(const Tensor& tensor) {
  const std::vector<float> scales = load_scales(tensor);
  const int64_t cols = tensor.size(0), rows = tensor.size(1);
  std::vector<float> transposed(scales.size());
  for (int64_t row = 0; row < rows && cols > 0; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      transposed[static_cast<size_t>(row * cols + col)] = scales[static_cast<size_t>(col * rows + row)];
    }
  }
  return transposed;
}

std::vector<int32_t> load_group_index(const Tensor& tensor, int64_t num_groups) {
  std::vector<int32_t> groups(static_cast<size_t>(tensor.numel()));
  for (size_t i = 0; i < groups.size(); ++i) {
    groups[i] = load<int32_t>(tensor, static_cast<int64_t>(i));
    if (groups[i] >= 0 && groups[i] < num_groups) continue;
    fail(fmt::format("{} has the index {} at {}, out of range: there are {} groups", printable(tensor.name),
                     groups[i], i, num_groups));
  }
  return groups;
}

}  // namespace quantfuse::checkpoint
