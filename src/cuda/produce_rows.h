// SPDX-License-Identifier: Apache-2.0
//
// Rows that a kernel computes and stores as an Output asks: rounded to floats, or quantized with a static
// scale, one per row, or one per group of columns. A Source computes the numbers. Two kernels:
//
//   whole   A row, or a piece of it where nothing spans the row, lies in the registers of a block or, if it
//           is short, of 1 to 32 lanes of a warp: what is read is read once.
//             gmem --16 bytes a thread--> Source --> floats in regs --max--> scale --> codes --> gmem
//           Groups of up to 32 threads' vectors, a power of two of them, have a scale of their own.
//   any     A block goes along a row number by number, several times: for rows that do not lie on 16 bytes,
//           are longer than the registers of 1024 threads, have other groups, or are rotated by more columns
//           than a warp holds. Rows that are rotated are held in shared memory for it.
//
// A Source has, for the whole kernel,
//     kWidth;  produce(part, v, scratch): the numbers of a thread's vectors
// and for the other
//     begin_row(row, scratch): what value() needs to know, found by all threads;  value(state, row, column)
#pragma once

#include "core/choose.h"
#include "core/device.h"
#include "core/output.h"
#include "cuda/hadamard.h"
#include "cuda/launch.h"
#include "cuda/ptx/dependent_launch.h"
#include "cuda/row_codes.h"

namespace quantfuse {

// Shared memory of the reductions over a block.
struct RowScratch {
  float maxima[32], sums[32];
  double exact_sums[32];
};

// Columns [begin, end) of a row, which `lanes` threads share, this one being `lane` of them.
template <bool kIsBlock_>
struct RowPart {
  static constexpr bool kIsBlock = kIsBlock_;
  int64_t row;
  int begin, end;  // both 0 where there is no such row
  int lane, lanes;

  template <int kWidth>
  __device__ __forceinline__ int column(int vec) const {
    return begin + (vec * lanes + lane) * kWidth;
  }
  __device__ __forceinline__ float max_of(float x, RowScratch& scratch) const {
    if constexpr (kIsBlock) return max_over_block(x, scratch.maxima);
    else return max_over_lanes(x, lanes);
  }
  template <class Number>
  __device__ __forceinline__ Number sum_of(Number x, Number (&parts)[32]) const {
    if constexpr (kIsBlock) return sum_over_block(x, parts);
    else return sum_over_lanes(x, lanes);
  }
};

// How rows are divided among blocks and their threads.
struct RowDivision {
  Divider pieces;  // of a row
  uint32_t parts;  // rows * pieces
  int piece;       // columns, whole vectors and groups
  int cols;        // of a row
  int lanes_log2;  // of a team
  int group_log2;  // log2 of the lanes that hold a group; -1: a scale serves the part, or none is dynamic
};

// ---- Stores ----

template <int kWidth>
__device__ __forceinline__ void store_floats(const Matrix& y, int64_t row, int column,
                                             const float (&v)[kWidth]) {
  const auto store = [&](auto type) {
    using T = decltype(type);
    constexpr int kRun =
        static_cast<int>(16 / sizeof(T)) < kWidth ? static_cast<int>(16 / sizeof(T)) : kWidth;
#pragma unroll
    for (int i = 0; i < kWidth; i += kRun) {
      float run[kRun];
#pragma unroll
      for (int j = 0; j < kRun; ++j) run[j] = v[i + j];
      *reinterpret_cast<Rounded<T, kRun>*>(y.row<T>(row) + column + i) = Rounded<T, kRun>(run);
    }
  };
  switch (y.dtype) {
    case DType::f32: return store(float{});
    case DType::f16: return store(f16{});
    default: return store(bf16{});
  }
}

template <int kWidth>
__device__ __forceinline__ void store_codes(uint8_t* to, qf_format format, const float (&v)[kWidth],
                                            float inverse) {
  uint32_t words[kWidth / 4];
#pragma unroll
  for (int i = 0; i < kWidth / 4; ++i) {
    words[i] = format == QF_INT8       ? encode4<QF_INT8>(v + 4 * i, inverse)
               : format == QF_FP8_E4M3 ? encode4<QF_FP8_E4M3>(v + 4 * i, inverse)
                                       : encode4<QF_FP8_E5M2>(v + 4 * i, inverse);
  }
  if constexpr (kWidth == 8) *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
  else *reinterpret_cast<uint32_t*>(to) = words[0];
}

template <int kCount>
__device__ __forceinline__ float largest_of(const float (&v)[kCount], float largest) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) largest = fmaxf(largest, fabsf(v[i]));  // passes over NaN
  return largest;
}

