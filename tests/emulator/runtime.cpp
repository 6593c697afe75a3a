// SPDX-License-Identifier: Apache-2.0
//
// The part of the CUDA runtime that the library, its tests and its command call, on an emulated GPU.
// What is put on a stream that is being captured is kept, and done when its graph is launched. Kernels end in
// their order, the last ones when something waits for them. One that may begin before the kernel ahead has
// ended does so as early as it can: its part in front of griddepcontrol.wait is run before the two kernels
// ahead of it.
//
// The GPU is an H200 in what selection asks of it: QUANTFUSE_EMULATED_SMS gives it another number of
// multiprocessors. QUANTFUSE_EMULATOR_SEED lets copies arrive late and warps take turns in another order;
// with QUANTFUSE_EMULATOR_RACES=1 accesses to shared memory that nothing orders are errors.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>

#include "machine.h"
#include "tensor_map.h"

using emulator::Fault;
using emulator::LaunchConfig;
using emulator::Machine;
using emulator::Module;
using emulator::Program;

namespace {

struct Function {
  Module* module;
  std::string name;
  int shared_limit = 48 * 1024;
  int architecture = 0;
};

struct Graph {
  std::vector<std::function<void()>> work;
};

struct Stream {
  Graph* capturing = nullptr;
};

struct State {
  std::mutex mutex, running;
  std::deque<std::unique_ptr<Machine>> kernels;  // that have not ended
  std::vector<std::unique_ptr<Module>> modules;
  std::map<const void*, Function> functions;  // by the host's stub
  Stream default_stream;
};
State& state() {
  static State* all = new State;  // lasts longer than whatever ends with the program
  return *all;
}

constexpr int kSms = 132;

thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_message;

cudaError_t failed(cudaError_t e, const std::string& message) {
  last_error = e;
  last_message = message;
  return e;
}

uint64_t number_from(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text && *text ? std::strtoull(text, nullptr, 10) : otherwise;
}

Stream& stream_of(cudaStream_t s) { return s ? *reinterpret_cast<Stream*>(s) : state().default_stream; }

void finish_kernels(size_t left) {
  auto& kernels = state().kernels;
  while (kernels.size() > left) {
    const std::unique_ptr<Machine> kernel = std::move(kernels.front());
    kernels.pop_front();
    try {
      kernel->run();
    } catch (const Fault& fault) {
      kernels.clear();
      throw Fault(kernel->program.name + ": " + fault.what());
    }
  }
}

template <class Work>
cudaError_t guarded(Work work) {
  try {
    const std::lock_guard one_at_a_time(state().running);
    work();
  } catch (const Fault& fault) {
    return failed(cudaErrorLaunchFailure, fault.what());
  }
  return cudaSuccess;
}
cudaError_t finish() {
  return guarded([] { finish_kernels(0); });
}

// Now, or when the graph is launched.
template <class Work>
cudaError_t enqueue(cudaStream_t s, Work work) {
  Stream& stream = stream_of(s);
  if (!stream.capturing) return guarded(work);
  stream.capturing->work.push_back(work);
  return cudaSuccess;
}

// ---- What nvcc embeds: a container with the PTX as it is (nvcc --no-compress) ----

struct FatbinWrapper {
  uint32_t magic, version;
  const uint8_t* data;
  void* unused;
};
struct FatbinHeader {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
};
struct FatbinEntry {
  uint16_t kind, version;
  uint32_t header_bytes;
  uint64_t bytes;
  uint32_t compressed_bytes, unknown;
  uint16_t minor, major;
  uint32_t architecture;
};
constexpr uint16_t kPtx = 1;

struct Registered {
  Module* module = nullptr;
  int architecture = 0;
};

Registered load(const void* wrapper) {
  const uint8_t* data = static_cast<const FatbinWrapper*>(wrapper)->data;
  FatbinHeader header;
  std::memcpy(&header, data, sizeof header);
  const uint8_t* at = data + header.header_bytes;
  const uint8_t* end = at + header.bytes;
  Registered best;
  std::string_view text;
  while (at < end) {
    FatbinEntry entry;
    std::memcpy(&entry, at, sizeof entry);
    if (entry.kind == kPtx && entry.compressed_bytes == 0 &&
        static_cast<int>(entry.architecture) > best.architecture) {
      const char* ptx = reinterpret_cast<const char*>(at + entry.header_bytes);
      text = {ptx, strnlen(ptx, entry.bytes)};
      best.architecture = static_cast<int>(entry.architecture);
    }
    at += entry.header_bytes + entry.bytes;
  }
  if (best.architecture == 0) return best;
  try {
    state().modules.push_back(std::make_unique<Module>(text));
    best.module = state().modules.back().get();
  } catch (const Fault& fault) {
    std::fprintf(stderr, "emulator: %s\n", fault.what());
  }
  return best;
}

Function* find_function(const void* stub) {
  auto& functions = state().functions;
  const auto it = functions.find(stub);
  return it == functions.end() ? nullptr : &it->second;
}

cudaError_t launch(const void* stub, LaunchConfig config, void** args, cudaStream_t stream) {
  Function* f = find_function(stub);
  if (!f || !f->module || !f->module->has(f->name))
    return failed(cudaErrorInvalidDeviceFunction, "no such kernel");
  if (config.grid.count() == 0 || config.block.count() == 0 || config.block.count() > 1024 ||
      config.grid.y > 65535 || config.grid.z > 65535 || config.grid.x > 0x7fffffff)
    return failed(cudaErrorInvalidConfiguration, "a grid or block of this size");
  const Program* program;
  try {
    const std::lock_guard lock(state().mutex);
    program = &f->module->program(f->name);
  } catch (const Fault& fault) {
    return failed(cudaErrorInvalidPtx, fault.what());
  }
  config.cluster = std::max(config.cluster, program->cluster);
  if (static_cast<int>(config.dynamic_shared) > f->shared_limit)
    return failed(cudaErrorInvalidValue, "more shared memory than the kernel was allowed");
  std::vector<uint8_t> params(program->param_bytes);
  for (size_t p = 0; p < program->params.size(); ++p)
    std::memcpy(params.data() + program->params[p].first, args[p], program->params[p].second);
  return enqueue(stream, [program, config, params] {
    constexpr size_t kUnderWay = 2;
    auto& kernels = state().kernels;
    if (!config.overlaps) finish_kernels(0);
    auto kernel =
        std::make_unique<Machine>(*program, config, params, number_from("QUANTFUSE_EMULATOR_SEED", 0),
                                  number_from("QUANTFUSE_EMULATOR_RACES", 0) != 0);
    if (!kernels.empty()) {
      try {
        kernel->run_ahead();
      } catch (const Fault& fault) {
        kernels.clear();
        throw Fault(program->name + ": " + fault.what());
      }
    }
    kernels.push_back(std::move(kernel));
    finish_kernels(kUnderWay);
  });
}

emulator::Dim3 dim(dim3 d) { return {d.x, d.y, d.z}; }

uint32_t cluster_of(const cudaLaunchConfig_t& c) {
  for (unsigned a = 0; a < c.numAttrs; ++a)
    if (c.attrs[a].id == cudaLaunchAttributeClusterDimension) return c.attrs[a].val.clusterDim.x;
  return 1;
}

}  // namespace

