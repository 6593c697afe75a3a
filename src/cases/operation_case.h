// SPDX-License-Identifier: Apache-2.0
//
// What the cases of all operations share: tensors, workspaces, calls. A case of one operation declares its
// tensors in its constructor and says how to fill them, how they become the C arguments, and how to judge the
// result.
#pragma once

#include <deque>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cases/compare.h"
#include "cases/tensor.h"
#include "formats/codes.h"

namespace quantfuse::cases {

// The three C functions of an operation.
template <class Args>
struct Functions {
  const char* op;
  qf_status (*run)(const Args*, const qf_call*);
  qf_status (*workspace)(const Args*, const qf_call*, uint64_t*);
  size_t (*explain)(const Args*, const qf_call*, char*, size_t);
};
#define QF_CASE_FUNCTIONS(op) \
  { #op, qf_##op, qf_##op##_workspace, qf_##op##_explain }

template <class Args>
class OperationCase : public Case {
 public:
  void make(qf_device new_device, uint64_t seed, int copies) final {
    device = new_device;
    Random random(seed);
    fill(random);
    for (Tensor& tensor : tensors_) tensor.place(device, copies);
    place_extra(copies);
    sets_.clear();
    for (int i = 0; i < copies; ++i) sets_.push_back(args(i));
    workspace_kernel_.reset();
    forget_oracle();
  }

  void reset() final {
    for (Tensor& tensor : tensors_) tensor.reset();
    workspace_.fill(kUnwrittenWorkspace);
  }

  qf_status run(const char* kernel, int copy, void* stream) final {
    qf_call call = {};
    call.stream = stream;
    call.kernel = kernel;
    const Args& set = sets_.at(static_cast<size_t>(copy));
    // The size is asked for once per kernel, so that a bench measures the call and not the question.
    if (!workspace_kernel_ || *workspace_kernel_ != (kernel ? kernel : "")) {
      uint64_t bytes = 0;
      if (const qf_status status = functions_.workspace(&set, &call, &bytes); status != QF_OK) return status;
      workspace_ = Buffer(device, bytes);
      workspace_.fill(kUnwrittenWorkspace);
      workspace_kernel_ = kernel ? kernel : "";
    }
    call.workspace = workspace_.data();
    call.workspace_bytes = workspace_.size();
    return functions_.run(&set, &call);
  }

  std::string check() final {
    synchronize(device);
    for (Tensor& tensor : tensors_) {
      if (std::string wrong = tensor.fetch(); !wrong.empty()) return wrong;
    }
    if (!workspace_.has_intact_guards()) return "wrote outside the workspace";
    return compare();
  }

  std::string explain(const char* kernel) final {
    qf_call call = {};
    call.kernel = kernel;
    const Args a = sets_.empty() ? args(kNoData) : sets_[0];
    const size_t length = functions_.explain(&a, &call, nullptr, 0);
    if (length == 0) throw std::runtime_error(qf_last_error());
    std::string json(length + 1, '\0');
    functions_.explain(&a, &call, json.data(), json.size());
    json.resize(length);
    return json;
  }

  std::vector<uint8_t> outputs(int copy) final {
    synchronize(device);
    std::vector<uint8_t> bytes;
    for (const Tensor& tensor : tensors_) {
      if (tensor.role() == Role::input) continue;
      const std::vector<uint8_t> more = tensor.read(copy);
      bytes.insert(bytes.end(), more.begin(), more.end());
    }
    return bytes;
  }

 protected:
  explicit OperationCase(const Functions<Args>& functions) : functions_(functions) { op = functions.op; }

  virtual void fill(Random& random) = 0;  // the initial contents of all inputs
  virtual Args args(int set) = 0;         // the C arguments over the tensors of a set
  virtual std::string compare() = 0;      // result() of the outputs with the reference; "" if all is well
  virtual void forget_oracle() = 0;       // the inputs are new: what the reference said no longer holds
  virtual void place_extra(int /*copies*/) {}  // memory that is not a tensor of the mathematics

  Tensor& add(std::string name, Role role, qf_dtype dtype, std::vector<int64_t> shape,
              int64_t row_padding = 0) {
    Tensor& tensor = tensors_.emplace_back(std::move(name), role, dtype, std::move(shape), row_padding);
    bytes += static_cast<double>(tensor.data_bytes()) * (role == Role::in_out ? 2 : 1);
    return tensor;
  }
  const qf_tensor* view(Tensor* tensor, int set) { return tensor ? tensor->view(set, device) : nullptr; }

  // ---- For the operations whose output may be quantized ----

  // Declares y, and out_scale where there is one. `spec` has out_format, out_mode, out_group, dtype and
  // row_padding.
  template <class Spec>
  Output add_output(const Spec& spec, Role role, int64_t rows, int64_t cols) {
    Output out = {spec.out_format, spec.out_mode, spec.out_group, nullptr, nullptr, false};
    const qf_dtype dtype = out.is_quantized() ? code_dtype(out.format, spec.row_padding > 0) : spec.dtype;
    out.y = &add("y", role, dtype, {rows, cols}, spec.row_padding);
    if (!out.is_quantized()) return out;
    if (out.mode == QF_SCALE_STATIC) {
      out.scale = &add("out_scale", Role::input, kF32, {1});
      return out;
    }
    const int64_t groups = ceil_div(cols, resolved(out.group, cols));
    if constexpr (requires { spec.has_transposed_scale; })
      out.has_transposed_scale = spec.has_transposed_scale;
    if (out.has_transposed_scale) {
      out.scale = &add("out_scale", Role::output, kF32, {groups, rows}, spec.row_padding);
      out.scale->show_transposed();
    } else {
      out.scale = &add("out_scale", Role::output, kF32, {rows, groups});
    }
    return out;
  }
  // A static scale that covers +-largest.
  static void fill_static_scale(const Output& out, double largest) {
    if (out.scale && out.scale->role() == Role::input) {
      out.scale->initial().set(0, 0, largest / code_range(out.format).symmetric_max);
    }
  }
  void set_output(Args& a, const Output& out, int set) {
    a.y = view(out.y, set);
    a.out_format = out.format;
    a.out_mode = out.mode;
    a.out_group = out.group;
    a.out_scale = view(out.scale, set);
  }
  // Runs the reference kernel, but with the numbers before their rounding or quantization as the output.
  void run_reference_into(FloatMatrix& y, Args a) {
    a.y = &y.view;
    a.out_format = QF_FORMAT_NONE;
    a.out_scale = nullptr;
    if constexpr (requires { a.hadamard; }) a.hadamard = 0;
    run_reference(a);
  }

  // Runs the reference kernel on the CPU.
  void run_reference(const Args& a) {
    const std::string kernel = op + "_ref";
    qf_call call = {};
    call.kernel = kernel.c_str();
    uint64_t bytes_needed = 0;
    qf_status status = functions_.workspace(&a, &call, &bytes_needed);
    if (status == QF_OK) {
      const Buffer workspace({QF_CPU, 0}, bytes_needed);
      call.workspace = workspace.data();
      call.workspace_bytes = bytes_needed;
      status = functions_.run(&a, &call);
    }
    if (status != QF_OK) throw std::runtime_error("the reference failed: " + std::string(qf_last_error()));
  }

 private:
  static constexpr uint8_t kUnwrittenWorkspace = 0xff;

  Functions<Args> functions_;
  std::deque<Tensor> tensors_;
  std::vector<Args> sets_;
  Buffer workspace_;
  std::optional<std::string> workspace_kernel_;  // whom workspace_ was made for
};

}  // namespace quantfuse::cases
