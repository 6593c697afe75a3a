// SPDX-License-Identifier: Apache-2.0
//
// y[m,n] = epilogue( sum_k x[m,k] * ((q[n,k] - z[n,g]) * s[n,g] + o[n,g]) )          m <= 2
//                                              x: f16 | bf16, q: int4 | int8; or x: bf16, q, s: mxfp4
//
// For one or two tokens, where the weight is the traffic. A block streams strips of 16 rows of it once:
//   gmem w --bulk copies--> smem ring --> regs --shift, mask--> bytes --mma--> s32 --> f32 --> smem --> y
//
// Turning int4 codes into 16-bit floats costs 12 instructions for 8 of them, and the integer pipe becomes the
// limit before the memory does. As bytes (16 times the code: the high nibble of a byte) they cost 3, so x is
// made bytes too, three limbs of a fixed point by tile of 128 columns (x_limbs.h). Their products with the
// codes are summed over a group as exact integers; a zero point is subtracted as zero * (sum of x), an offset
// added likewise. Limb l of token t is column 2 l + t of a product, and the limbs are added at the end of a
// strip.
//
// MXFP4 codes are not cheaper as bytes, but their bits at the places of bf16's are the numbers times 2^-126:
// x is made as much larger, by tile of 128 columns and exactly, and the sums of a group are scaled.
//
// Work: one block an SM; cluster c of C blocks takes strips c, c + clusters, ...; the blocks of a cluster
// split k, and the consumer warps of a block split theirs tile by tile:
//   strip of 16 rows, C = 2:   | rank 0: tiles 0 .. 15              | rank 1: tiles 16 .. 31             |
//     unit (one copy)          | w0 w1 w2 ... w7 w0 w1 ...       w7 | w0 w1 ...                          |
// An epilogue warp adds the warps' parts in a fixed order while the consumers go on; in a cluster it sends
// the sum to one rank, whose producer warp, done by then, adds the ranks' in rank order (through distributed
// shared memory): no atomics, and the same bits on every run.
//
// An x that is yet to be normalized gets its gain before it becomes limbs, while its squares are added up;
// the factor that is common to a token's columns commutes with the product and is left to the epilogue.
//
// The kernel before may still be running: the producer fills the ring, which depends on nothing, while
// everyone else waits for it to end. Blocks of half an SM leave room for those of the next kernel, whose
// rings then fill while this one drains.
#include <algorithm>
#include <type_traits>

#include "core/choose.h"
#include "cuda/cursor.h"
#include "cuda/occupancy.h"
#include "cuda/ptx/async_copy.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/dependent_launch.h"
#include "cuda/ptx/logic.h"
#include "cuda/ptx/matrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/mma_int8.h"
#include "linear/linear_canonical.h"
#include "linear/strip_codes.h"
#include "linear/strip_share.h"
#include "linear/x_limbs.h"