// The numbers of a thread's vectors; 0 beyond the end.
template <class Part, int kVecs, int kWidth>
__device__ __forceinline__ void store_part(const Output& out, const RowDivision& d, const Part& part,
                                           const float (&v)[kVecs][kWidth], RowScratch& scratch) {
  if (!out.is_quantized()) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int column = part.template column<kWidth>(i);
      if (column < part.end) store_floats(out.y, part.row, column, v[i]);
    }
    return;
  }
  const float symmetric_max = code_range(out.format).symmetric_max;
  uint8_t* codes = out.y.row<uint8_t>(part.row);
  float inverse = 0;
  if (out.is_static) {
    inverse = 1.0f / *static_cast<const float*>(out.scale.data);
  } else if (d.group_log2 < 0) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) largest = largest_of(v[i], largest);
    const float scale = scale_from_amax(part.max_of(largest, scratch), symmetric_max);
    if (part.lane == 0 && part.end > 0) out.scale_at(part.row, 0) = scale;
    inverse = 1.0f / scale;
  }
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int column = part.template column<kWidth>(i);
    if (d.group_log2 >= 0) {
      const int lanes = 1 << d.group_log2;
      const float scale = scale_from_amax(max_over_lanes(largest_of(v[i], 0.0f), lanes), symmetric_max);
      if (column < part.end && (part.lane & (lanes - 1)) == 0) {
        out.scale_at(part.row, column / kWidth >> d.group_log2) = scale;
      }
      inverse = 1.0f / scale;
    }
    if (column < part.end) store_codes(codes + column, out.format, v[i], inverse);
  }
}

// One number. Not inlined: several places need it, and none of them is in a hurry.
static __device__ __noinline__ void store_number(const Output& out, int64_t row, int64_t column, float value,
                                                 float inverse) {
  if (!out.is_quantized()) {
    switch (out.y.dtype) {
      case DType::f32: return from_float(value, out.y.row<float>(row)[column]);
      case DType::f16: return from_float(value, out.y.row<f16>(row)[column]);
      default: return from_float(value, out.y.row<bf16>(row)[column]);
    }
  }
  out.y.row<uint8_t>(row)[column] = encode_value(out.format, __fmul_rn(value, inverse), 0);
}

// ---- Kernels ----

// Where nothing is, a part is empty.
template <bool kIsBlock>
__device__ __forceinline__ RowPart<kIsBlock> part_at(const RowDivision& d, uint32_t index) {
  const uint32_t row = d.pieces.quotient(index);
  const int begin = static_cast<int>(index - row * d.pieces.divisor) * d.piece;
  const bool is_there = index < d.parts;
  const int lanes = kIsBlock ? static_cast<int>(blockDim.x) : 1 << d.lanes_log2;
  return {is_there ? row : 0, is_there ? begin : 0, is_there ? min(begin + d.piece, d.cols) : 0,
          static_cast<int>(threadIdx.x) & (kIsBlock ? ~0 : lanes - 1), lanes};
}

// Blocks of up to 512 threads with two vectors each are what many rows are divided into. Three of them to a
// multiprocessor, 42 registers a thread, keep more bytes on their way than fewer with more registers; sm_75
// has room for two.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr int kBlocksOfMany = 2;
#else
inline constexpr int kBlocksOfMany = 3;
#endif
template <int kVecs, bool kIsBlock>
struct Bounds {
  static constexpr int kThreads = !kIsBlock ? 256 : kVecs == 2 ? kMaxRowThreads / 2 : kMaxRowThreads;
  static constexpr int kBlocks = kIsBlock && kVecs == 2 ? kBlocksOfMany : 1;
};

template <class Source, int kVecs, bool kIsBlock>
__global__ void __launch_bounds__(Bounds<kVecs, kIsBlock>::kThreads, Bounds<kVecs, kIsBlock>::kBlocks)
    whole_rows_kernel(const __grid_constant__ Source source, const __grid_constant__ Output out,
                      const __grid_constant__ RowDivision d) {
  __shared__ RowScratch scratch;
  const uint32_t index =
      kIsBlock ? blockIdx.x : blockIdx.x * (blockDim.x >> d.lanes_log2) + (threadIdx.x >> d.lanes_log2);
  const auto part = part_at<kIsBlock>(d, index);
  ptx::allow_next_kernel();
  ptx::wait_for_previous_kernel();
  float v[kVecs][Source::kWidth];
  source.produce(part, v, scratch);
  if (out.hadamard > 0) rotate_vectors(v, static_cast<int>(out.hadamard));
  store_part(out, d, part, v, scratch);
}

