// SPDX-License-Identifier: Apache-2.0
//
// Random numbers that are the same on every machine and standard library, so that a seed names a failure.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace quantfuse::cases {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 0x632be59bd9b4e019ull) {}

  uint64_t next() {  // splitmix64
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }

  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  bool chance(int percent) { return below(100) < percent; }
  double uniform(double low, double high) {
    return low + (high - low) * (static_cast<double>(next() >> 11) * 0x1p-53);
  }

  // Mean 0, deviation 1, within +-3.5: the sum of four uniform numbers, which one draw holds.
  float normal() {
    const uint64_t u = next();
    const auto sum = static_cast<int64_t>((u & 0xffff) + (u >> 16 & 0xffff) + (u >> 32 & 0xffff) + (u >> 48));
    return static_cast<float>(sum - 2 * 0xffff) * (1.7320508f / 65536.0f);
  }

  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int64_t>(values.size()))];
  }

 private:
  uint64_t state_;
};

}  // namespace quantfuse::cases
