// SPDX-License-Identifier: Apache-2.0
//
// What NVML knows and the CUDA runtime does not. It is loaded at run time where the driver brings it.
#pragma once

#include <cstdint>
#include <string>

namespace quantfuse::cli {

// "580.159.04"; "" where there is no NVML. (The version that the CUDA runtime reports is that of CUDA.)
std::string driver_version();

// The energy counter of a GPU.
class EnergyMeter {
 public:
  explicit EnergyMeter(const std::string& pci_bus_id);

  bool is_present() const { return reason_.empty(); }
  const std::string& reason() const { return reason_; }  // why it is not
  uint64_t millijoules() const;                          // since the driver was loaded

 private:
  using GetEnergy = int (*)(void* device, unsigned long long* millijoules);
  void* device_ = nullptr;
  GetEnergy get_energy_ = nullptr;
  std::string reason_;
};

}  // namespace quantfuse::cli