namespace quantfuse::linear_stream_sm90 {
using linear::Problem;
using linear::StripLayout;
using linear::StripShare;
using linear::XLimbs;
namespace {

constexpr int kMaxTokens = 2, kMaxCluster = 8;
constexpr int kConsumerWarps = 8, kProducerWarp = kConsumerWarps;  // and one for the epilogue
constexpr int kConsumerThreads = 32 * kConsumerWarps, kThreads = kConsumerThreads + 2 * 32;
// A unit is a stage of the ring: 2 KB of codes and their scales for each warp, whatever the format.
constexpr int tiles_per_warp(int bits) { return 8 / bits; }
constexpr int unit_tiles(int bits) { return kConsumerWarps * tiles_per_warp(bits); }
// Units under way at most. With 2 all SMs get the same share of the memory's bandwidth (an H200's 132 end
// within 10% of each other); with 3 or more those of some GPCs get less, and all wait for them: 57344 x 8192
// took 62, 70 and 78 us with 2, 3 and 4. Besides, x waits behind them.
constexpr int kInFlight = 2;
constexpr int kPartRow = StripLayout::kRows + 4;  // floats from token to token in a part: other banks
constexpr int kPartBuffers = 2;
constexpr int kReady = 1;  // named barrier: the barriers in memory are initialised, x is there

// A tile of the packed weight, with zeros or offsets of so many bytes.
template <int kBits_, int kGroups_, int kZeroBytes_>
struct Format {
  static constexpr int kBits = kBits_, kGroups = kGroups_, kZeroBytes = kZeroBytes_;
  static constexpr bool kHasZeros = kZeroBytes == 1, kHasOffsets = kZeroBytes == 4;
  static constexpr bool kHasSums = kZeroBytes > 0;  // of x
  static constexpr int kTilesPerWarp = tiles_per_warp(kBits), kUnitTiles = unit_tiles(kBits);
  static constexpr int kCodeShift = 8 - kBits;  // codes are multiplied as bytes, from their high bits down
  static constexpr int kCodeBytes = StripLayout::kRows * StripLayout::kCols * kBits / 8;
  static constexpr int kVectors = kCodeBytes / 512;  // of 16 bytes a lane
  static constexpr int kZeroOffset = kCodeBytes + kGroups * StripLayout::kRows * 4;
  static constexpr int kTileBytes = kZeroOffset + kGroups * StripLayout::kRows * kZeroBytes;
  static constexpr int kBlocks = 4 / kGroups;  // of 32 columns, in a group
  static constexpr int kScaleBytes = 4;        // of a row, or of rows g and g + 8
  static_assert(kTileBytes % 16 == 0, "bulk copies");
};
struct Mxfp4 : Format<4, 4, 0> {
  static constexpr int kScaleBytes = 8;
  static constexpr int kTileBytes = kCodeBytes + kGroups * StripLayout::kRows;
};

struct Sizes {
  int m = 0, strips = 0, tiles = 0;  // of x; of the weight; of a strip
  int cluster = 0;                   // blocks that split k
  int x_tiles = 0;                   // of a block, at most
  int stages = 0;                    // of the ring
  int inbox_slots = 0;               // strips whose sum a block makes for its cluster, at most; 0 without one
  bool has_squares = false;          // of an x that is yet to be normalized, and all in this block
};

struct Params : Sizes {
  Problem problem;
  float* staged;  // see finish_rows
  bool is_x_aligned;
};

// Where things are in shared memory, which begins with the ring.
struct Smem {
  QF_HD Smem(const Sizes& p, int tokens, int bytes_of_unit, int groups, bool has_sums) {
    m = tokens;
    unit_bytes = bytes_of_unit;
    x_tile_bytes = XLimbs::bytes_of_tile(m, groups, has_sums);
    part_floats = m * kPartRow;
    x = p.stages * unit_bytes;
    parts = x + p.x_tiles * x_tile_bytes;
    inbox = parts + kPartBuffers * kConsumerWarps * part_floats * 4;
    squares = inbox + p.inbox_slots * p.cluster * part_floats * 4;
    full = (squares + (p.has_squares ? m * kConsumerThreads * 4 : 0) + 15) / 16 * 16;
    empty = full + p.stages * 8;
    parts_full = empty + p.stages * 8;
    parts_empty = parts_full + kPartBuffers * 8;
    inbox_full = parts_empty + kPartBuffers * 8;
    bytes = inbox_full + p.inbox_slots * 8;
  }
  int m;  // as p.m, but known to the compiler where it can be
  int unit_bytes, x_tile_bytes, part_floats;
  int x, parts, inbox, squares, full, empty, parts_full, parts_empty, inbox_full;  // offsets
  int bytes;
};

// By the lanes of a warp side by side: the first copies wait for it.
__device__ void init_barriers(const Params& p, const Smem& smem, uint32_t base, int lane) {
#pragma unroll 1
  for (int s = lane; s < p.stages; s += 32) {
    ptx::barrier_init(base + smem.full + 8 * s, 1);
    ptx::barrier_init(base + smem.empty + 8 * s, kConsumerWarps);
  }
  if (lane < kPartBuffers) {
    ptx::barrier_init(base + smem.parts_full + 8 * lane, kConsumerWarps);
    ptx::barrier_init(base + smem.parts_empty + 8 * lane, 1);
  }
#pragma unroll 1
  for (int i = lane; i < p.inbox_slots; i += 32) {
    ptx::barrier_init(base + smem.inbox_full + 8 * i, 1);
    ptx::barrier_expect(base + smem.inbox_full + 8 * i, p.cluster * smem.m * StripLayout::kRows * 4);
  }
  ptx::barrier_init_fence();
  __syncwarp();
}

// One thread copies unit after unit.
template <class F>
__device__ void produce(const Params& p, const Smem& smem, const StripShare& share, uint32_t base) {
  const uint64_t policy = ptx::evict_first_policy();
  const int in_flight = min(kInFlight, p.stages);
  Cursor stage, landed;
  int copies = 0;
  for (int strip = share.first_strip; strip < p.strips; strip += share.strip_step) {
    const uint8_t* from =
        p.problem.strips.data + (static_cast<int64_t>(strip) * p.tiles + share.first_tile) * F::kTileBytes;
#pragma unroll 1
    for (int tile = 0; tile < share.tiles; tile += F::kUnitTiles, ++copies) {
      if (copies >= p.stages) ptx::barrier_wait(base + smem.empty + 8 * stage.at, stage.parity ^ 1);
      if (copies >= in_flight) {
        ptx::barrier_wait(base + smem.full + 8 * landed.at, landed.parity);
        landed.advance(p.stages);
      }
      const uint32_t bytes = min(F::kUnitTiles, share.tiles - tile) * F::kTileBytes;
      const uint32_t full = base + smem.full + 8 * stage.at;
      ptx::barrier_expect(full, bytes);
      ptx::bulk_copy(base + stage.at * smem.unit_bytes, from + tile * F::kTileBytes, bytes, full, policy);
      stage.advance(p.stages);
    }
  }
}

// ---- Consumers ----

// A lane's places in shared memory. They move by constants: the loop is bound by what it issues, so an
// address computed again is time lost.
struct Places {
  uint32_t codes, scales, zeros;  // of the warp's first tile of a unit in the ring
  uint32_t x, x_swapped;          // columns 0..63 and, 64 on, 64..127
  uint32_t factors, sums;         // of x
};

// Columns of a product that are no token's or limb's get another's numbers, and their sums are not used.
template <class F>
__device__ Places first_places(const XLimbs& limbs, uint32_t base, int warp, int lane) {
  const int column = lane / 4, q = lane % 4;
  const int token = min(column % 2, limbs.m - 1);
  const int limb = std::is_same_v<F, Mxfp4> ? 0 : min(column / 2, XLimbs::kLimbs - 1);
  const uint32_t ring = base + warp * F::kTileBytes, swap = (token & 1) * 64;
  const uint32_t x = limbs.tile(warp) + token * XLimbs::kTokenBytes + limb * XLimbs::kLimbBytes + q * 16;
  // Lane q has limb q of tokens 0 and 1: their factors, but their sums for limb 0 alone. The others
  // find the zeros of tokens that do not exist.
  return {ring + lane * 16,
          ring + F::kCodeBytes + column * F::kScaleBytes,
          ring + F::kZeroOffset + column * F::kZeroBytes,
          x + swap,
          x - swap,
          limbs.factors(warp),
          limbs.sums(warp) + q * 8};
}

// A sum, and the squares of the two numbers of a word.
template <class Sum>
__device__ __forceinline__ Sum add_squares(uint32_t word, Sum sum) {
  const float2 two = as_floats(word, bf16{});
  const auto a = static_cast<Sum>(two.x), b = static_cast<Sum>(two.y);
  return fma(a, a, fma(b, b, sum));
}
template <class Sum>
__device__ __forceinline__ Sum sum_over_warp(Sum sum) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  return sum;
}

// The gain of the columns that a lane of fetch_x copies: of its first tiles fetched while x is under way.
struct Gain {
  static constexpr int kEarly = 2, kStep = 2 * kConsumerWarps;
  const Vector& gain;  // bf16
  const int first_column, first;
  uint4 early[kEarly];

