// SPDX-License-Identifier: Apache-2.0
//
// How a call is timed, on the CPU and on a GPU.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace quantfuse::cli {

struct Timing {
  double us = 0;  // the median
  double us_p10 = 0, us_p90 = 0;
  size_t samples = 0;
  double joules = 0;             // of a call; 0: not measured
  std::vector<double> turns_us;  // the median of each turn, where several took turns
};
Timing summarize(std::vector<double> microseconds);

// How many times as long as `other` it takes. Of two that took turns, the median over the turns: a machine
// that changes its speed in between changes it for both.
double times_as_long(const Timing& timing, const Timing& other);

// What is timed: call(0), call(1), ... call(copies - 1), call(0), ...
struct Contender {
  std::function<void(int copy)> call;
  int copies = 1;
};

// Warms up, then runs for `seconds` and at least 20 times; where that takes ten times `seconds`, five times
// will do. Calls too short for the clock are timed several at once.
Timing measure(Contender contender, double seconds);

// The same for each of several that are to be compared. They take turns: when the machine is slower for a
// while, because somebody else is using it too, it is so for all of them.
std::vector<Timing> measure_in_turns(std::vector<Contender> contenders, double seconds);

// How many copies of `bytes` are more than four times the cache: by the time one comes round again it is
// cold.
int copies_beyond_cache(double bytes, double cache_bytes);

// ---- CUDA; in a build without it these throw ----

struct GpuLimits {
  double read_gbps = 0, copy_gbps = 0;
  std::string runtime;           // "13.0"
  std::string no_energy_reason;  // why there is no energy counter; "": there is one
};
GpuLimits measure_gpu_limits(int id);
// As measure(); the calls are captured into a graph and its replays are timed by events, so that what is
// measured is the device's time and not the host's. `has_energy`: where the GPU counts its energy, replays go
// on for another 0.1 s or a little more, from one step of the counter to another.
Timing measure_on_gpu(int id, const std::function<void(int copy, void* stream)>& call, int copies,
                      double seconds, bool has_energy = false);

}  // namespace quantfuse::cli
