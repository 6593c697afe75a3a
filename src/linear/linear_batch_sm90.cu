// SPDX-License-Identifier: Apache-2.0
//
// y[m,n] = epilogue( sum_k x[m,k] * ((q[n,k] - z[n,g]) * s[n,g] + o[n,g]) )     m <= 16, x: f16 | bf16
//
// For a batch of decoding, where the weight is still the traffic. A block holds its part of x in shared
// memory and streams strips of 16 rows of the weight past it, each byte once:
//   gmem w --bulk copies--> smem ring --> regs --decode--> 16-bit numbers --mma--> sums of a group
//     --* s--> totals --> smem --> y
// Codes less their zero points are exact in 16 bits and a group's sum is scaled in float32, so that nothing
// is rounded that the formula does not round. An offset is added as o times the sum of its group's x, which a
// block makes of its x once. The byte scales of MXFP4 are part of the numbers, exactly, if these are bf16:
// their sums go on over all of a strip.
//
// Work: one block an SM; cluster c of C blocks takes strips c, c + clusters, ...; the blocks of a cluster
// split k, so that x is read C times less, and the consumer warps of a block split theirs tile by tile:
//   strip of 16 rows, C = 2:   | rank 0: tiles 0 .. 15              | rank 1: tiles 16 .. 31             |
//     stage                    | w0 w1 w2 ...                   w15 | w0 w1 ...                      w15 |
// Epilogue warps add the warps' parts in a fixed order while the consumers go on; in a cluster one of them
// sends the sum to one rank (through distributed shared memory), where the other adds the ranks' in rank
// order: no atomics, and the same bits on every run.
//
// The kernel before may still be running (programmatic dependent launch): until it has ended only the weight
// is read.
#include <algorithm>

#include "core/choose.h"
#include "cuda/cursor.h"
#include "cuda/occupancy.h"
#include "cuda/ptx/async_copy.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/dependent_launch.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/shared_memory.h"
#include "linear/linear_canonical.h"
#include "linear/strip_codes.h"
#include "linear/strip_share.h"
#include "linear/x_tiles.h"

