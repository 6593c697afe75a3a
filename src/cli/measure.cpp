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

constexpr size_t kMinSamples = 20, kMinSlowSamples = 5, kMaxSamples = 200000, kTurns = 7;
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
  return {at(0.5), at(0.1), at(0.9), us.size(), 0, {}};
}

double times_as_long(const Timing& timing, const Timing& other) {
  if (timing.turns_us.size() != other.turns_us.size() || timing.turns_us.empty()) return timing.us / other.us;
  std::vector<double> ratios;
  for (size_t i = 0; i < timing.turns_us.size(); ++i)
    ratios.push_back(timing.turns_us[i] / other.turns_us[i]);
  return summarize(ratios).us;
}

namespace {

// Waits until the idle threads of whichever runtime ran last (OpenMP's, OpenBLAS's, ours) no longer spin for
// work and so leave the CPUs to the next.
void let_idle_threads_sleep() { std::this_thread::sleep_for(std::chrono::milliseconds(40)); }

// The samples of one contender.
class Sampler {
 public:
  explicit Sampler(Contender contender) : contender_(std::move(contender)) {}

  // Two calls at least, and 50 ms: the first ones pay for threads, page faults and clock speed.
  void warm_up() {
    const auto start = Clock::now();
    int calls = 0;
    for (; calls < 2 || (calls < 4096 && seconds_since(start) < 0.05); ++calls) next();
    calls_per_sample_ =
        std::max(1, static_cast<int>(std::ceil(kClockResolution * calls / seconds_since(start))));
  }
  // 1 / turns of all samples.
  void take_turn(double seconds, size_t turns) {
    const size_t first = us_.size(), least = first + kMinSamples / turns,
                 least_slow = first + kMinSlowSamples / turns + 1;
    for (const auto start = Clock::now(); us_.size() < kMaxSamples;) {
      const double elapsed = seconds_since(start) * static_cast<double>(turns);
      if (us_.size() >= least && elapsed >= seconds) break;
      if (us_.size() >= least_slow && elapsed >= 10 * seconds) break;
      const auto sample = Clock::now();
      for (int i = 0; i < calls_per_sample_; ++i) next();
      us_.push_back(seconds_since(sample) * 1e6 / calls_per_sample_);
    }
    turns_us_.push_back(summarize({us_.begin() + static_cast<std::ptrdiff_t>(first), us_.end()}).us);
  }
  Timing timing() {
    Timing timing = summarize(std::move(us_));
    timing.turns_us = std::move(turns_us_);
    return timing;
  }

 private:
  void next() {
    contender_.call(copy_);
    copy_ = copy_ + 1 == contender_.copies ? 0 : copy_ + 1;
  }

  Contender contender_;
  int copy_ = 0, calls_per_sample_ = 1;
  std::vector<double> us_, turns_us_;
};

}  // namespace

Timing measure(Contender contender, double seconds) {
  return measure_in_turns({std::move(contender)}, seconds)[0];
}

std::vector<Timing> measure_in_turns(std::vector<Contender> contenders, double seconds) {
  std::vector<Sampler> samplers;
  for (Contender& contender : contenders) samplers.emplace_back(std::move(contender));
  const size_t turns = samplers.size() > 1 ? kTurns : 1;
  for (size_t turn = 0; turn < turns; ++turn) {
    for (Sampler& sampler : samplers) {
      let_idle_threads_sleep();
      sampler.warm_up();
      sampler.take_turn(seconds, turns);
    }
  }
  std::vector<Timing> timings;
  for (Sampler& sampler : samplers) timings.push_back(sampler.timing());
  return timings;
}

int copies_beyond_cache(double bytes, double cache_bytes) {
  const double wanted = std::ceil(4 * cache_bytes / std::max(bytes, 1.0)) + 1;
  const double affordable = std::max(1.0, std::floor(kMaxCopyBytes / std::max(bytes, 1.0)));
  return static_cast<int>(std::min({wanted, affordable, static_cast<double>(kMaxCopies)}));
}

}  // namespace quantfuse::cli
