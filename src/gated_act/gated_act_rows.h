// SPDX-License-Identifier: Apache-2.0
//
// Gated activation on either vector type S. For rows of any length. A thread takes whole rows:
//   x[:n], x[n:] --> act(gate) * up --> chunk of float32 in the L1 cache --> y, scale
#pragma once

#include "cpu/row_output.h"
#include "cpu/threads.h"
#include "gated_act/gated_act.h"

namespace quantfuse::gated_act {

// `ups` is null where nothing is gated. Meanwhile the same columns `ahead` numbers further are fetched.
template <class S, qf_activation Kind, class T>
void gate(const T* gates, const T* ups, int64_t n, float* values, int64_t ahead) {
  const auto activated = [&](int64_t i, auto... count) __attribute__((always_inline)) {
    __builtin_prefetch(gates + i + ahead);
    return activate<S>(Kind, S::load(gates + i, count...));
  };
  if (!ups) return produce_floats<S>(n, values, activated);
  produce_floats<S>(
      n, values, [&](int64_t i, auto... count) __attribute__((always_inline)) {
        __builtin_prefetch(ups + i + ahead);
        return S::mul(activated(i, count...), S::load(ups + i, count...));
      });
}

template <class S, class T>
void gate_row(const Problem& p, int64_t row) {
  const T* gates = p.x.row<T>(row);
  const T* ups = p.is_gated ? gates + p.n : nullptr;
  const int64_t ahead = row + 1 < p.m ? p.x.row_stride : 0;  // the next row
  store_row<S>(p.out, row, p.n, [&](int64_t col, int64_t count, float* values) {
    fetch_output(p.out, row, col, count);
    choose_value<QF_IDENTITY, QF_RELU, QF_GELU, QF_GELU_TANH, QF_SILU>(
        p.activation, [&](auto kind) __attribute__((always_inline)) {
          gate<S, kind.value>(gates + col, ups ? ups + col : nullptr, count, values, ahead);
        });
  });
}

template <class S>
void launch_rows(const Problem& p, const Launch&) {
  // A range below some 8k outputs is done before another thread has woken up.
  const int64_t grain = p.n >= 8192 ? 1 : ceil_div(8192, p.n);
  choose_float(
      p.x.dtype, [&](auto type) __attribute__((always_inline)) {
        parallel_ranges(p.m, grain, [&](int64_t begin, int64_t end) {
          for (int64_t row = begin; row < end; ++row) gate_row<S, typename decltype(type)::type>(p, row);
        });
      });
}

}  // namespace quantfuse::gated_act