namespace quantfuse::linear_batch_sm90 {
using linear::Problem;
using linear::StripLayout;
using linear::StripShare;
namespace {

constexpr int kMaxTokens = 16, kMaxCluster = 8, kEpilogueWarps = 2;
constexpr int kSteps = StripLayout::kCols / StripLayout::kStepCols;
// Stages under way at most: two for the reason that linear_stream_sm90.cu has. Up to 8 tokens a third pays
// where a block has many strips (8192 x 28672 with 4 tokens: 33.6 us in place of 34.1; E4M3, 28672 x 4096
// with 1: 28.3 in place of 31.4) and costs where it has few (4096 x 4096 with 4: 5.18 in place of 5.06).
constexpr int kInFlight = 2, kInFlightOfMany = 3;
constexpr int kXRowBytes = StripLayout::kCols * 2;
constexpr int kPartRow = StripLayout::kRows + 4;  // floats from token to token in a part: other banks
// One buffer of parts: what a second one takes from the ring costs more than it brings (57344 x 8192 with 16
// tokens: 81.4 us in place of 86.1; 4096 x 4096 with 4: 5.06 in place of 5.17).
constexpr int kPartBuffers = 1, kMaxInboxSlots = 4;
constexpr int kReady = 1;  // named barrier: those in memory are initialised (and, with 16 tokens, x is there)

template <int kTokens_, bool kIs4Bit>
struct Shape {
  static constexpr int kTokens = kTokens_;
  static constexpr int kWarps = kIs4Bit ? 16 : 8;  // of consumers; each has a tile of a stage
  static constexpr int kProducerWarp = kWarps;
  static constexpr int kThreads = 32 * (kWarps + 1 + kEpilogueWarps);
  static constexpr int kPartFloats = kTokens * kPartRow;
  static constexpr int kManyStrips = kIs4Bit ? 20 : 12;
};

struct Sizes {
  int m = 0, strips = 0, tiles = 0;  // of x; of the weight; of a strip
  int cluster = 0;                   // blocks that split k
  int stages = 0, in_flight = 0;     // of the ring; under way at most
  int tile_bytes = 0;
  int sum_groups = 0;   // of a tile of x: for a weight with offsets
  int inbox_slots = 0;  // for sums of strips that a block makes for its cluster; 0 without one
};

// Where things are in shared memory, which begins with x. Made by the host: a block has better things to do.
struct Smem {
  template <class S>
  static Smem of(const Sizes& p) {
    Smem at;
    const int x_tiles = (p.tiles + p.cluster - 1) / p.cluster;
    at.x_tile_bytes = p.m * kXRowBytes;
    at.stage_bytes = S::kWarps * p.tile_bytes;
    at.ring = x_tiles * at.x_tile_bytes;
    at.sums = at.ring + p.stages * at.stage_bytes;
    at.parts = at.sums + x_tiles * p.sum_groups * S::kTokens * 4;
    at.inbox = at.parts + kPartBuffers * S::kWarps * S::kPartFloats * 4;
    at.full = at.inbox + p.inbox_slots * p.cluster * S::kPartFloats * 4;
    at.empty = at.full + p.stages * 8;
    at.parts_full = at.empty + p.stages * 8;
    at.parts_empty = at.parts_full + kPartBuffers * 8;
    at.inbox_full = at.parts_empty + kPartBuffers * 8;
    at.credit = at.inbox_full + p.inbox_slots * 8;
    at.bytes = at.credit + p.inbox_slots * p.cluster * 8;
    return at;
  }
  int x_tile_bytes, stage_bytes;
  int ring, sums, parts, inbox, full, empty, parts_full, parts_empty, inbox_full, credit;  // offsets
  int bytes;
};

struct Params : Sizes {
  Smem smem;
  Problem problem;
  float* staged;  // see finish_rows
  bool is_x_aligned;
};

template <class S>
using XTilesOf = linear::XTiles<S::kTokens, S::kWarps>;

template <class S>
__device__ uint32_t inbox_bytes(const Params& p) {
  return p.cluster * S::kTokens * StripLayout::kRows * 4;
}

// By the lanes of a warp side by side: the first copies wait for it.
template <class S>
__device__ void init_barriers(const Params& p, uint32_t base, int lane) {
#pragma unroll 1
  for (int s = lane; s < p.stages; s += 32) {
    ptx::barrier_init(base + p.smem.full + 8 * s, 1);
    ptx::barrier_init(base + p.smem.empty + 8 * s, S::kWarps);
  }
  if (lane < kPartBuffers) {
    ptx::barrier_init(base + p.smem.parts_full + 8 * lane, S::kWarps);
    ptx::barrier_init(base + p.smem.parts_empty + 8 * lane, kEpilogueWarps);
  }
  if (lane < p.inbox_slots) {
    ptx::barrier_init(base + p.smem.inbox_full + 8 * lane, 1);
    ptx::barrier_expect(base + p.smem.inbox_full + 8 * lane, inbox_bytes<S>(p));
  }
  if (lane < p.inbox_slots * p.cluster) ptx::barrier_init(base + p.smem.credit + 8 * lane, 1);
  ptx::barrier_init_fence();
  __syncwarp();
}

// One thread copies stage after stage.
template <class S>
__device__ void produce(const Params& p, const StripShare& share, uint32_t base) {
  const uint64_t policy = ptx::evict_first_policy();
  const int in_flight = min(p.in_flight, p.stages);
  Cursor stage, landed;
  int copies = 0;
  for (int strip = share.first_strip; strip < p.strips; strip += share.strip_step) {
    const uint8_t* from =
        p.problem.strips.data + (static_cast<int64_t>(strip) * p.tiles + share.first_tile) * p.tile_bytes;
#pragma unroll 1
    for (int tile = 0; tile < share.tiles; tile += S::kWarps, ++copies) {
      if (copies >= p.stages) ptx::barrier_wait(base + p.smem.empty + 8 * stage.at, stage.parity ^ 1);
      if (copies >= in_flight) {
        ptx::barrier_wait(base + p.smem.full + 8 * landed.at, landed.parity);
        landed.advance(p.stages);
      }
      const uint32_t bytes = min(S::kWarps, share.tiles - tile) * p.tile_bytes;
      const uint32_t full = base + p.smem.full + 8 * stage.at;
      ptx::barrier_expect(full, bytes);
      ptx::bulk_copy(base + p.smem.ring + stage.at * p.smem.stage_bytes, from + tile * p.tile_bytes, bytes,
                     full, policy);
      stage.advance(p.stages);
    }
  }
}

// ---- Consumers ----

enum class Zeros { none, bytes, offsets };

// How a weight is multiplied. kIsFolded: its byte scales are part of the numbers.
template <qf_format Format, class T_, int kGroups_, Zeros kZeros, bool kHasByteScales_ = false>
struct Kind {
  using T = T_;
  using Codes = StripCodes<Format, T>;
  static constexpr int kGroups = kGroups_;  // of a tile
  static constexpr bool kHasZeros = kZeros == Zeros::bytes, kHasOffsets = kZeros == Zeros::offsets;
  static constexpr bool kHasByteScales = kHasByteScales_;
  static constexpr bool kIsFolded = kHasByteScales && Codes::kFoldsByteScales;
};

// A warp's tile of the weight, in registers.
template <class K>
struct WeightTile {
  using Codes = typename K::Codes;
  uint4 vectors[Codes::kTileVectors];
  float scales[K::kGroups][2];  // of rows g and g + 8
  float offsets[K::kGroups][2];
  uint32_t terms[K::kGroups][2];

