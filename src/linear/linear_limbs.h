// SPDX-License-Identifier: Apache-2.0
//
// y = act(x w^T) for the weights of linear_int.h and 16-bit floats in x, in integer arithmetic. By token and
// segment of at most 128 k, x is rounded to a fixed point under its largest magnitude and split into three
// signed bytes, its limbs:
//
//   x = factor (65536 x2 + 256 x1 + x0) + error,      2^e <= max |x| < 2^(e+1),  factor = 2^(e-20)
//
// |error| <= factor / 2 <= 2^-21 max |x|: none for a BF16 number of the 13 binades below the largest, nor for
// an FP16 number of the 10 (docs/numerics.md). The limbs are three rows of an integer product (linear_int.h),
// which is exact; three of its steps of 4 k take less time than four of float32, and codes need not be
// decoded. A NaN or an infinity makes the factor NaN, and so every sum of that token.
#pragma once

#include "linear/linear_int.h"

namespace quantfuse::linear {

inline constexpr int64_t kLimbSegment = 128;
inline constexpr int kLimbs = 3;
static_assert(kMaxTileRows % kLimbs == 0);

// Tokens of a tile whose codes go from memory to registers: as many as have their sums for a panel in
// registers.
template <class S>
inline constexpr int64_t kDirectTokens = S::kRegisters == 32 ? 4 : 2;

template <class S>
QF_INLINE bool has_direct_tokens(qf_format format, int64_t tokens) {
  return tokens <= kDirectTokens<S> || is_direct<S>(format, kLimbs * tokens);
}

// Rows are limbs: three of a token.
struct LimbBatch : Batch<int32_t> {
  const int32_t* sums;     // [segment][row]: of a limb
  const float* factors;    // [segment][token]
  const float* sums_of_x;  // [segment][token]: in units of the factor

