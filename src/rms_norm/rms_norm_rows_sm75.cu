// SPDX-License-Identifier: Apache-2.0
//
// h[r,c] = x[r,c] + residual[r,c], rounded to the type of x and written back to residual
// y[r,c] = quantize( h[r,c] * gain[c] / sqrt(sum_c h[r,c]^2 / n + eps) )          x: f32 | f16 | bf16
//
// Bound by memory. A row stays in registers between its sum of squares and its codes (cuda/produce_rows.h):
//   x, residual --> h --> residual;  h^2 --sum--> root;  h * gain / root --max--> scale --> codes
#include "core/element.h"
#include "cuda/produce_rows.h"
#include "rms_norm/rms_norm.h"

namespace quantfuse::rms_norm_rows_sm75 {
using rms_norm::Problem;
namespace {

constexpr const char* kName = "rms_norm_rows_sm75";

template <class T>
struct Norm {
  static constexpr int kWidth = kVectorWidth<T>;
  Matrix x, residual;
  Vector gain;
  double eps;
  float n, eps_f32;

  // 1 / sqrt(mean(h^2) + eps). Squares of numbers beyond 2^64 overflow float32 and those of numbers below
  // 2^-63 vanish in it: where that may have shaped the sum, it is taken again in double.
  __device__ __forceinline__ bool has_lost_squares(float sum) const {
    return !(sum <= 0x1p127f) || mean_of(sum) < 0x1p-100f;
  }
  __device__ __forceinline__ float mean_of(float sum) const { return sum / n + eps_f32; }
  __device__ __forceinline__ float exact_factor(double sum) const {
    return static_cast<float>(1.0 / sqrt(sum / static_cast<double>(x.cols) + eps));
  }

  static constexpr DType kType = sizeof(T) == 4           ? DType::f32
                                 : std::is_same_v<T, f16> ? DType::f16
                                                          : DType::bf16;

  template <class Part, int kVecs>
  __device__ __forceinline__ void produce(const Part& part, float (&v)[kVecs][kWidth],
                                          RowScratch& scratch) const {
    load(part, v);
    // For few rows the gain is on its way while the squares are summed. For many it is in the L1 cache, and
    // its registers are better spent on more threads.
    const uint4 ahead = kVecs == 1 ? gain_vector(part.template column<kWidth>(0), part.end) : uint4{};
    const float factor = factor_of(part, v, scratch);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int column = part.template column<kWidth>(i);
      float g[kWidth];
      unpack(kVecs == 1 ? ahead : gain_vector(column, part.end), g, T{});
      if (!has_same_type()) load_other_gain(column, part.end, g);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[i][j] = v[i][j] * factor * g[j];
    }
  }

  __device__ __forceinline__ bool has_same_type() const { return gain && gain.dtype == kType; }
  __device__ __forceinline__ uint4 gain_vector(int column, int end) const {
    return has_same_type() && column < end ? *reinterpret_cast<const uint4*>(gain.as<T>() + column) : uint4{};
  }

  // h, which is written back to the residual.
  template <class Part, int kVecs>
  __device__ __forceinline__ void load(const Part& part, float (&v)[kVecs][kWidth]) const {
    uint4 numbers[kVecs], added[kVecs];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int column = part.template column<kWidth>(i);
      const bool is_there = column < part.end;
      numbers[i] = is_there ? *reinterpret_cast<const uint4*>(x.row<T>(part.row) + column) : uint4{};
      added[i] = is_there && residual ? *reinterpret_cast<const uint4*>(residual.row<T>(part.row) + column)
                                      : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      unpack(numbers[i], v[i], T{});
      if (!residual) continue;
      float r[kWidth];
      unpack(added[i], r, T{});
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[i][j] += r[j];
      const Rounded<T, kWidth> h(v[i]);
      const int column = part.template column<kWidth>(i);
      if (column < part.end) *reinterpret_cast<Rounded<T, kWidth>*>(residual.row<T>(part.row) + column) = h;
      unpack({h.words[0], h.words[1], h.words[2], h.words[3]}, v[i], T{});
    }
  }