  __device__ __forceinline__ void load(uint32_t from, const StripLayout& w, int lane) {
#pragma unroll
    for (int i = 0; i < Codes::kTileVectors; ++i) vectors[i] = ptx::load_shared16(from + lane * 16 + i * 512);
    const uint32_t scales_at = from + Codes::kTileVectors * 512;
    ByteScales bytes = {};
    if constexpr (K::kHasByteScales) bytes = ByteScales::load(scales_at, lane);
#pragma unroll
    for (int i = 0; i < 2 * K::kGroups; ++i) {
      const int row = i * 8 + lane / 4;  // of group i / 2
      if constexpr (K::kIsFolded) {
        terms[i / 2][i % 2] = bytes.factor(i % 2, i / 2);
        continue;
      }
      scales[i / 2][i % 2] =
          K::kHasByteScales ? bytes.scale(i % 2, i / 2) : ptx::load_shared_float(scales_at + row * 4);
      terms[i / 2][i % 2] = Codes::term();
      if constexpr (K::kHasOffsets)
        offsets[i / 2][i % 2] = ptx::load_shared_float(from + w.zero_offset() + row * 4);
      if constexpr (K::kHasZeros)
        terms[i / 2][i % 2] = Codes::term(ptx::load_shared_s8(from + w.zero_offset() + row));
    }
  }
  __device__ __forceinline__ void decode(const Codes& codes, int step, uint32_t (&a)[4]) const {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(vectors);
    codes.decode(words + step * Codes::kStepWords, terms[step / (kSteps / K::kGroups)], a);
  }
};

// acc += w x. `x`: this lane's row of a tile's first matrices; `x_sums`: the sums of its tokens.
template <class S, class K>
__device__ __forceinline__ void multiply(float (&acc)[S::kTokens / 8][4], const WeightTile<K>& w,
                                         const typename K::Codes& codes, uint32_t x, uint32_t x_sums) {
  constexpr int kGroups = K::kIsFolded ? 1 : K::kGroups, kGroupSteps = kSteps / kGroups;
  constexpr int kBlocks = S::kTokens / 8;
  constexpr int kLoadSteps = 2 / kBlocks, kLoads = kSteps / kLoadSteps;
  constexpr int kAhead = 2;  // loads that are under way
  uint32_t b[kLoads][4];
  const auto load = [&](int i) { ptx::load_matrices(b[i], XTilesOf<S>::at_step(x, i * kLoadSteps)); };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(i);
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    float sums[2][4] = {};  // two chains of products: the two blocks of 8 tokens, or even and odd steps
    if constexpr (K::kIsFolded) {
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) sums[i / 4][i % 4] = acc[i / 4][i % 4];
    }
#pragma unroll
    for (int s = j * kGroupSteps; s < (j + 1) * kGroupSteps; ++s) {
      const int at = s / kLoadSteps;
      if (s % kLoadSteps == 0 && at + kAhead < kLoads) load(at + kAhead);
      uint32_t a[4];
      w.decode(codes, s, a);
      using T = typename K::T;
      if constexpr (kBlocks == 1) {
        const int half = s % 2;
        ptx::mma_m16n8k16<T>(sums[half], a, b[at][half * 2], b[at][half * 2 + 1], sums[half]);
      } else {
        ptx::mma_m16n8k16<T>(sums[0], a, b[at][0], b[at][1], sums[0]);
        ptx::mma_m16n8k16<T>(sums[1], a, b[at][2], b[at][3], sums[1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kBlocks == 1) sums[0][i] += sums[1][i];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        acc[block][i] =
            K::kIsFolded ? sums[block][i] : fmaf(sums[block][i], w.scales[j][i / 2], acc[block][i]);
    }
    if constexpr (K::kHasOffsets) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float2 x_sum = ptx::load_shared_float2(x_sums + (j * S::kTokens + block * 8) * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          acc[block][i] = fmaf(w.offsets[j][i / 2], i % 2 ? x_sum.y : x_sum.x, acc[block][i]);
      }
    }
  }
}

template <class S, class K>
__device__ void consume(const Params& p, const StripShare& share, char* shared, const XTilesOf<S>& x) {
  constexpr int kBlocks = S::kTokens / 8;
  constexpr float kUnit = K::kIsFolded ? linear::kByteScaleUnit : 1.0f;
  const uint32_t base = x.at;
  const int warp = x.warp, lane = x.lane;
  if constexpr (K::kHasOffsets) x.template sum<typename K::T, K::kGroups>();
  const uint32_t first_x = x.matrix_row(warp), x_step = S::kWarps * x.tile_bytes;
  constexpr int kTileSums = K::kGroups * S::kTokens * 4;
  const uint32_t first_sums = x.sums_at + warp * kTileSums + lane % 4 * 8;
  const uint32_t first_tile = base + p.smem.ring + warp * p.tile_bytes;
  const typename K::Codes codes(p.problem.weight.format);
  Cursor stage, part = {0, 1};
  for (int strip = share.first_strip; strip < p.strips; strip += share.strip_step) {
    float acc[kBlocks][4] = {};
    uint32_t x_at = first_x, x_sums = first_sums;
    for (int tile = 0; tile < share.tiles; tile += S::kWarps) {
      const uint32_t full = base + p.smem.full + 8 * stage.at,
                     from = first_tile + stage.at * p.smem.stage_bytes;
      ptx::barrier_wait(full, stage.parity);
      WeightTile<K> w;
      w.load(from, p.problem.strips.layout, lane);
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(full + p.smem.empty - p.smem.full);
      if (tile + warp < share.tiles) multiply<S, K>(acc, w, codes, x_at, x_sums);
      x_at += x_step, x_sums += S::kWarps * kTileSums;
      stage.advance(p.stages);
    }

    // hand this warp's part to the epilogue
    ptx::barrier_wait(base + p.smem.parts_empty + 8 * part.at, part.parity);
    float* out =
        reinterpret_cast<float*>(shared + p.smem.parts) + (part.at * S::kWarps + warp) * S::kPartFloats;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        out[(b * 8 + lane % 4 * 2 + i % 2) * kPartRow + lane / 4 + i / 2 * 8] = acc[b][i] * kUnit;
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(base + p.smem.parts_full + 8 * part.at);
    part.advance(kPartBuffers);
  }
}

// ---- Epilogue ----

// A warp's work is tokens `first`, first + step, ... of a strip for lanes 0..15, one for each row, and those
// behind them for lanes 16..31. sums[i]: the parts of the i-th, always added in the same order.
template <int kParts, int kPairs>
__device__ __forceinline__ void sum_parts(const float* parts, int num_parts, int part_floats, int step,
                                          float (&sums)[kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    float v[kParts];
#pragma unroll
    for (int j = 0; j < kParts; ++j)
      v[j] = j < num_parts ? parts[j * part_floats + i * step * kPartRow] : 0.0f;
#pragma unroll
    for (int j = 4; j < kParts; ++j) v[j % 4] += v[j];
    sums[i] = (v[0] + v[1]) + (v[2] + v[3]);
  }
}

template <class S>
struct Epilogue {
  const Params& p;
  const StripShare& share;
  char* shared;
  uint32_t base;  // of shared memory
  int lane;

