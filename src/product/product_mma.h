// SPDX-License-Identifier: Apache-2.0
//
// y[m,n] = epilogue( sum over parts of k of a_scale * b_scale * sum_k (a[m,k] - a_zero) * (b[n,k] - b_zero) )
//
// Every product of codes on tensor cores without wgmma: what product_mma_sm80 and product_mma_sm75 share.
// Any sizes, strides, groups, zero points and order of b.
//
//   gmem codes --cp.async, or through registers, decoded--> smem ring --ldmatrix--> mma.sync --> sums
//   sums of a part of k --scales--> float32 totals;   over all of k, exact in int32, where one scale is enough
//   totals --smem, warps along k added in their order--> epilogue --> y
//
// A block has one tile of y. Warps divide it, and with few tokens divide the columns of k too, so that a
// narrow tile still streams b through all of them.
//
// The arithmetic is that of a Math: what a unit of 16 bytes holds, and whether its sums are promoted.
//   IntegerSums     signed bytes, int32 over all of k; zero points by row and column sums
//   IntegerGroups   the same by parts, each promoted to float32; zero points of b alone, as bytes
//   IntegerWideZeros   the same with zero points of 32 bits, of both
//   Fp8             E4M3 as it is, promoted every 128 columns: the tensor cores add FP8 products with less
//                   than float32's precision
//   Halves          f16, which every format is exactly: FP8 where there is no mma of it, mixed formats
#pragma once

#include "core/device.h"
#include "cuda/launch.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/mma_int8.h"
#include "linear/finish_unit.h"
#include "product/mma_feed.h"

