// SPDX-License-Identifier: Apache-2.0
//
// q[r,c] = saturate( round(y[r,c] * (1 / scale[r,C])) + zero[r,C] ),  C = c / group,  y the Hadamard rotation
// of every `hadamard` columns of x
//
// Runs of at most 32 vectors of 16 bytes that become 8-bit codes with float32 scales stay in registers
// (cuda/produce_rows.h). Else a block takes a row, which stays in shared memory as float32 between its
// rotation and its codes:
//   gmem x --> smem --rotate (cuda/hadamard.h)--> smem --max--> scale;  smem --> codes --> gmem q
// The groups of a row are divided among the warps; those of more than 1024 columns are the whole block's. A
// thread encodes two neighbouring numbers at a time, which are one byte of 4-bit codes.
#include "core/choose.h"
#include "core/device.h"
#include "cuda/produce_rows.h"
#include "quantize/quantize.h"

namespace quantfuse::quantize_rotated_sm75 {
using quantize::Problem;
using quantize::Quantizer;
namespace {

constexpr const char* kName = "quantize_rotated_sm75";

// Two numbers, already divided by the scale, in the two lowest bytes.
__device__ uint32_t encode2(qf_format format, float a, float b, int zero) {
  const auto both = [&](auto kind) -> uint32_t {
    return encode_value(kind.value, a, zero) | encode_value(kind.value, b, zero) << 8;
  };
  switch (format) {
    case QF_INT8: return both(std::integral_constant<qf_format, QF_INT8>{});
    case QF_INT4: return both(std::integral_constant<qf_format, QF_INT4>{});
#if __CUDA_ARCH__ >= 890
    case QF_FP8_E4M3: return ptx::pack_e4m3(a, b);
    case QF_FP8_E5M2: return ptx::pack_e5m2(a, b);
#else
    case QF_FP8_E4M3: return both(std::integral_constant<qf_format, QF_FP8_E4M3>{});
    case QF_FP8_E5M2: return both(std::integral_constant<qf_format, QF_FP8_E5M2>{});
#endif
    case QF_FP4_E2M1: return both(std::integral_constant<qf_format, QF_FP4_E2M1>{});
    default: return both(std::integral_constant<qf_format, QF_NF4>{});
  }
}

// A row in shared memory, whose numbers are those there times `norm`.
struct RotatedRow {
  PaddedRow held;
  float norm;
  __device__ __forceinline__ float operator[](int c) const { return __fmul_rn(held[c], norm); }
};

// Columns [begin, end) of a row have scale `group` of it. Of their pairs every `stride`-th from `first` on is
// this thread's.
struct Share {
  int64_t row, group;
  int begin, end, first, stride;
};

struct Range {
  float high = 0, depth = 0;
};

__device__ Range range_of(const RotatedRow& y, const Share& s) {
  Range range;
  for (int c = s.begin + s.first; c < s.end; c += s.stride) {
    range.high = fmaxf(range.high, y[c]), range.depth = fmaxf(range.depth, -y[c]);  // passes over NaN
  }
  return range;
}

__device__ Quantizer quantizer_of(const Problem& p, const Share& s, const Range& range) {
  const int64_t band = p.row_blocks() == 1 ? 0 : s.row, at = p.scale_index(band, s.group);
  if (!p.is_static()) {
    const Quantizer z =
        quantize::quantizer_from_range(p.scale_kind(), code_range(p.format), -range.depth, range.high);
    if (s.first == 0) {
      if (p.has_e8m0_scale()) static_cast<uint8_t*>(p.scale.data)[at] = z.e8m0;
      else static_cast<float*>(p.scale.data)[at] = z.scale;
      if (p.zero) p.zero.row<int8_t>(band)[s.group] = static_cast<int8_t>(z.zero);
    }
    return z;
  }
  Quantizer z;
  z.scale = p.has_e8m0_scale() ? E8m0::decode(static_cast<const uint8_t*>(p.scale.data)[at])
                               : static_cast<const float*>(p.scale.data)[at];
  if (p.zero) z.zero = p.zero.row<const int8_t>(band)[s.group];
  return z;
}

// Returns the sum of the codes, of the integer formats.
__device__ int encode(const Problem& p, const RotatedRow& y, const Share& s, const Quantizer& z) {
  const float inverse = 1.0f / z.scale;
  uint8_t* q = p.q.row<uint8_t>(s.row);
  int sum = 0;
  for (int c = s.begin + 2 * s.first; c < s.end; c += 2 * s.stride) {
    const bool has_second = c + 1 < s.end;
    uint32_t codes =
        encode2(p.format, __fmul_rn(y[c], inverse), has_second ? __fmul_rn(y[c + 1], inverse) : 0.0f, z.zero);
    if (!has_second) codes &= 255;
    if (is_packed_4bit(p.format)) {
      q[c / 2] = static_cast<uint8_t>(codes | codes >> 4);
    } else {
      q[c] = static_cast<uint8_t>(codes);
      if (has_second) q[c + 1] = static_cast<uint8_t>(codes >> 8);
    }
    const auto value_of = [&](uint32_t code) {
      return p.format == QF_INT4 ? static_cast<int>(code ^ 8) - 8
                                 : static_cast<int>(static_cast<int8_t>(code));
    };
    sum += value_of(codes & 255) + (has_second ? value_of(codes >> 8) : 0);
  }
  return sum;
}

template <class T>
__device__ void load_row(const PaddedRow& held, const T* x, int n, bool is_whole) {
  if (!is_whole) {
    for (int c = threadIdx.x; c < n; c += blockDim.x) held[c] = to_float(x[c]);
    return;
  }
  constexpr int kWidth = kVectorWidth<T>;
#pragma unroll 2
  for (int c = threadIdx.x * kWidth; c < n; c += blockDim.x * kWidth) {
    float v[kWidth];
    unpack(*reinterpret_cast<const uint4*>(x + c), v, T{});
#pragma unroll
    for (int i = 0; i < kWidth; ++i) held[c + i] = v[i];
  }
}

template <class T>
__global__ void __launch_bounds__(kMaxRowThreads) kernel(const __grid_constant__ Problem p, bool is_whole) {
  __shared__ float highs[32], depths[32];
  __shared__ int sums[32];
  extern __shared__ float numbers[];
  const int n = static_cast<int>(p.cols), threads = blockDim.x;
  const int64_t row = blockIdx.x;
  const RotatedRow y = {{numbers}, hadamard_norm(p.hadamard)};
  ptx::allow_next_kernel();
  ptx::wait_for_previous_kernel();

  load_row(y.held, p.x.row<T>(row), n, is_whole);
  __syncthreads();
  rotate_row(y.held, n, static_cast<int>(p.hadamard));

  const int group = p.block.rows == 1 ? static_cast<int>(p.block.cols) : n;
  const bool is_by_block = group > kLargestWarpGroup;
  const int lane = is_by_block ? static_cast<int>(threadIdx.x) : static_cast<int>(threadIdx.x) % 32;
  const int team = is_by_block ? 0 : static_cast<int>(threadIdx.x) / 32,
            teams = is_by_block ? 1 : threads / 32;
  for (int i = team; i * group < n; i += teams) {
    const Share s = {row, i, i * group, min(n, (i + 1) * group), lane, is_by_block ? threads : 32};
    Range range;
    if (!p.is_static()) {
      range = range_of(y, s);
      range.high = is_by_block ? max_over_block(range.high, highs) : max_over_warp(range.high);
      range.depth = is_by_block ? max_over_block(range.depth, depths) : max_over_warp(range.depth);
    }
    int sum = encode(p, y, s, quantizer_of(p, s, range));
    if (p.row_sums) {
      sum = is_by_block ? sum_over_block(sum, sums) : sum_over_lanes(sum, 32);
      if (lane == 0) p.row_sums.row<int32_t>(row)[i] = sum;
    }
    if (is_by_block) __syncthreads();  // before the next group uses the shared memory
  }
}

Verdict accepts(const Problem& p) {
  constexpr int64_t kReserved = 2048;  // of shared memory, for the reductions and the launch itself
  const bool is_per_tensor = p.block.rows >= p.rows && p.block.cols >= p.cols;
  return Requirements()
      .require(p.hadamard > 0, "only rows that are rotated are for this kernel")
      .require(p.mode != QF_SCALE_MSE, "the MSE search is for weights, which are quantized on the CPU")
      .require(p.block.rows == 1 || (is_per_tensor && p.is_static()),
               "a scale belongs to a row or a group of it here, or if static to the tensor")
      .require(!is_packed_4bit(p.format) || p.block.cols % 2 == 0 || p.col_blocks() == 1,
               "groups of 4-bit codes end within a byte")
      .require(p.rows < 1ll << 31, "there are 2^31 rows or more")
      .require(static_cast<int64_t>(PaddedRow::bytes(p.cols)) + kReserved <= gpu_max_smem_bytes(p.device.id),
               "a row that is rotated does not fit into shared memory");
}

// ---- In registers ----

// x as it is, for the kernels of cuda/produce_rows.h.
template <class T>
struct Plain {
  static constexpr int kWidth = kVectorWidth<T>;
  Matrix x;

