// SPDX-License-Identifier: Apache-2.0
#include "cases/buffer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#if QUANTFUSE_CASES_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace quantfuse::cases {
namespace {

#if QUANTFUSE_CASES_HAVE_CUDA
void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

uint8_t* cuda_allocate(qf_device device, size_t bytes) {
  check(cudaSetDevice(device.id), "cudaSetDevice");
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), "cudaMalloc");
  return static_cast<uint8_t*>(memory);
}
void cuda_free(void* memory) { cudaFree(memory); }
void cuda_copy(void* to, const void* from, size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
}
void cuda_fill(void* memory, uint8_t byte, size_t bytes) {
  check(cudaMemset(memory, byte, bytes), "cudaMemset");
}
void cuda_synchronize(qf_device device) {
  check(cudaSetDevice(device.id), "cudaSetDevice");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}
#else
[[noreturn]] void no_cuda() {
  throw std::runtime_error("built without CUDA: there is no memory of a CUDA device");
}
uint8_t* cuda_allocate(qf_device, size_t) { no_cuda(); }
void cuda_free(void*) {}
void cuda_copy(void*, const void*, size_t) { no_cuda(); }
void cuda_fill(void*, uint8_t, size_t) { no_cuda(); }
void cuda_synchronize(qf_device) { no_cuda(); }
#endif

}  // namespace

Buffer::Buffer(qf_device device, size_t bytes) : device_(device), bytes_(bytes) {
  const size_t total = bytes + 2 * kGuardBytes;
  if (is_on_cuda()) {
    memory_ = cuda_allocate(device, total);
    cuda_fill(memory_, kGuardByte, total);
  } else {
    memory_ = static_cast<uint8_t*>(std::aligned_alloc(64, (total + 63) / 64 * 64));
    if (!memory_) throw std::runtime_error("out of memory: " + std::to_string(total) + " bytes for a tensor");
    std::memset(memory_, kGuardByte, total);
  }
}

Buffer::~Buffer() { is_on_cuda() ? cuda_free(memory_) : std::free(memory_); }

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }
Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(memory_, other.memory_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void* Buffer::data() const { return memory_ ? memory_ + kGuardBytes : nullptr; }

void Buffer::write(const uint8_t* host) {
  if (bytes_ == 0) return;
  is_on_cuda() ? cuda_copy(data(), host, bytes_) : void(std::memcpy(data(), host, bytes_));
}

void Buffer::fill(uint8_t byte) {
  if (bytes_ == 0) return;
  is_on_cuda() ? cuda_fill(data(), byte, bytes_) : void(std::memset(data(), byte, bytes_));
}

std::vector<uint8_t> Buffer::read() const {
  std::vector<uint8_t> host(bytes_);
  if (bytes_ > 0)
    is_on_cuda() ? cuda_copy(host.data(), data(), bytes_) : void(std::memcpy(host.data(), data(), bytes_));
  return host;
}

bool Buffer::has_intact_guards() const {
  if (!memory_) return true;
  uint8_t bands[2 * kGuardBytes];
  const uint8_t* const behind = memory_ + kGuardBytes + bytes_;
  if (is_on_cuda()) {
    cuda_copy(bands, memory_, kGuardBytes);
    cuda_copy(bands + kGuardBytes, behind, kGuardBytes);
  } else {
    std::memcpy(bands, memory_, kGuardBytes);
    std::memcpy(bands + kGuardBytes, behind, kGuardBytes);
  }
  return std::all_of(std::begin(bands), std::end(bands), [](uint8_t byte) { return byte == kGuardByte; });
}

void synchronize(qf_device device) {
  if (device.type == QF_CUDA) cuda_synchronize(device);
}

}  // namespace quantfuse::cases
