// SPDX-License-Identifier: Apache-2.0
//
// y[m,n] = epilogue( sum over parts of k of a_scale * b_scale * sum_k (a[m,k] - a_zero) * (b[n,k] - b_zero) )
//
// Every product of codes on tensor cores without wgmma: what product_mma_sm80 and product_mma_sm75 share.
// Any sizes, strides, groups, zero points and order of b.
//
//   gmem codes --cp.async, or through registers, decoded--> smem ring             mma_feed.h
//   smem ring --ldmatrix--> mma.sync --> sums [--scales--> float32 totals]        mma_multiply.h, mma_math.h
//   totals --smem, warps along k added in their order--> epilogue --> y           mma_finish.h
//
// A block has one tile of y. Warps divide it, and with few tokens divide the columns of k too, so that a
// narrow tile still streams b through all of them.
#pragma once

#include "core/device.h"
#include "cuda/launch.h"
#include "product/mma_feed.h"
#include "product/mma_finish.h"
#include "product/mma_multiply.h"

namespace quantfuse::product_mma {
namespace {

template <class Arch, class Math, class S, bool kIsAsync>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSm)
    kernel(const __grid_constant__ Product p, const __grid_constant__ Plan plan, float* staged) {
  extern __shared__ __align__(kRowBytes) char shared[];
  const uint32_t ring = ptx::shared_address(shared);
  const unsigned m_tile = blockIdx.x % plan.m_tiles, n_tile = blockIdx.x / plan.m_tiles;
  const TileRows a = rows_of_a<S>(p, m_tile), b = rows_of_b<S>(p, n_tile);
  Feed<Math, S, kIsAsync> feed(p, plan, a, b);
  Multiplier<Math, S> multiplier(p, plan, a, b);
  const int count = (plan.cut.tiles + S::kWarpsK - 1) / S::kWarpsK;

  // The ring has stages ahead; the place of the stage before is free as soon as all have met.
  int fetched = 0, free_slot = 0, slot = 0;
#pragma unroll 1
  for (; fetched < plan.stages - 1; ++fetched, ++free_slot) {
    if (fetched < count) {
      feed.fetch(fetched, ring + free_slot * plan.stage_bytes);
      feed.store(fetched, ring + free_slot * plan.stage_bytes);
    }
    Arch::end_stage();
  }
#pragma unroll 1
  for (int stage = 0; stage < count; ++stage, ++fetched) {
    Arch::wait_stage(plan.stages);
    __syncthreads();
    const uint32_t to = ring + free_slot * plan.stage_bytes;
    if (fetched < count) feed.fetch(fetched, to);
    Arch::end_stage();
    multiplier.add(stage, ring + slot * plan.stage_bytes);
    if (fetched < count) feed.store(fetched, to);
    if (++free_slot == plan.stages) free_slot = 0;
    if (++slot == plan.stages) slot = 0;
  }
  __syncthreads();

  auto* words = reinterpret_cast<uint32_t*>(shared);  // the ring's memory, which all are done with
  multiplier.store(words);
  __syncthreads();
  Finish<Math, S>{p, plan, words}.run(staged, a, b);
}

// ---- On the host ----

// How codes that follow each other come, `bits` each.
template <class Math>
Way way_of(const Operand& o, const Cut& cut) {
  const int64_t unit_bytes = Math::kUnitCodes * (is_packed_4bit(o.format) ? 4 : 8) / 8;
  const int64_t cut_bits = int64_t{cut.unit} * (is_packed_4bit(o.format) ? 4 : 8);
  const bool is_aligned = reinterpret_cast<uint64_t>(o.codes.data) % unit_bytes == 0 &&
                          o.codes.row_stride % unit_bytes == 0 && cut_bits % (8 * unit_bytes) == 0;
  if (!is_aligned) return Way::kCareful;
  return Math::kHasAsyncCopies && !is_packed_4bit(o.format) ? Way::kAsync : Way::kWide;
}
// Four columns of n.
inline Way way_of_columns(const Operand& o) {
  const int64_t bytes = is_packed_4bit(o.format) ? 2 : 4;
  const bool is_aligned =
      reinterpret_cast<uint64_t>(o.codes.data) % bytes == 0 && o.codes.row_stride % bytes == 0;
  return is_aligned ? Way::kWide : Way::kCareful;
}

template <class Arch, class Math, class S>
Plan make_plan(const Product& p) {
  Plan plan = {};
  plan.cut = cut_columns(p, Math::kTileColumns, Math::kStepColumns);
  plan.m_tiles = static_cast<unsigned>(ceil_div(p.m, S::kM));
  plan.n_tiles = static_cast<unsigned>(ceil_div(p.n_out, p.is_gated() ? S::kN / 2 : S::kN));
  plan.a_way = way_of<Math>(p.a, plan.cut);
  plan.b_way = p.b_order == QF_NK ? way_of<Math>(p.b, plan.cut) : way_of_columns(p.b);
  plan.has_scales_at_end = p.a.block.cols >= p.k && p.b.block.cols >= p.k;
  plan.has_row_sums = !Math::kSubtractsZeros && p.b.has_zeros();
  plan.has_column_sums = !Math::kSubtractsZeros && p.a.has_zeros();
  plan.has_wide_zeros = p.has_wide_zeros();
  if (plan.has_wide_zeros && Math::kPromotes) plan.has_row_sums = plan.has_column_sums = true;

  const int scale_bytes = plan.cut.parts * S::kWarpsK * S::kRows * 4;
  plan.zero_offset = S::kCodeBytes + (plan.has_scales_at_end ? 0 : scale_bytes);
  const bool has_zeros = Math::kPromotes && plan.stages_zeros();
  plan.stage_bytes = static_cast<int>(round_up(plan.zero_offset + (has_zeros ? scale_bytes : 0), kRowBytes));
  const int64_t limit =
      std::min<int64_t>(gpu_max_smem_bytes(p.device.id), Arch::kMaxSmemBytes) / S::kBlocksPerSm;
  plan.stages = static_cast<int>(std::clamp<int64_t>(limit / plan.stage_bytes, 2, Arch::kMaxStages));
  const int result_words = S::kWarpsK * (S::kM * (S::kN + 4) + S::kRows);
  plan.smem_bytes = std::max(plan.stages * plan.stage_bytes, result_words * 4);
  return plan;
}

template <class Arch, class Math, class S, bool kIsAsync>
void launch_shape(const Product& p, float* staged, const Launch& launch) {
  const Plan plan = make_plan<Arch, Math, S>(p);
  const LaunchShape shape = {dim3(plan.m_tiles * plan.n_tiles), dim3(S::kThreads),
                             static_cast<size_t>(plan.smem_bytes)};
  launch_kernel(Arch::kName, kernel<Arch, Math, S, kIsAsync>, shape, launch, p, plan, staged);
}

// Whether int32 holds the sum over all of k: 128^2 * 131071 is the last below 2^31. Zero points are taken
// from it in 64 bits; exact results are modulo 2^32 anyway.
inline bool has_integer_sums(const Product& p) {
  return p.is_exact() || (p.a.block.cols >= p.k && p.b.block.cols >= p.k && p.k <= 131071);
}

// Whether cp.async brings both operands as the tensor cores take them.
template <class Math>
bool is_async(const Product& p) {
  const Cut cut = cut_columns(p, Math::kTileColumns, Math::kStepColumns);
  return p.b_order == QF_NK && way_of<Math>(p.a, cut) == Way::kAsync && way_of<Math>(p.b, cut) == Way::kAsync;
}

}  // namespace
}  // namespace quantfuse::product_mma
