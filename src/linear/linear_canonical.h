// SPDX-License-Identifier: Apache-2.0
//
// What the CUDA kernels of linear share that read the canonical weight: the steps of a call, and the
// epilogue.
//
//   [x --quantize_rows--> codes in the workspace]  -->  product, epilogue  -->  y
//                                                       [float32 in the workspace --quantize_rows--> y]
//
// The bracketed steps are for activations that are to be quantized, and for outputs with dynamic scales.
#pragma once

#include "core/device.h"
#include "core/element.h"
#include "cuda/activation.h"
#include "cuda/launch.h"
#include "linear/device_weight.h"
#include "linear/linear.h"
#include "quantize/quantize.h"

namespace quantfuse::quantize_rows_sm75 {
extern const Kernel<quantize::Problem> entry;
}

namespace quantfuse::linear {

struct CanonicalPlan {
  int64_t x_codes, x_scale, result, total_bytes;  // offsets in the workspace
  bool quantizes_x, quantizes_y;
};

// Without `finishes_y` codes of y with dynamic scales are made of float32 numbers afterwards.
inline CanonicalPlan plan_canonical(const Problem& p, bool finishes_y = false) {
  CanonicalPlan plan = {};
  plan.quantizes_x = p.has_act_quant() && !p.x_scale;
  plan.quantizes_y = p.out.is_quantized() && !p.out.is_static && !finishes_y;
  int64_t offset = 0;
  const auto reserve = [&](int64_t bytes) {
    const int64_t at = offset;
    offset = round_up(offset + bytes, 256);
    return at;
  };
  plan.x_codes = reserve(plan.quantizes_x ? p.m * p.k : 0);
  plan.x_scale = reserve(plan.quantizes_x ? p.m * ceil_div(p.k, p.act_group) * 4 : 0);
  plan.result = reserve(plan.quantizes_y ? p.m * p.n_out * 4 : 0);
  plan.total_bytes = offset;
  return plan;
}

inline size_t canonical_workspace_bytes(const Problem& p) {
  return static_cast<size_t>(plan_canonical(p).total_bytes);
}

inline Requirements accepts_canonical(const Problem& p) {
  return Requirements()
      .require(p.m < 1ll << 31 && p.k < 1ll << 31, "m or k is 2^31 or more")
      .require(static_cast<bool>(p.weight.codes),
               "reads the canonical weight, and only the packed one is given")
      .require(
          p.m * ceil_div(p.k, p.act_group > 0 ? p.act_group : 1) < 1ll << 31 && p.m * p.n_out < 1ll << 40,
          "m is too large");
}

// x[m, k] as the product takes it. Not inlined where it is quantized: it is long.
static __device__ __noinline__ float quantized_input(const Problem& p, int64_t m, int64_t k) {
  return decode_at(p.act_format, p.x.row_bytes_at(m), k) * p.x_scale.row<const float>(m)[k / p.act_group];
}
__device__ inline float input_at(const Problem& p, int64_t m, int64_t k) {
  return p.x_scale ? quantized_input(p, m, k) : float_at(p.x, m, k);
}

__device__ inline float activate_device(qf_activation kind, float x) {
  float v[1] = {x};
  activate(kind, v);
  return v[0];
}

// ---- The epilogue. P is linear::Problem, or another with its epilogue's fields ----

// What is long and reads no memory is never inlined: a kernel may have the epilogue in several places.
static __device__ __noinline__ float activate_device_call(qf_activation kind, float x) {
  return activate_device(kind, x);
}
static __device__ __noinline__ uint8_t encode_device_call(qf_format format, float x) {
  return encode_value(format, x, 0);
}

// Rows first, first + step, ... of one column of y, those of them that there are.
template <int kRows>
struct ColumnOfRows {
  int64_t column;
  int first, step;
  __device__ int row(int i) const { return first + i * step; }
};

// What the epilogue reads, apart from it, so that a kernel can ask for it before it has the sums.
template <int kRows>
struct EpilogueInputs {
  float bias = 0, up_bias = 0, inverse_scale = 0, residual[kRows] = {};