namespace quantfuse::product_mma {
namespace {

using linear::kUnit;

// ---- Arithmetic ----

template <class Arch>
struct Bytes {
  static constexpr int kUnitCodes = 16, kStepColumns = 32, kTileColumns = 128;
  static constexpr bool kHasAsyncCopies = Arch::kHasAsyncCopies, kSubtractsZeros = false;
  __device__ __forceinline__ static uint4 unit(qf_format format, uint4 codes, int) {
    return as_bytes(format, codes);
  }
  // body(format) as a constant: all of 8 bits are the same here.
  template <class Body>
  __device__ __forceinline__ static void with_format(qf_format format, const Body& body) {
    if (format == QF_INT4) body(std::integral_constant<qf_format, QF_INT4>{});
    else body(std::integral_constant<qf_format, QF_INT8>{});
  }
};

template <class Arch>
struct IntegerSums : Bytes<Arch> {
  using Sum = int;
  static constexpr bool kPromotes = false, kHasWideZeros = true;
  static constexpr int kInitial = 0;
  __device__ __forceinline__ static void multiply(int (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                  uint32_t b1) {
    Arch::multiply_bytes(c, a, b0, b1);
  }
};

// A sum of 128 products, (code - zero) of 9 bits times a code, is below 2^22: added to the bits of 1.5 * 2^23
// it is the low part of a float32.
template <class Arch>
struct IntegerGroups : IntegerSums<Arch> {
  static constexpr bool kPromotes = true, kHasWideZeros = false;
  static constexpr int kInitial = 0x4b400000;
  __device__ __forceinline__ static float to_float(int sum) {
    return float_from_bits(static_cast<uint32_t>(sum)) - 12582912.0f;
  }
};

template <class Arch>
struct IntegerWideZeros : IntegerGroups<Arch> {
  static constexpr bool kHasWideZeros = true;
};

template <class Arch>
struct Fp8 : Bytes<Arch> {
  using Sum = float;
  static constexpr bool kPromotes = true;
  static constexpr float kInitial = 0.0f;
  __device__ __forceinline__ static void multiply([[maybe_unused]] float (&c)[4],
                                                  [[maybe_unused]] const uint32_t (&a)[4],
                                                  [[maybe_unused]] uint32_t b0,
                                                  [[maybe_unused]] uint32_t b1) {
#if __CUDA_ARCH__ >= 890  // runs_fp8() asks whether the code that would run has it
    ptx::mma_m16n8k32_e4m3(c, a, b0, b1);
#endif
  }
  __device__ __forceinline__ static float to_float(float sum) { return sum; }
};

template <class Arch>
struct Halves {
  using Sum = float;
  static constexpr int kUnitCodes = 8, kStepColumns = 16, kTileColumns = 64;
  static constexpr bool kHasAsyncCopies = false, kSubtractsZeros = true, kPromotes = true;
  static constexpr float kInitial = 0.0f;
  __device__ __forceinline__ static uint4 unit(qf_format format, uint4 codes, int zero) {
    return as_halves(format, codes, zero);
  }
  template <class Body>
  __device__ __forceinline__ static void with_format(qf_format format, const Body& body) {
    if (format == QF_INT8) body(std::integral_constant<qf_format, QF_INT8>{});
    else if (format == QF_INT4) body(std::integral_constant<qf_format, QF_INT4>{});
    else if (format == QF_FP8_E4M3) body(std::integral_constant<qf_format, QF_FP8_E4M3>{});
    else if (format == QF_FP8_E5M2) body(std::integral_constant<qf_format, QF_FP8_E5M2>{});
    else body(std::integral_constant<qf_format, QF_FP4_E2M1>{});
  }
  __device__ __forceinline__ static void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                  uint32_t b1) {
    Arch::multiply_halves(c, a, b0, b1);
  }
  __device__ __forceinline__ static float to_float(float sum) { return sum; }
};

// (sum a b) less what zero points of 32 bits take from it, in 64 bits. `count`: the columns that were added.
__device__ inline int64_t subtract_zeros(int64_t sum, int row_sum, int column_sum, int a_zero, int b_zero,
                                         int count) {
  return sum - int64_t{b_zero} * row_sum - a_zero * (column_sum - int64_t{count} * b_zero);
}

// ---- The tiles of a stage ----

// kIsAsync: codes of both operands come by cp.async, and nothing is held for them.
template <class Math, class S, bool kIsAsync>
class Feed {
 public:
  __device__ Feed(const Product& p, const Plan& plan, const TileRows& a, const TileRows& b)
      : plan_(plan),
        is_nk_(p.b_order == QF_NK),
        a_(p.a, a, plan.cut),
        b_(p.b, b, plan.cut),
        b_columns_(p.b, b, plan.cut),
        scales_(p, plan, a, b) {}

  // To a free place of the ring. What is held is there after store().
  __device__ __forceinline__ void fetch(int stage, uint32_t to) {
    if constexpr (Math::kPromotes) scales_.load(stage, to, held_scales_);
    if constexpr (kIsAsync) {
      a_.copy_async(stage, to);
      b_.copy_async(stage, to);
    } else {
      if (is_nk_) {
        if (Math::kHasAsyncCopies && plan_.b_way == Way::kAsync) b_.copy_async(stage, to);
        else b_.load(plan_.b_way, stage, held_b_);
      } else {
        b_columns_.load(plan_.b_way, stage, held_b_);
      }
      if (Math::kHasAsyncCopies && plan_.a_way == Way::kAsync) {
        a_.copy_async(stage, to);
      } else {
        a_.load(plan_.a_way, stage, held_a_);
        if (!kHoldsA) a_.store(plan_.a_way, stage, to, held_a_);
      }
    }
  }
  __device__ __forceinline__ void store(int stage, uint32_t to) {
    if constexpr (Math::kPromotes) scales_.store(to, held_scales_);
    if constexpr (!kIsAsync) {
      if (kHoldsA && !(Math::kHasAsyncCopies && plan_.a_way == Way::kAsync))
        a_.store(plan_.a_way, stage, to, held_a_);
      if (!is_nk_) b_columns_.store(plan_.b_way, stage, to, held_b_);
      else if (!(Math::kHasAsyncCopies && plan_.b_way == Way::kAsync))
        b_.store(plan_.b_way, stage, to, held_b_);
    }
  }

