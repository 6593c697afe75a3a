// SPDX-License-Identifier: Apache-2.0
//
// A tensor for calls of the C interface: it owns its shape and, where asked for, its memory. Without memory
// it describes a problem to qf_OP_explain.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "quantfuse/quantfuse.h"

namespace quantfuse::cli {

inline constexpr qf_dtype kI8 = {0, 8, 1}, kI32 = {0, 32, 1}, kU8 = {1, 8, 1}, kF32 = {2, 32, 1},
                          kF16 = {2, 16, 1}, kBf16 = {4, 16, 1}, kE4m3 = {10, 8, 1}, kE5m2 = {12, 8, 1},
                          kE8m0 = {14, 8, 1};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

class Tensor {
 public:
  Tensor() = default;  // absent: get() is null

  Tensor(qf_dtype dtype, int64_t rows, int64_t cols, qf_device device = {QF_CPU, 0}) : state_(new State) {
    state_->shape = {rows, cols};
    state_->view = {nullptr, device, 2, dtype, state_->shape.data(), nullptr, 0};
  }
  static Tensor vector(qf_dtype dtype, int64_t size, qf_device device = {QF_CPU, 0}) {
    Tensor t(dtype, size, 1, device);
    t.state_->view.ndim = 1;
    return t;
  }

  // Zeroed and aligned memory on the CPU.
  Tensor&& allocated() && {
    const size_t size = (bytes() + 63) / 64 * 64 + 64;
    state_->memory.reset(std::aligned_alloc(64, size));
    if (!state_->memory) throw std::bad_alloc();
    std::memset(state_->memory.get(), 0, size);
    state_->view.data = state_->memory.get();
    return std::move(*this);
  }

  const qf_tensor* get() const { return state_ ? &state_->view : nullptr; }
  int64_t size() const { return state_->shape[0] * state_->shape[1]; }
  size_t bytes() const { return state_ ? static_cast<size_t>(size()) * state_->view.dtype.bits / 8 : 0; }
  template <class T>
  T* data() const {
    return static_cast<T*>(state_->view.data);
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  struct State {  // on the heap: `view` points to `shape`
    std::array<int64_t, 2> shape;
    qf_tensor view;
    std::unique_ptr<void, Free> memory;
  };
  std::unique_ptr<State> state_;
};

// Codes of `format` for a matrix [rows, cols], and the scales of its blocks.
inline Tensor codes_tensor(qf_format format, int64_t rows, int64_t cols, qf_device device = {QF_CPU, 0}) {
  const bool is_8bit = format == QF_INT8 || format == QF_FP8_E4M3 || format == QF_FP8_E5M2;
  const qf_dtype dtype = format == QF_INT8       ? kI8
                         : format == QF_FP8_E4M3 ? kE4m3
                         : format == QF_FP8_E5M2 ? kE5m2
                                                 : kU8;
  return Tensor(dtype, rows, is_8bit ? cols : ceil_div(cols, 2), device);
}
inline Tensor block_tensor(qf_dtype dtype, qf_block block, int64_t rows, int64_t cols,
                           qf_device device = {QF_CPU, 0}) {
  const auto blocks = [](int64_t size, int64_t whole) { return size == 0 ? 1 : ceil_div(whole, size); };
  return Tensor(dtype, blocks(block.rows, rows), blocks(block.cols, cols), device);
}

}  // namespace quantfuse::cli