  int64_t tokens() const { return rows / kLimbs; }
};

// 128 columns are the tiles that x is rounded in, and a segment is to lie in one of them. Sums are scaled
// once a group, and take longer to scale than floats do: with groups of 32 the float32 kernel is as fast or
// faster, with groups of 64 up to 40% slower (Zen 5, AVX-512 and AVX-VNNI).
inline constexpr int64_t kMinLimbGroup = 64;
QF_INLINE Verdict accepts_limbs(const Problem& p, int lanes) {
  const int64_t group = p.weight.num_groups > 1 ? p.weight.block.cols : kLimbSegment;
  return packed_for(p, lanes)
      .require(has_integer_numbers(p.weight.format), kNoIntegers)
      .require(!p.has_act_quant(), "the activations are quantized")
      .require(p.x.dtype == DType::f16 || p.x.dtype == DType::bf16, "the activations are not 16-bit floats")
      .require(!has_k_map(p), "the weight's columns are in another order than those of x")
      .require(group % kLimbSegment == 0 || group == kMinLimbGroup,
               "the weight's groups are neither multiples of 128 columns nor 64");
}

// ---- x ----

// The limbs of x[r, k .. k + n) as bytes, zeros behind them up to `length`; their sums; the factor.
template <class S, class T>
QF_INLINE float encode_limbs(const T* x, int64_t n, int64_t length, int8_t* const (&limbs)[kLimbs],
                             int32_t (&sums)[kLimbs]) {
  constexpr int64_t L = S::kLanes;
  alignas(64) int32_t largest[L];
  auto most = S::zero_i();
  for (int64_t i = 0; i < n; i += L) {
    most = S::max(most, S::and_(S::bits(S::load(x + i, n - i)), S::set1(0x7fffffff)));
  }
  S::store_i(largest, most);
  int32_t bits = 0;
  for (const int32_t lane : largest) bits = bits < lane ? lane : bits;

  constexpr int32_t kInfinity = 0x7f800000, kSmallest = 5;  // 2^(5 - 127) = 2^-122, whose inverse is normal
  const bool is_finite = bits < kInfinity;
  const int32_t exponent = (bits >> 23) - 20 > kSmallest ? (bits >> 23) - 20 : kSmallest;
  const auto inverse = S::set1(is_finite ? float_from_bits(static_cast<uint32_t>(254 - exponent) << 23) : 0);
  typename S::I total[kLimbs] = {S::zero_i(), S::zero_i(), S::zero_i()};
  for (int64_t i = 0; i < length; i += L) {
    auto value = S::to_int(S::mul(i < n ? S::load(x + i, n - i) : S::zero(), inverse));
    if (!is_finite) value = S::zero_i();
    // Half of a limb is carried into the next.
    const typename S::I bytes[kLimbs] = {value, S::template shr<8>(S::add(value, S::set1(0x80))),
                                         S::template shr<16>(S::add(value, S::set1(0x8080)))};
    for (int l = 0; l < kLimbs; ++l) S::store_u8(limbs[l] + i, bytes[l], length - i);
  }
  for (int l = 0; l < kLimbs; ++l) {
    for (int64_t i = 0; i < length; i += 4 * L) {
      alignas(64) int8_t run[4 * L] = {};
      __builtin_memcpy(run, limbs[l] + i, static_cast<size_t>(length - i < 4 * L ? length - i : 4 * L));
      total[l] = S::dot4(total[l], S::set1(0x01010101), S::load_i(run));
    }
    sums[l] = S::reduce_add(total[l]);
  }
  return is_finite ? float_from_bits(static_cast<uint32_t>(exponent) << 23) : float_from_bits(0x7fc00000);
}

// Tokens [token, token + count) of a batch, a tile.
template <class S>
QF_INLINE void prepare_limb_tile(const LimbBatch& c, int64_t token, int64_t count, int32_t* sums,
                                 float* factors, float* sums_of_x, int32_t* x) {
  const Problem& p = c.p;
  for (int64_t s = 0; s < c.num_segments; ++s) {
    const int64_t begin = c.segments[s].begin, length = c.segments[s].end - begin;
    const int64_t n = p.k - begin < length ? p.k - begin : length;
    alignas(64) int32_t words[kLimbs * kDirectTokens<S>][kLimbSegment / 4];
    for (int64_t i = 0; i < count; ++i) {
      int8_t* const limbs[kLimbs] = {reinterpret_cast<int8_t*>(words[kLimbs * i]),
                                     reinterpret_cast<int8_t*>(words[kLimbs * i + 1]),
                                     reinterpret_cast<int8_t*>(words[kLimbs * i + 2])};
      int32_t own[kLimbs];
      choose_value<DType::f16, DType::bf16>(
          p.x.dtype, [&](auto dtype) __attribute__((always_inline)) {
            using T = std::conditional_t<dtype.value == DType::f16, f16, bf16>;
            const T* row = p.x.row<const T>(c.to.first_row + token + i) + begin;
            factors[s * c.tokens() + token + i] =
                encode_limbs<S>(row, n, length, limbs, own) * byte_unit_of(p.weight.format);
          });
      for (int l = 0; l < kLimbs; ++l) sums[s * c.rows + kLimbs * (token + i) + l] = own[l];
      sums_of_x[s * c.tokens() + token + i] =
          65536.0f * static_cast<float>(own[2]) + static_cast<float>(256 * own[1] + own[0]);
    }
    interleave_rows<S>(words[0], kLimbSegment / 4, kLimbs * count, length / 4,
                       x + begin / 4 * c.rows + kLimbs * token * (length / 4));
  }
}

// ---- Products ----

template <class S>
__attribute__((noinline, noclone)) void finish_limbs(const LimbBatch& c, int64_t token, int64_t tokens,
                                                     int64_t panel, int64_t panels, const float* totals) {
  const int64_t stride = kLimbs * totals_stride<S>(panels);
  finish_rows<S>(
      c.p, c.to, c.to.first_row + token, tokens, panel,
      panels, [&](int64_t t) __attribute__((always_inline)) {
        const float* of_token = totals + t * stride;
        return [of_token](int64_t i) __attribute__((always_inline)) { return S::load(of_token + i); };
      });
}

template <class Simd, qf_format Format>
struct LimbWork : CodeWork<Simd, Format, LimbBatch> {
  using Base = CodeWork<Simd, Format, LimbBatch>;
  using Base::batch, Base::L;
  using typename Base::Dot, typename Base::S;
  static constexpr int64_t kRowsOfToken = kLimbs;
  static constexpr int64_t kMaxDecoded = Base::Decoder::kIs4Bit ? kLimbSegment : 0;

