// SPDX-License-Identifier: Apache-2.0
//
// Loops that do nothing but the one thing they measure. Each is compiled for its own instructions by a target
// attribute and chosen by what the CPU has; accumulators are many enough to cover the latency of the
// instruction (4 or 5 cycles, two of them a cycle), and they start from different numbers, or the compiler
// would see that they are all one. What a loop returns is any part of its sums: it only has to depend on
// them.
#include "limits.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#define QF_TARGET(isa) __attribute__((target(isa)))
#endif

namespace quantfuse::cli {
namespace {

using Clock = std::chrono::steady_clock;
using ReadLoop = uint64_t (*)(const uint8_t* data, size_t bytes);  // bytes % 1024 == 0
using ArithmeticLoop = double (*)(int64_t iterations);  // something of the result, so that none is dropped

struct Arithmetic {
  ArithmeticLoop loop = nullptr;
  double operations = 0;  // per iteration
};

constexpr int kAccumulators = 12;

template <class T>
T first_of(const void* vector) {
  T value;
  std::memcpy(&value, vector, sizeof value);
  return value;
}

uint64_t read_scalar(const uint8_t* data, size_t bytes) {
  uint64_t sum[4] = {};
  for (size_t i = 0; i < bytes; i += 32) {
    uint64_t v[4];
    std::memcpy(v, data + i, 32);
    for (int j = 0; j < 4; ++j) sum[j] += v[j];
  }
  return sum[0] + sum[1] + sum[2] + sum[3];
}

double fma_scalar(int64_t iterations) {
  float acc[kAccumulators];
  for (int j = 0; j < kAccumulators; ++j) acc[j] = static_cast<float>(j);
  for (int64_t i = 0; i < iterations; ++i) {
    for (float& a : acc) a = a * 0.5f + 1.0f;
  }
  double sum = 0;
  for (const float a : acc) sum += a;
  return sum;
}

double dot_scalar(int64_t iterations) {
  int32_t acc[kAccumulators];
  for (int j = 0; j < kAccumulators; ++j) acc[j] = j;
  const volatile int8_t seed = 3;
  const int8_t x = seed;
  for (int64_t i = 0; i < iterations; ++i) {
    for (int32_t& a : acc) a = a / 2 + x * x;
  }
  double sum = 0;
  for (const int32_t a : acc) sum += a;
  return sum;
}

#if defined(__x86_64__)

// As kernels read packed weights: several streams at once, which the memory serves a few per cent faster
// than one, and fetched into L2 two pages ahead in all, which keeps the memory busy across the 4 KiB pages at
// which the hardware's prefetches stop.
constexpr size_t kStreams = 4, kPrefetchBytes = 8192 / kStreams;

void fetch(const uint8_t* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at + kPrefetchBytes), _MM_HINT_T1);
}

QF_TARGET("avx2") uint64_t read_avx2(const uint8_t* data, size_t bytes) {
  __m256i sum[kStreams] = {};
  const size_t part = bytes / kStreams;
  for (size_t i = 0; i < part; i += 64) {
    for (size_t j = 0; j < kStreams; ++j) {
      const auto* at = reinterpret_cast<const __m256i*>(data + j * part + i);
      fetch(data + j * part + i);
      sum[j] = _mm256_add_epi64(sum[j], _mm256_add_epi64(_mm256_load_si256(at), _mm256_load_si256(at + 1)));
    }
  }
  const __m256i total = _mm256_add_epi64(_mm256_add_epi64(sum[0], sum[1]), _mm256_add_epi64(sum[2], sum[3]));
  return first_of<uint64_t>(&total);
}

QF_TARGET("avx512f") uint64_t read_avx512(const uint8_t* data, size_t bytes) {
  __m512i sum[kStreams] = {};
  const size_t part = bytes / kStreams;
  for (size_t i = 0; i < part; i += 64) {
    for (size_t j = 0; j < kStreams; ++j) {
      fetch(data + j * part + i);
      sum[j] = _mm512_add_epi64(sum[j], _mm512_load_si512(data + j * part + i));
    }
  }
  const __m512i total = _mm512_add_epi64(_mm512_add_epi64(sum[0], sum[1]), _mm512_add_epi64(sum[2], sum[3]));
  return first_of<uint64_t>(&total);
}