// Columns [begin, end) share a dynamic scale; every `stride`-th of them from `first` on is this thread's.
struct GroupShare {
  int begin, end, first, stride;
};
template <class Value, class Max>
__device__ __forceinline__ void store_group(const Output& out, int64_t row, const GroupShare& s,
                                            const Value& value, const Max& max_of_all) {
  float largest = 0;
  for (int c = s.begin + s.first; c < s.end; c += s.stride) largest = fmaxf(largest, fabsf(value(c)));
  const float scale = scale_from_amax(max_of_all(largest), code_range(out.format).symmetric_max);
  if (s.first == 0) out.scale_at(row, s.begin / out.group) = scale;
  const float inverse = 1.0f / scale;
  for (int c = s.begin + s.first; c < s.end; c += s.stride) store_number(out, row, c, value(c), inverse);
}

inline constexpr int kLargestWarpGroup = 1024;

template <class Source, bool kIsRotated>
__global__ void __launch_bounds__(kMaxRowThreads)
    any_rows_kernel(const __grid_constant__ Source source, const __grid_constant__ Output out) {
  __shared__ RowScratch scratch;
  extern __shared__ float rotated[];
  const int64_t row = blockIdx.x;
  const int n = static_cast<int>(out.y.cols), threads = blockDim.x;
  ptx::allow_next_kernel();
  ptx::wait_for_previous_kernel();

  const auto state = source.begin_row(row, scratch);
  const PaddedRow held = {rotated};
  float norm = 1;
  if constexpr (kIsRotated) {
    for (int c = threadIdx.x; c < n; c += threads) held[c] = source.value(state, row, c);
    __syncthreads();
    rotate_row(held, n, static_cast<int>(out.hadamard));
    norm = hadamard_norm(out.hadamard);
  }
  const auto value = [&](int c) {
    return kIsRotated ? __fmul_rn(held[c], norm) : source.value(state, row, c);
  };

  if (!out.is_quantized() || out.is_static) {
    const float inverse = out.is_quantized() ? 1.0f / *static_cast<const float*>(out.scale.data) : 0.0f;
    for (int c = threadIdx.x; c < n; c += threads) store_number(out, row, c, value(c), inverse);
    return;
  }
  const int group = static_cast<int>(out.group);
  if (group > kLargestWarpGroup) {
    for (int begin = 0; begin < n; begin += group) {
      store_group(out, row, {begin, min(n, begin + group), static_cast<int>(threadIdx.x), threads}, value,
                  [&](float largest) { return max_over_block(largest, scratch.maxima); });
      __syncthreads();  // before the next group uses the scratch
    }
  } else {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int begin = warp * group; begin < n; begin += threads / 32 * group) {
      store_group(out, row, {begin, min(n, begin + group), lane, 32}, value,
                  [](float largest) { return max_over_warp(largest); });
    }
  }
}

// ---- Launches ----

inline bool is_aligned(const void* data, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0;
}

// Whether every run of `width` numbers of a row lies on a multiple of its bytes (of 16 at most).
inline bool has_whole_vectors(const Matrix& a, int64_t width) {
  const int64_t bytes = width * dtype_bytes(a.dtype);
  return is_aligned(a.data, bytes < 16 ? bytes : 16) && a.cols % width == 0 &&
         (a.rows <= 1 || a.row_stride % width == 0);
}

inline int log2_of(int64_t power) {
  int log2 = 0;
  while ((int64_t{1} << log2) < power) ++log2;
  return log2;
}

struct RowPlan {
  bool is_whole = false, is_block = false;
  int vecs = 1, threads = 256;
  int64_t grid = 1;
  RowDivision division = {Divider(1), 0, 0, 0, 0, -1};
};

