// SPDX-License-Identifier: Apache-2.0
//
// q[r,c] = saturate( round(x[r,c] * (1 / scale[r,C])) + zero[r,C] ),  C = c / group      x: f32 | f16 | bf16
//
// Codes per token, per group within a token, and static per tensor: what a W8A8 layer needs of its
// activations, and what the groups of a weight are quantized by. The kernel is bound by memory, so a number
// is read once: it stays in registers between the search for the largest magnitude and the encoding.
//   gmem x --16 bytes a thread--> regs --max--> shuffles, smem --> scale --> codes in regs --> gmem q
//
// A segment is what shares a scale. Short ones (a group, a short row) go to a team of 1 to 32 lanes of a
// warp, many teams to a block; long ones to a whole block. With kVecs = 2, bf16 and groups of 128:
//   lane   0  1  2  3  4  5  6  7 | 8  9 ...      a team of 8 lanes: 16 vectors of 8 numbers
//   vec    0  1  2  3  4  5  6  7 | 0  1
//          8  9 10 11 12 13 14 15 | 8  9          each load of a team is 128 contiguous bytes
// Where a vector would not lie on 16 bytes or would cross an end, the numbers of a thread lie `lanes` apart
// instead, so that a warp still reads and writes contiguous memory; and a segment longer than the registers
// of 1024 threads is read twice, the second time from L2.
#include "core/choose.h"
#include "core/device.h"
#include "cuda/launch.h"
#include "cuda/ptx/dependent_launch.h"
#include "cuda/row_codes.h"
#include "quantize/quantize.h"

namespace quantfuse::quantize_rows_sm75 {
using quantize::Problem;
using quantize::Quantizer;
using quantize::ScaleKind;
namespace {

constexpr int kMaxThreads = kMaxRowThreads, kMaxTeamThreads = 512;
constexpr int64_t kMaxTeamVectors = 128;

struct Params {
  const void* x;
  uint8_t* q;
  void* scale;
  int8_t* zero;
  int32_t* row_sums;
  int64_t stride_x, stride_q;  // from row to row
  int64_t stride_scale,
      stride_scale_cols;  // from row to row and group to group; 0 where one serves the tensor
  uint32_t segments;
  Divider groups;  // segments in a row
  int cols, group;
  int lanes_log2;  // of a team
  qf_format format;
  bool is_static;
};

struct Range {
  float high = 0, depth = 0;  // max x and max -x, at least 0; without a zero point high = max |x|
};

// x's type T_, what it becomes, and how many of it are a vector of 16 bytes. INT4 stands for all codes of 4
// bits: which they are is known when the kernel runs.
template <class T_, qf_format kFormat_, ScaleKind kKind_>
struct Coding {
  using T = T_;
  static constexpr qf_format kFormat = kFormat_;
  static constexpr ScaleKind kKind = kKind_;
  static constexpr bool kHasZero = kKind == ScaleKind::asymmetric, kHasE8m0 = kKind == ScaleKind::e8m0;
  static constexpr int kWidth = kVectorWidth<T>;
  static constexpr bool kIsPacked = is_packed_4bit(kFormat);
  static constexpr bool kIsForGroups = kIsPacked || kHasE8m0;  // short segments in whole vectors alone
  __device__ static qf_format format(const Params& p) { return kIsPacked ? p.format : kFormat; }
};

template <class T>
struct Segment {
  const T* x;
  uint8_t* q;
  int n;  // 0 beyond the last segment
  int64_t scale_index, index;
};

template <class C>
__device__ Segment<typename C::T> segment_at(const Params& p, uint32_t index) {
  const uint32_t row = p.groups.quotient(index), group = index - row * p.groups.divisor;
  const int first = static_cast<int>(group) * p.group;
  return {static_cast<const typename C::T*>(p.x) + row * p.stride_x + first,
          p.q + row * p.stride_q + (C::kIsPacked ? first / 2 : first),
          index < p.segments ? min(p.group, p.cols - first) : 0,
          row * p.stride_scale + group * p.stride_scale_cols, static_cast<int64_t>(index)};
}

// kWidth codes of 4 bits, the first in the lowest ones.
template <int kWidth>
__device__ uint32_t encode_nibbles(qf_format format, const float (&x)[kWidth], float inverse, int zero) {
  const auto encode_all = [&](auto encode) {
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) codes |= uint32_t{encode(__fmul_rn(x[i], inverse))} << (4 * i);
    return codes;
  };
  switch (format) {
    case QF_INT4: return encode_all([&](float v) { return encode_value(QF_INT4, v, zero); });
    case QF_FP4_E2M1: return encode_all([](float v) { return encode_value(QF_FP4_E2M1, v, 0); });
    default: return encode_all([](float v) { return encode_value(QF_NF4, v, 0); });
  }
}
template <int kWidth>
__device__ int sum_of_nibbles(uint32_t codes) {
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum += static_cast<int>((codes >> (4 * i) & 15) ^ 8) - 8;
  return sum;
}

// The numbers a thread holds, kVecs vectors of them. kWhole: vectors lie whole and aligned in memory.
template <class C, int kVecs, bool kWhole>
struct Held {
  static constexpr int kWidth = C::kWidth;
  using T = typename C::T;
  union Vector {
    uint4 all;
    T numbers[kWidth];
  };
  Vector v[kVecs];