  // Where this lane's first number is in a part.
  __device__ int offset(int first) const { return (first + lane / 16) * kPartRow + lane % 16; }

  template <int kPairs>
  __device__ void sum_of_warps(const Cursor& part, int first, int step, float (&sums)[kPairs]) const {
    const float* parts = reinterpret_cast<const float*>(shared + p.smem.parts) + offset(first);
    sum_parts<S::kWarps>(parts + part.at * S::kWarps * S::kPartFloats, S::kWarps, S::kPartFloats, step, sums);
  }
  __device__ void wait_for_parts(const Cursor& part) const {
    ptx::barrier_wait(base + p.smem.parts_full + 8 * part.at, part.parity);
  }
  // By one warp, or by both.
  __device__ void give_back_parts(const Cursor& part, int arrivals) const {
    __syncwarp();
    if (lane < arrivals) ptx::barrier_arrive(base + p.smem.parts_empty + 8 * part.at);
  }

  template <int kPairs>
  __device__ void store(int strip, int first, int step, const float (&sums)[kPairs]) const {
    // Of a gated weight rows 0..7 are gates, and 8 lanes up are their ups.
    const Problem& problem = p.problem;
    const bool is_gated = problem.weight.is_gated;
    const int row = lane % 16;
    const linear::ColumnOfRows<kPairs> at = {int64_t{strip} * (is_gated ? 8 : 16) + row, first + lane / 16,
                                             step};
    float ups[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) ups[i] = __shfl_down_sync(~0u, sums[i], 8);
    if (at.column < problem.n_out && !(is_gated && row >= 8)) {
      linear::EpilogueInputs<kPairs> inputs;
      inputs.load(problem, at);
      linear::finish_rows<kPairs>(problem, p.staged, at, sums, ups, inputs);
    }
  }