  __device__ Gain(const Vector& of_all, int column, int warp, int lane)
      : gain(of_all),
        first_column(column + lane % 16 * 8),
        first(warp + lane / 16 * kConsumerWarps),
        early() {
    if (!gain) return;
#pragma unroll
    for (int i = 0; i < kEarly; ++i) early[i] = of_tile(first + i * kStep);
  }
  __device__ uint4 of_tile(int tile) const {
    const int column = first_column + tile * StripLayout::kCols;
    return column < gain.size ? __ldcg(reinterpret_cast<const uint4*>(gain.as<uint16_t>() + column))
                              : uint4{};
  }
  // Rounds x times the gain to x's type, where fetch_x brought it, and adds up the squares of x.
  template <int kTokens>
  __device__ void apply(const XLimbs& limbs, int lane, float (&squares)[kTokens]) const {
#pragma unroll
    for (float& sum : squares) sum = 0;
    for (int tile = first; tile < limbs.tiles; tile += kStep) {
      const uint4 g = tile == first ? early[0] : tile == first + kStep ? early[1] : of_tile(tile);
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        const uint32_t at = limbs.tile(tile) + token * XLimbs::kTokenBytes + lane % 16 * 16;
        const uint4 v = ptx::load_shared16(at);
        ptx::store_shared16(at, {product(v.x, g.x), product(v.y, g.y), product(v.z, g.z), product(v.w, g.w)});
        for (const uint32_t word : {v.x, v.y, v.z, v.w}) squares[token] = add_squares(word, squares[token]);
      }
    }
    __syncwarp();
  }
  __device__ static uint32_t product(uint32_t a, uint32_t b) {
    const float2 x = as_floats(a, bf16{}), y = as_floats(b, bf16{});
    return ptx::pack_two(x.x * y.x, x.y * y.y, /*is_bf16=*/true);
  }
};

// The sum of the squares of a token, by a warp: of numbers in memory.
template <class Sum>
__device__ Sum sum_of_squares(const Matrix& x, bool is_aligned, int token, int lane) {
  const auto* row = x.row<const uint16_t>(token);
  const int columns = static_cast<int>(x.cols), whole = is_aligned ? columns / 8 * 8 : 0;
  Sum sum = 0;
#pragma unroll 4
  for (int i = lane * 8; i < whole; i += 256) {
    const uint4 v = __ldcg(reinterpret_cast<const uint4*>(row + i));
    for (const uint32_t word : {v.x, v.y, v.z, v.w}) sum = add_squares(word, sum);
  }
  for (int i = whole + lane; i < columns; i += 32) sum = add_squares(uint32_t{__ldcg(row + i)}, sum);
  return sum_over_warp(sum);
}

// 1 / sqrt(mean of x^2 + eps), by a warp. Squares of numbers beyond 2^64 overflow float32 and those of
// numbers below 2^-63 vanish in it.
__device__ float inverse_rms(const Params& p, const Smem& smem, const char* shared, int token, int lane) {
  const Matrix& x = p.problem.x;
  float sum = 0;
  if (p.has_squares) {
    const auto* squares = reinterpret_cast<const float*>(shared + smem.squares) + token * kConsumerThreads;
#pragma unroll
    for (int i = 0; i < kConsumerWarps; ++i) sum += squares[i * 32 + lane];
    sum = sum_over_warp(sum);
  } else {
    sum = sum_of_squares<float>(x, p.is_x_aligned, token, lane);
  }
  const float mean = sum / static_cast<float>(x.cols) + static_cast<float>(p.problem.x_eps);
  if (sum <= 0x1p127f && mean >= 0x1p-100f) return rsqrtf(mean);
  const double exact = sum_of_squares<double>(x, p.is_x_aligned, token, lane);
  return static_cast<float>(1 / sqrt(exact / static_cast<double>(x.cols) + p.problem.x_eps));
}

