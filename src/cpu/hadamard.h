// SPDX-License-Identifier: Apache-2.0
//
// The Hadamard rotation of formats/hadamard.h on either vector type S, in place: the same bits.
#pragma once

#include "cpu/vector_math.h"
#include "formats/hadamard.h"

namespace quantfuse {

// Lanes whose number has the bit `Step` change their sign: x[i ^ Step] + (+-x[i]) is the sum in the lower
// lane of a pair and the difference in the upper one.
template <class S, int Step>
QF_INLINE typename S::F hadamard_step_in_vector(typename S::F x) {
  alignas(64) static constexpr auto kSigns = [] {
    struct {
      uint32_t of[16];
    } signs = {};
    for (int i = 0; i < 16; ++i) signs.of[i] = (i & Step) != 0 ? 0x80000000u : 0;
    return signs;
  }();
  const auto signed_x = S::from_bits(S::xor_(S::bits(x), S::load_i(kSigns.of)));
  return S::add(S::template swap_lanes<Step>(x), signed_x);
}

// `n` numbers, a multiple of `size`.
template <class S>
QF_INLINE void rotate(float* values, int64_t n, int64_t size) {
  if (size < S::kLanes) return rotate_scalar(values, n, size);
  const auto norm = S::set1(hadamard_norm(size));
  for (int64_t i = 0; i < n; i += S::kLanes) {
    auto v = S::load(values + i);
    v = hadamard_step_in_vector<S, 1>(v);
    v = hadamard_step_in_vector<S, 2>(v);
    v = hadamard_step_in_vector<S, 4>(v);
    if constexpr (S::kLanes == 16) v = hadamard_step_in_vector<S, 8>(v);
    S::store(values + i, size == S::kLanes ? S::mul(v, norm) : v);
  }
  // Two steps at a time where there are two left, which halves the traffic to the cache.
  for (int64_t step = S::kLanes; step < size;) {
    const bool is_double = step * 2 < size;
    const int64_t span = is_double ? 4 * step : 2 * step;
    const auto factor = span == size ? norm : S::set1(1.0f);
    for (int64_t begin = 0; begin < n; begin += span) {
      for (float* p = values + begin; p < values + begin + step; p += S::kLanes) {
        auto a = S::load(p), b = S::load(p + step);
        const auto sum = S::add(a, b), difference = S::sub(a, b);
        if (!is_double) {
          S::store(p, S::mul(sum, factor));
          S::store(p + step, S::mul(difference, factor));
          continue;
        }
        a = S::load(p + 2 * step), b = S::load(p + 3 * step);
        const auto sum2 = S::add(a, b), difference2 = S::sub(a, b);
        S::store(p, S::mul(S::add(sum, sum2), factor));
        S::store(p + step, S::mul(S::add(difference, difference2), factor));
        S::store(p + 2 * step, S::mul(S::sub(sum, sum2), factor));
        S::store(p + 3 * step, S::mul(S::sub(difference, difference2), factor));
      }
    }
    step = span;
  }
}

}  // namespace quantfuse
