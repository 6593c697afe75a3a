// SPDX-License-Identifier: Apache-2.0
//
// x[k,n] = (q[k,n] - zero[g,n]) * scale[g,n]                                 AWQ's and GPTQ's words, any bits
//
// A thread takes 4 neighbouring columns of 32 rows, which in GPTQ's layout are whole words; zero points and
// scales stay in registers for as long as the group is the same.
//   gmem words --> regs --shift, scale--> gmem x, 8 or 16 bytes a thread
#include "core/choose.h"
#include "cuda/launch.h"
#include "dequantize_words/dequantize_words.h"

namespace quantfuse::dequantize_words_sm75 {
using dequantize_words::Problem;
namespace {

constexpr int kThreads = 128, kColumns = 4, kRows = 32;

template <class T>
struct alignas(kColumns * sizeof(T)) Numbers {
  T values[kColumns];
};

template <qf_word_layout kLayout, int kBits, class T>
__global__ void __launch_bounds__(kThreads) kernel(const __grid_constant__ Problem p, bool is_aligned) {
  const int64_t col = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kColumns;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kRows, last = min(first + kRows, p.k);
  if (col >= p.n) return;
  const int count = static_cast<int>(min(p.n - col, int64_t{kColumns}));
  int zeros[kColumns] = {};
  float scales[kColumns] = {};
  int64_t group = -1;
  Problem fixed = p;  // layout and bits as constants
  fixed.layout = kLayout, fixed.bits = kBits;
#pragma unroll 4
  for (int64_t row = first; row < last; ++row) {
    const int64_t own = p.group_of(row);
    if (own != group) {
      group = own;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (i >= count) continue;
        zeros[i] = dequantize_words::zero_at(fixed, group, col + i);
        scales[i] = float_at(p.scales, group, col + i);
      }
    }
    Numbers<T> out = {};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (i >= count) continue;
      const int difference = dequantize_words::code_at(fixed, row, col + i) - zeros[i];
      from_float(static_cast<float>(difference) * scales[i], out.values[i]);
    }
    T* to = p.x.row<T>(row) + col;
    if (is_aligned && count == kColumns) {
      *reinterpret_cast<Numbers<T>*>(to) = out;
    } else {
      for (int i = 0; i < count; ++i) to[i] = out.values[i];
    }
  }
}

Verdict accepts(const Problem& p) {
  return Requirements()
      .require(p.k < int64_t{kRows} * 65536, "k is 2 million or more")
      .require(p.n < 1ll << 31, "n is 2^31 or more");
}

void launch(const Problem& p, const Launch& launch) {
  const int64_t bytes = kColumns * dtype_bytes(p.x.dtype);
  const bool is_aligned = reinterpret_cast<uint64_t>(p.x.data) % bytes == 0 && p.x.row_stride % kColumns == 0;
  const LaunchShape shape = {dim3(static_cast<unsigned>(ceil_div(p.n, kThreads * kColumns)),
                                  static_cast<unsigned>(ceil_div(p.k, kRows))),
                             dim3(kThreads)};
  choose_value<QF_WORDS_AWQ, QF_WORDS_GPTQ, QF_WORDS_GPTQ_V2>(p.layout, [&](auto layout) {
    const auto run = [&](auto bits) {
      choose_float(p.x.dtype, [&](auto type) {
        launch_kernel("dequantize_words_sm75",
                      kernel<layout.value, bits.value, typename decltype(type)::type>, shape, launch, p,
                      is_aligned);
      });
    };
    if constexpr (layout.value == QF_WORDS_AWQ) run(std::integral_constant<int, 4>{});
    else choose_value<2, 3, 4, 8>(p.bits, run);
  });
}

}  // namespace

extern const Kernel<Problem> entry = {"dequantize_words_sm75", Target::sm75, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::dequantize_words_sm75