// The sums of tokens that do not exist.
template <class F>
__device__ void clear_sums(const XLimbs& limbs, int warp, int lane) {
  for (int tile = warp; tile < limbs.tiles; tile += kConsumerWarps)
    for (int i = lane; i < F::kGroups * XLimbs::kRowBytes / 4; i += 32)
      ptx::store_shared4(limbs.sums(tile) + i * 4, 0);
  __syncwarp();
}

// x of an MXFP4 weight: what fetch_x brought, in the order in which the lanes of a warp want it. A lane's 16
// bytes are the columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of two steps:
//   [pair of steps; neighbours swapped for odd tokens][q][step of the pair][4 numbers]
//
// Where 2^e <= max |x| < 2^(e + 1) in a tile of a token, x is there times 2^(kXExponent - e), so that its
// products with codes times 2^-126 are far from both ends of float32. Byte scales are taken for exponents of
// float32. The tile's factor makes up for all that, but for 2^kSumExponent, which is left to the end: with it
// the factors of small x would be too small for float32.
constexpr int kXExponent = 99, kSumExponent = -30;
constexpr int kFactorExponent = 126 - kXExponent - (linear::kByteScaleBias - 127) - kSumExponent;

__device__ void order_x(const XLimbs& limbs, int warp, int lane) {
  const int step = lane / 8, q = lane % 4, second = lane / 4 % 2;
  const auto power = [](int e) { return __uint_as_float(static_cast<uint32_t>(e + 127) << 23); };
  for (int tile = warp; tile < limbs.tiles; tile += kConsumerWarps) {
    for (int token = 0; token < limbs.m; ++token) {
      const uint32_t at = limbs.tile(tile) + token * XLimbs::kTokenBytes, swap = (token & 1) * 64;
      uint32_t words[2] = {ptx::load_shared4(at + lane * 4), ptx::load_shared4(at + 128 + lane * 4)};
      const uint32_t pair = __vmaxu2(words[0] & 0x7fff7fffu, words[1] & 0x7fff7fffu);
      const uint32_t largest = __reduce_max_sync(~0u, max(pair & 0xffffu, pair >> 16));
      // Smaller numbers stay as much smaller than those of 2^kXExponent as they are.
      const int e = max(static_cast<int>(largest >> 7) - 127, -126 - kFactorExponent), up = kXExponent - e;
      const uint32_t to = at + ((step / 2 * 64) ^ swap) + q * 16 + step % 2 * 8 + second * 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // by two factors, because one might be too large
        const float2 x = as_floats(words[i], bf16{});
        const float half = power(up / 2), rest = power(up - up / 2);
        ptx::store_shared4(to + i * 128, ptx::pack_two(x.x * half * rest, x.y * half * rest, true));
      }
      if (lane == 0) ptx::store_shared_float(limbs.factors(tile) + token * 4, power(e + kFactorExponent));
    }
  }
  __syncwarp();
}

template <class F>
struct Weights {
  uint4 codes[F::kVectors];
  float scales[F::kGroups][2];  // of rows g and g + 8
  int zeros[F::kGroups][2];
  float offsets[F::kGroups][2];

  __device__ __forceinline__ void load(const Places& at, int offset) {
#pragma unroll
    for (int i = 0; i < F::kVectors; ++i) codes[i] = ptx::load_shared16(at.codes + offset + i * 512);
#pragma unroll
    for (int i = 0; i < 2 * F::kGroups; ++i) {
      scales[i / 2][i % 2] = ptx::load_shared_float(at.scales + offset + i * 32);
      if constexpr (F::kHasZeros) zeros[i / 2][i % 2] = ptx::load_shared_s8(at.zeros + offset + i * 8);
      if constexpr (F::kHasOffsets)
        offsets[i / 2][i % 2] = ptx::load_shared_float(at.zeros + offset + i * 32);
    }
  }

  // The operand of 32 columns.
  __device__ __forceinline__ void bytes(int block, uint32_t (&a)[4]) const {
    if constexpr (F::kBits == 8) {
      const uint4& v = codes[block];
      a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    } else {
      const uint4& v = codes[block / 2];
      const uint32_t words[2] = {block % 2 ? v.z : v.x, block % 2 ? v.w : v.y};
#pragma unroll
      for (int i = 0; i < 4; ++i)  // stored as code + 8
        a[i] = ptx::flip_and_mask(i % 2 ? words[i / 2] : words[i / 2] << 4, 0x88888888u, 0xf0f0f0f0u);
    }
  }
};

template <>
struct Weights<Mxfp4> {
  uint4 codes[Mxfp4::kVectors];
  ByteScales scales;

