// SPDX-License-Identifier: Apache-2.0
//
// Layers whose every input is the output of the one before, called without waiting in between: the same bits
// as one at a time. On a GPU a kernel may begin before the one ahead has ended, so that it must not touch too
// early what that writes, its workspace included, which all calls share here.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>

#include "cases/buffer.h"
#include "cases/tensor.h"
#include "cases/verify.h"
#include "formats/numbers.h"

namespace quantfuse::cases {
namespace {

constexpr int64_t kWidth = 512;  // of every layer's input and output
constexpr int kRounds = 3;

struct Scheme {
  const char* name;
  qf_format format;
  int64_t group;
  qf_format act_format = QF_FORMAT_NONE;
  bool has_offset = false, has_g_idx = false, has_gain = false;
};

const Scheme kSchemes[] = {
    {"int4", QF_INT4, 128},
    {"int4, normalized", QF_INT4, 128, QF_FORMAT_NONE, false, false, true},
    {"int4, offsets", QF_INT4, 32, QF_FORMAT_NONE, true},
    {"int4, act-order", QF_INT4, 64, QF_FORMAT_NONE, false, true},
    {"int8", QF_INT8, 0},
    {"nf4", QF_NF4, 64},
    {"int4 by int8", QF_INT4, 128, QF_INT8},
    {"int8 by int8", QF_INT8, 0, QF_INT8},
    {"int8 by int8, groups", QF_INT8, 128, QF_INT8},
    {"e4m3 by e4m3", QF_FP8_E4M3, 0, QF_FP8_E4M3},
};

void check(qf_status status) {
  if (status != QF_OK) throw std::runtime_error(qf_last_error());
}

struct Matrix {
  Matrix(qf_device device, qf_dtype dtype, int64_t rows, int64_t cols)
      : sizes{rows, cols}, memory(device, static_cast<size_t>(rows * cols) * dtype.bits / 8) {
    view = {memory.data(), device, 2, dtype, sizes, nullptr, 0};
  }
  Matrix(const Matrix&) = delete;
  template <class T>
  void fill(const std::function<T()>& draw) {
    std::vector<T> values(memory.size() / sizeof(T));
    for (T& value : values) value = draw();
    memory.write(reinterpret_cast<const uint8_t*>(values.data()));
  }
  int64_t sizes[2];
  Buffer memory;
  qf_tensor view;
};

struct Layer {
  Layer(const Scheme& scheme, qf_device device, bool is_gated, std::mt19937& random)
      : rows(is_gated ? 2 * kWidth : kWidth),
        groups(scheme.group ? kWidth / scheme.group : 1),
        codes(device, code_dtype(scheme.format, false), rows, row_bytes(scheme.format, kWidth)),
        scale(device, kF32, rows, groups),
        offset(device, kF32, rows, groups),
        g_idx(device, kI32, 1, kWidth) {
    codes.fill<uint8_t>([&] {
      const auto byte = static_cast<uint8_t>(random());
      return scheme.format == QF_FP8_E4M3 ? static_cast<uint8_t>(byte & 0xd7) : byte;  // up to 15
    });
    std::uniform_real_distribution<float> about_one(0.5f, 1.5f), small(-0.02f, 0.02f);
    const float largest = scheme.format == QF_NF4    ? 1
                          : scheme.format == QF_INT4 ? 8
                          : is_fp8(scheme.format)    ? 6
                                                     : 128;
    scale.fill<float>([&] { return 0.07f / largest * about_one(random); });
    offset.fill<float>([&] { return small(random); });
    int32_t column = 0;
    g_idx.fill<int32_t>(
        [&] { return static_cast<int32_t>(37 * column++ % kWidth / std::max<int64_t>(scheme.group, 1)); });
    g_idx_view = g_idx.view, g_idx_view.ndim = 1, g_idx_view.shape = g_idx.sizes + 1;

    weight.format = scheme.format, weight.n = rows, weight.k = kWidth, weight.block = {1, scheme.group};
    weight.is_gated = is_gated, weight.is_constant = 1;
    weight.codes = &codes.view, weight.scale = &scale.view;
    if (scheme.has_offset) weight.offset = &offset.view;
    if (scheme.has_g_idx) weight.g_idx = &g_idx_view;
    uint64_t bytes = 0;
    if (qf_weight_packed_bytes(&weight, device, &bytes) != QF_OK) return;
    packed = Buffer(device, bytes);
    packed_size = static_cast<int64_t>(bytes);
    packed_view = {packed.data(), device, 1, kU8, &packed_size, nullptr, 0};
    weight.packed = &packed_view;
    check(qf_weight_pack(&weight, nullptr));
  }
  Layer(const Layer&) = delete;

