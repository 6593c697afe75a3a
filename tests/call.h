// SPDX-License-Identifier: Apache-2.0
//
// Calls of the C interface that are right in every respect, made to be spoiled in one.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "quantfuse/quantfuse.h"

namespace quantfuse {

inline constexpr qf_dtype kF32 = {2, 32, 1}, kF16 = {2, 16, 1}, kBf16 = {4, 16, 1};
inline constexpr qf_dtype kI8 = {0, 8, 1}, kU8 = {1, 8, 1}, kI32 = {0, 32, 1};

// A compact tensor on the CPU, 64-byte aligned, that remembers what it held at first.
struct Operand {
  Operand(std::string operand_name, qf_dtype dtype, std::vector<int64_t> sizes, bool is_written)
      : name(std::move(operand_name)), is_output(is_written), shape(std::move(sizes)), strides(shape.size()) {
    int64_t count = 1;
    for (size_t i = shape.size(); i-- > 0;) strides[i] = count, count *= shape[i];
    bytes = static_cast<size_t>(count) * dtype.bits / 8;
    memory.reset(static_cast<uint8_t*>(std::aligned_alloc(64, bytes / 64 * 64 + 64)));
    std::memset(memory.get(), 0, bytes / 64 * 64 + 64);
    view = {memory.get(),
            {QF_CPU, 0},
            static_cast<int32_t>(shape.size()),
            dtype,
            shape.data(),
            strides.data(),
            0};
  }
  Operand(const Operand&) = delete;

  template <class T>
  Operand& fill(const std::function<T(int64_t)>& value) {
    for (size_t i = 0; i < bytes / sizeof(T); ++i)
      at<T>(static_cast<int64_t>(i)) = value(static_cast<int64_t>(i));
    return *this;
  }
  template <class T>
  T& at(int64_t i) {
    return reinterpret_cast<T*>(memory.get())[i];
  }

  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::string name;
  bool is_output;
  bool is_optional = false;
  bool may_be_scalar = false;  // of rank 0
  bool has_own_rows = false;   // any number of them: no other tensor has this dimension
  std::vector<int64_t> shape, strides;
  size_t bytes = 0;
  std::unique_ptr<uint8_t, Free> memory;
  qf_tensor view = {};
  const qf_tensor** slot = nullptr;  // where the arguments point to this operand
};

template <class Args>
struct Call {
  using Run = qf_status (*)(const Args*, const qf_call*);
  using Workspace = qf_status (*)(const Args*, const qf_call*, uint64_t*);

  Call(Run run_function, Workspace workspace_function) : run_(run_function), workspace_(workspace_function) {}
  Call(const Call&) = delete;

  Operand& input(const char* name, const qf_tensor*& slot, qf_dtype dtype, std::vector<int64_t> shape) {
    Operand& operand = operands.emplace_back(name, dtype, std::move(shape), false);
    operand.slot = &slot;
    slot = &operand.view;
    // One is a fair number everywhere: a scale, a code, an activation. Bytes are set to 1 as well, which as
    // E8M0 is small.
    if (dtype.bits == 32 && dtype.code == 2) operand.fill<float>([](int64_t) { return 1.0f; });
    if (dtype.bits == 8) operand.fill<uint8_t>([](int64_t) { return uint8_t{1}; });
    return operand;
  }
  Operand& output(const char* name, const qf_tensor*& slot, qf_dtype dtype, std::vector<int64_t> shape) {
    Operand& operand = input(name, slot, dtype, std::move(shape));
    operand.is_output = true;
    std::memset(operand.memory.get(), 0x5c, operand.bytes);
    return operand;
  }
  Operand& operand(const std::string& name) {
    for (Operand& o : operands) {
      if (o.name == name) return o;
    }
    throw std::logic_error("no operand " + name);
  }

  // With a workspace as large as it should be, unless `call` brings its own.
  qf_status run(const qf_call* call = nullptr) {
    if (call) return run_(&args, call);
    uint64_t needed = 0;
    if (const qf_status status = workspace_(&args, nullptr, &needed); status != QF_OK)
      return run_(&args, nullptr);
    workspace_memory.resize(needed + 64);
    const auto address = reinterpret_cast<uintptr_t>(workspace_memory.data());
    qf_call with_workspace = {};
    with_workspace.workspace = reinterpret_cast<void*>((address + 63) / 64 * 64);
    with_workspace.workspace_bytes = needed;
    return run_(&args, &with_workspace);
  }
  uint64_t workspace_bytes(const qf_call* call = nullptr) {
    uint64_t needed = 0;
    return workspace_(&args, call, &needed) == QF_OK ? needed : 0;
  }

  bool outputs_are_untouched() const {
    for (const Operand& o : operands) {
      for (size_t i = 0; o.is_output && i < o.bytes; ++i) {
        if (o.memory.get()[i] != 0x5c) return false;
      }
    }
    return true;
  }

  Args args = {};
  std::deque<Operand> operands;
  std::vector<uint8_t> workspace_memory;

 private:
  Run run_;
  Workspace workspace_;
};

}  // namespace quantfuse
