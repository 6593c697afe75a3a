// SPDX-License-Identifier: Apache-2.0
//
// What GPTQ and AWQ are for: on a layer whose inputs are correlated they lose less than rounding to nearest.
// And what their callers count on: the same bits for every number of threads, nothing lost of channels that
// calibration has not seen.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "call.h"
#include "cases/random.h"
#include "formats/codes.h"

namespace quantfuse {
namespace {

constexpr int64_t kRows = 96, kColumns = 512, kInputs = 768, kGroup = 128, kGroups = kColumns / kGroup;

// A layer with inputs of 512 channels that share 32 causes and differ in size, as those of language models
// do.
struct Layer {
  std::vector<float> weight, x, hessian;

  Layer() : weight(kRows * kColumns), x(kInputs * kColumns), hessian(kColumns * kColumns) {
    cases::Random random(5);
    for (float& w : weight) w = 0.05f * random.normal();
    std::vector<float> mix(32 * kColumns), size(kColumns);
    for (float& v : mix) v = random.normal();
    for (float& v : size) v = std::exp(0.8f * random.normal());
    for (int64_t t = 0; t < kInputs; ++t) {
      float causes[32];
      for (float& c : causes) c = random.normal();
      for (int64_t c = 0; c < kColumns; ++c) {
        float sum = 0;
        for (int64_t i = 0; i < 32; ++i) sum += 0.2f * causes[i] * mix[i * kColumns + c];
        x[t * kColumns + c] = size[c] * (sum + 0.5f * random.normal());
      }
    }
    for (int64_t a = 0; a < kColumns; ++a) {
      for (int64_t b = 0; b < kColumns; ++b) {
        double sum = 0;
        for (int64_t t = 0; t < kInputs; ++t)
          sum += static_cast<double>(x[t * kColumns + a]) * x[t * kColumns + b];
        hessian[a * kColumns + b] = static_cast<float>(sum);
      }
    }
  }

  // The squared error of the layer's outputs, of a weight that differs by `d`.
  double output_error(const std::vector<double>& d) const {
    double error = 0;
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t t = 0; t < kInputs; ++t) {
        double y = 0;
        for (int64_t c = 0; c < kColumns; ++c) y += d[r * kColumns + c] * x[t * kColumns + c];
        error += y * y;
      }
    }
    return error;
  }
};

const Layer& layer() {
  static const Layer the_layer;
  return the_layer;
}

template <class CallType>
void fill(CallType& call, const char* name, const std::vector<float>& values) {
  call.operand(name).template fill<float>([&](int64_t i) { return values[static_cast<size_t>(i)]; });
}

struct GptqCall : Call<qf_gptq_quantize_args> {
  explicit GptqCall(qf_act_order order = QF_ACT_ORDER_NONE)
      : Call(qf_gptq_quantize, qf_gptq_quantize_workspace) {
    args.format = QF_INT4;
    args.group = kGroup;
    args.act_order = order;
    input("weight", args.weight, kF32, {kRows, kColumns});
    input("hessian", args.hessian, kF32, {kColumns, kColumns});
    output("q", args.q, kU8, {kRows, kColumns / 2});
    output("scale", args.scale, kF32, {kRows, kGroups});
    if (order == QF_ACT_ORDER_GROUP) output("g_idx", args.g_idx, kI32, {kColumns});
    fill(*this, "weight", layer().weight);
    fill(*this, "hessian", layer().hessian);
  }
};

struct NearestCall : Call<qf_quantize_args> {
  NearestCall() : Call(qf_quantize, qf_quantize_workspace) {
    args.format = QF_INT4;
    args.block = {1, kGroup};
    input("x", args.x, kF32, {kRows, kColumns});
    output("q", args.q, kU8, {kRows, kColumns / 2});
    output("scale", args.scale, kF32, {kRows, kGroups});
    fill(*this, "x", layer().weight);
  }
};

// Codes times scales minus the weight, each column divided by its channel's factor first.
template <class CallType>
std::vector<double> difference(CallType& call, const float* channel_scale = nullptr) {
  std::vector<double> d(kRows * kColumns);
  const int32_t* g_idx = nullptr;
  for (Operand& o : call.operands) {
    if (o.name == "g_idx") g_idx = &o.at<int32_t>(0);
  }
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kColumns; ++c) {
      const int64_t group = g_idx ? g_idx[c] : c / kGroup;
      const double value = decode_at(QF_INT4, &call.operand("q").template at<uint8_t>(r * kColumns / 2), c) *
                           call.operand("scale").template at<float>(r * kGroups + group);
      d[r * kColumns + c] =
          value / (channel_scale ? channel_scale[c] : 1.0f) - layer().weight[r * kColumns + c];
    }
  }
  return d;
}

double nearest_error() {
  NearestCall call;
  EXPECT_EQ(call.run(), QF_OK) << qf_last_error();
  return layer().output_error(difference(call));
}