QF_TARGET("avx2,fma") double fma_avx2(int64_t iterations) {
  __m256 acc[kAccumulators];
  for (int j = 0; j < kAccumulators; ++j) acc[j] = _mm256_set1_ps(static_cast<float>(j));
  const __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(1.0f);
  for (int64_t i = 0; i < iterations; ++i) {
    for (auto& x : acc) x = _mm256_fmadd_ps(x, a, b);
  }
  for (const auto& x : acc) acc[0] = _mm256_add_ps(acc[0], x);
  return first_of<float>(acc);
}

QF_TARGET("avx512f") double fma_avx512(int64_t iterations) {
  __m512 acc[kAccumulators];
  for (int j = 0; j < kAccumulators; ++j) acc[j] = _mm512_set1_ps(static_cast<float>(j));
  const __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(1.0f);
  for (int64_t i = 0; i < iterations; ++i) {
    for (auto& x : acc) x = _mm512_fmadd_ps(x, a, b);
  }
  for (const auto& x : acc) acc[0] = _mm512_add_ps(acc[0], x);
  return first_of<float>(acc);
}

// Without VNNI an 8-bit dot product takes three instructions. The empty asm makes the operand new every time:
// the compiler would otherwise take the products, which do not change, out of the loop.
QF_TARGET("avx2") double dot_avx2(int64_t iterations) {
  __m256i acc[kAccumulators];
  for (int j = 0; j < kAccumulators; ++j) acc[j] = _mm256_set1_epi32(j);
  __m256i a = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
  for (int64_t i = 0; i < iterations; ++i) {
    for (auto& x : acc) {
      asm volatile("" : "+x"(a));
      x = _mm256_add_epi32(x, _mm256_madd_epi16(_mm256_maddubs_epi16(a, a), ones));
    }
  }
  for (const auto& x : acc) acc[0] = _mm256_add_epi32(acc[0], x);
  return first_of<int32_t>(acc);
}

QF_TARGET("avx2,avxvnni") double dot_avx_vnni(int64_t iterations) {
  using Sums = int32_t __attribute__((vector_size(32)));  // as dot_vnni
  Sums acc[kAccumulators];
  for (int j = 0; j < kAccumulators; ++j) acc[j] = (Sums)_mm256_set1_epi32(j);
  const __m256i a = _mm256_set1_epi8(3);
  for (int64_t i = 0; i < iterations; ++i) {
    for (auto& x : acc) x = (Sums)_mm256_dpbusd_avx_epi32((__m256i)x, a, a);
  }
  for (const auto& x : acc) acc[0] += x;
  return first_of<int32_t>(acc);
}

QF_TARGET("avx512f,avx512vnni") double dot_vnni(int64_t iterations) {
  using Sums = int32_t __attribute__((vector_size(64)));  // GCC copies sums of __m512i at every product
  Sums acc[kAccumulators];
  for (int j = 0; j < kAccumulators; ++j) acc[j] = (Sums)_mm512_set1_epi32(j);
  const __m512i a = _mm512_set1_epi8(3);
  for (int64_t i = 0; i < iterations; ++i) {
    for (auto& x : acc) x = (Sums)_mm512_dpbusd_epi32((__m512i)x, a, a);
  }
  for (const auto& x : acc) acc[0] += x;
  return first_of<int32_t>(acc);
}

QF_TARGET("avx512f,avx512bf16") double dot_bf16(int64_t iterations) {
  __m512 acc[kAccumulators];
  for (int j = 0; j < kAccumulators; ++j) acc[j] = _mm512_set1_ps(static_cast<float>(j));
  const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1e-3f), _mm512_set1_ps(1e-3f));
  for (int64_t i = 0; i < iterations; ++i) {
    for (auto& x : acc) x = _mm512_dpbf16_ps(x, a, a);
  }
  for (const auto& x : acc) acc[0] = _mm512_add_ps(acc[0], x);
  return first_of<float>(acc);
}