  // Where in the segment number j of vector i is; `lanes` threads share the segment from `begin` on.
  __device__ static int position(int i, int j, int begin, int lane, int lanes) {
    return begin + i * lanes * kWidth + (kWhole ? lane * kWidth + j : lane + j * lanes);
  }

  __device__ void load(const Segment<T>& s, int begin, int lane, int lanes) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      v[i].all = {};
      if constexpr (kWhole) {
        const int at = position(i, 0, begin, lane, lanes);
        if (at < s.n) v[i].all = *reinterpret_cast<const uint4*>(s.x + at);
      } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const int at = position(i, j, begin, lane, lanes);
          if (at < s.n) v[i].numbers[j] = s.x[at];
        }
      }
    }
  }

  __device__ void include_in(Range& range) const {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      float x[kWidth];
      unpack(v[i].all, x, T{});
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {  // fmaxf passes over NaN
        range.high = fmaxf(range.high, C::kHasZero ? x[j] : fabsf(x[j]));
        if (C::kHasZero) range.depth = fmaxf(range.depth, -x[j]);
      }
    }
  }

  // Returns the sum of the codes where row sums are wanted.
  __device__ int encode(const Params& p, const Segment<T>& s, const Quantizer& z, int begin, int lane,
                        int lanes) const {
    const float inverse = 1.0f / z.scale;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int at = position(i, 0, begin, lane, lanes);
      if (at >= s.n) break;
      float x[kWidth];
      unpack(v[i].all, x, T{});
      if constexpr (C::kIsPacked) {
        static_assert(kWhole);
        const uint32_t codes = encode_nibbles(p.format, x, inverse, z.zero);
        if constexpr (kWidth == 8) *reinterpret_cast<uint32_t*>(s.q + at / 2) = codes;
        else *reinterpret_cast<uint16_t*>(s.q + at / 2) = static_cast<uint16_t>(codes);
        if (p.row_sums) sum += sum_of_nibbles<kWidth>(codes);
      } else {
        uint32_t codes[kWidth / 4];
#pragma unroll
        for (int j = 0; j < kWidth / 4; ++j)
          codes[j] = encode4<C::kFormat, C::kHasZero>(x + 4 * j, inverse, z.zero);
        if constexpr (kWhole) {
          if constexpr (kWidth == 8) *reinterpret_cast<uint2*>(s.q + at) = {codes[0], codes[1]};
          else *reinterpret_cast<uint32_t*>(s.q + at) = codes[0];
        } else {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            const int each = position(i, j, begin, lane, lanes);
            if (each < s.n) s.q[each] = static_cast<uint8_t>(codes[j / 4] >> (8 * (j % 4)));
            else codes[j / 4] &= ~(255u << (8 * (j % 4)));  // not in the sum
          }
        }
        if (p.row_sums) {
#pragma unroll
          for (int j = 0; j < kWidth / 4; ++j) sum = __dp4a(static_cast<int>(codes[j]), 0x01010101, sum);
        }
      }
    }
    return sum;
  }
};

template <class C>
__device__ Quantizer quantizer_of(const Params& p, const Segment<typename C::T>& s, const Range& range) {
  if (p.is_static) {
    Quantizer z;
    z.scale = C::kHasE8m0 ? E8m0::decode(static_cast<const uint8_t*>(p.scale)[s.scale_index])
                          : static_cast<const float*>(p.scale)[s.scale_index];
    if (C::kHasZero) z.zero = p.zero[s.scale_index];  // static scales are compact, as zero points are
    return z;
  }
  return quantize::quantizer_from_range(C::kKind, code_range(C::format(p)), -range.depth, range.high);
}

template <class C>
__device__ void store_quantizer(const Params& p, const Segment<typename C::T>& s, const Quantizer& z) {
  if (p.is_static) return;
  if (C::kHasE8m0) static_cast<uint8_t*>(p.scale)[s.scale_index] = z.e8m0;
  else static_cast<float*>(p.scale)[s.scale_index] = z.scale;
  if (C::kHasZero) p.zero[s.index] = static_cast<int8_t>(z.zero);
}

