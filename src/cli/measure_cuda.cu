// SPDX-License-Identifier: Apache-2.0
//
// The CUDA half of measure.h.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <stdexcept>

#include "measure.h"
#include "nvml.h"

namespace quantfuse::cli {
namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

class Stream {
 public:
  explicit Stream(int id) {
    check(cudaSetDevice(id), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }  // NOLINT: it is one

 private:
  cudaStream_t stream_ = nullptr;
};

// Everything that `record` puts on the stream, as one graph to replay.
class Graph {
 public:
  template <class Record>
  Graph(cudaStream_t stream, Record record) : stream_(stream) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    record();
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    const cudaError_t error = cudaGraphInstantiate(&exec_, graph, 0);
    cudaGraphDestroy(graph);
    check(error, "cudaGraphInstantiate");
    check(cudaEventCreate(&start_), "cudaEventCreate");
    check(cudaEventCreate(&stop_), "cudaEventCreate");
  }
  ~Graph() {
    cudaEventDestroy(start_);
    cudaEventDestroy(stop_);
    cudaGraphExecDestroy(exec_);
  }
  Graph(const Graph&) = delete;

  double replay_us() {
    float ms = 0;
    check(cudaEventRecord(start_, stream_), "cudaEventRecord");
    check(cudaGraphLaunch(exec_, stream_), "cudaGraphLaunch");
    check(cudaEventRecord(stop_, stream_), "cudaEventRecord");
    check(cudaEventSynchronize(stop_), "the measured calls");
    check(cudaEventElapsedTime(&ms, start_, stop_), "cudaEventElapsedTime");
    return ms * 1e3;
  }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t exec_ = nullptr;
  cudaEvent_t start_ = nullptr, stop_ = nullptr;
};

// A block takes one tile: on an H200 that reads 2% faster than blocks that stay and loop.
constexpr int kThreads = 256;
constexpr int kLoads = 8;  // of 16 bytes, in flight per thread
constexpr size_t kTile = kThreads * kLoads;

__device__ void load_tile(const uint4* in, uint4 (&v)[kLoads]) {
#pragma unroll
  for (int j = 0; j < kLoads; ++j) v[j] = __ldcs(in + blockIdx.x * kTile + j * kThreads + threadIdx.x);
}

__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* in, uint32_t* sink) {
  uint4 v[kLoads];
  load_tile(in, v);
  uint32_t sum = 0;
#pragma unroll
  for (int j = 0; j < kLoads; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  if (sum != 0) *sink = sum;  // keeps the loads; the buffer is zero, so it never happens
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const uint4* in, uint4* out) {
  uint4 v[kLoads];
  load_tile(in, v);
#pragma unroll
  for (int j = 0; j < kLoads; ++j) __stcs(out + blockIdx.x * kTile + j * kThreads + threadIdx.x, v[j]);
}

class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) {
    check(cudaMalloc(&data_, bytes), "cudaMalloc");
    check(cudaMemset(data_, 0, bytes), "cudaMemset");
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

const EnergyMeter& energy_meter(int id) {
  static std::map<int, EnergyMeter> meters;
  const auto known = meters.find(id);
  if (known != meters.end()) return known->second;
  char bus[32] = "";
  check(cudaDeviceGetPCIBusId(bus, sizeof bus, id), "cudaDeviceGetPCIBusId");
  return meters.emplace(id, EnergyMeter(bus)).first->second;
}

// Joules of a replay. The counter goes in steps of some tens of milliseconds, so that both ends are at one.
double replay_joules(Graph& graph, const EnergyMeter& meter) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::duration<double> kLeast(0.1), kMost(2);
  const auto next_step = [&](uint64_t from, int& replays) {
    uint64_t now = from;
    for (const auto begin = Clock::now(); now == from && Clock::now() - begin < kMost; ++replays) {
      graph.replay_us();
      now = meter.millijoules();
    }
    return now;
  };
  int replays = 0;
  const uint64_t first = next_step(meter.millijoules(), replays);
  replays = 0;
  const auto begin = Clock::now();
  uint64_t last = first;
  while (Clock::now() - begin < kLeast) {
    const uint64_t now = next_step(last, replays);
    if (now == last) return 0;  // it does not count
    last = now;
  }
  return static_cast<double>(last - first) * 1e-3 / replays;
}

}  // namespace

GpuLimits measure_gpu_limits(int id) {
  const Stream stream(id);
  size_t free_bytes = 0, total_bytes = 0;
  int version = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  check(cudaRuntimeGetVersion(&version), "cudaRuntimeGetVersion");

  // Gigabytes, several times a graph: starting and ending a kernel then is less than a hundredth of it.
  constexpr int kPasses = 4;
  const size_t num_tiles = std::min(size_t{4} << 30, free_bytes / 4) / sizeof(uint4) / kTile;
  const size_t bytes = num_tiles * kTile * sizeof(uint4);
  const DeviceBuffer in(bytes), out(bytes), sink(64);
  const auto blocks = static_cast<unsigned>(num_tiles);
  Graph read(stream, [&] {
    for (int i = 0; i < kPasses; ++i) {
      read_kernel<<<blocks, kThreads, 0, stream>>>(in.as<uint4>(), sink.as<uint32_t>());
    }
  });
  Graph copy(stream, [&] {
    for (int i = 0; i < kPasses; ++i)
      copy_kernel<<<blocks, kThreads, 0, stream>>>(in.as<uint4>(), out.as<uint4>());
  });

  GpuLimits limits;
  limits.no_energy_reason = energy_meter(id).reason();
  limits.runtime = std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  const double kilobytes = static_cast<double>(bytes) * kPasses / 1e3;  // a microsecond of which is a GB/s
  for (int i = 0; i < 10; ++i) {
    limits.read_gbps = std::max(limits.read_gbps, kilobytes / read.replay_us());
    limits.copy_gbps = std::max(limits.copy_gbps, 2 * kilobytes / copy.replay_us());
  }
  return limits;
}

Timing measure_on_gpu(int id, const std::function<void(int, void*)>& call, int copies, double seconds,
                      bool has_energy) {
  const Stream stream(id);
  // The first round, outside of any capture: modules are loaded and workspaces are made.
  for (int i = 0; i < copies; ++i) call(i, stream);
  check(cudaStreamSynchronize(stream), "the warm-up");

  constexpr int kMinCalls = 20;  // in a graph, so that its own start is small beside them
  const int rounds = (kMinCalls + copies - 1) / copies, calls = rounds * copies;
  Graph graph(stream, [&] {
    for (int i = 0; i < calls; ++i) call(i % copies, stream);
  });
  for (int i = 0; i < 3; ++i) graph.replay_us();
  std::vector<double> us;
  for (double total = 0; us.size() < 20 || (total < seconds * 1e6 && us.size() < 10000);) {
    const double replay = graph.replay_us();
    total += replay;
    us.push_back(replay / calls);
  }
  Timing timing = summarize(std::move(us));
  if (has_energy && energy_meter(id).is_present())
    timing.joules = replay_joules(graph, energy_meter(id)) / calls;
  return timing;
}

}  // namespace quantfuse::cli
