// SPDX-License-Identifier: Apache-2.0
//
// Memory on the CPU or a CUDA device between two guard bands, which show a write that missed its tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quantfuse/quantfuse.h"

namespace quantfuse::cases {

inline constexpr uint8_t kGuardByte = 0xa5;

class Buffer {
 public:
  Buffer() = default;
  Buffer(qf_device device,
         size_t bytes);  // throws std::runtime_error where the device has no memory or is not there
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  void* data() const;  // 64-byte aligned; on a CUDA device 256-byte, as what frameworks allocate
  size_t size() const { return bytes_; }
  void write(const uint8_t* host);  // all of it
  void fill(uint8_t byte);
  std::vector<uint8_t> read() const;
  bool has_intact_guards() const;

 private:
  static constexpr size_t kGuardBytes = 256;
  bool is_on_cuda() const { return device_.type == QF_CUDA; }

  qf_device device_ = {QF_CPU, 0};
  uint8_t* memory_ = nullptr;  // guard, data, guard
  size_t bytes_ = 0;
};

// Waits for everything that was started on the device, and throws what went wrong there. Nothing to do on the
// CPU.
void synchronize(qf_device device);

}  // namespace quantfuse::cases