// `has_vectors`: the inputs' rows lie in whole vectors of `width`. `spans_row`: a number depends on the row.
inline RowPlan plan_rows(const Output& out, int64_t m, int64_t n, int width, bool has_vectors, bool spans_row,
                         int num_sms) {
  RowPlan plan;
  const bool is_dynamic = out.is_quantized() && !out.is_static;
  const bool has_row_scale = is_dynamic && out.group >= n;
  const int64_t vectors = n / width, group_lanes = out.group / width;
  // Rotated runs of columns that at most the 32 lanes of a warp hold.
  const int64_t run_lanes = out.hadamard > width ? out.hadamard / width : 1;
  const bool has_lane_groups = is_dynamic && !has_row_scale && out.group % width == 0 && group_lanes <= 32 &&
                               is_hadamard_size(group_lanes);
  plan.is_whole = has_vectors && has_whole_vectors(out.y, width) && run_lanes <= 32 &&
                  (!is_dynamic || has_row_scale || has_lane_groups);
  const bool is_one_part = spans_row || has_row_scale;
  if (is_one_part && vectors > 4 * kMaxRowThreads) plan.is_whole = false;
  if (!plan.is_whole) {
    plan.threads = n > 2048 ? kMaxRowThreads : 256;
    return plan;
  }

  RowDivision& d = plan.division;
  d.cols = static_cast<int>(n);
  d.group_log2 = has_lane_groups ? log2_of(group_lanes) : -1;
  int64_t pieces = 1, piece_vectors = vectors;
  if (vectors <= 128) {
    plan.vecs = vectors <= 64 ? 2 : 4;
    while ((plan.vecs << d.lanes_log2) < vectors || (1 << d.lanes_log2) < run_lanes) ++d.lanes_log2;
  } else {
    plan.is_block = true;
    const bool is_small = m * vectors < int64_t{num_sms} * 2 * kMaxRowThreads;
    if (is_one_part) {
      // Few rows: more threads, each with less to do. Many: bytes in flight are what counts, and blocks that
      // fit an SM evenly.
      plan.vecs = vectors > kMaxRowThreads ? 4 : is_small ? 1 : 2;
    } else {
      plan.vecs = is_small ? 1 : 2;
      const int64_t most = is_small ? 128 : 256 * plan.vecs;
      pieces = ceil_div(vectors, most);
      piece_vectors = ceil_div(vectors, pieces);
      // Whole groups and whole runs: both are powers of two.
      piece_vectors =
          round_up(piece_vectors, has_lane_groups && group_lanes > run_lanes ? group_lanes : run_lanes);
      pieces = ceil_div(vectors, piece_vectors);
    }
    plan.threads = static_cast<int>(round_up(ceil_div(piece_vectors, plan.vecs), 32));
  }
  d.pieces = Divider(static_cast<uint32_t>(pieces));
  d.piece = static_cast<int>(piece_vectors * width);
  d.parts = static_cast<uint32_t>(m * pieces);
  plan.grid = plan.is_block ? m * pieces : ceil_div(m << d.lanes_log2, plan.threads);
  return plan;
}

template <class Source>
void launch_whole_rows(const char* name, const Source& source, const Output& out, const RowPlan& plan,
                       const Launch& launch) {
  const LaunchShape shape = {dim3(static_cast<unsigned>(plan.grid)),
                             dim3(static_cast<unsigned>(plan.threads)), 0, /*overlap_previous=*/true};
  const RowDivision& d = plan.division;
  if (plan.is_block) {
    choose_value<1, 2, 4>(plan.vecs, [&](auto vecs) {
      launch_kernel(name, whole_rows_kernel<Source, vecs.value, true>, shape, launch, source, out, d);
    });
  } else {
    choose_value<2, 4>(plan.vecs, [&](auto vecs) {
      launch_kernel(name, whole_rows_kernel<Source, vecs.value, false>, shape, launch, source, out, d);
    });
  }
}

template <class Source>
void launch_rows(const char* name, const Source& source, const Output& out, int64_t m, const RowPlan& plan,
                 const Launch& launch) {
  if (plan.is_whole) return launch_whole_rows(name, source, out, plan, launch);
  LaunchShape shape = {dim3(static_cast<unsigned>(m)), dim3(static_cast<unsigned>(plan.threads)), 0,
                       /*overlap_previous=*/true};
  if (out.hadamard == 0)
    return launch_kernel(name, any_rows_kernel<Source, false>, shape, launch, source, out);
  shape.smem_bytes = PaddedRow::bytes(out.y.cols);
  launch_kernel(name, any_rows_kernel<Source, true>, shape, launch, source, out);
}

// What the kernels above ask of a problem, whatever its Source.
inline Requirements accepts_output_rows(const Output& out, int64_t m, int64_t n, int device) {
  constexpr int64_t kReserved = 1024;  // RowScratch, and what a launch takes for itself
  return Requirements()
      .require(n < 1ll << 30, "rows have 2^30 numbers or more")
      .require(m * ceil_div(n, 128) < 1ll << 31, "there are too many rows")
      .require(out.hadamard == 0 ||
                   static_cast<int64_t>(PaddedRow::bytes(n)) + kReserved <= gpu_max_smem_bytes(device),
               "a row that is rotated does not fit into shared memory");
}

}  // namespace quantfuse