TEST(Gptq, LosesAQuarterLessThanRoundingToNearest) {
  for (const qf_act_order order : {QF_ACT_ORDER_NONE, QF_ACT_ORDER_GROUP, QF_ACT_ORDER_STATIC}) {
    GptqCall call(order);
    ASSERT_EQ(call.run(), QF_OK) << qf_last_error();
    const double share = layer().output_error(difference(call)) / nearest_error();
    RecordProperty("share_of_nearest_" + std::to_string(order), std::to_string(share));
    EXPECT_LT(share, 0.75) << "act_order " << order;
  }
}

TEST(Gptq, GivesTheSameBitsForEveryNumberOfThreads) {
  std::vector<uint8_t> first;
  for (const int32_t threads : {1, 2, 3, 7}) {
    qf_set_num_threads(threads);
    GptqCall call(QF_ACT_ORDER_GROUP);
    ASSERT_EQ(call.run(), QF_OK) << qf_last_error();
    std::vector<uint8_t> bits;
    for (const Operand& o : call.operands) {
      if (o.is_output) bits.insert(bits.end(), o.memory.get(), o.memory.get() + o.bytes);
    }
    if (first.empty()) first = bits;
    EXPECT_EQ(bits, first) << threads << " threads";
  }
  qf_set_num_threads(0);
}

TEST(Gptq, RoundsToNearestWhatCalibrationHasNotSeen) {
  GptqCall call;
  call.operand("hessian").fill<float>([](int64_t) { return 0.0f; });
  NearestCall nearest;
  ASSERT_EQ(call.run(), QF_OK) << qf_last_error();
  ASSERT_EQ(nearest.run(), QF_OK) << qf_last_error();
  for (const char* name : {"q", "scale"}) {
    EXPECT_EQ(std::memcmp(call.operand(name).memory.get(), nearest.operand(name).memory.get(),
                          call.operand(name).bytes),
              0)
        << name;
  }
}

TEST(Gptq, DampingMakesARankOneHessianDefinite) {
  GptqCall call;
  call.operand("hessian").fill<float>([](int64_t) { return 2.0f; });
  EXPECT_EQ(call.run(), QF_OK) << qf_last_error();
  call.args.damping = 1e-15;
  EXPECT_EQ(call.run(), QF_BAD_ARGUMENT);
  EXPECT_NE(std::string(qf_last_error()).find("not positive definite"), std::string::npos) << qf_last_error();
}

struct AwqCall : Call<qf_awq_search_args> {
  AwqCall() : Call(qf_awq_search, qf_awq_search_workspace) {
    args.format = QF_INT4;
    args.group = kGroup;
    input("weight", args.weight, kF32, {kRows, kColumns});
    input("x", args.x, kF32, {kInputs, kColumns});
    output("channel_scale", args.channel_scale, kF32, {kColumns});
    output("clip", args.clip, kF32, {kRows, kGroups});
    output("loss", args.loss, kF32, {21});
    fill(*this, "weight", layer().weight);
    fill(*this, "x", layer().x);
  }
  const float* channel_scale() { return &operand("channel_scale").at<float>(0); }
};

// Rounds w * channel_scale, limited to +-clip, to nearest.
double error_after(AwqCall& awq, bool is_clipped) {
  NearestCall call;
  call.operand("x").fill<float>([&](int64_t i) {
    const float limit =
        is_clipped ? awq.operand("clip").at<float>(i / kColumns * kGroups + i % kColumns / kGroup) : INFINITY;
    return std::fmin(std::fmax(layer().weight[i] * awq.channel_scale()[i % kColumns], -limit), limit);
  });
  EXPECT_EQ(call.run(), QF_OK) << qf_last_error();
  return layer().output_error(difference(call, awq.channel_scale()));
}

TEST(Awq, LosesATenthLessThanRoundingToNearest) {
  AwqCall call;
  ASSERT_EQ(call.run(), QF_OK) << qf_last_error();
  const double nearest = nearest_error(), scaled = error_after(call, false),
               clipped = error_after(call, true);
  RecordProperty("scaled", std::to_string(scaled / nearest));
  RecordProperty("clipped", std::to_string(clipped / nearest));
  EXPECT_LT(scaled, 0.9 * nearest);
  EXPECT_LT(clipped, scaled);
}

TEST(Awq, ReportsTheLossesThatItsScalesHave) {
  AwqCall call;
  ASSERT_EQ(call.run(), QF_OK) << qf_last_error();
  const float* losses = &call.operand("loss").at<float>(0);
  EXPECT_NEAR(losses[0] / nearest_error(), 1, 1e-3);
  EXPECT_NEAR(*std::min_element(losses, losses + 21) / error_after(call, false), 1, 1e-3);
}

}  // namespace
}  // namespace quantfuse
