// SPDX-License-Identifier: Apache-2.0
//
// linear_mma.h for sm_80 and newer: stages come by cp.async into a ring of up to four, while the tensor cores
// multiply 16 x 8 x 16. For packed weights of every format on GPUs that are not Hopper, and for those x that
// the Hopper kernels do not take.
#include "core/choose.h"
#include "linear/linear_mma.h"

namespace quantfuse::linear_mma_sm80 {
using linear::Problem;
using namespace linear_mma;
namespace {

struct Pipeline {
  template <class T>
  struct Product {
    __device__ __forceinline__ static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                    uint32_t b1, const float (&c)[4]) {
      ptx::mma_m16n8k16<T>(d, a, b0, b1, c);
    }
  };

  // An A100's shared memory is the most: the other GPUs then run what it does.
  static Limits limits(const Problem& p) {
    return {std::min<int64_t>(gpu_max_smem_bytes(p.device.id), 163 * 1024), 3, 4};
  }

  // In the middle of a stage's products the block meets, and copies are begun while they go on: the next
  // stage is there, and everyone is done with the one before, whose place the one after the ring takes.
  template <class Feed, class Use>
  __device__ __forceinline__ static void run(const Feed& feed, const Plan& plan, const char* shared,
                                             const Use& use) {
    const uint32_t ring = ptx::shared_address(shared);
    const int count = feed.stages();
    int fetched = 0, free_slot = 0, slot = 0;
    const auto fetch_next = [&] {
      const uint32_t to = ring + free_slot * plan.stage_bytes;
      if (feed.is_whole(fetched)) {
        const auto copy = [&](int, int at, const char* from) { ptx::copy16_async(to + at, from, 16); };
        feed.weight_units(fetched, copy);
        feed.x_units(fetched, copy);
      } else if (fetched < count) {
        feed.copy_carefully(fetched, to);
      }
      ptx::end_copy_group();
      ++fetched;
      if (++free_slot == plan.stages) free_slot = 0;
    };
    // All that has been begun is there, but for the last stage of a ring of 4.
    const auto meet = [&] {
      if (plan.stages == 4) ptx::wait_copy_groups<1>();
      else ptx::wait_copy_groups<0>();
      __syncthreads();
    };
#pragma unroll 1
    while (fetched < plan.stages - 1) fetch_next();
    meet();
#pragma unroll 1
    for (int stage = 0; stage < count; ++stage) {
      use(stage, shared + slot * plan.stage_bytes, [&] {
        meet();
        fetch_next();
      });
      if (++slot == plan.stages) slot = 0;
    }
    __syncthreads();
  }
};

// As few tokens as hold them all, up to 64; a warp then has two strips, so that a load of x serves both.
template <class Body>
auto with_shape(const Problem& p, const Body& body) {
  if (p.m <= 16) return body(Shape<16, 1, 8>{});
  using Large = Shape<64, 2, 8>;
  if (p.m <= 32 || !fits<Large>(p, Pipeline::limits(p))) return body(Shape<32, 1, 8>{});
  return body(Large{});
}

Verdict accepts(const Problem& p) {
  return accepts_strips(p).require(p.x.dtype == DType::f16 || p.x.dtype == DType::bf16,
                                   "the activations are not FP16 or BF16");
}

size_t workspace_bytes(const Problem& p) {
  return with_shape(p, [&](auto shape) {
    return workspace_bytes_of(p, make_plan<decltype(shape)>(p, Pipeline::limits(p)));
  });
}

void launch(const Problem& problem, const Launch& launch) {
  linear::launch_canonical(problem, launch, [&](const Problem& p, float* staged) {
    choose_strip_format(p.weight.format, [&](auto format) {
      choose_bool(p.x.dtype == DType::bf16, [&](auto is_bf16) {
        using T = std::conditional_t<is_bf16.value, bf16, f16>;
        with_shape(p, [&](auto shape) {
          launch_shape<Pipeline, decltype(shape), format.value, T>("linear_mma_sm80", p, staged, launch);
        });
      });
    });
  });
}

}  // namespace

extern const Kernel<Problem> entry = {
    "linear_mma_sm80",          Target::sm80, accepts, workspace_bytes, launch,
    /*is_batch_invariant=*/true};

}  // namespace quantfuse::linear_mma_sm80
