// SPDX-License-Identifier: Apache-2.0
//
// The product of a few rows of integer codes with INT8 rows of b ([n, k]): dot products along k. Each row of
// b is read once as it lies, so the traffic is b and nothing else. Results have the bits of scaled_mm_int.h.
//
//   a  prepared: signed bytes in rows padded with zeros, and, where a has zero points, a row of ones: its
//      products are the sums of b that they need
//   b  rows --load, flip the sign bits--> dot products with each row of a --> one vector of partial sums per
//      row and column --transpose lanes x lanes of them and add--> sums of `lanes` columns
//
// Threads take ranges of panels of 2 * lanes columns.
#pragma once

#include "scaled_mm/scaled_mm_int.h"

namespace quantfuse::scaled_mm {

inline constexpr int64_t kMaxDotRows = 4;  // rows of a. With more, packing b pays.

QF_INLINE Requirements accepts_int_dot(const Problem& p) {
  Requirements r = accepts_int(p);
  r.require(p.m <= kMaxDotRows, "a has more than 4 rows");
  r.require(p.b_format == QF_INT8 && p.b_order == QF_NK, "b is not INT8 in rows along k");
  r.require(has_int_totals(p), "there are several scales along k, or k is too long for int32 sums");
  return r;
}

struct DotCall {
  const Problem& p;
  const int8_t* a;      // [m, and one more where a has zero points][stride] bytes
  const int32_t* sums;  // [m]
  int64_t stride;       // k rounded up to whole vectors
};

template <class S>
QF_INLINE int64_t dot_stride(const Problem& p) {
  return round_up(p.k, 4 * S::kLanes);
}

// partial[m * 2 * lanes + i] = the lanes of sum over k of a[m] * (b[col + i] + 128), for NR rows of b.
template <class S, int MT, int NR>
QF_INLINE void dot_rows(const DotCall& c, int64_t col, typename S::Sums* partial) {
  constexpr int64_t kVector = 4 * S::kLanes;
  const Problem& p = c.p;
  const auto flip = S::set1(sign_bits(QF_INT8));
  const char* b = p.b.row_bytes_at(col);
  typename S::Sums acc[MT * NR] = {};
  auto add = [&](const char* from, int64_t stride, const int8_t* a) __attribute__((always_inline)) {
    typename S::I w[NR];
    unrolled<NR>([&](auto i)
                     __attribute__((always_inline)) { w[i] = S::xor_(S::load_i(from + i * stride), flip); });
    unrolled<MT * NR>([&](auto i) __attribute__((always_inline)) {
      acc[i] = S::dot4(acc[i], w[i % NR], S::load_i(a + i / NR * c.stride));
    });
  };
  int64_t k = 0;
  for (; k + kVector <= p.k; k += kVector) {
    // Rows are too short to look ahead along k: what is fetched are the next rows. Into L2, because rows of
    // 4 KB take turns at the same few places of L1, where there is no room for these too.
    for (int i = NR; i < 2 * NR; ++i) __builtin_prefetch(b + k + i * p.b.row_stride, 0, 2);
    add(b + k, p.b.row_stride, c.a + k);
  }
  if (k < p.k) {
    alignas(64) char edge[NR * kVector] = {};
    for (int i = 0; i < NR; ++i) {
      __builtin_memcpy(edge + i * kVector, b + i * p.b.row_stride + k, static_cast<size_t>(p.k - k));
    }
    add(edge, kVector, c.a + k);
  }
  unrolled<MT * NR>([&](auto i) __attribute__((always_inline)) {
    partial[i / NR * 2 * S::kLanes + i % NR] = acc[i];
  });
}

// MT: rows of a, with the row of ones where HasZero.
template <class S, int MT, bool HasZero>
__attribute__((noinline)) void multiply_dot(const DotCall& c, int64_t panel) {
  constexpr int64_t L = S::kLanes;
  // Sums of 4 rows share what is loaded of a; 20 of them, or 8 with 16 registers.
  constexpr int NR = S::kRegisters == 32 ? 4 : MT <= 2 ? 4 : 2;
  const Problem& p = c.p;
  IntColumns<S> columns;
  columns.init(p, panel);
  columns.load_scales(p, 0);

  typename S::Sums partial[MT * 2 * L];
  int64_t i = 0;
  for (; i + NR <= columns.count; i += NR) dot_rows<S, MT, NR>(c, columns.col + i, partial + i);
  for (; i < columns.count; ++i) dot_rows<S, MT, 1>(c, columns.col + i, partial + i);
  for (; i < 2 * L; ++i) {
    for (int m = 0; m < MT; ++m) partial[m * 2 * L + i] = typename S::Sums{};
  }

  alignas(64) int32_t totals[MT][2 * L];
  for (int m = 0; m < MT; ++m) {
    for (int half = 0; half < 2; ++half) {
      typename S::I r[L];
      for (int64_t j = 0; j < L; ++j) r[j] = S::ints(partial[(m * 2 + half) * L + j]);
      S::transpose(r);
      auto sum = r[0];
      for (int64_t j = 1; j < L; ++j) sum = S::add(sum, r[j]);
      S::store_i(totals[m] + half * L, sum);
    }
  }
  if constexpr (HasZero) {  // the row of ones is sum u: less count * zero, it is sum b - count * zb
    for (int64_t j = 0; j < 2 * L; j += L) {
      const auto terms = S::mul(S::load_i(columns.zero + j), S::set1(static_cast<int32_t>(p.k)));
      S::store_i(columns.sums + j, S::sub(S::load_i(totals[MT - 1] + j), terms));
    }
  }
  for (int64_t m = 0; m < p.m; ++m) {
    finish_int_row<S>(p, columns, m, c.sums[m], p.a_scale_at(m, 0), totals[m]);
  }
}

// ---- The call ----

template <class S>
QF_INLINE size_t int_dot_workspace_bytes(const Problem& p) {
  return static_cast<size_t>((kMaxDotRows + 1) * dot_stride<S>(p));
}

template <class S>
QF_INLINE void launch_int_dot(const Problem& p, const Launch& launch) {
  auto* a = static_cast<int8_t*>(launch.workspace);
  int32_t sums[kMaxDotRows];
  const int64_t stride = dot_stride<S>(p);
  for (int64_t r = 0; r < p.m; ++r) sums[r] = load_row_bytes<S>(p, r, 0, p.k, a + r * stride);
  if (p.a_zero) {
    __builtin_memset(a + p.m * stride, 1, static_cast<size_t>(p.k));
    __builtin_memset(a + p.m * stride + p.k, 0, static_cast<size_t>(stride - p.k));
  }
  const DotCall call = {p, a, sums, stride};
  auto run = [&](auto rows, auto has_zero) __attribute__((always_inline)) {
    const int64_t panel_work = 2 * S::kLanes * (p.k + 1);
    parallel_ranges(ceil_div(p.n, 2 * S::kLanes), ceil_div(kMinPartProducts / 4, panel_work),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t panel = begin; panel < end; ++panel) {
                        multiply_dot<S, rows.value + has_zero.value, has_zero.value>(call, panel);
                      }
                    });
  };
  choose_bool(
      static_cast<bool>(p.a_zero), [&](auto has_zero) __attribute__((always_inline)) {
        choose_value<1, 2, 3, 4>(
            static_cast<int>(p.m), [&](auto rows) __attribute__((always_inline)) { run(rows, has_zero); });
      });
}

}  // namespace quantfuse::scaled_mm