#if !defined(QF_EMULATE_AMX)
// Tiles of zeros: 4 of sums, whose products do not wait for each other.
struct alignas(64) TileShape {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileShape kTileShape;
constexpr double kTileProducts = 16 * 16 * 16;  // of words

QF_TARGET("amx-tile,amx-int8") double dot_int8_tiles(int64_t iterations) {
  _tile_loadconfig(&kTileShape);  // which clears them
  for (int64_t i = 0; i < iterations; i += 4) {
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
  }
  _tile_release();
  return 0;
}

QF_TARGET("amx-tile,amx-bf16") double dot_bf16_tiles(int64_t iterations) {
  _tile_loadconfig(&kTileShape);
  for (int64_t i = 0; i < iterations; i += 4) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 0;
}
#endif

#endif

struct Loops {
  ReadLoop read = read_scalar;
  Arithmetic f32 = {fma_scalar, 2.0 * kAccumulators}, int8 = {dot_scalar, 2.0 * kAccumulators}, bf16;
};

Loops loops_of_this_cpu([[maybe_unused]] const std::string& isa = {}) {
  Loops loops;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    loops.read = read_avx2;
    loops.f32 = {fma_avx2, 2.0 * 8 * kAccumulators};
    loops.int8 = {dot_avx2, 2.0 * 32 * kAccumulators};
  }
  if (isa == "avx_vnni") loops.int8 = {dot_avx_vnni, 2.0 * 32 * kAccumulators};
  if (__builtin_cpu_supports("avx512f")) {
    loops.read = read_avx512;
    loops.f32 = {fma_avx512, 2.0 * 16 * kAccumulators};
  }
  if (__builtin_cpu_supports("avx512vnni")) loops.int8 = {dot_vnni, 2.0 * 64 * kAccumulators};
  if (__builtin_cpu_supports("avx512bf16")) loops.bf16 = {dot_bf16, 2.0 * 32 * kAccumulators};
#if !defined(QF_EMULATE_AMX)
  if (isa == "amx") loops.int8 = {dot_int8_tiles, 2 * 4 * kTileProducts};
  if (isa == "amx") loops.bf16 = {dot_bf16_tiles, 2 * 2 * kTileProducts};
#endif
#endif
  return loops;
}

// Seconds from the moment all threads are ready until the last is done.
template <class Work>
double time_on_threads(int threads, Work work) {
  std::atomic<int> num_ready{0};
  std::atomic<bool> is_started{false};
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t) {
    pool.emplace_back([&, t] {
      ++num_ready;
      while (!is_started.load(std::memory_order_acquire)) std::this_thread::yield();
      work(t);
    });
  }
  while (num_ready.load() != threads) std::this_thread::yield();
  const auto start = Clock::now();
  is_started.store(true, std::memory_order_release);
  for (std::thread& thread : pool) thread.join();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// `amount` per nanosecond in the best of many passes, of which run() says the seconds: a limit is what the
// machine does when nothing disturbs it.
template <class Run>
double best_rate(double amount, Run run) {
  double best = 0;
  const auto start = Clock::now();
  for (int pass = 0; pass < 8 || Clock::now() - start < std::chrono::milliseconds(400); ++pass) {
    best = std::max(best, amount / run() / 1e9);
  }
  return best;
}

std::atomic<uint64_t> sink;  // takes every result, so that no loop is dead code

double measure_gops(const Arithmetic& arithmetic, int threads) {
  if (!arithmetic.loop) return 0;
  constexpr int64_t kIterations = 2000000;  // about 5 ms
  return best_rate(arithmetic.operations * kIterations * threads, [&] {
    return time_on_threads(threads, [&](int) { sink += arithmetic.loop(kIterations) != 0.0 ? 1 : 0; });
  });
}

}  // namespace

MemoryRead::MemoryRead(int threads) : threads_(threads) {
  constexpr size_t kAlignment = 1 << 12;
  part_ = (size_t{512} << 20) / static_cast<size_t>(threads) / kAlignment * kAlignment;
  const size_t total = part_ * static_cast<size_t>(threads);
  // The prefetches run past the end by two pages; the addresses need not exist.
  data_.reset(static_cast<uint8_t*>(std::aligned_alloc(kAlignment, total)), std::free);
  if (!data_) throw std::bad_alloc();
#if defined(__linux__)
  madvise(data_.get(), total, MADV_HUGEPAGE);  // as packed weights are: what the memory has to give
#endif
  time_on_threads(threads,
                  [&](int t) { std::memset(data_.get() + part_ * static_cast<size_t>(t), 1, part_); });
}

double MemoryRead::run() const {
  static const ReadLoop read = loops_of_this_cpu().read;
  return time_on_threads(threads_,
                         [&](int t) { sink += read(data_.get() + part_ * static_cast<size_t>(t), part_); });
}

CpuLimits measure_cpu_limits(int threads, const MemoryRead& memory, const std::string& isa) {
  const Loops loops = loops_of_this_cpu(isa);
  return {best_rate(memory.bytes(), [&] { return memory.run(); }), measure_gops(loops.f32, threads),
          measure_gops(loops.bf16, threads), measure_gops(loops.int8, threads)};
}

}  // namespace quantfuse::cli
