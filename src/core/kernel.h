// SPDX-License-Identifier: Apache-2.0
//
// What every kernel of every operation has, and how one of them is chosen: the first in kernels.list that
// accepts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "quantfuse/quantfuse.h"

namespace quantfuse {

// What a kernel is built for. CUDA targets are the compute capability they need at least.
enum class Target : int16_t {
  reference = 0,
  avx2,
  avx_vnni,
  avx512,
  avx512_bf16,
  amx,
  sm75 = 75,
  sm80 = 80,
  sm90 = 90
};

constexpr bool is_cuda(Target t) { return t >= Target::sm75; }
const char* target_name(Target t);

// accepts() answers yes, or no with a reason (a string literal, so that refusing costs nothing).
struct Verdict {
  const char* reason = nullptr;
  explicit operator bool() const { return reason == nullptr; }
};
inline constexpr Verdict kYes{};
constexpr Verdict no(const char* reason) { return {reason}; }

// Chain of conditions: `return require(p.k % 8 == 0, "k is not a multiple of 8").require(...)`.
class Requirements {
 public:
  constexpr Requirements& require(bool condition, const char* reason_if_not) {
    if (!verdict_.reason && !condition) verdict_.reason = reason_if_not;
    return *this;
  }
  constexpr operator Verdict() const { return verdict_; }  // NOLINT: the chain is its verdict

 private:
  Verdict verdict_;
};

// What a launch gets besides its problem.
struct Launch {
  void* stream = nullptr;
  void* workspace = nullptr;
};

template <class Problem>
struct Kernel {
  const char* name;
  Target target;
  Verdict (*accepts)(const Problem&);  // null: not compiled into this build
  size_t (*workspace_bytes)(const Problem&);
  void (*launch)(const Problem&, const Launch&);
  // Where a problem asks for it: whether the bits of a row are the same for any number of rows.
  bool is_batch_invariant = false;
  bool normalizes_x = false;  // likewise: whether it takes an x that is yet to be normalized
};

// Static, so that each kernel file has its own: a shared copy could be one compiled for AVX-512.
template <class Problem>
static size_t no_workspace(const Problem&) {
  return 0;
}

// Whether kernels of this target can run on `device` here: compiled, within QUANTFUSE_ISA / QUANTFUSE_MAX_SM,
// present.
Verdict target_runs(Target target, qf_device device);

template <class Problem>
Verdict verdict_on(const Kernel<Problem>& kernel, const Problem& problem, qf_device device) {
  if (!kernel.accepts) return no("not compiled into this build");
  if (Verdict v = target_runs(kernel.target, device); !v) return v;
  if constexpr (requires { problem.batch_invariant; }) {
    if (problem.batch_invariant && !kernel.is_batch_invariant)
      return no("the bits of a row depend on the number of rows");
  }
  if constexpr (requires { problem.x_gain; }) {
    if (problem.x_gain && !kernel.normalizes_x) return no("does not normalize x");
  }
  return kernel.accepts(problem);
}

}  // namespace quantfuse
