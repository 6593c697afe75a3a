// SPDX-License-Identifier: Apache-2.0
#include "nvml.h"

#include <dlfcn.h>

namespace quantfuse::cli {
namespace {

constexpr int kSuccess = 0;  // nvmlReturn_t

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// For the life of the command; null where there is none.
void* load_nvml() {
  static void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  return library;
}

}  // namespace

std::string driver_version() {
  int (*init)() = nullptr;
  int (*get_version)(char*, unsigned) = nullptr;
  void* library = load_nvml();
  char version[80] = "";
  if (!library || !find(library, "nvmlInit_v2", init) ||
      !find(library, "nvmlSystemGetDriverVersion", get_version) || init() != kSuccess ||
      get_version(version, sizeof version) != kSuccess) {
    return "";
  }
  return version;
}

EnergyMeter::EnergyMeter(const std::string& pci_bus_id) {
  int (*init)() = nullptr;
  int (*get_device)(const char*, void**) = nullptr;
  void* library = load_nvml();
  unsigned long long now = 0;
  if (!library) {
    reason_ = "there is no libnvidia-ml.so.1";
  } else if (!find(library, "nvmlInit_v2", init) ||
             !find(library, "nvmlDeviceGetHandleByPciBusId_v2", get_device) ||
             !find(library, "nvmlDeviceGetTotalEnergyConsumption", get_energy_)) {
    reason_ = "this NVML has no energy counter";
  } else if (init() != kSuccess || get_device(pci_bus_id.c_str(), &device_) != kSuccess) {
    reason_ = "NVML does not know the GPU";
  } else if (get_energy_(device_, &now) != kSuccess) {
    reason_ = "the GPU has no energy counter";
  }
}

uint64_t EnergyMeter::millijoules() const {
  unsigned long long now = 0;
  get_energy_(device_, &now);
  return now;
}

}  // namespace quantfuse::cli
