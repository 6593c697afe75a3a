// SPDX-License-Identifier: Apache-2.0
//
// y[m,n] = epilogue( sum_k x[m,k] * ((q[n,k] - z[n,g]) * s[n,g] + o[n,g]) )   any number of tokens, weight, x
//
// Tiles of cuda/fma_tile.h from the canonical weight, float32 throughout: the path for what no tensor-core
// kernel takes.
//   gmem x --> f32 in smem
//   gmem q --8 codes a thread--> decode, scale --> f32 in smem --fma with x--> sums --> epilogue --> y
// Of a gated weight a tile has 64 gate rows, then the 64 up rows that belong to them.
#include "core/choose.h"
#include "cuda/fma_tile.h"
#include "linear/linear_canonical.h"

namespace quantfuse::linear_tiles_sm75 {
using linear::Problem;
namespace {

template <class Tile>
__device__ void load_x(const Problem& p, int64_t row0, int64_t k0, typename Tile::Shared& shared) {
  for (int i = threadIdx.x; i < Tile::kTileRows * Tile::kSteps; i += Tile::kThreads) {
    const int row = i / Tile::kSteps, step = i % Tile::kSteps;
    const bool exists = row0 + row < p.m && k0 + step < p.k;
    shared.a[step][row] = exists ? linear::input_at(p, row0 + row, k0 + step) : 0.0f;
  }
}

// 128 columns of 16 steps are 256 runs of 8: one a thread.
struct OwnRun {
  int column, step;
  bool exists;
  WeightRow weights;

  __device__ OwnRun(const Problem& p, int64_t col0)
      : column(threadIdx.x % 128), step(threadIdx.x / 128 * kCodeRun) {
    int64_t row = col0 + column;
    exists = row < p.n;
    if (p.weight.is_gated) {
      const int64_t out = col0 + column % 64;
      exists = out < p.n_out, row = column < 64 ? out : p.n_out + out;
    }
    weights = row_of(p.weight, exists ? row : 0);
  }
};

template <class Tile, qf_format Format, bool kIsAligned>
__device__ void load_w(const Problem& p, const OwnRun& own, int64_t k0, typename Tile::Shared& shared) {
  const int64_t left = p.k - (k0 + own.step);
  float w[kCodeRun] = {};
  if (own.exists && left > 0) {
    load_weights<Format, kIsAligned>(p.weight, own.weights, k0 + own.step,
                                     static_cast<int>(min(left, int64_t{kCodeRun})), w);
  }
#pragma unroll
  for (int i = 0; i < kCodeRun; ++i) shared.b[own.step + i][own.column] = w[i];
}

template <class Tile, qf_format Format, bool kIsAligned>
__global__ void __launch_bounds__(Tile::kThreads) kernel(const __grid_constant__ Problem p, float* staged) {
  __shared__ typename Tile::Shared shared;
  const int out_cols = p.weight.is_gated ? Tile::kTileCols / 2 : Tile::kTileCols;
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * Tile::kTileRows;
  const int64_t col0 = static_cast<int64_t>(blockIdx.y) * out_cols;
  const OwnRun own(p, col0);
  Tile tile;
  for (int64_t k0 = 0; k0 < p.k; k0 += Tile::kSteps) {
    load_x<Tile>(p, row0, k0, shared);
    load_w<Tile, Format, kIsAligned>(p, own, k0, shared);
    __syncthreads();
    tile.add(shared);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    const int64_t row = row0 + Tile::ty() + 16 * i;
    if (row >= p.m) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t col = col0 + 4 * Tile::tx() + j;
      if (col < p.n_out) linear::finish_device(p, staged, row, col, tile.sums[i][0][j], tile.sums[i][1][j]);
      if (!p.weight.is_gated && col + 64 < p.n_out) {
        linear::finish_device(p, staged, row, col + 64, tile.sums[i][1][j], 0.0f);
      }
    }
  }
}

Verdict accepts(const Problem& p) {
  const int64_t columns = p.weight.is_gated ? 64 : 128;
  return linear::accepts_canonical(p).require(ceil_div(p.n_out, columns) < 65536, "n is more than 8 million");
}

void launch(const Problem& problem, const Launch& launch) {
  linear::launch_canonical(problem, launch, [&](const Problem& p, float* staged) {
    choose_value<QF_INT4, QF_FP4_E2M1, QF_NF4, QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2, QF_F32, QF_F16, QF_BF16>(
        device_code_path(p.weight.format), [&](auto format) {
          choose_bool(has_aligned_runs(p.weight), [&](auto aligned) {
            const auto run = [&](auto tile) {
              using Tile = decltype(tile);
              const int64_t columns = p.weight.is_gated ? Tile::kTileCols / 2 : Tile::kTileCols;
              const LaunchShape shape = {dim3(static_cast<unsigned>(ceil_div(p.m, Tile::kTileRows)),
                                              static_cast<unsigned>(ceil_div(p.n_out, columns))),
                                         dim3(Tile::kThreads)};
              launch_kernel("linear_tiles_sm75", kernel<Tile, format.value, aligned.value>, shape, launch, p,
                            staged);
            };
            if (p.m <= FmaTile<2>::kTileRows) run(FmaTile<2>{});
            else run(FmaTile<8>{});
          });
        });
  });
}

}  // namespace

extern const Kernel<Problem> entry = {
    "linear_tiles_sm75",        Target::sm75, accepts, linear::canonical_workspace_bytes, launch,
    /*is_batch_invariant=*/true};

}  // namespace quantfuse::linear_tiles_sm75