  __device__ __forceinline__ void load(const Places& at, int offset) {
#pragma unroll
    for (int i = 0; i < Mxfp4::kVectors; ++i) codes[i] = ptx::load_shared16(at.codes + offset + i * 512);
    const float2 two = ptx::load_shared_float2(at.scales + offset);
    scales = {{__float_as_uint(two.x), __float_as_uint(two.y)}};
  }
};

// acc += w x of the warp's tile number `index` of a unit.
template <class F, int kTokens>
__device__ __forceinline__ void multiply(float (&acc)[4], const Weights<Mxfp4>& w, const Places& at,
                                         int index, uint32_t step) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(w.codes);
  float of_tile[4];
#pragma unroll
  for (int j = 0; j < Mxfp4::kGroups; ++j) {
    const uint4 x = ptx::load_shared16((j % 2 ? at.x_swapped + 64 : at.x) + j / 2 * 128 + index * step);
    const float scale[2] = {w.scales.as_exponent(0, j), w.scales.as_exponent(1, j)};
    float sum[4] = {};
    uint32_t a[4];
    StripCodes<QF_FP4_E2M1, bf16>::place_bits(words[2 * j], a);
    ptx::mma_m16n8k16<bf16>(sum, a, x.x, x.y, sum);
    StripCodes<QF_FP4_E2M1, bf16>::place_bits(words[2 * j + 1], a);
    ptx::mma_m16n8k16<bf16>(sum, a, x.z, x.w, sum);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kTokens == 1 && i % 2) continue;
      of_tile[i] = j == 0 ? scale[i / 2] * sum[i] : fmaf(scale[i / 2], sum[i], of_tile[i]);
    }
  }
  const float2 factor = ptx::load_shared_float2(at.factors + index * step);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (kTokens == 1 && i % 2) continue;
    acc[i] = fmaf(of_tile[i], i % 2 ? factor.y : factor.x, acc[i]);
  }
}

// The same, but for the limbs' weights.
template <class F, int kTokens>
__device__ __forceinline__ void multiply(float (&acc)[4], const Weights<F>& w, const Places& at, int index,
                                         uint32_t step) {
  uint4 x;
  float of_tile[4];
#pragma unroll
  for (int j = 0; j < F::kGroups; ++j) {
    int sum[4] = {};
#pragma unroll
    for (int b = j * F::kBlocks; b < (j + 1) * F::kBlocks; ++b) {
      uint32_t a[4];
      w.bytes(b, a);
      if (b % 2 == 0) x = ptx::load_shared16((b < 2 ? at.x : at.x_swapped + 64) + index * step);
      ptx::mma_m16n8k32_s8(sum, a, b % 2 ? x.z : x.x, b % 2 ? x.w : x.y);
    }
    float2 x_sum = {};
    if constexpr (F::kHasSums)
      x_sum = ptx::load_shared_float2(at.sums + index * step + j * XLimbs::kRowBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kTokens == 1 && i % 2) continue;
      auto total = static_cast<float>(sum[i]);
      if constexpr (F::kHasZeros)
        total = fmaf(-static_cast<float>(w.zeros[j][i / 2]), i % 2 ? x_sum.y : x_sum.x, total);
      of_tile[i] = j == 0 ? w.scales[j][i / 2] * total : fmaf(w.scales[j][i / 2], total, of_tile[i]);
      if constexpr (F::kHasOffsets)
        of_tile[i] = fmaf(w.offsets[j][i / 2], i % 2 ? x_sum.y : x_sum.x, of_tile[i]);
    }
  }
  const float2 factor = ptx::load_shared_float2(at.factors + index * step);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (kTokens == 1 && i % 2) continue;
    acc[i] = fmaf(of_tile[i], i % 2 ? factor.y : factor.x, acc[i]);
  }
}

// The limbs' parts, in every lane of a row.
__device__ void add_limbs(float (&acc)[4], int lane) {
  const int limb = lane % 4;
  const float weight = limb < XLimbs::kLimbs ? __uint_as_float((127u + 8 * limb) << 23) : 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    acc[i] *= weight;
    acc[i] += __shfl_xor_sync(~0u, acc[i], 1);
    acc[i] += __shfl_xor_sync(~0u, acc[i], 2);
  }
}

