// SPDX-License-Identifier: Apache-2.0
//
// dequantize_words over either vector type S: bit for bit what dequantize_words_ref computes. Threads divide
// stripes of 512 columns by runs of rows; the zero points and scales of a stripe are laid out as floats once
// for all neighbouring rows of a group.
#pragma once

#include "core/choose.h"
#include "cpu/threads.h"
#include "cpu/vector_math.h"
#include "dequantize_words/dequantize_words.h"

namespace quantfuse::dequantize_words {

inline constexpr int64_t kStripe = 512, kRows = 64;

template <class S>
struct Stripe {
  const Problem& p;
  int64_t col, count;
  alignas(64) float zeros[kStripe], scales[kStripe];
  alignas(64) int32_t codes[kStripe];
  int64_t group = -1;

  QF_INLINE Stripe(const Problem& problem, int64_t first)
      : p(problem), col(first), count(problem.n - first < kStripe ? problem.n - first : kStripe) {}

  QF_INLINE void enter(int64_t new_group) {
    if (new_group == group) return;
    group = new_group;
    for (int64_t i = 0; i < count; ++i) zeros[i] = static_cast<float>(zero_at(p, group, col + i));
    choose_float(
        p.scales.dtype, [&](auto type) __attribute__((always_inline)) {
          using T = typename decltype(type)::type;
          const T* row = p.scales.row<const T>(group) + col;
          for (int64_t i = 0; i < count; i += S::kLanes) S::store(scales + i, S::load(row + i, count - i));
        });
  }

  QF_INLINE void load_codes(int64_t row) {
    if (p.layout == QF_WORDS_AWQ) {
      const uint32_t* words = p.qweight.row<const uint32_t>(row) + col / 8;
      for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<int32_t>(words[i / 8] >> awq_shift(i) & 15);
    } else if (p.bits == 3) {
      for (int64_t i = 0; i < count; ++i) codes[i] = code_at(p, row, col + i);
    } else {
      const int64_t bit = row * p.bits;
      const uint32_t* words = p.qweight.row<const uint32_t>(bit / 32) + col;
      const int shift = static_cast<int>(bit % 32);
      const uint32_t mask = (1u << p.bits) - 1;
      for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<int32_t>(words[i] >> shift & mask);
    }
  }

  template <class T>
  QF_INLINE void store(int64_t row) const {
    T* out = p.x.row<T>(row) + col;
    for (int64_t i = 0; i < count; i += S::kLanes) {
      const auto difference = S::sub(S::to_float(S::load_i(codes + i)), S::load(zeros + i));
      S::store(out + i, S::mul(difference, S::load(scales + i)), count - i);
    }
  }
};

template <class S>
QF_INLINE void dequantize_words_rows(const Problem& p) {
  const int64_t stripes = ceil_div(p.n, kStripe), runs = ceil_div(p.k, kRows);
  choose_float(
      p.x.dtype, [&](auto type) __attribute__((always_inline)) {
        using T = typename decltype(type)::type;
        parallel_ranges(stripes * runs, 1, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            Stripe<S> stripe(p, i / runs * kStripe);
            const int64_t first = i % runs * kRows, last = first + kRows < p.k ? first + kRows : p.k;
            for (int64_t row = first; row < last; ++row) {
              stripe.enter(p.group_of(row));
              stripe.load_codes(row);
              stripe.template store<T>(row);
            }
          }
        });
      });
}

}  // namespace quantfuse::dequantize_words
