// SPDX-License-Identifier: Apache-2.0
//
// y[r,c] = quantize( act(x[r,c]) * x[r,n+c] ), or quantize( act(x[r,c]) )          x: f32 | f16 | bf16
//
// Bound by memory. What is read is read once, and stays in registers up to its codes (cuda/produce_rows.h):
//   gate, up --> act(gate) * up --max--> scale --> codes
#include "core/element.h"
#include "cuda/activation.h"
#include "cuda/produce_rows.h"
#include "gated_act/gated_act.h"

namespace quantfuse::gated_act_rows_sm75 {
using gated_act::Problem;
namespace {

constexpr const char* kName = "gated_act_rows_sm75";

template <class T>
struct Gated {
  static constexpr int kWidth = kVectorWidth<T>;
  Matrix x;
  int64_t up;  // columns from the gate to what it gates; 0: nothing is gated
  qf_activation activation;

  template <class Part, int kVecs>
  __device__ __forceinline__ void produce(const Part& part, float (&v)[kVecs][kWidth], RowScratch&) const {
    uint4 gates[kVecs], ups[kVecs];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int column = part.template column<kWidth>(i);
      const bool is_there = column < part.end;
      const T* at = x.row<T>(part.row) + column;
      gates[i] = is_there ? *reinterpret_cast<const uint4*>(at) : uint4{};
      ups[i] = is_there && up > 0 ? *reinterpret_cast<const uint4*>(at + up) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      unpack(gates[i], v[i], T{});
      activate(activation, v[i]);
      if (up == 0) continue;
      float u[kWidth];
      unpack(ups[i], u, T{});
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[i][j] *= u[j];
    }
  }

  // ---- Number by number ----

  struct State {};
  __device__ State begin_row(int64_t, RowScratch&) const { return {}; }
  __device__ float value(State, int64_t row, int c) const {
    float v[1] = {to_float(x.row<T>(row)[c])};
    activate(activation, v);
    return up == 0 ? v[0] : v[0] * to_float(x.row<T>(row)[up + c]);
  }
};

Verdict accepts(const Problem& p) { return accepts_output_rows(p.out, p.m, p.n, p.device.id); }

void launch(const Problem& p, const Launch& launch) {
  choose_float(p.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kWidth = Gated<T>::kWidth;
    const bool has_vectors = has_whole_vectors(p.x, kWidth) && p.n % kWidth == 0;
    const RowPlan plan =
        plan_rows(p.out, p.m, p.n, kWidth, has_vectors, /*spans_row=*/false, gpu_num_sms(p.device.id));
    launch_rows(kName, Gated<T>{p.x, p.is_gated ? p.n : 0, p.activation}, p.out, p.m, plan, launch);
  });
}

}  // namespace

extern const Kernel<Problem> entry = {kName, Target::sm75, accepts, no_workspace<Problem>, launch};

}  // namespace quantfuse::gated_act_rows_sm75