  // Without a cluster: each of the two warps has every other pair of tokens.
  __device__ void run_alone(int warp) const {
    constexpr int kStep = 2 * kEpilogueWarps;
    const int first = 2 * warp;
    Cursor part;
    for (int strip = share.first_strip; strip < p.strips; strip += share.strip_step) {
      float sums[S::kTokens / kStep];
      wait_for_parts(part);
      sum_of_warps(part, first, kStep, sums);
      give_back_parts(part, 1);
      part.advance(kPartBuffers);
      store(strip, first, kStep, sums);
    }
  }

  // In a cluster strips i, i + C, ... belong to rank i: every rank sends its sum of a strip to the owner's
  // inbox. A slot is used again when its owner has said so (the credit).
  __device__ void forward() const {
    Cursor part, slot = {0, 1};
    int owner = 0;
    for (int strip = share.first_strip; strip < p.strips; strip += share.strip_step) {
      wait_for_parts(part);
      ptx::barrier_wait_cluster(base + p.smem.credit + 8 * (slot.at * p.cluster + owner), slot.parity);
      const uint32_t barrier = ptx::address_in_block(base + p.smem.inbox_full + 8 * slot.at, owner);
      const uint32_t inbox = ptx::address_in_block(
          base + p.smem.inbox + (slot.at * p.cluster + share.rank) * S::kPartFloats * 4, owner);
#pragma unroll
      for (int token = 0; token < S::kTokens; token += 8) {
        float sums[4];
        sum_of_warps(part, token, 2, sums);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          ptx::store_async(inbox + (offset(token) + 2 * i * kPartRow) * 4, sums[i], barrier);
      }
      give_back_parts(part, kEpilogueWarps);
      part.advance(kPartBuffers);
      if (++owner == p.cluster) owner = 0, slot.advance(p.inbox_slots);
    }
  }
  __device__ void store_inbox() const {
    const int step = share.strip_step * p.cluster;
    Cursor slot;
    for (int strip = share.first_strip + share.rank * share.strip_step; strip < p.strips; strip += step) {
      const uint32_t full = base + p.smem.inbox_full + 8 * slot.at;
      ptx::barrier_wait(full, slot.parity);
      float sums[S::kTokens / 8][4];
      const float* inbox =
          reinterpret_cast<const float*>(shared + p.smem.inbox) + slot.at * p.cluster * S::kPartFloats;
#pragma unroll
      for (int b = 0; b < S::kTokens / 8; ++b)
        sum_parts<kMaxCluster>(inbox + offset(8 * b), p.cluster, S::kPartFloats, 2, sums[b]);
      __syncwarp();
      // A credit is given only where all will wait for it: nobody is gone when it comes. The slot's next
      // round is announced before.
      if (strip + p.inbox_slots * step < p.strips) {
        if (lane == 0) ptx::barrier_expect(full, inbox_bytes<S>(p));
        __syncwarp();
        if (lane < p.cluster)
          ptx::barrier_arrive_remote(
              ptx::address_in_block(base + p.smem.credit + 8 * (slot.at * p.cluster + share.rank), lane));
      }
      slot.advance(p.inbox_slots);
#pragma unroll
      for (int b = 0; b < S::kTokens / 8; ++b) store(strip, 8 * b, 2, sums[b]);
    }
  }
};

// run(Kind).
template <qf_format Format, class T, bool kHasOffsets, class Run>
__device__ __forceinline__ void choose_kind(const StripLayout& w, const Run& run) {
  if constexpr (StripCodes<Format, T>::kMayHaveByteScales)
    if (linear::has_byte_scales(w)) return run(Kind<Format, T, 4, Zeros::none, true>{});
  const auto of_groups = [&]<Zeros kZeros>(std::integral_constant<Zeros, kZeros>) {
    if (w.groups == 1) run(Kind<Format, T, 1, kZeros>{});
    else if (w.groups == 2) run(Kind<Format, T, 2, kZeros>{});
    else if (w.groups == 4) run(Kind<Format, T, 4, kZeros>{});
    else run(Kind<Format, T, 8, kZeros>{});
  };
  if constexpr (kHasOffsets) return of_groups(std::integral_constant<Zeros, Zeros::offsets>{});
  if constexpr (is_integer(Format) && !kHasOffsets)
    if (w.has_zeros) return of_groups(std::integral_constant<Zeros, Zeros::bytes>{});
  of_groups(std::integral_constant<Zeros, Zeros::none>{});
}

template <class S, qf_format Format, class T, bool kHasOffsets>
__global__ void __launch_bounds__(S::kThreads, 1) kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared[];
  const StripShare share = linear::share_of_block(p.tiles, p.cluster);
  const uint32_t base = ptx::shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool is_alone = p.cluster == 1;
  ptx::allow_next_kernel();