 private:
  // Where a mostly comes by cp.async, and totals stand beside the sums, registers for it are not worth it.
  static constexpr bool kHoldsA = !(Math::kHasAsyncCopies && Math::kPromotes);
  const Plan& plan_;
  bool is_nk_;
  RowFeed<Math, S, S::kM, 0> a_;
  RowFeed<Math, S, S::kN, S::kM> b_;
  ColumnFeed<Math, S> b_columns_;
  ScaleFeed<S> scales_;
  uint4 held_a_[RowFeed<Math, S, S::kM, 0>::kHeld];
  uint4 held_b_[std::max(RowFeed<Math, S, S::kN, S::kM>::kHeld, ColumnFeed<Math, S>::kHeld)];
  typename ScaleFeed<S>::Held held_scales_;
};

// ---- The product of a warp ----

template <class Math, class S>
class Multiplier {
 public:
  static constexpr int kMTiles = S::kM / S::kWarpsM / 16, kNTiles = S::kN / S::kWarpsN / 8;
  static_assert(kNTiles % 2 == 0 && kMTiles > 0);

  __device__ Multiplier(const Product& p, const Plan& plan, const TileRows& a, const TileRows& b)
      : p_(p), plan_(plan), a_(a), b_(b) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    m_ = warp % S::kWarpsM * kMTiles * 16;
    n_ = warp / S::kWarpsM % S::kWarpsN * kNTiles * 8;
    k_warp_ = warp / S::kWarpsM / S::kWarpsN;
    clear();
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) row_sums_[i][0] = row_sums_[i][1] = 0;
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) column_sums_[j] = 0;
  }

  // Its tile of the stage at shared address `at`.
  __device__ __forceinline__ void add(int stage, uint32_t at) {
    const int tile = stage * S::kWarpsK + k_warp_;
    if (tile >= plan_.cut.tiles) return;
    const uint32_t codes = at + k_warp_ * S::kTileBytes;
    // Lane l gives row l % 16 of a and unit l / 16 to ldmatrix, row l % 8 (+ 8) of b and unit l / 8 % 2. A
    // step changes the unit by an xor.
    const uint32_t a = codes + (m_ + lane() % 16) * kRowBytes + (lane() / 16 ^ lane() % 8) * kUnitBytes;
    const uint32_t b = codes + (S::kM + n_ + lane() / 16 * 8 + lane() % 8) * kRowBytes +
                       (lane() / 8 % 2 ^ lane() % 8) * kUnitBytes;
    if constexpr (!Math::kPromotes) {
      add_steps<4>(a, b);
    } else if (plan_.cut.parts == 1) {
      clear();
      add_steps<4>(a, b);
      promote(tile, 0, at);
    } else {
      const int part_steps = 4 / plan_.cut.parts;
#pragma unroll 1
      for (int part = 0; part < plan_.cut.parts; ++part) {
        clear();
#pragma unroll 1
        for (int step = part * part_steps; step < (part + 1) * part_steps; ++step)
          add_steps<1>(a ^ step * 32, b ^ step * 32);
        promote(tile, part, at);
      }
    }
  }

  // Sums or totals to [warp along k][token][kN + 4], then those of rows and of columns, [warp along k][kM] and
  // [kN].
  __device__ void store(uint32_t* to) const {
    constexpr int kStride = S::kN + 4;
    uint32_t* tile = to + k_warp_ * S::kM * kStride;
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint32_t* pair = tile + (m_ + i * 16 + h * 8 + lane() / 4) * kStride + n_ + j * 8 + lane() % 4 * 2;
          *reinterpret_cast<uint2*>(pair) = {word(i, j, 2 * h), word(i, j, 2 * h + 1)};
        }
      }
    }
    if constexpr (!Math::kPromotes) {
      uint32_t* rows = to + S::kWarpsK * S::kM * kStride;
      uint32_t* columns = rows + S::kWarpsK * S::kM;
      if (plan_.has_row_sums && n_ == 0) {
#pragma unroll
        for (int i = 0; i < 2 * kMTiles; ++i) {
          const int sum = sum_over_quad(row_sums_[i / 2][i % 2]);
          if (lane() % 4 == 0) rows[k_warp_ * S::kM + m_ + i * 8 + lane() / 4] = static_cast<uint32_t>(sum);
        }
      }
      if (plan_.has_column_sums && m_ == 0) {
#pragma unroll
        for (int j = 0; j < kNTiles; ++j) {
          const int sum = sum_over_quad(column_sums_[j]);
          if (lane() % 4 == 0)
            columns[k_warp_ * S::kN + n_ + j * 8 + lane() / 4] = static_cast<uint32_t>(sum);
        }
      }
    }
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int sum_over_quad(int x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }
  __device__ uint32_t word(int i, int j, int at) const {
    if constexpr (Math::kPromotes) return float_bits(totals_[i][j][at]);
    else return static_cast<uint32_t>(sums_[i][j][at]);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums_[i][j][c] = Math::kInitial;
      }
    }
  }

  template <int kSteps>
  __device__ __forceinline__ void add_steps(uint32_t a_row, uint32_t b_row) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[kMTiles][4];
