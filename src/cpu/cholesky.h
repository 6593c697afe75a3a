// SPDX-License-Identifier: Apache-2.0
//
// a = L L^T in place, in double: the lower triangle of `a` becomes L; what lies above the diagonal is
// scratch.
//
// Right-looking, 128 columns at a time: the diagonal block, alone; the rows below it, solved against it; and
// their product with themselves, taken from the rest of the triangle. The product is nearly all of the work,
// and add_product does it at the speed of the registers: a small part of what GPTQ needs. So there is no call
// for LAPACK, which the library would then have to find before it could be loaded.
#pragma once

#include "cpu/product.h"
#include "cpu/threads.h"

namespace quantfuse {

inline constexpr int64_t kCholeskyBlock = 128;

// Columns from one row of `a` to the next: whole tiles, and not a power of two, which would put the rows of a
// tile into the same cache sets.
constexpr int64_t cholesky_stride(int64_t size) { return round_up(size, kCholeskyBlock) + 16; }
// Doubles of scratch.
constexpr int64_t cholesky_scratch(int64_t size) {
  return kCholeskyBlock * (cholesky_stride(size) + kCholeskyBlock);
}

// The diagonal block a[0:size, 0:size], and its transpose for the rows below. Returns what cholesky() does.
template <class D>
QF_INLINE int64_t factor_diagonal_block(double* a, int64_t stride, int64_t size,
                                        const double* smallest_pivots, double* transpose) {
  for (int64_t j = 0; j < size; ++j) {
    double* row = a + j * stride;
    double pivot = row[j];
    for (int64_t m = 0; m < j; ++m) pivot -= row[m] * row[m];
    if (!(pivot >= smallest_pivots[j])) return j;
    row[j] = __builtin_sqrt(pivot);
    for (int64_t i = j + 1; i < size; ++i) {
      double* below = a + i * stride;
      double sum = below[j];
      for (int64_t m = 0; m < j; ++m) sum -= below[m] * row[m];
      below[j] = sum / row[j];
    }
  }
  for (int64_t j = 0; j < kCholeskyBlock; ++j) {
    for (int64_t i = 0; i < kCholeskyBlock; ++i)
      transpose[j * kCholeskyBlock + i] = i < size && j <= i ? a[i * stride + j] : 0;
  }
  return -1;
}

// One row below the diagonal block: x L^T = row, solved for x in place.
template <class D>
QF_INLINE void solve_row(double* row, const double* transpose) {
  constexpr int64_t kLanes = D::kLanes;
  for (int64_t m = 0; m < kCholeskyBlock; ++m) {
    const double* column = transpose + m * kCholeskyBlock;
    row[m] /= column[m];
    const auto x = D::set1(-row[m]);
    int64_t j = m + 1;
    for (; j % kLanes != 0; ++j) row[j] -= row[m] * column[j];
    for (; j < kCholeskyBlock; j += kLanes)
      D::store(row + j, D::fma(x, D::load(column + j), D::load(row + j)));
  }
}

// Returns -1, or the first column whose pivot is below smallest_pivots[column] (or NaN): `a` is then not
// positive definite in double precision. `scratch` has cholesky_scratch(size) doubles, rows of `a`
// cholesky_stride(size).
template <class D>
__attribute__((noinline)) int64_t cholesky(double* a, int64_t size, const double* smallest_pivots,
                                           double* scratch) {
  constexpr int64_t kBlock = kCholeskyBlock, kTileRows = 48, kChunkCols = 256;
  const int64_t stride = cholesky_stride(size);
  double* transpose = scratch;                // [block][block]
  double* panel = scratch + kBlock * kBlock;  // [block][stride]: the solved rows as columns
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t end = begin + kBlock < size ? begin + kBlock : size;
    const int64_t failed = factor_diagonal_block<D>(a + begin * stride + begin, stride, end - begin,
                                                    smallest_pivots + begin, transpose);
    if (failed >= 0) return begin + failed;
    const int64_t below = size - end;
    parallel_ranges(below, 64, [&](int64_t r0, int64_t r1) {
      for (int64_t r = r0; r < r1; ++r) {
        double* row = a + (end + r) * stride + begin;
        solve_row<D>(row, transpose);
        for (int64_t m = 0; m < kBlock; ++m) panel[m * stride + r] = row[m];
      }
    });

    // Row r needs columns up to r alone, so a tile near the top is paired with one near the bottom.
    const int64_t tiles = ceil_div(below, kTileRows);
    parallel_ranges(ceil_div(tiles, 2), 1, [&](int64_t t0, int64_t t1) {
      auto update = [&](int64_t tile) __attribute__((always_inline)) {
        const int64_t r0 = tile * kTileRows, r1 = r0 + kTileRows < below ? r0 + kTileRows : below;
        const int64_t cols = round_up(r1, kProductCols<D>);
        for (int64_t c = 0; c < cols; c += kChunkCols) {
          add_product<D, true>({a + (end + r0) * stride + begin, stride, panel + c, stride,
                                a + (end + r0) * stride + end + c, stride, r1 - r0,
                                cols - c < kChunkCols ? cols - c : kChunkCols, kBlock});
        }
      };
      for (int64_t t = t0; t < t1; ++t) {
        update(t);
        if (tiles - 1 - t != t) update(tiles - 1 - t);
      }
    });
  }
  return -1;
}

}  // namespace quantfuse