  template <class Part, int kVecs>
  __device__ __forceinline__ float factor_of(const Part& part, const float (&v)[kVecs][kWidth],
                                             RowScratch& scratch) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum = fmaf(v[i][j], v[i][j], sum);
    }
    sum = part.sum_of(sum, scratch.sums);
    const bool is_lost = has_lost_squares(sum);
    // All threads of the block, or of the warp that several rows share, take the same way.
    if (Part::kIsBlock ? !is_lost : !__any_sync(~0u, is_lost)) return rsqrtf(mean_of(sum));
    double exact = 0;
#pragma unroll 1
    for (int i = 0; i < kVecs * kWidth; ++i) {
      const double h = number(v, i);
      exact += h * h;
    }
    exact = part.sum_of(exact, scratch.exact_sums);
    return is_lost ? exact_factor(exact) : rsqrtf(mean_of(sum));
  }

  // Number i of the vectors without an address, which would put them into memory.
  template <int kVecs>
  __device__ __forceinline__ static float number(const float (&v)[kVecs][kWidth], int i) {
    float found = 0;
#pragma unroll
    for (int k = 0; k < kVecs * kWidth; ++k) found = k == i ? v[k / kWidth][k % kWidth] : found;
    return found;
  }

  __device__ __forceinline__ void load_other_gain(int column, int end, float (&g)[kWidth]) const {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      g[j] = !gain ? 1.0f : column + j < end ? float_at(gain, column + j) : 0.0f;
    }
  }

  // ---- Number by number ----

  struct State {
    const T* h;
    float factor;
  };

  __device__ State begin_row(int64_t row, RowScratch& scratch) const {
    const int cols = static_cast<int>(x.cols), threads = blockDim.x;
    if (residual) {
      for (int c = threadIdx.x; c < cols; c += threads) {
        T& h = residual.row<T>(row)[c];
        from_float(to_float(x.row<T>(row)[c]) + to_float(h), h);
      }
    }
    const T* h = residual ? residual.row<T>(row) : x.row<T>(row);
    float sum = 0;
    for (int c = threadIdx.x; c < cols; c += threads) sum = fmaf(to_float(h[c]), to_float(h[c]), sum);
    sum = sum_over_block(sum, scratch.sums);  // and every thread sees what the others wrote
    if (!has_lost_squares(sum)) return {h, rsqrtf(mean_of(sum))};
    double exact = 0;
    for (int c = threadIdx.x; c < cols; c += threads)
      exact += static_cast<double>(to_float(h[c])) * to_float(h[c]);
    return {h, exact_factor(sum_over_block(exact, scratch.exact_sums))};
  }
  __device__ __forceinline__ float value(const State& state, int64_t, int c) const {
    return to_float(state.h[c]) * state.factor * (gain ? float_at(gain, c) : 1.0f);
  }
};

Verdict accepts(const Problem& p) { return accepts_output_rows(p.out, p.m, p.n, p.device.id); }

void launch(const Problem& p, const Launch& launch) {
  choose_float(p.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kWidth = Norm<T>::kWidth;
    const bool has_vectors = has_whole_vectors(p.x, kWidth) &&
                             (!p.residual || has_whole_vectors(p.residual, kWidth)) &&
                             (!p.gain || is_aligned(p.gain.data, 16));
    const RowPlan plan =
        plan_rows(p.out, p.m, p.n, kWidth, has_vectors, /*spans_row=*/true, gpu_num_sms(p.device.id));
    launch_rows(kName,
                Norm<T>{p.x, p.residual, p.gain, p.eps, static_cast<float>(p.n), static_cast<float>(p.eps)},
                p.out, p.m, plan, launch);
  });
}

}  // namespace

extern const Kernel<Problem> entry = {kName, Target::sm75, accepts, no_workspace<Problem>, launch};

}  // namespace quantfuse::rms_norm_rows_sm75
