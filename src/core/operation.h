// SPDX-License-Identifier: Apache-2.0
//
// The road that every call takes: parse -> select -> launch. An operation is a struct with
//
//   static constexpr const char* name;
//   using Args = qf_..._args;   using Problem = ...;
//   static Problem parse(const Args&, Arguments&);          // checked, named sizes
//   static bool is_empty(const Problem&);                   // nothing to write
//   static std::span<const Kernel<Problem>* const> kernels();
//
// and QF_DEFINE_OPERATION(qf_name, Struct) gives it its three C functions.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/expect.h"
#include "core/kernel.h"

namespace quantfuse {

// Makes the device of a call current for the length of a scope (CUDA; nothing to do on the CPU).
class DeviceScope {
 public:
  explicit DeviceScope(qf_device device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = -1;
};

struct Candidate {
  const char* kernel;
  Verdict verdict;
};

// The parts that need no template.
[[noreturn]] void fail_no_kernel(const char* op, std::span<const Candidate> candidates);
std::string explain_json(int chosen, std::span<const Candidate> candidates);
size_t copy_text(const std::string& text, char* out, size_t capacity);
void check_workspace(const char* op, size_t needed, const qf_call& call);

template <class Op>
struct Selection {
  const Kernel<typename Op::Problem>* kernel = nullptr;
  int index = -1;
};

// The first kernel that accepts, or the forced one. With `candidates`, records every kernel's verdict.
template <class Op>
Selection<Op> select(const typename Op::Problem& problem, qf_device device, const qf_call& call,
                     std::span<Candidate> candidates = {}) {
  Selection<Op> chosen;
  const auto kernels = Op::kernels();
  const std::string_view forced = call.kernel ? call.kernel : "";
  bool is_known = forced.empty();
  for (size_t i = 0; i < kernels.size(); ++i) {
    const auto& kernel = *kernels[i];
    Verdict verdict = kYes;
    if (!forced.empty() && forced != kernel.name) {
      verdict = no("another kernel was asked for by name");
    } else if (call.strict && kernel.target == Target::reference && forced.empty()) {
      verdict = no("strict calls do not fall back to the reference");
    } else {
      verdict = verdict_on(kernel, problem, device);
    }
    is_known = is_known || forced == kernel.name;
    if (!candidates.empty()) candidates[i] = {kernel.name, verdict};
    if (verdict && !chosen.kernel) {
      chosen = {&kernel, static_cast<int>(i)};
      if (candidates.empty()) break;
    }
  }
  if (!is_known)
    fail_argument(std::string(Op::name) + ": there is no kernel named '" + std::string(forced) + "'");
  return chosen;
}

template <class Op>
Selection<Op> select_or_fail(const typename Op::Problem& problem, qf_device device, const qf_call& call) {
  auto chosen = select<Op>(problem, device, call);
  if (!chosen.kernel) {
    std::vector<Candidate> candidates(Op::kernels().size());
    select<Op>(problem, device, call, candidates);
    fail_no_kernel(Op::name, candidates);
  }
  return chosen;
}

inline constexpr qf_call kDefaultCall = {};

template <class Op>
qf_status run(const typename Op::Args* args, const qf_call* call_or_null) noexcept {
  return guarded([&] {
    const qf_call& call = call_or_null ? *call_or_null : kDefaultCall;
    Arguments arguments(Op::name, /*needs_data=*/true);
    arguments.require(args != nullptr, "args is null");
    const auto problem = Op::parse(*args, arguments);
    if (Op::is_empty(problem)) return;
    const DeviceScope scope(arguments.device());
    const auto chosen = select_or_fail<Op>(problem, arguments.device(), call);
    check_workspace(Op::name, chosen.kernel->workspace_bytes(problem), call);
    chosen.kernel->launch(problem, {call.stream, call.workspace});
  });
}

template <class Op>
qf_status workspace(const typename Op::Args* args, const qf_call* call_or_null, uint64_t* bytes) noexcept {
  return guarded([&] {
    const qf_call& call = call_or_null ? *call_or_null : kDefaultCall;
    Arguments arguments(Op::name, /*needs_data=*/false);
    arguments.require(args != nullptr, "args is null");
    arguments.require(bytes != nullptr, "bytes is null");
    const auto problem = Op::parse(*args, arguments);
    *bytes = 0;
    if (Op::is_empty(problem)) return;
    *bytes = select_or_fail<Op>(problem, arguments.device(), call).kernel->workspace_bytes(problem);
  });
}

// {"chosen": NAME or null, "candidates": [...]}; 0 with qf_last_error() set where the arguments are bad.
template <class Op>
size_t explain(const typename Op::Args* args, const qf_call* call_or_null, char* json,
               size_t capacity) noexcept {
  size_t length = 0;
  if (json && capacity > 0) json[0] = '\0';
  guarded([&] {
    const qf_call& call = call_or_null ? *call_or_null : kDefaultCall;
    Arguments arguments(Op::name, /*needs_data=*/false);
    arguments.require(args != nullptr, "args is null");
    const auto problem = Op::parse(*args, arguments);
    std::vector<Candidate> candidates(Op::kernels().size());
    const auto chosen = select<Op>(problem, arguments.device(), call, candidates);
    length = copy_text(explain_json(chosen.index, candidates), json, capacity);
  });
  return length;
}

#define QF_DEFINE_OPERATION(function, Op)                                                                  \
  extern "C" qf_status function(const Op::Args* args, const qf_call* call) { return run<Op>(args, call); } \
  extern "C" qf_status function##_workspace(const Op::Args* args, const qf_call* call, uint64_t* bytes) {  \
    return workspace<Op>(args, call, bytes);                                                               \
  }                                                                                                        \
  extern "C" size_t function##_explain(const Op::Args* args, const qf_call* call, char* json,              \
                                       size_t capacity) {                                                  \
    return explain<Op>(args, call, json, capacity);                                                        \
  }

}  // namespace quantfuse