#pragma unroll
      for (int i = 0; i < kMTiles; ++i) ptx::load_matrices(a[i], (a_row ^ step * 32) + i * 16 * kRowBytes);
      if constexpr (std::is_same_v<typename Math::Sum, int>) {
        if (plan_.has_row_sums) {
#pragma unroll
          for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
              row_sums_[i][h] = add_bytes(a[i][h], add_bytes(a[i][2 + h], row_sums_[i][h]));
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kNTiles; j += 2) {
        uint32_t b[4];
        ptx::load_matrices(b, (b_row ^ step * 32) + j * 8 * kRowBytes);
        if constexpr (std::is_same_v<typename Math::Sum, int>) {
          if (Math::kHasWideZeros && plan_.has_column_sums) {
            column_sums_[j] = add_bytes(b[0], add_bytes(b[1], column_sums_[j]));
            column_sums_[j + 1] = add_bytes(b[2], add_bytes(b[3], column_sums_[j + 1]));
          }
        }
#pragma unroll
        for (int i = 0; i < kMTiles; ++i) {
          Math::multiply(sums_[i][j], a[i], b[0], b[1]);
          Math::multiply(sums_[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
  __device__ static int add_bytes(uint32_t bytes, int sum) {
    return __dp4a(static_cast<int>(bytes), 0x01010101, sum);
  }

  // totals += sums * scales of a part.
  __device__ __forceinline__ void promote(int tile, int part, uint32_t at) {
    const uint32_t first = (part * S::kWarpsK + k_warp_) * S::kRows;  // of scales, and of zero points
    const uint32_t a_at = at + S::kCodeBytes + (first + m_ + lane() / 4) * 4;
    const uint32_t b_index = first + S::kM + n_ + lane() % 4 * 2;
    float a_scales[kMTiles][2];
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        a_scales[i][h] = plan_.has_scales_at_end ? 1.0f : ptx::load_shared_float(a_at + (i * 16 + h * 8) * 4);
    }
    const auto add = [&](const auto& value) {  // value(i, j, c) of the sums
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) {
        float2 b_scales = {1.0f, 1.0f};
        if (!plan_.has_scales_at_end) {
          b_scales = ptx::load_shared_float2(at + S::kCodeBytes + (b_index + j * 8) * 4);
        }
#pragma unroll
        for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const float scale = a_scales[i][c / 2] * (c % 2 ? b_scales.y : b_scales.x);
            totals_[i][j][c] = fmaf(value(i, j, c), scale, totals_[i][j][c]);
          }
        }
      }
    };
    if constexpr (std::is_same_v<typename Math::Sum, int>) {
      if constexpr (Math::kHasWideZeros) return add_less_wide_zeros(tile, part, add);
      if (plan_.has_row_sums) subtract_staged_zeros(at + plan_.zero_offset + b_index * 4);
    }
    add([&](int i, int j, int c) { return Math::to_float(sums_[i][j][c]); });
  }

  // sum a b - zero * sum a, where zero points of b are bytes.
  __device__ __forceinline__ void subtract_staged_zeros(uint32_t zeros) {
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) row_sums_[i][h] = sum_over_quad(row_sums_[i][h]);
    }
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      const int zero[2] = {static_cast<int>(ptx::load_shared4(zeros + j * 32)),
                           static_cast<int>(ptx::load_shared4(zeros + j * 32 + 4))};