  if (warp < S::kWarps) {
    if (!is_alone) ptx::cluster_arrive_relaxed();
    ptx::wait_for_previous_kernel();
    const XTilesOf<S> x = {base, base + p.smem.sums, p.m, share.tiles, p.smem.x_tile_bytes, warp, lane};
    x.fetch(p.problem.x, share.first_tile, p.is_x_aligned);
    // A warp reads no x but its own, and may begin as soon as that is there. With 16 tokens it is quicker, by
    // 3%, that all warps begin together; why is not known.
    if (S::kTokens > 8) x.wait();
    ptx::named_barrier_sync(kReady, S::kThreads);
    if (S::kTokens == 8) x.wait();
    choose_kind<Format, T, kHasOffsets>(p.problem.strips.layout,
                                        [&]<class K>(K) { consume<S, K>(p, share, shared, x); });
  } else if (warp == S::kProducerWarp) {
    init_barriers<S>(p, base, lane);
    if (!is_alone) ptx::cluster_arrive_relaxed();
    ptx::named_barrier_arrive(kReady, S::kThreads);  // the producer waits for nobody
    if (lane == 0) produce<S>(p, share, base);
    __syncwarp();
    ptx::wait_for_previous_kernel();
  } else {
    if (!is_alone) ptx::cluster_arrive_relaxed();
    ptx::named_barrier_sync(kReady, S::kThreads);
    ptx::wait_for_previous_kernel();
    const Epilogue<S> epilogue = {p, share, shared, base, lane};
    const int epilogue_warp = warp - S::kProducerWarp - 1;
    if (is_alone) {
      epilogue.run_alone(epilogue_warp);
    } else {
      ptx::cluster_wait();  // the barriers of all blocks are initialised
      if (epilogue_warp == 0) epilogue.forward();
      else epilogue.store_inbox();
    }
  }
}

