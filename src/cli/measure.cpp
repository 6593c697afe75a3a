// SPDX-License-Identifier: Apache-2.0
#include "measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

namespace quantfuse::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr size_t kMinSamples = 20, kMinSlowSamples = 5, kMaxSamples = 200000;
constexpr double kClockResolution =
    5e-6;  // a sample is at least this long: 100 times what reading the clock costs
constexpr double kMaxCopyBytes = 2e9;
constexpr int kMaxCopies = 512;  // of something tiny, which a real caller finds in the cache anyway

}  // namespace

Timing summarize(std::vector<double> us) {
  if (us.empty()) return {};
  std::sort(us.begin(), us.end());
  const auto at = [&](double fraction) {
    return us[static_cast<size_t>(std::lround(fraction * (us.size() - 1)))];
  };
  return {at(0.5), at(0.1), at(0.9), us.size()};
}

Timing measure(const std::function<void(int)>& call, int copies, double seconds) {
  int copy = 0;
  const auto next = [&] {
    call(copy);
    copy = copy + 1 == copies ? 0 : copy + 1;
  };

  // Two calls at least, and 50 ms: the first ones pay for threads, page faults and clock speed.
  const auto warm_up = Clock::now();
  int warm_calls = 0;
  for (; warm_calls < 2 || (warm_calls < 4096 && seconds_since(warm_up) < 0.05); ++warm_calls) next();
  const double typical = seconds_since(warm_up) / warm_calls;
  const int calls_per_sample = std::max(1, static_cast<int>(std::ceil(kClockResolution / typical)));

  std::vector<double> us;
  for (const auto start = Clock::now(); us.size() < kMaxSamples;) {
    const double elapsed = seconds_since(start);
    if (us.size() >= kMinSamples && elapsed >= seconds) break;
    if (us.size() >= kMinSlowSamples && elapsed >= 10 * seconds) break;
    const auto sample = Clock::now();
    for (int i = 0; i < calls_per_sample; ++i) next();
    us.push_back(seconds_since(sample) * 1e6 / calls_per_sample);
  }
  return summarize(std::move(us));
}

int copies_beyond_cache(double bytes, double cache_bytes) {
  const double wanted = std::ceil(3 * cache_bytes / std::max(bytes, 1.0)) + 1;
  const double affordable = std::max(1.0, std::floor(kMaxCopyBytes / std::max(bytes, 1.0)));
  return static_cast<int>(std::min({wanted, affordable, static_cast<double>(kMaxCopies)}));
}

void let_idle_threads_sleep() { std::this_thread::sleep_for(std::chrono::milliseconds(100)); }

}  // namespace quantfuse::cli
