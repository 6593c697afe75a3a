// SPDX-License-Identifier: Apache-2.0
//
// The formula as written: integers modulo 2^64, which leaves them exact modulo 2^32, and floating sums in
// double. The oracle of every other scaled_mm kernel.
#include <vector>

#include "cpu/scalar.h"
#include "scaled_mm/scaled_mm.h"

namespace quantfuse::scaled_mm_ref {
using scaled_mm::Problem;
namespace {

// Row r of a, codes less their zero point.
std::vector<double> row_of_a(const Problem& p, int64_t r) {
  std::vector<double> row(p.k);
  for (int64_t k = 0; k < p.k; ++k) {
    row[k] = static_cast<double>(decode_at(p.a_format, p.a.row_bytes_at(r), k)) - p.a_zero_at(r);
  }
  return row;
}

// Column c of b, likewise.
std::vector<double> column_of_b(const Problem& p, int64_t c) {
  std::vector<double> column(p.k);
  for (int64_t k = 0; k < p.k; ++k) {
    const bool is_nk = p.b_order == QF_NK;
    const float code = decode_at(p.b_format, p.b.row_bytes_at(is_nk ? c : k), is_nk ? k : c);
    column[k] = static_cast<double>(code) - p.b_zero_at(c);
  }
  return column;
}

int32_t integer_product(const std::vector<double>& a, const std::vector<double>& b) {
  uint64_t sum = 0;
  for (size_t k = 0; k < a.size(); ++k) {
    sum +=
        static_cast<uint64_t>(static_cast<int64_t>(a[k])) * static_cast<uint64_t>(static_cast<int64_t>(b[k]));
  }
  return static_cast<int32_t>(static_cast<uint32_t>(sum));
}

float scaled_product(const Problem& p, const std::vector<double>& a, const std::vector<double>& b,
                     int64_t row, int64_t col) {
  double sum = 0;
  for (int64_t k = 0; k < p.k; ++k) {
    const double a_scale = p.a_scale_at(row, k / p.a_block.cols),
                 b_scale = p.b_scale_at(col, k / p.b_block.cols);
    sum += a[k] * a_scale * (b[k] * b_scale);
  }
  if (p.bias) sum += float_at(p.bias, col);
  return static_cast<float>(sum);
}

Verdict accepts(const Problem&) { return kYes; }

void launch(const Problem& p, const Launch&) {
  std::vector<std::vector<double>> a(p.m);
  for (int64_t r = 0; r < p.m; ++r) a[r] = row_of_a(p, r);
  for (int64_t c = 0; c < p.n; ++c) {
    const std::vector<double> b = column_of_b(p, c);
    for (int64_t r = 0; r < p.m; ++r) {
      if (p.is_exact()) {
        p.c.row<int32_t>(r)[c] = integer_product(a[r], b);
      } else {
        set_float(p.c, r, c, scaled_product(p, a[r], b, r, c));
      }
    }
  }
}

}  // namespace

extern const Kernel<Problem> entry = {"scaled_mm_ref", Target::reference, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::scaled_mm_ref
