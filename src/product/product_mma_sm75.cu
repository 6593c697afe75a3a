// SPDX-License-Identifier: Apache-2.0
//
// product_mma.h for sm_75: the next stage is loaded into registers while the tensor cores multiply 8 x 8 x 16
// bytes, or 16 x 8 x 8 f16 numbers, from this one.
#include "product/kernels.h"
#include "product/product_mma.h"

namespace quantfuse::product_mma_sm75 {
using namespace product_mma;
namespace {

struct Arch {
  static constexpr const char* kName = "product_mma_sm75";
  static constexpr bool kHasAsyncCopies = false;
  static constexpr int kMaxStages = 2;
  static constexpr int64_t kMaxSmemBytes = 64 * 1024;

  __device__ __forceinline__ static void multiply_bytes(int (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                        uint32_t b1) {
    ptx::mma_m8n8k16_s8(c[0], c[1], a[0], b0);
    ptx::mma_m8n8k16_s8(c[2], c[3], a[1], b0);
    ptx::mma_m8n8k16_s8(c[0], c[1], a[2], b1);
    ptx::mma_m8n8k16_s8(c[2], c[3], a[3], b1);
  }
  __device__ __forceinline__ static void multiply_halves(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                         uint32_t b1) {
    ptx::mma_m16n8k8(c, a[0], a[1], b0, c);
    ptx::mma_m16n8k8(c, a[2], a[3], b1, c);
  }
  __device__ static void end_stage() {}
  __device__ static void wait_stage(int) {}
};

template <class Math>
void launch_math(const Product& p, float* staged, const Launch& launch) {
  using Few = Shape<16, 32, 1, 1, 4, 1>;
  using Large = Shape<128, 64, 4, 2, 1, 1>;
  if (p.m <= Few::kM) launch_shape<Arch, Math, Few, false>(p, staged, launch);
  else launch_shape<Arch, Math, Large, false>(p, staged, launch);
}

}  // namespace

void launch(const Product& p, float* staged, const Launch& launch) {
  if (!p.is_integer()) launch_math<Halves<Arch>>(p, staged, launch);
  else if (has_integer_sums(p)) launch_math<IntegerSums<Arch>>(p, staged, launch);
  else if (p.has_wide_zeros()) launch_math<IntegerWideZeros<Arch>>(p, staged, launch);
  else launch_math<IntegerGroups<Arch>>(p, staged, launch);
}

}  // namespace quantfuse::product_mma_sm75