#pragma unroll
      for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums_[i][j][c] -= zero[c % 2] * row_sums_[i][c / 2];
      }
    }
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) row_sums_[i][0] = row_sums_[i][1] = 0;
  }

  // Zero points of 32 bits with groups, which scaled_mm allows and nobody needs to be fast.
  template <class Add>
  __device__ __forceinline__ void add_less_wide_zeros(int tile, int part, const Add& add) {
    const int first = plan_.cut.first(tile), columns = plan_.cut.count(tile, first) - part * plan_.cut.part;
    const int count = min(max(columns, 0), plan_.cut.part);
    int a_zeros[kMTiles][2], b_zeros[kNTiles][2], column_sums[kNTiles][2];
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_sums_[i][h] = sum_over_quad(row_sums_[i][h]);
        const int64_t row = a_.row(m_ + i * 16 + h * 8 + lane() / 4);
        a_zeros[i][h] = row < 0 ? 0 : p_.a.zero_at(row, 0);
      }
    }
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      column_sums_[j] = sum_over_quad(column_sums_[j]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int column = lane() % 4 * 2 + h;
        column_sums[j][h] = __shfl_sync(~0u, column_sums_[j], column * 4);
        const int64_t col = b_.row(n_ + j * 8 + column);
        b_zeros[j][h] = col < 0 ? 0 : p_.b.zero_at(col, 0);
      }
    }
    add([&](int i, int j, int c) {
      return static_cast<float>(subtract_zeros(sums_[i][j][c] - Math::kInitial, row_sums_[i][c / 2],
                                               column_sums[j][c % 2], a_zeros[i][c / 2], b_zeros[j][c % 2],
                                               count));
    });
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) row_sums_[i][0] = row_sums_[i][1] = 0;
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) column_sums_[j] = 0;
  }

  const Product& p_;
  const Plan& plan_;
  const TileRows& a_;
  const TileRows& b_;
  int m_, n_, k_warp_;
  typename Math::Sum sums_[kMTiles][kNTiles][4];
  float totals_[kMTiles][kNTiles][4] = {};
  int row_sums_[kMTiles][2], column_sums_[kNTiles];
};

// ---- The epilogue ----

// What a thread needs to make outputs of the sums in shared memory, as Multiplier::store() left them.
template <class Math, class S>
struct Finish {
  static constexpr int kStride = S::kN + 4;
  const Product& p;
  const Plan& plan;
  const uint32_t* words;