// ---- The host's side ----

// How a call is laid out on the GPU. No stages: it does not fit.
struct Plan : Sizes {
  int grid = 0, smem_bytes = 0;
};

// As many stages as fit and there is work for; none where that is too few to stream. Up to 8 tokens a pair of
// blocks is quicker than one that has only two stages (8192 x 28672: 4 tokens by pairs in 36 us, 3 by blocks
// alone in 44); four blocks are not quicker than such a pair.
template <class S>
Plan plan_for(const Problem& p, int cluster) {
  const int64_t min_stages = S::kTokens == 8 && cluster == 1 ? 3 : 2;
  const StripLayout& w = p.strips.layout;
  const int64_t budget = gpu_max_smem_bytes(p.device.id);
  const int64_t places = resident_clusters(kernel<Shape<8, true>, QF_INT4, bf16, false>, p.device.id, cluster,
                                           Shape<8, true>::kThreads);
  const int64_t clusters = std::min(places, w.strips);
  if (clusters == 0 || ceil_div(w.tiles, cluster) * p.m * kXRowBytes > budget) return {};
  Plan plan;
  plan.m = static_cast<int>(p.m), plan.cluster = cluster, plan.tile_bytes = w.tile_bytes;
  plan.sum_groups = w.has_offsets ? w.groups : 0;
  plan.strips = static_cast<int>(w.strips), plan.tiles = static_cast<int>(w.tiles);
  plan.grid = static_cast<int>(clusters * cluster);
  const auto bytes = [&](int64_t stages) {
    plan.stages = static_cast<int>(stages);
    return Smem::of<S>(plan).bytes;
  };
  const int64_t strips = ceil_div(w.strips, clusters);  // of a cluster
  plan.in_flight = S::kTokens == 8 && strips >= S::kManyStrips ? kInFlightOfMany : kInFlight;
  if (cluster > 1)
    plan.inbox_slots = static_cast<int>(std::min<int64_t>(ceil_div(strips, cluster), kMaxInboxSlots));
  const int64_t steps = strips * ceil_div(ceil_div(w.tiles, cluster), S::kWarps);
  const int64_t fixed = bytes(0), each = bytes(1) - fixed;
  const int64_t stages = std::min((budget - fixed) / each, steps);
  if (stages < std::min(min_stages, steps)) return {};
  plan.smem_bytes = bytes(stages);
  return plan;
}

