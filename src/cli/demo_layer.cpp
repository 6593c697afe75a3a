// SPDX-License-Identifier: Apache-2.0
#include "demo_layer.h"

#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>

namespace quantfuse::cli {
namespace {

uint16_t to_bf16(float value) {  // of finite numbers, to nearest even
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void check_status(qf_status status) {
  if (status != QF_OK) throw std::runtime_error(qf_last_error());
}

template <class Work>
void parallel(int64_t count, const Work& work) {
  const int64_t threads = qf_get_num_threads();
  std::vector<std::thread> pool;
  for (int64_t t = 0; t < threads; ++t) {
    pool.emplace_back([=, &work] {
      for (int64_t i = count * t / threads; i < count * (t + 1) / threads; ++i) work(i);
    });
  }
  for (std::thread& thread : pool) thread.join();
}

}  // namespace

// Student's t with 8 degrees of freedom has about the tails of trained weights (kurtosis 4.5); a hundredth of
// the inputs are ten times as large as the others, as in the hidden states of real models.
FloatLayer::FloatLayer(int64_t n, int64_t k, int64_t tokens)
    : n(n),
      k(k),
      tokens(tokens),
      weight(Tensor(kF32, n, k).allocated()),
      x(Tensor(kBf16, tokens, k).allocated()),
      exact_y(static_cast<size_t>(tokens * n)) {
  parallel(n, [&](int64_t row) {
    std::mt19937 random(static_cast<uint32_t>(row));
    std::student_t_distribution<float> heavy(8.0f);
    for (int64_t c = 0; c < k; ++c) weight.data<float>()[row * k + c] = 0.02f * heavy(random);
  });
  std::mt19937 random(12345);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < tokens * k; ++i) {
    x.data<uint16_t>()[i] = to_bf16(normal(random) * (i % k % 100 == 7 ? 10.0f : 1.0f));
  }
  parallel(n, [&](int64_t row) {
    for (int64_t t = 0; t < tokens; ++t) exact_y[static_cast<size_t>(t * n + row)] = dot(t, row);
  });
}

float FloatLayer::dot(int64_t token, int64_t row) const {
  const uint16_t* a = x.data<uint16_t>() + token * k;
  const float* w = weight.data<float>() + row * k;
  constexpr int kLanes = 16;  // sums side by side, which a compiler makes a vector of
  float sums[kLanes] = {};
  int64_t c = 0;
  for (; c + kLanes <= k; c += kLanes) {
    for (int j = 0; j < kLanes; ++j) sums[j] += from_bf16(a[c + j]) * w[c + j];
  }
  double total = 0;
  for (const float s : sums) total += s;
  for (; c < k; ++c) total += from_bf16(a[c]) * w[c];
  return static_cast<float>(total);
}

class QuantizedLayer::Call {
 public:
  Call(const QuantizedLayer& layer, int64_t tokens)
      : layer_(layer),
        x_(Tensor(kBf16, tokens, layer.layer_.k).allocated()),
        y_(Tensor(kBf16, tokens, layer.layer_.n).allocated()) {
    std::memcpy(x_.data<void>(), layer.layer_.x.data<void>(), x_.bytes());
    args_.x = x_.get();
    args_.act_format = layer.act_format_;
    args_.weight = layer.view_;
    args_.y = y_.get();
    uint64_t bytes = 0;
    check_status(qf_linear_workspace(&args_, nullptr, &bytes));
    workspace_ = Tensor::vector(kU8, static_cast<int64_t>(bytes)).allocated();
    call_.workspace = workspace_.data<void>();
    call_.workspace_bytes = bytes;
  }

  void run(int copy) {
    args_.weight.packed = layer_.packed_[static_cast<size_t>(copy)].get();
    check_status(qf_linear(&args_, &call_));
  }
  double y(size_t i) const { return from_bf16(y_.data<uint16_t>()[i]); }

 private:
  const QuantizedLayer& layer_;
  Tensor x_, y_, workspace_;
  qf_linear_args args_ = {};
  qf_call call_ = {};
};

QuantizedLayer::QuantizedLayer(const FloatLayer& layer, const cases::LinearSpec& spec, double cache_bytes)
    : layer_(layer), act_format_(spec.act_format) {
  const cases::WeightSpec& w = spec.weight;
  codes_ = codes_tensor(w.format, layer.n, layer.k).allocated();
  scale_ = block_tensor(w.has_e8m0_scale ? kE8m0 : kF32, w.block, layer.n, layer.k).allocated();
  const qf_quantize_args args = {layer.weight.get(),
                                 w.format,
                                 w.block,
                                 QF_SCALE_DYNAMIC,
                                 codes_.get(),
                                 scale_.get(),
                                 nullptr,
                                 nullptr,
                                 0};
  uint64_t workspace_bytes = 0;
  check_status(qf_quantize_workspace(&args, nullptr, &workspace_bytes));
  const Tensor workspace = Tensor::vector(kU8, static_cast<int64_t>(workspace_bytes)).allocated();
  qf_call call = {};
  call.workspace = workspace.data<void>();
  call.workspace_bytes = workspace_bytes;
  check_status(qf_quantize(&args, &call));

  view_ = {w.format, layer.n, layer.k, w.block,           codes_.get(), scale_.get(),
           nullptr,  nullptr, 0,       /*is_constant=*/1, nullptr,      nullptr};
  uint64_t packed_bytes = 0;
  check_status(qf_weight_packed_bytes(&view_, {QF_CPU, 0}, &packed_bytes));
  const int copies = copies_beyond_cache(static_cast<double>(packed_bytes), cache_bytes);
  for (int i = 0; i < copies; ++i)
    packed_.push_back(Tensor::vector(kU8, static_cast<int64_t>(packed_bytes)).allocated());
  view_.packed = packed_[0].get();
  check_status(qf_weight_pack(&view_, nullptr));
  for (int i = 1; i < copies; ++i)
    std::memcpy(packed_[i].data<void>(), packed_[0].data<void>(), packed_bytes);
}

double QuantizedLayer::error() const {
  Call call(*this, layer_.tokens);
  call.run(0);
  double difference = 0, norm = 0;
  for (size_t i = 0; i < layer_.exact_y.size(); ++i) {
    const double exact = layer_.exact_y[i], d = call.y(i) - exact;
    difference += d * d;
    norm += exact * exact;
  }
  return std::sqrt(difference / norm);
}

Timing QuantizedLayer::time(int64_t tokens, double seconds) const {
  Call call(*this, tokens);
  return measure({[&](int copy) { call.run(copy); }, static_cast<int>(packed_.size())}, seconds);
}

}  // namespace quantfuse::cli