  // Eight sums of a token from column `from` of the tile on, warps along k in their order.
  template <class T>
  __device__ __forceinline__ void load(int token, int from, T (&v)[kUnit]) const {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] = 0;
#pragma unroll
    for (int warp = 0; warp < S::kWarpsK; ++warp) {
      const auto* part = reinterpret_cast<const uint4*>(words + (warp * S::kM + token) * kStride + from);
      const uint4 low = part[0], high = part[1];
      const uint32_t bits[kUnit] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        if constexpr (std::is_same_v<T, float>) v[i] += float_from_bits(bits[i]);
        else v[i] += bits[i];  // unsigned, which wraps
      }
    }
  }
  __device__ int add_sums(const uint32_t* sums, int stride) const {
    uint32_t sum = 0;
    for (int warp = 0; warp < S::kWarpsK; ++warp) sum += sums[warp * stride];
    return static_cast<int>(sum);
  }

  // use(index, sum in 32 or 64 bits) for those of the eight columns of b, `col` and on, that there are.
  template <class Use>
  __device__ __forceinline__ void each_sum(int token, int64_t row, int from, int64_t col, int count,
                                           const Use& use) const {
    uint32_t sums[kUnit];
    load(token, from, sums);
    const bool has_zeros = (plan.has_row_sums || plan.has_column_sums) && plan.cut.k > 0;
    const uint32_t* rows = words + S::kWarpsK * S::kM * kStride;
    const int row_sum = plan.has_row_sums ? add_sums(rows + token, S::kM) : 0;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (i >= count) continue;
      int64_t sum = static_cast<int>(sums[i]);
      if (has_zeros) {
        const uint32_t* columns = rows + S::kWarpsK * S::kM + from + i;
        sum = subtract_zeros(sum, row_sum, plan.has_column_sums ? add_sums(columns, S::kN) : 0,
                             p.a.zero_at(row, 0), p.b.zero_at(col + i, 0), plan.cut.k);
      }
      use(i, sum);
    }
  }

  __device__ __forceinline__ void store_exact(int token, int64_t row, int from, int64_t col,
                                              int count) const {
    int v[kUnit] = {};
    each_sum(token, row, from, col, count, [&](int i, int64_t sum) { v[i] = static_cast<int32_t>(sum); });
    auto* to = p.out.y.row<int32_t>(row) + col;
    if (count == kUnit && reinterpret_cast<uint64_t>(to) % 16 == 0) {
      reinterpret_cast<int4*>(to)[0] = {v[0], v[1], v[2], v[3]};
      reinterpret_cast<int4*>(to)[1] = {v[4], v[5], v[6], v[7]};
    } else {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        if (i < count) to[i] = v[i];
      }
    }
  }

  // Eight numbers, scaled.
  __device__ __forceinline__ void numbers(int token, int64_t row, int from, int64_t col, int count,
                                          float (&v)[kUnit]) const {
    if constexpr (Math::kPromotes) {
      load(token, from, v);
    } else {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) v[i] = 0.0f;
      each_sum(token, row, from, col, count, [&](int i, int64_t sum) {
        v[i] = plan.has_row_sums || plan.has_column_sums ? static_cast<float>(sum)
                                                         : static_cast<float>(static_cast<int>(sum));
      });
    }
    if (!plan.has_scales_at_end || plan.cut.k == 0) return;  // no columns have no scales
    const float a_scale = p.a.scale_at(row, 0);
    const Matrix& scale = p.b.scale;
    if (scale.dtype == DType::f32 && p.b.block.rows == 1 && count == kUnit) {
      const float* b_scales = static_cast<const float*>(scale.data) + col;
#pragma unroll
      for (int i = 0; i < kUnit; ++i) v[i] *= a_scale * b_scales[i];
    } else {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        if (i < count) v[i] *= a_scale * p.b.scale_at(col + i, 0);
      }
    }
  }

  __device__ void run(float* staged, const TileRows& a, const TileRows& b) const {
    const int units = b.half / kUnit;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < S::kM * units; i += S::kThreads) {
      const int token = i / units, from = i % units * kUnit;
      const int64_t row = a.row(token), col = b.first + from;
      if (row < 0) return;
      if (col >= p.n_out) continue;
      const int count = static_cast<int>(min(p.n_out - col, int64_t{kUnit}));
      if constexpr (!Math::kPromotes) {
        if (p.is_exact()) {
          store_exact(token, row, from, col, count);
          continue;
        }
      }
      float v[kUnit], up[kUnit] = {};
      numbers(token, row, from, col, count, v);
      if (p.is_gated()) numbers(token, row, b.half + from, p.n_out + col, count, up);
      linear::finish_unit(p, staged, row, col, v, up);
    }
  }
};

// ---- The kernel ----

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