// A strip costs a cluster some time, so that it is no larger than x demands.
template <class S>
Plan make_plan(const Problem& p) {
  for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
    if (const Plan plan = plan_for<S>(p, cluster); plan.stages > 0) return plan;
  }
  return {};
}

// run(Shape) for the number of tokens and the width of the codes.
template <class Run>
auto with_shape(const Problem& p, const Run& run) {
  const bool is_4bit = StripLayout::kRows * StripLayout::kCols / 2 == p.strips.layout.code_bytes;
  const auto of_width = [&](auto width) {
    constexpr bool kIs4Bit = decltype(width)::value;
    return p.m <= 8 ? run(Shape<8, kIs4Bit>{}) : run(Shape<16, kIs4Bit>{});
  };
  return is_4bit ? of_width(std::true_type{}) : of_width(std::false_type{});
}

Verdict accepts(const Problem& p) {
  const Verdict v = Requirements()
                        .require(p.strips.is_there, "the weight is not packed (qf_weight_pack)")
                        .require(!p.has_act_quant(), "the activations are quantized")
                        .require(p.x.dtype == DType::f16 || p.x.dtype == DType::bf16,
                                 "the activations are not FP16 or BF16")
                        .require(p.m <= kMaxTokens, "m is more than 16");
  if (!v) return v;
  const bool fits = with_shape(p, [&](auto shape) { return make_plan<decltype(shape)>(p).stages > 0; });
  return Requirements().require(fits, "m rows of x do not fit shared memory beside the weight");
}

template <class S, qf_format Format, class T>
void launch_shape(const Problem& p, float* staged, const Launch& launch) {
  const Plan plan = make_plan<S>(p);
  Params params = {};
  static_cast<Sizes&>(params) = plan;
  params.smem = Smem::of<S>(plan);
  params.problem = p, params.staged = staged;
  params.is_x_aligned = reinterpret_cast<uintptr_t>(p.x.data) % 16 == 0 && p.x.row_stride % 8 == 0;
  LaunchShape shape = {dim3(static_cast<unsigned>(plan.grid)), dim3(S::kThreads),
                       static_cast<size_t>(plan.smem_bytes), /*overlap_previous=*/true};
  shape.cluster = static_cast<unsigned>(plan.cluster);
  choose_bool(p.strips.layout.has_offsets, [&](auto has_offsets) {
    constexpr bool kHasOffsets = has_offsets.value && is_integer(Format);
    launch_kernel("linear_batch_sm90", kernel<S, Format, T, kHasOffsets>, shape, launch, params);
  });
}

void launch(const Problem& problem, const Launch& launch) {
  linear::launch_canonical(problem, launch, [&](const Problem& p, float* staged) {
    choose_strip_format(p.weight.format, [&](auto format) {
      choose_bool(p.x.dtype == DType::bf16, [&](auto is_bf16) {
        using T = std::conditional_t<is_bf16.value, bf16, f16>;
        constexpr bool kIs4Bit = StripCodes<format.value, T>::kIs4Bit;
        if (p.m <= 8) launch_shape<Shape<8, kIs4Bit>, format.value, T>(p, staged, launch);
        else launch_shape<Shape<16, kIs4Bit>, format.value, T>(p, staged, launch);
      });
    });
  });
}

}  // namespace

extern const Kernel<Problem> entry = {"linear_batch_sm90", Target::sm90, accepts,
                                      linear::canonical_workspace_bytes, launch};

}  // namespace quantfuse::linear_batch_sm90
