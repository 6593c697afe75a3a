// SPDX-License-Identifier: Apache-2.0
//
// dx[m,k] = sum_n dy[m,n] * ((q[n,k] - z[n,g]) * s[n,g] + o[n,g])             any number of tokens and weight
//
// Tiles of cuda/fma_tile.h from the canonical weight, float32 throughout. Columns of a tile run along k, as
// the codes of a row do.
#include "core/choose.h"
#include "core/element.h"
#include "cuda/fma_tile.h"
#include "cuda/launch.h"
#include "linear/device_weight.h"
#include "linear_backward/linear_backward.h"

namespace quantfuse::linear_backward_tiles_sm75 {
using linear_backward::Problem;
namespace {

template <class Tile, qf_format Format, bool kIsAligned>
__global__ void __launch_bounds__(Tile::kThreads) kernel(const __grid_constant__ Problem p) {
  __shared__ typename Tile::Shared shared;
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * Tile::kTileRows;
  const int64_t col0 = static_cast<int64_t>(blockIdx.y) * Tile::kTileCols;
  const int step = threadIdx.x / 16, run = threadIdx.x % 16 * kCodeRun;  // of the weight: one run a thread
  const int64_t left = p.k - (col0 + run);
  Tile tile;
  for (int64_t n0 = 0; n0 < p.n; n0 += Tile::kSteps) {
    for (int i = threadIdx.x; i < Tile::kTileRows * Tile::kSteps; i += Tile::kThreads) {
      const int row = i / Tile::kSteps, n = i % Tile::kSteps;
      shared.a[n][row] = row0 + row < p.m && n0 + n < p.n ? float_at(p.dy, row0 + row, n0 + n) : 0.0f;
    }
    float w[kCodeRun] = {};
    if (n0 + step < p.n && left > 0) {
      load_weights<Format, kIsAligned>(p.weight, row_of(p.weight, n0 + step), col0 + run,
                                       static_cast<int>(min(left, int64_t{kCodeRun})), w);
    }
#pragma unroll
    for (int i = 0; i < kCodeRun; ++i) shared.b[step][run + i] = w[i];
    __syncthreads();
    tile.add(shared);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    const int64_t row = row0 + Tile::ty() + 16 * i;
    if (row >= p.m) continue;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int64_t col = col0 + j / 4 * 64 + 4 * Tile::tx() + j % 4;
      if (col < p.k) set_float(p.dx, row, col, tile.sums[i][j / 4][j % 4]);
    }
  }
}

Verdict accepts(const Problem& p) {
  return Requirements().require(ceil_div(p.k, 128) < 65536, "k is more than 8 million");
}

void launch(const Problem& p, const Launch& launch) {
  choose_value<QF_INT4, QF_FP4_E2M1, QF_NF4, QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2>(
      device_code_path(p.weight.format), [&](auto format) {
        choose_bool(has_aligned_runs(p.weight), [&](auto aligned) {
          const auto run = [&](auto tile) {
            using Tile = decltype(tile);
            const LaunchShape shape = {dim3(static_cast<unsigned>(ceil_div(p.m, Tile::kTileRows)),
                                            static_cast<unsigned>(ceil_div(p.k, Tile::kTileCols))),
                                       dim3(Tile::kThreads)};
            launch_kernel("linear_backward_tiles_sm75", kernel<Tile, format.value, aligned.value>, shape,
                          launch, p);
          };
          if (p.m <= FmaTile<2>::kTileRows) run(FmaTile<2>{});
          else run(FmaTile<8>{});
        });
      });
}

}  // namespace

extern const Kernel<Problem> entry = {"linear_backward_tiles_sm75", Target::sm75, accepts,
                                      no_workspace<Problem>, launch};

}  // namespace quantfuse::linear_backward_tiles_sm75