template <class F, int kTokens>
__device__ void consume(const Params& p, const Smem& smem, const StripShare& share, const XLimbs& limbs,
                        char* shared, int warp, int lane) {
  const uint32_t base = ptx::shared_address(shared);
  const Places first = first_places<F>(limbs, base, warp, lane);
  const uint32_t step = kConsumerWarps * smem.x_tile_bytes;
  const uint32_t ring_bytes = p.stages * smem.unit_bytes, to_empty = smem.empty - smem.full;
  uint32_t in_ring = 0, full = base + smem.full, parity = 0;
  Cursor part = {0, 1};
  for (int strip = share.first_strip; strip < p.strips; strip += share.strip_step) {
    float acc[4] = {};
    Places at = first;
    for (int unit = 0; unit < share.tiles; unit += F::kUnitTiles) {
      const int tile = unit + warp;
      at.codes = first.codes + in_ring, at.scales = first.scales + in_ring, at.zeros = first.zeros + in_ring;
      ptx::barrier_wait(full, parity);
      const bool has_second = F::kTilesPerWarp > 1 && tile + kConsumerWarps < share.tiles;
      Weights<F> w[2];
      w[0].load(at, 0);
      if (has_second) w[1].load(at, kConsumerWarps * F::kTileBytes);
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(full + to_empty);
      if (has_second) {
        multiply<F, kTokens>(acc, w[0], at, 0, step);
        multiply<F, kTokens>(acc, w[1], at, 1, step);
      } else if (tile < share.tiles) {
        multiply<F, kTokens>(acc, w[0], at, 0, step);
      }
      at.x += F::kTilesPerWarp * step, at.x_swapped += F::kTilesPerWarp * step;
      at.factors += F::kTilesPerWarp * step, at.sums += F::kTilesPerWarp * step;
      in_ring += smem.unit_bytes, full += 8;
      if (in_ring == ring_bytes) in_ring = 0, full = base + smem.full, parity ^= 1;
    }

    // hand this warp's part to the epilogue warp
    if constexpr (std::is_same_v<F, Mxfp4>) {  // every lane of a row has the same
#pragma unroll
      for (float& sum : acc) sum *= __uint_as_float(static_cast<uint32_t>(127 + kSumExponent) << 23);
    } else {
      add_limbs(acc, lane);
    }
    ptx::barrier_wait(base + smem.parts_empty + 8 * part.at, part.parity);
    float* out =
        reinterpret_cast<float*>(shared + smem.parts) + (part.at * kConsumerWarps + warp) * smem.part_floats;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = i % 2, row = lane / 4 + i / 2 * 8;
      if (token < smem.m) out[token * kPartRow + row] = acc[i];
    }
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(base + smem.parts_full + 8 * part.at);
    part.advance(kPartBuffers);
  }
}

// ---- Epilogue ----

// Parts of a strip are added by a warp: lanes 0..15 are the rows of even tokens, 16..31 those of odd ones.
// All loads are under way before the first addition.
__device__ __forceinline__ float sum_of_parts(const float* part, int num_parts, int part_floats) {
  float parts[kConsumerWarps];
#pragma unroll
  for (int i = 0; i < kConsumerWarps; ++i) parts[i] = part[min(i, num_parts - 1) * part_floats];
#pragma unroll
  for (int i = 0; i < kConsumerWarps; ++i) parts[i] = i < num_parts ? parts[i] : 0.0f;
  return ((parts[0] + parts[4]) + (parts[1] + parts[5])) + ((parts[2] + parts[6]) + (parts[3] + parts[7]));
}
static_assert(kConsumerWarps == 8 && kMaxCluster <= 8, "a part is a warp's or a rank's");

// In a cluster: adds the warps' parts, and sends the sum to the rank that is to store it.
__device__ void forward_strips(const Params& p, const Smem& smem, const StripShare& share, char* shared,
                               int lane) {
  const uint32_t base = ptx::shared_address(shared);
  const int row = lane % 16;
  const auto* parts = reinterpret_cast<const float*>(shared + smem.parts) + row;
  Cursor part;
  int owner = 0, slot = 0;
  for (int strip = share.first_strip; strip < p.strips; strip += share.strip_step) {
    ptx::barrier_wait(base + smem.parts_full + 8 * part.at, part.parity);
    const uint32_t barrier = ptx::address_in_block(base + smem.inbox_full + 8 * slot, owner);
    const uint32_t inbox = ptx::address_in_block(
        base + smem.inbox + (slot * p.cluster + share.rank) * smem.part_floats * 4, owner);
    for (int token = lane / 16; token < smem.m; token += 2) {
      const float* of_token = parts + part.at * kConsumerWarps * smem.part_floats + token * kPartRow;
      const float sum = sum_of_parts(of_token, kConsumerWarps, smem.part_floats);
      ptx::store_async(inbox + (token * kPartRow + row) * 4, sum, barrier);
    }
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(base + smem.parts_empty + 8 * part.at);
    part.advance(kPartBuffers);
    if (++owner == p.cluster) owner = 0, ++slot;
  }
}

// Adds the parts of the strips that are this block's to store, its warps' or its cluster's, and stores them.
template <int kTokens>
__device__ void store_strips(const Params& p, const Smem& smem, const StripShare& share, char* shared,
                             int lane) {
  constexpr int kPairs = (kTokens + 1) / 2;
  const Problem& problem = p.problem;
  const uint32_t base = ptx::shared_address(shared);
  const bool is_gated = problem.weight.is_gated, is_alone = p.cluster == 1;
  const int row = lane % 16, num_parts = is_alone ? kConsumerWarps : p.cluster;
  const uint32_t barriers = base + (is_alone ? smem.parts_full : smem.inbox_full);
  const auto* parts = reinterpret_cast<const float*>(shared + (is_alone ? smem.parts : smem.inbox)) + row;
  float factor = 1;  // of the lane's token
  if (problem.x_gain) {
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      const float of_token = inverse_rms(p, smem, shared, token, lane);
      if (token == lane / 16 || kTokens == 1) factor = of_token;
    }
  }
  Cursor part;
  for (int strip = share.first_strip + share.rank * share.strip_step; strip < p.strips;
       strip += p.cluster * share.strip_step) {
    // Of a gated weight rows 0..7 are gates, and 8 lanes up are their ups.
    const linear::ColumnOfRows<kPairs> at = {int64_t{strip} * (is_gated ? 8 : 16) + row, lane / 16, 2};
    const bool is_column = at.column < problem.n_out && !(is_gated && row >= 8);
    linear::EpilogueInputs<kPairs> inputs;
    if (is_column) inputs.load(problem, at);
    ptx::barrier_wait(barriers + 8 * part.at, part.parity);
    const float* of_strip = parts + part.at * num_parts * smem.part_floats;
    float sums[kPairs], ups[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      sums[i] = factor *
                sum_of_parts(of_strip + min(at.row(i), smem.m - 1) * kPartRow, num_parts, smem.part_floats);
    __syncwarp();
    if (is_alone && lane == 0) ptx::barrier_arrive(base + smem.parts_empty + 8 * part.at);
    part.advance(is_alone ? kPartBuffers : p.inbox_slots);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) ups[i] = __shfl_down_sync(~0u, sums[i], 8);
    if (is_column) linear::finish_rows<kPairs>(problem, p.staged, at, sums, ups, inputs);
  }
}