extern "C" {

// ---- What nvcc's host code calls ----

void** __cudaRegisterFatBinary(void* wrapper) {
  return reinterpret_cast<void**>(new Registered(load(wrapper)));
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void** handle) { delete reinterpret_cast<Registered*>(handle); }
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void** handle, const char* stub, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  const auto* registered = reinterpret_cast<Registered*>(handle);
  state().functions[stub] = {registered->module, name, 48 * 1024, registered->architecture};
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}

namespace {
thread_local struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} pushed;
}  // namespace

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
  *static_cast<cudaStream_t*>(stream) = pushed.stream;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** args, size_t shared,
                             cudaStream_t stream) {
  return launch(stub, {dim(grid), dim(block), 1, static_cast<uint32_t>(shared)}, args, stream);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t shared,
                               cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* stub, void** args) {
  LaunchConfig config{dim(c->gridDim), dim(c->blockDim), 1, static_cast<uint32_t>(c->dynamicSmemBytes)};
  config.cluster = cluster_of(*c);
  for (unsigned a = 0; a < c->numAttrs; ++a)
    if (c->attrs[a].id == cudaLaunchAttributeProgrammaticStreamSerialization)
      config.overlaps = c->attrs[a].val.programmaticStreamSerializationAllowed != 0;
  return launch(stub, config, args, c->stream);
}