  int64_t rows, groups, packed_size = 0;
  Matrix codes, scale, offset, g_idx;
  Buffer packed;
  qf_tensor g_idx_view, packed_view;
  qf_weight weight = {};
};

class Chain {
 public:
  Chain(const Scheme& scheme, qf_device device, int64_t m)
      : scheme_(scheme),
        device_(device),
        random_(static_cast<uint32_t>(m)),
        gate_up_(scheme, device, true, random_),
        down_(scheme, device, false, random_),
        gain_(device, kBf16, 1, kWidth),
        x_(device, kBf16, m, kWidth),
        h_(device, kBf16, m, kWidth),
        y_(device, kBf16, m, kWidth) {
    std::normal_distribution<float> normal;
    start_.resize(x_.memory.size());
    for (size_t i = 0; i < start_.size(); i += 2) {
      bf16 number;
      from_float(normal(random_), number);
      std::memcpy(&start_[i], &number, 2);
    }
    gain_.fill<uint16_t>([] { return uint16_t{0x3f80}; });  // 1
    gain_view_ = gain_.view, gain_view_.ndim = 1, gain_view_.shape = gain_.sizes + 1;
    uint64_t bytes = 0;
    for (const Step& step : steps()) {
      const qf_linear_args args = arguments(step);
      uint64_t of_step = 0;
      check(qf_linear_workspace(&args, nullptr, &of_step));
      bytes = std::max(bytes, of_step);
    }
    workspace_ = Buffer(device, bytes);
  }

  // x, h and y in the end.
  std::vector<uint8_t> run(bool waits) {
    x_.memory.write(start_.data());
    qf_call call = {};
    call.workspace = workspace_.data(), call.workspace_bytes = workspace_.size();
    for (int round = 0; round < kRounds; ++round) {
      for (const Step& step : steps()) {
        const qf_linear_args args = arguments(step);
        check(qf_linear(&args, &call));
        if (waits) synchronize(device_);
      }
    }
    synchronize(device_);
    std::vector<uint8_t> result;
    for (const Matrix* matrix : {&x_, &h_, &y_}) {
      const std::vector<uint8_t> bytes = matrix->memory.read();
      result.insert(result.end(), bytes.begin(), bytes.end());
    }
    return result;
  }

 private:
  struct Step {
    const Layer& layer;
    const Matrix &from, &to;
    bool adds_x;
  };
  std::vector<Step> steps() const {
    return {{gate_up_, x_, h_, false}, {down_, h_, y_, true}, {down_, y_, x_, false}};
  }
  qf_linear_args arguments(const Step& step) const {
    qf_linear_args args = {};
    args.x = &step.from.view, args.y = &step.to.view;
    args.weight = step.layer.weight;
    args.act_format = scheme_.act_format;
    args.act_group = scheme_.act_format != QF_FORMAT_NONE ? scheme_.group * (scheme_.format == QF_INT8) : 0;
    if (step.layer.weight.is_gated) args.activation = QF_SILU;
    if (step.adds_x) args.residual = &x_.view;
    if (scheme_.has_gain) args.x_gain = &gain_view_, args.x_eps = 1e-5;
    return args;
  }

  const Scheme& scheme_;
  qf_device device_;
  std::mt19937 random_;
  Layer gate_up_, down_;
  Matrix gain_, x_, h_, y_;
  qf_tensor gain_view_;
  std::vector<uint8_t> start_;
  Buffer workspace_;
};

void expect_the_same_bits(qf_device device) {
  for (const Scheme& scheme : kSchemes) {
    for (const int64_t m : {1, 5, 16, 40, 130}) {
      SCOPED_TRACE(std::string(scheme.name) + ", m=" + std::to_string(m));
      Chain chain(scheme, device, m);
      const std::vector<uint8_t> expected = chain.run(/*waits=*/true);
      for (int i = 0; i < 3; ++i) ASSERT_EQ(chain.run(/*waits=*/false), expected);
    }
  }
}

TEST(DependentChain, OnAGpu) {
  if (!has_cuda_device()) GTEST_SKIP() << "there is no CUDA device here";
  expect_the_same_bits({QF_CUDA, 0});
}

}  // namespace
}  // namespace quantfuse::cases