template <class F, int kTokens>
__global__ void __launch_bounds__(kThreads, 2) kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char shared[];
  const Smem smem(p, kTokens, F::kUnitTiles * F::kTileBytes, F::kGroups, F::kHasSums);
  const StripShare share = linear::share_of_block(p.tiles, p.cluster);
  const uint32_t base = ptx::shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  ptx::allow_next_kernel();

  if (warp < kConsumerWarps) {
    if (p.cluster > 1) ptx::cluster_arrive();
    const XLimbs limbs = {base + smem.x, smem.m, share.tiles, smem.x_tile_bytes};
    if constexpr (F::kHasSums) clear_sums<F>(limbs, warp, lane);
    ptx::wait_for_previous_kernel();
    const Matrix& x = p.problem.x;
    const int first_column = share.first_tile * StripLayout::kCols;
    linear::fetch_x<kConsumerWarps>(x, first_column, p.is_x_aligned, limbs, warp, lane);
    const Gain gain(p.problem.x_gain, first_column, warp, lane);
    ptx::wait_copies();
    __syncwarp();
    if (p.problem.x_gain) {
      float squares[kTokens];
      gain.apply(limbs, lane, squares);
      auto* to = reinterpret_cast<float*>(shared + smem.squares) + threadIdx.x;
#pragma unroll
      for (int token = 0; token < kTokens && p.has_squares; ++token)
        to[token * kConsumerThreads] = squares[token];
    }
    if constexpr (std::is_same_v<F, Mxfp4>) order_x(limbs, warp, lane);
    else if (x.dtype == DType::bf16) linear::convert_x<kConsumerWarps, F, bf16>(limbs, warp, lane);
    else linear::convert_x<kConsumerWarps, F, f16>(limbs, warp, lane);
    ptx::named_barrier_sync(kReady, kThreads);
    consume<F, kTokens>(p, smem, share, limbs, shared, warp, lane);
    return;
  }
  if (warp == kProducerWarp) {
    init_barriers(p, smem, base, lane);
    if (p.cluster > 1) ptx::cluster_arrive();
    ptx::named_barrier_arrive(kReady, kThreads);  // the producer waits for nobody
    if (lane == 0) produce<F>(p, smem, share, base);
    __syncwarp();
    ptx::wait_for_previous_kernel();
    if (p.cluster == 1) return;
  } else {
    if (p.cluster > 1) ptx::cluster_arrive();
    ptx::wait_for_previous_kernel();
    ptx::named_barrier_sync(kReady, kThreads);
    if (p.cluster > 1) {
      ptx::cluster_wait();
      forward_strips(p, smem, share, shared, lane);
      return;
    }
  }
  store_strips<kTokens>(p, smem, share, shared, lane);
}

// ---- The host's side ----

// How a call is laid out on the GPU. No stages: it does not fit.
struct Plan : Sizes {
  int grid = 0, smem_bytes = 0;
};

// As many stages as fit `budget` and there is work for; none where that is too few to stream.
Plan plan_for(const Problem& p, int cluster, int64_t budget) {
  constexpr int64_t kMinStages = 3;
  const StripLayout& w = p.strips.layout;
  const int64_t clusters = std::min<int64_t>(
      resident_clusters(kernel<Format<4, 1, 0>, 1>, p.device.id, cluster, kThreads), w.strips);
  if (clusters == 0) return {};
  const int tiles_of_unit = unit_tiles(code_bits(w.format));
  const int64_t strips = ceil_div(w.strips, clusters);  // of a cluster
  const int64_t slots = cluster == 1 ? 0 : ceil_div(strips, cluster);
  const int64_t units = strips * ceil_div(ceil_div(w.tiles, cluster), tiles_of_unit);
  if (ceil_div(w.tiles, cluster) * p.m * XLimbs::kTokenBytes > budget || slots * cluster > budget) return {};
  Plan plan;
  plan.m = static_cast<int>(p.m), plan.cluster = cluster, plan.inbox_slots = static_cast<int>(slots);
  plan.has_squares = p.x_gain && cluster == 1;
  plan.strips = static_cast<int>(w.strips), plan.tiles = static_cast<int>(w.tiles);
  plan.x_tiles = static_cast<int>(ceil_div(w.tiles, cluster));
  plan.grid = static_cast<int>(clusters * cluster);
  const auto bytes = [&](int64_t stages) {
    plan.stages = static_cast<int>(stages);
    return Smem(plan, plan.m, tiles_of_unit * w.tile_bytes, w.groups, w.has_zeros || w.has_offsets).bytes;
  };
  const int64_t fixed = bytes(0), each = bytes(1) - fixed;
  const int64_t stages = std::min((budget - fixed) / each, units);
  if (stages < std::min(kMinStages, units)) return {};
  plan.smem_bytes = bytes(stages);
  return plan;
}

