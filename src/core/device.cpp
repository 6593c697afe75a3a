// SPDX-License-Identifier: Apache-2.0
#include "core/device.h"

#include <sched.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "core/error.h"

namespace quantfuse {
namespace {

constexpr Target kCpuTargets[] = {Target::reference, Target::avx2,        Target::avx_vnni,
                                  Target::avx512,    Target::avx512_bf16, Target::amx};

#if defined(__x86_64__)
struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};
// CPUID leaf 7 (Intel's manual); zeros where there is none.
Registers extended_features(unsigned subleaf) {
  Registers r;
  __get_cpuid_count(7, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

bool has_avx_vnni() { return (extended_features(1).a >> 4 & 1) != 0; }
#endif

#if defined(QF_EMULATE_AMX)
bool has_amx() { return true; }
bool may_use_amx() { return true; }
#elif defined(__x86_64__) && defined(__linux__)
// Tiles of bytes and of BF16 numbers, and a system that saves their registers.
constexpr long kGetSupported = 0x1021, kRequest = 0x1023, kTileData = 18;  // arch_prctl, linux/x86/xstate.rst

bool has_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
  uint64_t supported = 0;
  return (extended_features(0).d & kAll) == kAll && syscall(SYS_arch_prctl, kGetSupported, &supported) == 0 &&
         (supported >> kTileData & 1) != 0;
}

// A process has to ask before its first tile: a thread's state grows by 8 KB then. All its threads may use
// them.
bool may_use_amx() { return syscall(SYS_arch_prctl, kRequest, kTileData) == 0; }
#else
bool has_amx() { return false; }
bool may_use_amx() { return false; }
#endif

bool cpu_has(Target t) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (t == Target::avx2) return avx2;
  if (t == Target::avx_vnni) return avx2 && has_avx_vnni();
  if (t == Target::avx512) return avx512;
  if (t == Target::avx512_bf16) return avx512 && __builtin_cpu_supports("avx512bf16");
  if (t == Target::amx) return avx512 && has_amx();
#endif
  return t == Target::reference;
}

Target best_up_to(Target wanted) {
  Target best = Target::reference;
  for (const Target t : kCpuTargets) {
    if (t <= wanted && cpu_has(t)) best = t;
  }
  return best;
}

// What is used where QUANTFUSE_ISA says nothing. The dot product of BF16 pairs pays where it has twice the
// rate of float32, as on AMD's Zen 4. On Intel's CPUs, which have AMX for that, it has half of it (Emerald
// Rapids: 179 against 362 GFLOP/s on two cores). The kernels on tiles of AMX have been tested in software
// alone, and not timed: whoever wants them asks for them.
Target quickest_target(Target detected) {
#if defined(__x86_64__)
  if (detected >= Target::avx512_bf16 && !__builtin_cpu_is("amd")) return Target::avx512;
#endif
  return detected;
}

int num_cpus_of_process() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

Target chosen_by_environment() {
  const char* isa = std::getenv("QUANTFUSE_ISA");
  if (!isa || !*isa) return quickest_target(best_up_to(Target::amx));
  std::string names;
  for (const Target t : kCpuTargets) {
    if (std::strcmp(isa, target_name(t)) == 0) return best_up_to(t);
    names += std::string(t == Target::reference ? "" : t == Target::amx ? " or " : ", ") + target_name(t);
  }
  fail_argument(std::string("QUANTFUSE_ISA is '") + isa + "', expected " + names);
}

Target permitted(Target target) { return target == Target::amx && !may_use_amx() ? Target::avx512 : target; }

int threads_by_environment() {
  const char* text = std::getenv("QUANTFUSE_NUM_THREADS");
  if (!text || !*text) return num_cpus_of_process();
  int threads = 0;
  const char* end = text + std::strlen(text);
  const auto [rest, error] = std::from_chars(text, end, threads);
  if (error != std::errc() || rest != end || threads < 1 || threads > kMaxThreads) {
    fail_argument(std::string("QUANTFUSE_NUM_THREADS is '") + text + "', expected a number from 1 to " +
                  std::to_string(kMaxThreads));
  }
  return threads;
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

// Bytes of the data cache of a level that one CPU sees; 0 where the system does not tell. sysconf adds up the
// last caches of a whole AMD package, of which a CPU can use one.
int64_t cache_bytes(int cpu, int level, int sysconf_name) {
  const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index";
  for (int index = 0;; ++index) {
    const std::string at = folder + std::to_string(index) + "/";
    int its_level = 0;
    std::string type, unit;
    int64_t size = 0;
    if (!(std::ifstream(at + "level") >> its_level) || !(std::ifstream(at + "type") >> type)) break;
    if (its_level != level || type == "Instruction") continue;
    if (!(std::ifstream(at + "size") >> size >> unit) || unit != "K") break;
    return size * 1024;
  }
  return std::max(sysconf(sysconf_name), 0L);
}

}  // namespace

const CpuSettings& cpu_settings() {
  static const CpuSettings settings = [] {
    CpuSettings of_process = {permitted(chosen_by_environment()), 0, threads_by_environment()};
    for (const Target t : kCpuTargets) {
      if (t <= of_process.target && cpu_has(t)) of_process.targets |= 1u << static_cast<int>(t);
    }
    return of_process;
  }();
  return settings;
}

CpuInfo cpu_info() {
  CpuInfo info;
  info.model = cpu_model();
  info.num_cpus = num_cpus_of_process();
  cpu_set_t set;
  int first_cpu = 0;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    while (!CPU_ISSET(first_cpu, &set)) ++first_cpu;
  }
  info.l1_bytes = cache_bytes(first_cpu, 1, _SC_LEVEL1_DCACHE_SIZE);
  info.l2_bytes = cache_bytes(first_cpu, 2, _SC_LEVEL2_CACHE_SIZE);
  info.l3_bytes = cache_bytes(first_cpu, 3, _SC_LEVEL3_CACHE_SIZE);
  info.detected = best_up_to(Target::amx);
  return info;
}

const char* target_name(Target t) {
  switch (t) {
    case Target::reference: return "scalar";
    case Target::avx2: return "avx2";
    case Target::avx_vnni: return "avx_vnni";
    case Target::avx512: return "avx512";
    case Target::avx512_bf16: return "avx512_bf16";
    case Target::amx: return "amx";
    case Target::sm75: return "sm_75";
    case Target::sm80: return "sm_80";
    case Target::sm90: return "sm_90a";
  }
  return "unknown";
}

Verdict target_runs(Target target, qf_device device) {
  if (device.type == QF_CUDA) {
    if (!is_cuda(target)) return no("runs on the CPU, and the tensors are on a CUDA device");
    const int sm = gpu_acts_as(device.id);
    if (sm == 0) return no("there is no such CUDA device here");
    // 90a code runs on 9.0 alone; older targets also exist as PTX for everything newer.
    if (target == Target::sm90) return sm == 90 ? kYes : no("needs compute capability 9.0");
    return sm >= static_cast<int>(target) ? kYes : no("needs a GPU of a higher compute capability");
  }
  if (is_cuda(target)) return no("runs on CUDA devices, and the tensors are on the CPU");
  if (target == Target::avx512_bf16 && cpu_settings().target == Target::amx)
    return no("dot products of BF16 pairs are slow on CPUs with AMX");
  return cpu_settings().has(target)
             ? kYes
             : no("needs instructions that this CPU does not have, or that QUANTFUSE_ISA has to ask for");
}

}  // namespace quantfuse
