// SPDX-License-Identifier: Apache-2.0
//
// qf_version, qf_info, qf_kernels, and the setting of threads.
#include "core/info.h"

#include "core/device.h"
#include "core/operation.h"
#include "cpu/threads.h"

namespace quantfuse {
namespace {

#define QF_STRING_OF(x) #x
#define QF_STRING(x) QF_STRING_OF(x)
constexpr const char* kVersion =
    QF_STRING(QF_VERSION_MAJOR) "." QF_STRING(QF_VERSION_MINOR) "." QF_STRING(QF_VERSION_PATCH);

std::string quoted(const std::string& text) {
  std::string s = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') s += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) s += c;
  }
  return s + "\"";
}

std::string info_json() {
  const CpuInfo cpu = cpu_info();
  std::string s = "{\"version\": " + quoted(kVersion);
  s += ", \"cpu\": {\"model\": " + quoted(cpu.model) + ", \"cpus\": " + std::to_string(cpu.num_cpus) +
       ", \"threads\": " + std::to_string(num_threads()) +
       ", \"isa\": " + quoted(target_name(cpu_settings().target)) +
       ", \"isa_detected\": " + quoted(target_name(cpu.detected)) +
       ", \"l1_bytes\": " + std::to_string(cpu.l1_bytes) + ", \"l2_bytes\": " + std::to_string(cpu.l2_bytes) +
       ", \"l3_bytes\": " + std::to_string(cpu.l3_bytes) + "}";
  s += ", \"cuda\": {\"architectures\": " + quoted(cuda_compiled_architectures()) +
       ", \"driver\": " + quoted(cuda_driver_version()) + ", \"devices\": [";
  bool is_first = true;
  for (const GpuInfo& gpu : gpu_list()) {
    s += std::string(is_first ? "" : ", ") + "{\"name\": " + quoted(gpu.name) +
         ", \"compute_capability\": " + std::to_string(gpu.compute_capability) +
         ", \"acts_as\": " + std::to_string(gpu.acts_as) + ", \"sms\": " + std::to_string(gpu.num_sms) +
         ", \"memory_bytes\": " + std::to_string(gpu.memory_bytes) +
         ", \"l2_bytes\": " + std::to_string(gpu.l2_bytes) + "}";
    is_first = false;
  }
  return s + "]}}";
}

std::string kernels_json() {
  std::string s = "[";
  for (const OperationInfo& op : operations()) {
    for (const KernelInfo& kernel : op.kernels()) {
      Verdict verdict = kYes;
      if (!kernel.is_compiled) {
        verdict = no("not compiled into this build");
      } else if (!is_cuda(kernel.target)) {
        verdict = target_runs(kernel.target, {QF_CPU, 0});
      } else {
        verdict = no("there is no CUDA device here");
        for (int id = 0; gpu_acts_as(id) != 0 && !verdict; ++id)
          verdict = target_runs(kernel.target, {QF_CUDA, id});
      }
      s += std::string(s.size() > 1 ? ", " : "") + "{\"op\": \"" + op.name + "\", \"kernel\": \"" +
           kernel.name + "\", \"target\": \"" + target_name(kernel.target) +
           "\", \"available\": " + (verdict ? "true" : "false") + ", \"reason\": \"" +
           (verdict ? "" : verdict.reason) + "\"}";
    }
  }
  return s + "]";
}

template <class Make>
size_t text_result(Make make, char* out, size_t capacity) {
  size_t length = 0;
  guarded([&] { length = copy_text(make(), out, capacity); });
  return length;
}

}  // namespace
}  // namespace quantfuse

using namespace quantfuse;

extern "C" const char* qf_version(void) { return kVersion; }
extern "C" size_t qf_info(char* json, size_t capacity) { return text_result(info_json, json, capacity); }
extern "C" size_t qf_kernels(char* json, size_t capacity) {
  return text_result(kernels_json, json, capacity);
}
extern "C" int32_t qf_get_num_threads(void) {
  int32_t threads = 0;
  return guarded([&] { threads = num_threads(); }) == QF_OK ? threads : 0;
}
extern "C" qf_status qf_set_num_threads(int32_t n) {
  return guarded([&] { set_num_threads(n); });
}
