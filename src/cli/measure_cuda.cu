// SPDX-License-Identifier: Apache-2.0
//
// The CUDA half of measure.h.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "measure.h"

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

constexpr int kLoads = 4;  // of 16 bytes, in flight per thread

// Each block walks the buffer in steps of the whole grid, so that neighbours in time are neighbours in memory.
__global__ void read_kernel(const uint4* in, size_t count, uint32_t* sink) {
  uint32_t sum = 0;
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i + (kLoads - 1) * step < count;
       i += kLoads * step) {
    uint4 v[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) v[j] = __ldcs(in + i + j * step);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x9e3779b9u) *sink = sum;  // keeps the loads; the buffer is zero, so it never happens
}

__global__ void copy_kernel(const uint4* in, uint4* out, size_t count) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i + (kLoads - 1) * step < count;
       i += kLoads * step) {
    uint4 v[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) v[j] = __ldcs(in + i + j * step);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) __stcs(out + i + j * step, v[j]);
  }
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

}  // namespace

GpuLimits measure_gpu_limits(int id) {
  const Stream stream(id);
  constexpr size_t kBytes = size_t{1} << 30;  // far beyond any L2
  const DeviceBuffer in(kBytes), out(kBytes), sink(64);
  int sms = 0, version = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, id), "cudaDeviceGetAttribute");
  check(cudaRuntimeGetVersion(&version), "cudaRuntimeGetVersion");

  GpuLimits limits;
  limits.runtime = std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  for (const int blocks_per_sm : {4, 8, 16}) {
    const int blocks = sms * blocks_per_sm, threads = 2048 / std::min(blocks_per_sm, 8);
    const size_t step = static_cast<size_t>(blocks) * threads * kLoads;
    const size_t count = kBytes / sizeof(uint4) / step * step;
    Graph read(stream, [&] { read_kernel<<<blocks, threads, 0, stream>>>(in.as<uint4>(), count, sink.as<uint32_t>()); });
    Graph copy(stream, [&] { copy_kernel<<<blocks, threads, 0, stream>>>(in.as<uint4>(), out.as<uint4>(), count); });
    const double bytes = static_cast<double>(count) * sizeof(uint4);
    for (int i = 0; i < 10; ++i) {
      limits.read_gbps = std::max(limits.read_gbps, bytes / read.replay_us() / 1e3);
      limits.copy_gbps = std::max(limits.copy_gbps, 2 * bytes / copy.replay_us() / 1e3);
    }
  }
  return limits;
}

Timing measure_on_gpu(int id, const std::function<void(int, void*)>& call, int copies, double seconds) {
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
  return summarize(std::move(us));
}

}  // namespace quantfuse::cli
