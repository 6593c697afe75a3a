// SPDX-License-Identifier: Apache-2.0
//
// y of 16 bits where the weight is the row operand of wgmma: a warpgroup has 64 rows of the weight, and the
// tokens are columns.
//   sums --activation, * up, + residual--stmatrix, transposed--> smem, swizzled --box copy--> y
// A residual of y's type comes into shared memory by boxes of the same shape; in its box a number is where
// that of y will be in its own.
//
// Thread 4 g + q of a warp has tokens 8 u + 2 q, + 1 of rows g and g + 8 of the warp's 16 in unit u; of a
// gated weight these are a gate and its up row.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "core/output.h"
#include "cuda/ptx/async_copy.h"
#include "cuda/ptx/matrix.h"
#include "cuda/ptx/matrix_load.h"
#include "cuda/tensor_map.h"
#include "product/activate.h"

namespace quantfuse::product {

// Columns of y that a warpgroup has: those of a box.
QF_HD constexpr int box_cols(bool is_gated) { return is_gated ? 32 : 64; }

// ---- The host's side ----

// Whether y is stored by boxes, and the residual, if there is one, read by them. Not of a gated weight, for
// which nobody needs one: the compiler then has fewer registers for the loop that makes the sums.
inline bool has_transposed_boxes(const Output& out, const Matrix& residual, bool is_gated) {
  const Matrix& y = out.y;
  const bool is_half = y.dtype == DType::f16 || y.dtype == DType::bf16;
  return is_half && !out.is_quantized() && has_boxes(y) &&
         (!residual || (!is_gated && residual.dtype == y.dtype && has_boxes(residual)));
}

// Of y, or of a residual.
inline CUtensorMap transposed_boxes(const Matrix& y, bool is_gated, int tokens) {
  return tensor_map<2>(map_type(y.dtype), y.data, {y.cols, y.rows}, {y.row_stride * 2},
                       {box_cols(is_gated), tokens},
                       is_gated ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
}

// ---- The device's side ----

template <Act kAct_, bool kIsGated_, bool kHasResidual_>
struct BoxEpilogue {
  static constexpr Act kAct = kAct_;
  static constexpr bool kIsGated = kIsGated_, kHasResidual = kHasResidual_;
};

// body(BoxEpilogue), known to the compiler.
template <class Body>
__device__ __forceinline__ void with_box_epilogue(qf_activation kind, bool is_gated, bool has_residual,
                                                  const Body& body) {
  with_act(kind, [&](auto act) {
    if (is_gated) body(BoxEpilogue<act.value, true, false>{});
    else if (has_residual) body(BoxEpilogue<act.value, false, true>{});
    else body(BoxEpilogue<act.value, false, false>{});
  });
}

// A warpgroup that stores boxes, from one place in shared memory.
struct BoxStore {
  const CUtensorMap& y;
  uint32_t staged;
  int barrier;  // the warpgroup's
  bool is_bf16;
  int warp, lane;  // of the warpgroup, of the warp

  // The box of kTokens tokens whose first column and token these are. sums(unit, v): v[row][token] of a unit,
  // with all that is done before the activation. residual: where its box is.
  template <class E, int kTokens, class Sums>
  __device__ __forceinline__ void store(E, const Activate<E::kAct>& activate, int col, int token,
                                        uint32_t residual, const Sums& sums) const {
    constexpr int kUnits = E::kIsGated ? 4 : 2;  // in one instruction
    const bool is_first = warp == 0 && lane == 0;
    if (is_first) ptx::wait_stores_read();
    ptx::named_barrier_sync(barrier, 128);
#pragma unroll
    for (int unit = 0; unit < kTokens / 8; unit += kUnits) {
      const uint32_t at = place<E::kIsGated>(unit);
      uint32_t words[4], more[4] = {};
      if constexpr (E::kHasResidual) ptx::load_matrices_transposed(residual + at, more);
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        float v[2][2];
        sums(unit + i, v);
#pragma unroll
        for (int j = 0; j < 2; ++j) v[0][j] = activate(v[0][j]);
        if constexpr (E::kIsGated) {
#pragma unroll
          for (int j = 0; j < 2; ++j) v[0][j] *= v[1][j];
          words[i] = round<E::kHasResidual>(v[0], more[i]);
        } else {
#pragma unroll
          for (int j = 0; j < 2; ++j) v[1][j] = activate(v[1][j]);
          words[2 * i] = round<E::kHasResidual>(v[0], more[2 * i]);
          words[2 * i + 1] = round<E::kHasResidual>(v[1], more[2 * i + 1]);
        }
      }
      ptx::store_matrices_transposed(staged + at, words);
    }
    ptx::copy_fence();
    ptx::named_barrier_sync(barrier, 128);
    if (is_first) {
      ptx::store_box(y, col, token, staged);
      ptx::end_store_group();
    }
  }

  // In a box, the 16 bytes that this lane names of the four matrices from `unit` on.
  template <bool kIsGated>
  __device__ __forceinline__ uint32_t place(int unit) const {
    const int in_unit = lane % 8;
    if constexpr (kIsGated) return ((unit + lane / 8) * 8 + in_unit) * 64 + ((warp ^ (in_unit / 2)) << 4);
    else return ((unit + lane / 16) * 8 + in_unit) * 128 + (((warp * 2 + lane / 8 % 2) ^ in_unit) << 4);
  }
  template <bool kHasResidual>
  __device__ __forceinline__ uint32_t round(const float (&v)[2], uint32_t more) const {
    if constexpr (!kHasResidual) return ptx::pack_two(v[0], v[1], is_bf16);
    const float2 of_residual = ptx::unpack_two(more, is_bf16);
    return ptx::pack_two(v[0] + of_residual.x, v[1] + of_residual.y, is_bf16);
  }
};

}  // namespace quantfuse::product