template <class C, int kVecs, bool kWhole>
__global__ void __launch_bounds__(kMaxTeamThreads) team_kernel(const Params p) {
  const int lanes = 1 << p.lanes_log2, lane = threadIdx.x & (lanes - 1);
  const int team = threadIdx.x >> p.lanes_log2, teams = blockDim.x >> p.lanes_log2;
  const auto s = segment_at<C>(p, blockIdx.x * teams + team);
  ptx::allow_next_kernel();
  ptx::wait_for_previous_kernel();

  Held<C, kVecs, kWhole> held;
  held.load(s, 0, lane, lanes);
  Range range;
  if (!p.is_static) {
    held.include_in(range);
    range.high = max_over_lanes(range.high, lanes);
    if (C::kHasZero) range.depth = max_over_lanes(range.depth, lanes);
  }
  Quantizer z;
  if (s.n > 0) z = quantizer_of<C>(p, s, range);
  int sum = held.encode(p, s, z, 0, lane, lanes);
  if (p.row_sums) sum = sum_over_lanes(sum, lanes);
  if (lane == 0 && s.n > 0) {
    store_quantizer<C>(p, s, z);
    if (p.row_sums) p.row_sums[s.index] = sum;
  }
}

template <class C, int kVecs, bool kWhole>
__global__ void __launch_bounds__(kMaxThreads) block_kernel(const Params p) {
  __shared__ float high_parts[32], depth_parts[32];
  __shared__ int sum_parts[32];
  const int lane = threadIdx.x, lanes = blockDim.x, chunk = lanes * kVecs * C::kWidth;
  const auto s = segment_at<C>(p, blockIdx.x);
  ptx::allow_next_kernel();
  ptx::wait_for_previous_kernel();

  // The first chunk last: it is then still in registers when its codes are wanted. Whole vectors are one
  // chunk.
  Held<C, kVecs, kWhole> held;
  Range range;
  if (!kWhole && !p.is_static) {
    for (int begin = chunk; begin < s.n; begin += chunk) {
      held.load(s, begin, lane, lanes);
      held.include_in(range);
    }
  }
  held.load(s, 0, lane, lanes);
  if (!p.is_static) {
    held.include_in(range);
    range.high = max_over_block(range.high, high_parts);
    if (C::kHasZero) range.depth = max_over_block(range.depth, depth_parts);
  }

  const Quantizer z = quantizer_of<C>(p, s, range);
  if (lane == 0) store_quantizer<C>(p, s, z);
  int sum = held.encode(p, s, z, 0, lane, lanes);
  if (!kWhole) {
    for (int begin = chunk; begin < s.n; begin += chunk) {
      held.load(s, begin, lane, lanes);
      sum += held.encode(p, s, z, begin, lane, lanes);
    }
  }
  if (p.row_sums) {
    sum = sum_over_block(sum, sum_parts);
    if (lane == 0) p.row_sums[s.index] = sum;
  }
}

// How a segment is divided.
struct Shape {
  bool is_whole;  // in vectors of 16 bytes
  bool by_teams;
  int vecs;        // a thread's vectors: teams 2 or 4, blocks 1, 2, 4 or 8; 4 where not whole
  int lanes_log2;  // of a team
  int threads;     // of a block
};

Shape choose_shape(bool is_whole, int64_t vectors, int64_t segments, int num_sms) {
  if (vectors <= kMaxTeamVectors) {
    const int vecs = is_whole && vectors <= 64 ? 2 : 4;
    int lanes_log2 = 0;
    while ((vecs << lanes_log2) < vectors) ++lanes_log2;
    return {is_whole, true, vecs, lanes_log2, 256};
  }
  if (vectors > 8 * kMaxThreads) is_whole = false;
  // Few rows: more threads, each with less to do. Many: bytes in flight are what counts, and blocks that fit
  // an SM evenly.
  const int most = segments < 2 * num_sms ? kMaxThreads : 256;
  int vecs = is_whole ? 1 : 4;
  while (vecs < 4 && vectors > most * vecs) vecs *= 2;
  if (is_whole && vectors > kMaxThreads * vecs) vecs = 8;
  const int64_t threads = round_up(ceil_div(vectors, vecs), 32);
  return {is_whole, false, vecs, 0, static_cast<int>(threads < kMaxThreads ? threads : kMaxThreads)};
}

int64_t group_of(const Problem& p) { return p.block.rows == 1 ? p.block.cols : p.cols; }
int64_t groups_of(const Problem& p) { return ceil_div(p.cols, group_of(p)); }
int64_t width_of(const Problem& p) { return 16 / dtype_bytes(p.x.dtype); }

