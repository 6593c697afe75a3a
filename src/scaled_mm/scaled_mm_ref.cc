// SPDX-License-Identifier: Apache-2.0
//
// The formula as written: integers modulo 2^64, which leaves them exact modulo 2^32, and floating sums in
// double. The oracle of every other scaled_mm kernel.
#include <type_traits>
#include <vector>

#include "core/dot_products.h"
#include "cpu/scalar.h"
#include "scaled_mm/scaled_mm.h"

namespace quantfuse::scaled_mm_ref {
using scaled_mm::Problem;
namespace {

// Row r of a: codes less their zero point, and where Number is double times their scale.
template <class Number>
void row_of_a(const Problem& p, int64_t r, Number* row) {
  for (int64_t k = 0; k < p.k; ++k) {
    const double code = static_cast<double>(decode_at(p.a_format, p.a.row_bytes_at(r), k)) - p.a_zero_at(r);
    if constexpr (std::is_same_v<Number, double>) {
      row[k] = code * p.a_scale_at(r, k / p.a_block.cols);
    } else {
      row[k] = static_cast<Number>(static_cast<int64_t>(code));
    }
  }
}

// Column c of b, likewise.
template <class Number>
void column_of_b(const Problem& p, int64_t c, Number* column) {
  for (int64_t k = 0; k < p.k; ++k) {
    const bool is_nk = p.b_order == QF_NK;
    const double code =
        static_cast<double>(decode_at(p.b_format, p.b.row_bytes_at(is_nk ? c : k), is_nk ? k : c)) -
        p.b_zero_at(c);
    if constexpr (std::is_same_v<Number, double>) {
      column[k] = code * p.b_scale_at(c, k / p.b_block.cols);
    } else {
      column[k] = static_cast<Number>(static_cast<int64_t>(code));
    }
  }
}

// Calls store(row, column, sum) for every sum.
template <class Number, class Store>
void multiply(const Problem& p, const Store& store) {
  std::vector<Number> a(p.m * p.k), b(p.k), sums(p.m);
  for (int64_t r = 0; r < p.m; ++r) row_of_a(p, r, a.data() + r * p.k);
  for (int64_t c = 0; c < p.n; ++c) {
    column_of_b(p, c, b.data());
    dot_products(a.data(), p.m, p.k, b.data(), sums.data());
    for (int64_t r = 0; r < p.m; ++r) store(r, c, sums[r]);
  }
}

Verdict accepts(const Problem&) { return kYes; }

void launch(const Problem& p, const Launch&) {
  if (p.is_exact()) {
    return multiply<uint64_t>(p, [&](int64_t r, int64_t c, uint64_t sum) {
      p.c.row<int32_t>(r)[c] = static_cast<int32_t>(static_cast<uint32_t>(sum));
    });
  }
  multiply<double>(p, [&](int64_t r, int64_t c, double sum) {
    if (p.bias) sum += float_at(p.bias, c);
    set_float(p.c, r, c, static_cast<float>(sum));
  });
}

}  // namespace

extern const Kernel<Problem> entry = {"scaled_mm_ref", Target::reference, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::scaled_mm_ref
