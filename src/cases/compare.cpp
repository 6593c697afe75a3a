// SPDX-License-Identifier: Apache-2.0
#include "cases/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "formats/codes.h"

namespace quantfuse::cases {
namespace {

// v as the type of an output would hold it.
double rounded(DType dtype, double v) {
  const auto x = static_cast<float>(v);
  if (dtype == DType::f16) {
    f16 half;
    from_float(x, half);
    return to_float(half);
  }
  if (dtype == DType::bf16) {
    bf16 brain;
    from_float(x, brain);
    return to_float(brain);
  }
  return x;
}

double decoded(qf_format format, float v, float inverse_scale) {
  const uint8_t code = encode_value(format, v * inverse_scale, 0);
  return decode_at(format, &code, 0);
}

double scale_at(const Output& output, int64_t r, int64_t g) {
  const Image& scale = output.scale->result();
  return output.has_transposed_scale ? scale.value(g, r) : scale.value(r, g);
}

// The dynamic scales that a kernel wrote, one per row and group.
std::string compare_scales(const Output& output, const Expected& expected, int64_t group) {
  const float qmax = code_range(output.format).symmetric_max;
  const int64_t m = output.y->result().rows, n = output.y->result().cols;
  Differences differences(output.scale->name());
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t c0 = 0, g = 0; c0 < n; c0 += group, ++g) {
      double amax = 0, bound = 0;
      for (int64_t c = c0; c < std::min(c0 + group, n); ++c) {
        const auto i = static_cast<size_t>(r * n + c);
        amax = std::max(amax, std::abs(expected.values[i]));
        bound = std::max(bound, expected.bounds[i]);
      }
      const double want = scale_from_amax(static_cast<float>(amax), qmax);
      const double got = scale_at(output, r, g), allowed = bound / qmax + 4 * 0x1p-24 * want;
      if (!(std::abs(got - want) <= allowed)) {
        differences.add(
            r, g, [&] { return fmt::format("is {:.9g}, expected {:.9g} +- {:.2g}", got, want, allowed); });
      }
    }
  }
  return differences.text();
}

}  // namespace

void Differences::describe_first(int64_t r, int64_t c, const std::string& what) {
  first_ = fmt::format("{}[{}, {}] {}", tensor_, r, c, what);
}

std::string Differences::text() const {
  return count_ > 1 ? fmt::format("{} (and {} more)", first_, count_ - 1) : first_;
}

std::string compare_exactly(const Tensor& tensor, const Image& expected) {
  const Image& got = tensor.result();
  const int64_t each = dtype_bytes(got.dtype);
  const bool is_float = got.dtype == DType::f32 || got.dtype == DType::f16 || got.dtype == DType::bf16;
  Differences differences(tensor.name());
  for (int64_t r = 0; r < got.rows; ++r) {
    if (got.cols == 0 || std::memcmp(got.row(r), expected.row(r), static_cast<size_t>(got.cols * each)) == 0)
      continue;
    for (int64_t c = 0; c < got.cols; ++c) {
      if (std::memcmp(got.row(r) + c * each, expected.row(r) + c * each, static_cast<size_t>(each)) == 0)
        continue;
      const double a = got.value(r, c), b = expected.value(r, c);
      if (is_float && std::isnan(a) && std::isnan(b)) continue;
      differences.add(r, c, [&] { return fmt::format("is {:.9g}, expected {:.9g}", a, b); });
    }
  }
  return differences.text();
}

void rotate_expected(Expected& expected, int64_t size) {
  const double norm = 1 / std::sqrt(static_cast<double>(size)), steps = std::log2(static_cast<double>(size));
  for (size_t begin = 0; begin < expected.values.size(); begin += static_cast<size_t>(size)) {
    double* v = expected.values.data() + begin;
    double* bounds = expected.bounds.data() + begin;
    double bound = 0, magnitudes = 0;
    for (int64_t i = 0; i < size; ++i) bound += bounds[i], magnitudes += std::abs(v[i]);
    for (int64_t step = 1; step < size; step *= 2) {
      for (int64_t i = 0; i < size; ++i) {
        if ((i & step) != 0) continue;
        const double a = v[i], b = v[i + step];
        v[i] = a + b, v[i + step] = a - b;
      }
    }
    for (int64_t i = 0; i < size; ++i) {
      v[i] *= norm;
      bounds[i] = (bound + steps * 0x1p-24 * magnitudes) * norm + 2 * 0x1p-24 * std::abs(v[i]) + 0x1p-149;
    }
  }
}

std::string compare_floats(const Tensor& y, const Expected& expected) {
  const Image& got = y.result();
  Differences differences(y.name());
  for (int64_t r = 0; r < got.rows; ++r) {
    for (int64_t c = 0; c < got.cols; ++c) {
      const auto i = static_cast<size_t>(r * got.cols + c);
      const double v = expected.values[i], bound = expected.bounds[i], a = got.value(r, c);
      if (a == v || (std::isnan(v) && std::isnan(a))) continue;  // infinities have no bounds about them
      if (!(rounded(got.dtype, v - bound) <= a && a <= rounded(got.dtype, v + bound))) {
        differences.add(r, c,
                        [&] { return fmt::format("is {:.9g}, expected {:.9g} +- {:.2g}", a, v, bound); });
      }
    }
  }
  return differences.text();
}

std::string compare_output(const Output& output, const Expected& expected) {
  if (!output.is_quantized()) return compare_floats(*output.y, expected);
  const Image& y = output.y->result();
  const bool is_static = output.mode == QF_SCALE_STATIC;
  const int64_t group = resolved(output.group, y.cols);
  if (!is_static) {
    if (std::string wrong = compare_scales(output, expected, group); !wrong.empty()) return wrong;
  }
  const Image& scale = output.scale->result();
  Differences differences(output.y->name());
  for (int64_t r = 0; r < y.rows; ++r) {
    for (int64_t c = 0; c < y.cols; ++c) {
      const auto i = static_cast<size_t>(r * y.cols + c);
      const float inverse =
          1.0f / static_cast<float>(is_static ? scale.value(0) : scale_at(output, r, c / group));
      const double v = expected.values[i], bound = expected.bounds[i],
                   a = decode_at(output.format, y.row(r), c);
      const double reach = std::isfinite(v) ? bound : 0;  // infinities have no bounds about them
      const double low = decoded(output.format, static_cast<float>(v - reach), inverse);
      const double high = decoded(output.format, static_cast<float>(v + reach), inverse);
      if (std::isnan(v) && std::isnan(low) && std::isnan(a)) continue;
      if (!(low <= a && a <= high)) {
        differences.add(r, c, [&] {
          return fmt::format("is code {:g}, expected {:g} to {:g} for {:.9g} +- {:.2g}", a, low, high, v,
                             bound);
        });
      }
    }
  }
  return differences.text();
}

}  // namespace quantfuse::cases
