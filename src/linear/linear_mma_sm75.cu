// SPDX-License-Identifier: Apache-2.0
//
// linear_mma.h for sm_75: the next stage is loaded into registers while the tensor cores multiply 16 x 8 x 8
// from this one. FP16 alone, which is what they take.
#include "core/choose.h"
#include "linear/linear_mma.h"

namespace quantfuse::linear_mma_sm75 {
using linear::Problem;
using namespace linear_mma;
namespace {

struct Pipeline {
  template <class T>
  struct Product {
    static_assert(std::is_same_v<T, f16>);
    __device__ __forceinline__ static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                    uint32_t b1, const float (&c)[4]) {
      ptx::mma_m16n8k8(d, a[0], a[1], b0, c);
      ptx::mma_m16n8k8(d, a[2], a[3], b1, d);
    }
  };

  static Limits limits(const Problem& p) {
    return {std::min<int64_t>(gpu_max_smem_bytes(p.device.id), 64 * 1024), 1, 1};
  }

  template <class Feed, class Use>
  __device__ __forceinline__ static void run(const Feed& feed, const Plan& plan, const char* shared,
                                             const Use& use) {
    const uint32_t to = ptx::shared_address(shared);
    const int count = feed.stages();
    uint4 x[Feed::kXUnits], weight[Feed::kWeightUnits];
    const auto load = [&](int stage) {
      if (!feed.is_whole(stage)) return;
      feed.weight_units(
          stage, [&](int i, int, const char* from) { weight[i] = *reinterpret_cast<const uint4*>(from); });
      feed.x_units(stage,
                   [&](int i, int, const char* from) { x[i] = *reinterpret_cast<const uint4*>(from); });
    };
    const auto store = [&](int stage) {
      if (!feed.is_whole(stage)) return feed.copy_carefully(stage, to);
      feed.weight_units(stage, [&](int i, int at, const char*) { ptx::store_shared16(to + at, weight[i]); });
      feed.x_units(stage, [&](int i, int at, const char*) { ptx::store_shared16(to + at, x[i]); });
    };
    load(0);
#pragma unroll 1
    for (int stage = 0; stage < count; ++stage) {
      store(stage);
      __syncthreads();
      load(stage + 1);
      use(stage, shared, [] {});
      __syncthreads();
    }
  }
};

template <class Body>
auto with_shape(const Problem& p, const Body& body) {
  if (p.m <= 16) return body(Shape<16, 1, 4>{});
  return body(Shape<32, 1, 4>{});
}

Verdict accepts(const Problem& p) {
  return accepts_strips(p).require(p.x.dtype == DType::f16, "the activations are not FP16");
}

size_t workspace_bytes(const Problem& p) {
  return with_shape(p, [&](auto shape) {
    return workspace_bytes_of(p, make_plan<decltype(shape)>(p, Pipeline::limits(p)));
  });
}

void launch(const Problem& problem, const Launch& launch) {
  linear::launch_canonical(problem, launch, [&](const Problem& p, float* staged) {
    choose_strip_format(p.weight.format, [&](auto format) {
      with_shape(p, [&](auto shape) {
        launch_shape<Pipeline, decltype(shape), format.value, f16>("linear_mma_sm75", p, staged, launch);
      });
    });
  });
}

}  // namespace

extern const Kernel<Problem> entry = {
    "linear_mma_sm75",          Target::sm75, accepts, workspace_bytes, launch,
    /*is_batch_invariant=*/true};

}  // namespace quantfuse::linear_mma_sm75
