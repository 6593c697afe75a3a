// SPDX-License-Identifier: Apache-2.0
//
// c[r, 0:cols] += a[r, 0:depth] b[0:depth, 0:cols], or -=, of row-major matrices of float or double that lie
// in the caller's workspace: the products inside a longer algorithm, where nothing is quantized or packed.
//
// A tile of 6 rows and 4 vectors (2 with 16 registers) stays in registers over all of depth. b is read once
// per 6 rows: the caller keeps depth * cols within the L2 cache by cutting either. Every number is one fma
// chain in order of depth, so it does not depend on how many rows or columns are computed beside it.
#pragma once

#include <cstdint>

#include "cpu/vector_math.h"

namespace quantfuse {

template <class V>
struct Product {
  using T = typename V::Number;
  const T* a;
  int64_t a_stride;
  const T* b;
  int64_t b_stride;
  T* c;
  int64_t c_stride;
  int64_t rows;
  int64_t cols;  // a multiple of kProductCols<V>
  int64_t depth;
};

inline constexpr int kProductRows = 6;
template <class V>
inline constexpr int kProductVectors = V::kRegisters == 32 ? 4 : 2;
template <class V>
inline constexpr int64_t kProductCols = kProductVectors<V>* V::kLanes;

template <class V, int Rows, bool IsMinus>
QF_INLINE void add_product_tile(const Product<V>& p, int64_t row, int64_t col) {
  constexpr int kVectors = kProductVectors<V>, kLanes = V::kLanes;
  typename V::F sums[Rows][kVectors];
  const auto* a = p.a + row * p.a_stride;
  const auto* b = p.b + col;
  auto* c = p.c + row * p.c_stride + col;
  unrolled<Rows * kVectors>([&](auto i) __attribute__((always_inline)) {
    constexpr int r = i / kVectors, v = i % kVectors;
    sums[r][v] = V::load(c + r * p.c_stride + v * kLanes);
  });
  for (int64_t d = 0; d < p.depth; ++d, b += p.b_stride) {
    unrolled<Rows>([&](auto r) __attribute__((always_inline)) {
      const auto x = V::set1(a[r * p.a_stride + d]);
      unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
        const auto y = V::load(b + v * kLanes);
        sums[r][v] = IsMinus ? V::fnma(x, y, sums[r][v]) : V::fma(x, y, sums[r][v]);
      });
    });
  }
  unrolled<Rows * kVectors>([&](auto i) __attribute__((always_inline)) {
    constexpr int r = i / kVectors, v = i % kVectors;
    V::store(c + r * p.c_stride + v * kLanes, sums[r][v]);
  });
}

template <class V, bool IsMinus = false>
__attribute__((noinline)) void add_product(const Product<V>& p) {
  int64_t row = 0;
  for (; row + kProductRows <= p.rows; row += kProductRows) {
    for (int64_t col = 0; col < p.cols; col += kProductCols<V>)
      add_product_tile<V, kProductRows, IsMinus>(p, row, col);
  }
  for (; row < p.rows; ++row) {
    for (int64_t col = 0; col < p.cols; col += kProductCols<V>) add_product_tile<V, 1, IsMinus>(p, row, col);
  }
}

}  // namespace quantfuse