// Splitting k over a cluster saves of each block a part of making x limbs, and costs some time a strip: it
// pays where there are few strips. Beyond that a cluster is as large as x demands.
//
// Blocks of half an SM, so that the next kernel's are beside them and begin with full rings (the four layers
// of an 8B block in 37.8 us instead of 39.8). A block of a whole SM between them would wait for both halves,
// so that the half is taken even where the layer alone would do without.
Plan make_plan(const Problem& p) {
  constexpr int64_t kReserved = 1024;  // of shared memory, by the system for each block
  const int64_t whole = gpu_max_smem_bytes(p.device.id), half = (whole + kReserved) / 2 - kReserved;
  const StripLayout& w = p.strips.layout;
  const bool is_short = 3 * p.m * gpu_num_sms(p.device.id) > 2 * w.strips && w.tiles >= unit_tiles(4);
  for (int cluster = is_short ? 2 : 1; cluster <= 2; cluster *= 2)
    if (const Plan plan = plan_for(p, cluster, half); plan.stages > 0) return plan;
  for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2)
    if (const Plan plan = plan_for(p, cluster, whole); plan.stages > 0) return plan;
  return {};
}

// Not f16, which the gain may overflow before x is normalized.
bool takes_gain(const Problem& p) {
  return p.x.dtype == DType::bf16 && p.x_gain.dtype == DType::bf16 && p.k % 8 == 0 &&
         reinterpret_cast<uintptr_t>(p.x_gain.data) % 16 == 0;
}

Verdict accepts(const Problem& p) {
  const Verdict v = Requirements()
                        .require(p.strips.is_there, "the weight is not packed (qf_weight_pack)")
                        .require(is_integer(p.weight.format) ||
                                     (linear::has_byte_scales(p.strips.layout) && p.x.dtype == DType::bf16),
                                 "the weight is not int4, int8 or, with x in bf16, mxfp4")
                        .require(p.strips.layout.groups <= 4, "groups are no multiples of 32 columns")
                        .require(!p.has_act_quant(), "x is quantized or to be quantized")
                        .require(p.x.dtype == DType::f16 || p.x.dtype == DType::bf16, "x is not f16 or bf16")
                        .require(!p.x_gain || takes_gain(p),
                                 "x or x_gain is not bf16, or x_gain or k not a multiple of 16 bytes")
                        .require(p.m <= kMaxTokens, "m is more than 2");
  if (!v) return v;
  return Requirements().require(make_plan(p).stages > 0,
                                "m rows of x do not fit shared memory beside the weight");
}

template <class F>
void launch_format(const Problem& p, float* staged, const Launch& launch) {
  const Plan plan = make_plan(p);
  Params params = {};
  static_cast<Sizes&>(params) = plan;
  params.problem = p, params.staged = staged;
  params.is_x_aligned = reinterpret_cast<uintptr_t>(p.x.data) % 16 == 0 && p.x.row_stride % 8 == 0;
  LaunchShape shape = {dim3(static_cast<unsigned>(plan.grid)), dim3(kThreads),
                       static_cast<size_t>(plan.smem_bytes), /*overlap_previous=*/true};
  shape.cluster = static_cast<unsigned>(plan.cluster);
  choose_value<1, 2>(static_cast<int>(p.m), [&](auto tokens) {
    launch_kernel("linear_stream_sm90", kernel<F, tokens.value>, shape, launch, params);
  });
}

void launch(const Problem& problem, const Launch& launch) {
  linear::launch_canonical(problem, launch, [&](const Problem& p, float* staged) {
    const StripLayout& w = p.strips.layout;
    if (w.format == QF_FP4_E2M1) return launch_format<Mxfp4>(p, staged, launch);
    choose_value<4, 8>(w.format == QF_INT4 ? 4 : 8, [&](auto bits) {
      choose_value<1, 2, 4>(w.groups, [&](auto groups) {
        choose_value<0, 1, 4>(w.has_offsets ? 4
                              : w.has_zeros ? 1
                                            : 0,
                              [&](auto zero_bytes) {
                                launch_format<Format<bits.value, groups.value, zero_bytes.value>>(p, staged,
                                                                                                  launch);
                              });
      });
    });
  });
}

}  // namespace

extern const Kernel<Problem> entry = {
    "linear_stream_sm90",         Target::sm90, accepts, linear::canonical_workspace_bytes, launch,
    /*is_batch_invariant=*/false,
    /*normalizes_x=*/true};

}  // namespace quantfuse::linear_stream_sm90