  template <class P>
  __device__ __forceinline__ void load(const P& p, const ColumnOfRows<kRows>& at) {
    if (p.bias) {
      bias = float_at(p.bias, at.column);
      if (p.is_gated()) up_bias = float_at(p.bias, p.n_out + at.column);
    }
    if (p.residual) {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        if (at.row(i) < p.m) residual[i] = float_at(p.residual, at.row(i), at.column);
    }
    if (p.out.is_quantized() && p.out.is_static)
      inverse_scale = 1.0f / *static_cast<const float*>(p.out.scale.data);
  }
};

template <class T, class P, int kRows>
__device__ __forceinline__ void store_rows(const P& p, const ColumnOfRows<kRows>& at,
                                           const float (&v)[kRows]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (at.row(i) < p.m) from_float(v[i], p.out.y.template row<T>(at.row(i))[at.column]);
}

// y from the sums of its column, and from those of the up projection where the weight is gated.
template <int kRows, class P>
__device__ __forceinline__ void finish_rows(const P& p, float* staged, const ColumnOfRows<kRows>& at,
                                            const float (&sums)[kRows], const float (&ups)[kRows],
                                            const EpilogueInputs<kRows>& in) {
  float v[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) v[i] = p.bias ? sums[i] + in.bias : sums[i];
  if (kRows > 1 && p.activation == QF_SILU) {  // side by side
    activate(QF_SILU, v);
  } else if (p.activation != QF_IDENTITY) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) v[i] = activate_device_call(p.activation, v[i]);
  }
  if (p.is_gated()) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) v[i] *= p.bias ? ups[i] + in.up_bias : ups[i];
  }
  if (p.residual) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) v[i] += in.residual[i];
  }
  if (staged) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (at.row(i) < p.m) staged[at.row(i) * p.n_out + at.column] = v[i];
  } else if (p.out.is_quantized()) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (at.row(i) < p.m)
        p.out.y.template row<uint8_t>(at.row(i))[at.column] =
            encode_device_call(p.out.format, v[i] * in.inverse_scale);
    }
  } else if (p.out.y.dtype == DType::bf16) {
    store_rows<bf16>(p, at, v);
  } else if (p.out.y.dtype == DType::f16) {
    store_rows<f16>(p, at, v);
  } else {
    store_rows<float>(p, at, v);
  }
}

// One number of y. Not inlined: a tile has dozens of outputs. To read p from in here takes a good part of a
// microsecond, so that this is for kernels whose sums take much longer.
template <class P>
static __device__ __noinline__ void finish_device(const P& p, float* staged, int64_t row, int64_t col,
                                                  float sum, float up) {
  const ColumnOfRows<1> at = {col, static_cast<int>(row), 1};
  EpilogueInputs<1> inputs;
  inputs.load(p, at);
  finish_rows<1>(p, staged, at, {sum}, {up}, inputs);
}

// Runs the steps; product(problem, staged) launches the kernel, which itself makes y where `finishes_y`.
template <class Product>
void launch_canonical(const Problem& p, const Launch& launch, const Product& product,
                      bool finishes_y = false) {
  const CanonicalPlan plan = plan_canonical(p, finishes_y);
  char* workspace = static_cast<char*>(launch.workspace);
  const auto matrix = [](void* data, int64_t rows, int64_t cols, DType dtype) {
    return Matrix{data, rows, cols, cols, dtype};
  };
  const auto quantize_rows = [&](const Matrix& x, const Matrix& q, const Matrix& scale,
                                 int64_t scale_col_stride, qf_format format, int64_t group) {
    quantize::Problem step = {};
    step.x = x, step.q = q, step.scale = scale, step.scale_col_stride = scale_col_stride;
    step.format = format, step.mode = QF_SCALE_DYNAMIC, step.block = {1, group};
    step.rows = x.rows, step.cols = x.cols, step.device = p.device;
    quantize_rows_sm75::entry.launch(step, launch);
  };

  Problem product_problem = p;
  if (plan.quantizes_x && p.k > 0) {
    product_problem.x = matrix(workspace + plan.x_codes, p.m, p.k, DType::u8);
    product_problem.x_scale = matrix(workspace + plan.x_scale, p.m, ceil_div(p.k, p.act_group), DType::f32);
    quantize_rows(p.x, product_problem.x, product_problem.x_scale, 1, p.act_format, p.act_group);
  }
  auto* staged = plan.quantizes_y ? reinterpret_cast<float*>(workspace + plan.result) : nullptr;
  product(product_problem, staged);
  if (plan.quantizes_y) {
    quantize_rows(matrix(staged, p.m, p.n_out, DType::f32), p.out.y, p.out.scale, p.out.scale_col_stride,
                  p.out.format, p.out.group);
  }
}

}  // namespace quantfuse::linear