  template <int MT, int NP>
  __attribute__((noinline)) void add(TilesOfWork<int32_t> t) const {
    if constexpr (MT % kLimbs == 0) {  // no other tile is made
      for (int64_t i = 0; i < t.count; ++i, t.next(MT, totals_stride<S>(NP))) {
        Tile<Dot, MT, NP> tile;
        begin(tile, t);
        end(tile, this->multiply(tile, t), t);
      }
    }
  }
  template <int MT, int NP>
  QF_INLINE void begin(Tile<Dot, MT, NP>& tile, const TilesOfWork<int32_t>& t) const {
    const int32_t* sums = batch.sums + t.s * batch.rows + t.row;
    const int32_t offset = this->offset();
    tile.each([&](auto& sum, auto m, auto)
                  __attribute__((always_inline)) { sum = S::sums(S::set1(-offset * sums[m])); });
  }
  template <int MT, int NP>
  QF_INLINE void end(Tile<Dot, MT, NP>& tile, const LastSteps<int32_t>& last,
                     const TilesOfWork<int32_t>& t) const {
    choose_bool(
        batch.p.packed.zeros(t.panel) != nullptr, [&](auto has_zeros) __attribute__((always_inline)) {
          flush<has_zeros.value>(tile, last, t);
        });
  }
  // totals of a token, which are where its first limb is, += factor * scale * (sum of its limbs - zero * sum
  // of x). Sums of 128 products of bytes, times 256, are int32.
  template <bool HasZeros, int MT, int NP>
  QF_INLINE void flush(Tile<Dot, MT, NP>& tile, const LastSteps<int32_t>& last,
                       const TilesOfWork<int32_t>& t) const {
    const int64_t group = batch.segments[t.s].group * 2 * L, panel_stride = batch.plan.num_groups * 2 * L;
    const int64_t at_token = t.s * batch.tokens() + t.row / kLimbs;
    const float *scales = batch.p.packed.scales(t.panel) + group, *factors = batch.factors + at_token;
    [[maybe_unused]] const float* zeros = HasZeros ? batch.p.packed.zeros(t.panel) + group : nullptr;
    [[maybe_unused]] const float* sums_of_x = batch.sums_of_x + at_token;
    const float* const before = t.totals_before(kNoTotals<S>);
    float* const totals = t.totals;
    tile.finish(
        last, [&](auto& third, auto row, auto vector) __attribute__((always_inline)) {
          constexpr int token = row / kLimbs, v = vector;
          if constexpr (row % kLimbs != kLimbs - 1) return;
          const int64_t at = v / 2 * panel_stride + v % 2 * L;
          const auto low = S::add(S::ints(tile.acc[kLimbs * token][v]),
                                  S::template shl<8>(S::ints(tile.acc[kLimbs * token + 1][v])));
          const auto high = S::to_float(S::ints(third));
          auto value = S::fma(high, S::set1(65536.0f), S::to_float(low));
          if constexpr (HasZeros) value = S::fnma(S::load(zeros + at), S::set1(sums_of_x[token]), value);
          // Exact: a power of two. The product of scale and factor might be beyond what a float holds.
          value = S::mul(value, S::set1(factors[token]));
          const int64_t to = token * kLimbs * totals_stride<S>(NP) + v * L;
          S::store(totals + to, S::fma(value, S::load(scales + at), S::load(before + to)));
        });
  }
  QF_INLINE void finish(int64_t row, int64_t rows, int64_t panel, int64_t panels, const float* totals) const {
    finish_limbs<S>(batch, row / kLimbs, rows / kLimbs, panel, panels, totals);
  }
};

template <class S, qf_format Format>
QF_INLINE void multiply_limbs(const LimbBatch& c) {
  const LimbWork<S, Format> work = {{c}};
  if (!has_direct_tokens<S>(c.p.weight.format, c.tokens())) return multiply_batch(work);
  choose_rows<kDirectTokens<S>>(
      c.tile_rows / kLimbs, [&](auto tokens) __attribute__((always_inline)) {
        multiply_direct<kLimbs * tokens.value>(work);
      });
}

// ---- The call ----

struct LimbPlan {
  Plan plan;
  int64_t sums, factors, sums_of_x, total_bytes;  // offsets in the workspace
};

QF_INLINE LimbPlan make_limb_plan(const Problem& p) {
  LimbPlan plan = {make_plan(p, {kLimbs, kLimbs}, kLimbSegment, kLimbSegment), 0, 0, 0, 0};
  const int64_t floats = plan.plan.batch_rows * plan.plan.max_segments * 4;
  plan.sums = plan.plan.total_bytes;
  plan.factors = plan.sums + round_up(kLimbs * floats, 64);
  plan.sums_of_x = plan.factors + round_up(floats, 64);
  plan.total_bytes = plan.sums_of_x + round_up(floats, 64);
  return plan;
}

template <class S>
QF_INLINE void launch_limbs(const Problem& p, const Launch& launch) {
  const LimbPlan limbs = make_limb_plan(p);
  const Plan& plan = limbs.plan;
  char* workspace = static_cast<char*>(launch.workspace);
  auto* segments = reinterpret_cast<Segment*>(workspace + plan.segments);
  const int64_t num_segments = cut_segments(p, kLimbSegment, kLimbSegment, 1, segments).segments;
  auto* x = reinterpret_cast<int32_t*>(workspace + plan.x);
  auto* sums = reinterpret_cast<int32_t*>(workspace + limbs.sums);
  auto* factors = reinterpret_cast<float*>(workspace + limbs.factors);
  auto* sums_of_x = reinterpret_cast<float*>(workspace + limbs.sums_of_x);

  for (int64_t first_row = 0; first_row < p.m; first_row += plan.batch_rows) {
    const int64_t tokens = p.m - first_row < plan.batch_rows ? p.m - first_row : plan.batch_rows;
    const int64_t tile_tokens = has_direct_tokens<S>(p.weight.format, tokens)
                                    ? tile_rows_for(tokens, kDirectTokens<S>)
                                    : kMaxTileRows / kLimbs;
    const Destination to = {p.out.is_quantized() && !p.out.is_static,
                            reinterpret_cast<float*>(workspace + plan.result), first_row};
    const LimbBatch batch = {{p, plan, segments, num_segments, x, kLimbs * tokens, kLimbs * tile_tokens, to},
                             sums,
                             factors,
                             sums_of_x};
    parallel_ranges(ceil_div(tokens, tile_tokens), 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin * tile_tokens; t < end * tile_tokens && t < tokens; t += tile_tokens) {
        prepare_limb_tile<S>(batch, t, tokens - t < tile_tokens ? tokens - t : tile_tokens, sums, factors,
                             sums_of_x, x);
      }
    });
    choose_value<QF_INT4, QF_FP4_E2M1, QF_INT8>(
        code_path(p.weight.format), [&](auto format) __attribute__((always_inline)) {
          multiply_limbs<S, format.value>(batch);
        });
    finish_batch<S>(p, to, tokens);
  }
}

}  // namespace quantfuse::linear