  template <class Part, int kVecs>
  __device__ __forceinline__ void produce(const Part& part, float (&v)[kVecs][kWidth], RowScratch&) const {
    uint4 numbers[kVecs];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int column = part.template column<kWidth>(i);
      numbers[i] = column < part.end ? *reinterpret_cast<const uint4*>(x.row<T>(part.row) + column) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kVecs; ++i) unpack(numbers[i], v[i], T{});
  }
};

// The output of a producer, where the problem has no more than that: 8-bit codes with float32 scales.
Output output_of(const Problem& p) {
  Output out;
  out.y = p.q, out.format = p.format, out.is_static = p.is_static();
  out.group = p.block.cols, out.scale = p.scale, out.scale_col_stride = p.scale_col_stride;
  out.hadamard = p.hadamard;
  return out;
}

template <class T>
RowPlan plan_in_registers(const Problem& p) {
  const bool is_output = !is_packed_4bit(p.format) && p.scale_kind() == quantize::ScaleKind::symmetric &&
                         !p.row_sums && (!p.is_static() || (p.row_blocks() == 1 && p.col_blocks() == 1));
  const bool has_vectors = is_output && has_whole_vectors(p.x, kVectorWidth<T>);
  return plan_rows(output_of(p), p.rows, p.cols, kVectorWidth<T>, has_vectors, /*spans_row=*/false,
                   gpu_num_sms(p.device.id));
}

void launch(const Problem& p, const Launch& launch) {
  const int64_t threads = round_up(ceil_div(p.cols, 8), 32);
  const LaunchShape shape = {dim3(static_cast<unsigned>(p.rows)),
                             dim3(static_cast<unsigned>(threads < kMaxRowThreads ? threads : kMaxRowThreads)),
                             PaddedRow::bytes(p.cols), /*overlap_previous=*/true};
  const int64_t width = 16 / dtype_bytes(p.x.dtype);
  const bool is_whole = reinterpret_cast<uintptr_t>(p.x.data) % 16 == 0 && p.cols % width == 0 &&
                        (p.rows == 1 || p.x.row_stride % width == 0);
  choose_float(p.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const RowPlan plan = plan_in_registers<T>(p);
    if (plan.is_whole) return launch_whole_rows(kName, Plain<T>{p.x}, output_of(p), plan, launch);
    launch_kernel(kName, kernel<T>, shape, launch, p, is_whole);
  });
}

}  // namespace

extern const Kernel<Problem> entry = {kName, Target::sm75, accepts, no_workspace<Problem>, launch};

}  // namespace quantfuse::quantize_rotated_sm75