// Whether the vectors of x, and the codes they become, lie whole and on multiples of their sizes in every
// segment.
bool is_whole(const Problem& p) {
  const int64_t width = width_of(p), code_bytes = row_bytes(p.format, width);
  const auto is_aligned = [](const void* data, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(data) % bytes == 0;
  };
  return is_aligned(p.x.data, 16) && is_aligned(p.q.data, code_bytes) && p.cols % width == 0 &&
         (p.rows == 1 || (p.x.row_stride % width == 0 && p.q.row_stride % code_bytes == 0)) &&
         (groups_of(p) == 1 || group_of(p) % width == 0);
}

template <class C>
void launch_coding(const Params& params, const Launch& launch, const Shape& shape) {
  const char* name = "quantize_rows_sm75";
  const int64_t teams = shape.by_teams ? shape.threads >> shape.lanes_log2 : 1;
  const LaunchShape grid = {dim3(static_cast<unsigned>(ceil_div(params.segments, teams))),
                            dim3(static_cast<unsigned>(shape.threads)), 0, /*overlap_previous=*/true};
  if (shape.is_whole && shape.by_teams) {
    return choose_value<2, 4>(shape.vecs, [&](auto vecs) {
      launch_kernel(name, team_kernel<C, vecs.value, true>, grid, launch, params);
    });
  }
  if constexpr (!C::kIsForGroups) {
    if (!shape.is_whole) {
      return launch_kernel(name, shape.by_teams ? team_kernel<C, 4, false> : block_kernel<C, 4, false>, grid,
                           launch, params);
    }
    choose_value<1, 2, 4, 8>(shape.vecs, [&](auto vecs) {
      launch_kernel(name, block_kernel<C, vecs.value, true>, grid, launch, params);
    });
  }
}

void launch_shape(const Problem& p, const Launch& launch, const Shape& shape) {
  const Params params = {p.x.data,
                         static_cast<uint8_t*>(p.q.data),
                         p.scale.data,
                         static_cast<int8_t*>(p.zero.data),
                         static_cast<int32_t*>(p.row_sums.data),
                         p.x.row_stride,
                         p.q.row_stride,
                         p.row_blocks() == 1 ? 0 : p.scale.row_stride,
                         p.scale_col_stride,
                         static_cast<uint32_t>(p.rows * groups_of(p)),
                         Divider(static_cast<uint32_t>(groups_of(p))),
                         static_cast<int>(p.cols),
                         static_cast<int>(group_of(p)),
                         shape.lanes_log2,
                         p.format,
                         p.is_static()};
  choose_float(p.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using enum ScaleKind;
    if (is_packed_4bit(p.format)) {
      return choose_value<symmetric, asymmetric, e8m0>(p.scale_kind(), [&](auto kind) {
        launch_coding<Coding<T, QF_INT4, kind.value>>(params, launch, shape);
      });
    }
    if (p.has_e8m0_scale()) {
      return choose_value<QF_FP8_E4M3, QF_FP8_E5M2>(p.format, [&](auto format) {
        launch_coding<Coding<T, format.value, e8m0>>(params, launch, shape);
      });
    }
    if (p.zero) return launch_coding<Coding<T, QF_INT8, asymmetric>>(params, launch, shape);
    choose_value<QF_INT8, QF_FP8_E4M3, QF_FP8_E5M2>(p.format, [&](auto format) {
      launch_coding<Coding<T, format.value, symmetric>>(params, launch, shape);
    });
  });
}

// Whether a segment is a team's, in whole vectors.
bool is_short(const Problem& p) {
  return is_whole(p) && ceil_div(group_of(p), width_of(p)) <= kMaxTeamVectors;
}

Verdict accepts(const Problem& p) {
  const bool is_per_tensor = p.block.rows >= p.rows && p.block.cols >= p.cols;
  return Requirements()
      .require(p.mode != QF_SCALE_MSE, "the MSE search is for weights, which are quantized on the CPU")
      .require(p.hadamard == 0, "nothing is rotated here")
      .require(!p.has_e8m0_scale() || p.format != QF_INT8, "INT8 codes have float32 scales here")
      .require((!is_packed_4bit(p.format) && !p.has_e8m0_scale()) || is_short(p),
               "4-bit codes and E8M0 scales are for groups of at most 128 whole vectors of 16 bytes here")
      .require(p.block.rows == 1 || (is_per_tensor && p.is_static()),
               "a scale belongs to a row or a group of it here, or if static to the tensor")
      .require(p.cols < 1 << 30, "rows are shorter than 2^30 here")
      .require(p.rows * groups_of(p) < 1ll << 31, "there are fewer than 2^31 groups here");
}

void launch(const Problem& p, const Launch& launch) {
  const int64_t vectors = ceil_div(group_of(p), width_of(p));
  launch_shape(p, launch,
               choose_shape(is_whole(p), vectors, p.rows * groups_of(p), gpu_num_sms(p.device.id)));
}

}  // namespace

extern const Kernel<Problem> entry = {"quantize_rows_sm75", Target::sm75, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::quantize_rows_sm75