// ---- The device ----

cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : failed(cudaErrorInvalidDevice, "no such device");
}
cudaError_t cudaDeviceSynchronize() { return finish(); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  *p = {};
  std::snprintf(p->name, sizeof p->name, "emulated H200");
  p->major = 9, p->minor = 0;
  p->multiProcessorCount = kSms;
  p->totalGlobalMem = 8ull << 30;
  p->l2CacheSize = 50 << 20;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = 227 << 10;
  p->sharedMemPerMultiprocessor = 228 << 10;
  p->warpSize = 32;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int bytes, int) {
  return std::snprintf(id, bytes, "emulated"), cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* stub) {
  const Function* f = find_function(stub);
  if (!f) return failed(cudaErrorInvalidDeviceFunction, "no such kernel");
  *attributes = {};
  attributes->ptxVersion = attributes->binaryVersion = f->architecture;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* stub, cudaFuncAttribute attribute, int value) {
  Function* f = find_function(stub);
  if (!f) return failed(cudaErrorInvalidDeviceFunction, "no such kernel");
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value > 227 * 1024) return failed(cudaErrorInvalidValue, "more shared memory than there is");
    f->shared_limit = value;
  }
  return cudaSuccess;
}
// A cluster does not reach across the parts that a GPU is made of: of more than two blocks fewer fit than
// there are SMs for (30 of 4 blocks on an H200).
cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void*, const cudaLaunchConfig_t* c) {
  const int cluster = static_cast<int>(cluster_of(*c));
  *count = cluster > 2 ? kSms * 10 / 11 / cluster : kSms / cluster;
  return cudaSuccess;
}

// ---- Memory ----

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = emulator::allocate(bytes);
  return *memory ? cudaSuccess : failed(cudaErrorMemoryAllocation, "out of memory");
}
cudaError_t cudaFree(void* memory) {
  if (const cudaError_t e = finish(); e != cudaSuccess) return e;
  if (memory && !emulator::release(memory))
    return failed(cudaErrorInvalidValue, "memory that was not allocated");
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = 8ull << 30;
  *free = *total - std::min(*total, emulator::allocated_bytes());
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return enqueue(stream, [=] { finish_kernels(0), std::memmove(to, from, bytes); });
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t stream) {
  return enqueue(stream, [=] { finish_kernels(0), std::memset(to, byte, bytes); });
}
cudaError_t cudaMemset(void* to, int byte, size_t bytes) { return cudaMemsetAsync(to, byte, bytes, nullptr); }

// ---- Streams, graphs, events: time is not measured ----

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return *stream = reinterpret_cast<cudaStream_t>(new Stream), cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return delete reinterpret_cast<Stream*>(stream), cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return finish(); }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  return stream_of(stream).capturing = new Graph, cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Stream& s = stream_of(stream);
  *graph = reinterpret_cast<cudaGraph_t>(s.capturing);
  s.capturing = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  return *exec = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph))), cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (const auto& work : reinterpret_cast<Graph*>(exec)->work)
    if (const cudaError_t e = enqueue(stream, work); e != cudaSuccess) return e;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return delete reinterpret_cast<Graph*>(graph), cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  return delete reinterpret_cast<Graph*>(exec), cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return *event = reinterpret_cast<cudaEvent_t>(new char), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete reinterpret_cast<char*>(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return finish(); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { return *ms = 1, cudaSuccess; }

// ---- Errors ----

cudaError_t cudaGetLastError() {
  const cudaError_t e = last_error;
  last_error = cudaSuccess;
  return e;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error" : last_message.c_str(); }
const char* cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool is_known = std::string_view(name) == "cuTensorMapEncodeTiled";
  *function = is_known ? reinterpret_cast<void*>(emulator::encode_tiled) : nullptr;
  if (result) *result = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
