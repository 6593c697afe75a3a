// SPDX-License-Identifier: Apache-2.0
//
// product_mma.h for sm_80 and newer: bytes come by cp.async into a ring of up to four stages, while the
// tensor cores multiply 16 x 8 x 32 of them. FP8 is multiplied as such where the code is compiled for sm_89
// or newer.
#include "product/kernels.h"
#include "product/product_mma.h"

namespace quantfuse::product_mma_sm80 {
using namespace product_mma;
namespace {

struct Arch {
  static constexpr const char* kName = "product_mma_sm80";
  static constexpr bool kHasAsyncCopies = true;
  static constexpr int kMaxStages = 4;
  static constexpr int64_t kMaxSmemBytes = 227 * 1024;

  __device__ __forceinline__ static void multiply_bytes(int (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                        uint32_t b1) {
    ptx::mma_m16n8k32_s8(c, a, b0, b1);
  }
  __device__ __forceinline__ static void multiply_halves(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                         uint32_t b1) {
    ptx::mma_m16n8k16<f16>(c, a, b0, b1, c);
  }
  __device__ __forceinline__ static void end_stage() { ptx::end_copy_group(); }
  // Until the oldest of the stages that are on their way is there.
  __device__ __forceinline__ static void wait_stage(int stages) {
    if (stages == 4) ptx::wait_copy_groups<2>();
    else if (stages == 3) ptx::wait_copy_groups<1>();
    else ptx::wait_copy_groups<0>();
  }
};

// Few tokens: four warps stream as many slices of b. Else the larger tile, if there is one for most SMs: of
// 16 warps, or of 8 and two blocks to an SM where registers hold the sums alone.
using Few = Shape<16, 32, 1, 1, 4, 1>;
using Middle = Shape<64, 64, 2, 2, 2, 2>;
template <class Math, bool kIsAsync>
using Large = std::conditional_t<kIsAsync && !Math::kPromotes, Shape<128, 128, 2, 4, 1, 2>,
                                 Shape<128, 128, 4, 4, 1, 1>>;

bool fills_large(const Product& p) {
  const int64_t columns = p.is_gated() ? 64 : 128;
  return p.m > 64 &&
         ceil_div(p.m, 128) * ceil_div(p.n_out, columns) * 4 >= int64_t{gpu_num_sms(p.device.id)} * 3;
}

template <class Math, bool kIsAsync>
void launch_math(const Product& p, float* staged, const Launch& launch) {
  if (p.m <= Few::kM) launch_shape<Arch, Math, Few, kIsAsync>(p, staged, launch);
  else if (fills_large(p)) launch_shape<Arch, Math, Large<Math, kIsAsync>, kIsAsync>(p, staged, launch);
  else launch_shape<Arch, Math, Middle, kIsAsync>(p, staged, launch);
}
template <class Math>
void launch_integers(const Product& p, float* staged, const Launch& launch) {
  if (is_async<Math>(p)) launch_math<Math, true>(p, staged, launch);
  else launch_math<Math, false>(p, staged, launch);
}

// Rare: in two shapes alone.
void launch_wide_zeros(const Product& p, float* staged, const Launch& launch) {
  if (p.m <= Few::kM) launch_shape<Arch, IntegerWideZeros<Arch>, Few, false>(p, staged, launch);
  else launch_shape<Arch, IntegerWideZeros<Arch>, Middle, false>(p, staged, launch);
}

// Whether the code that would run has the mma of FP8, and may use it.
bool runs_fp8(const Product& p) {
  if (gpu_acts_as(p.device.id) < 89) return false;
  cudaFuncAttributes code;
  const auto* any = reinterpret_cast<const void*>(kernel<Arch, Fp8<Arch>, Few, true>);
  if (cudaFuncGetAttributes(&code, any) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return code.ptxVersion >= 89;
}

}  // namespace

void launch(const Product& p, float* staged, const Launch& launch) {
  const bool is_e4m3 = p.a.format == QF_FP8_E4M3 && p.b.format == QF_FP8_E4M3;
  if (p.is_integer() && has_integer_sums(p)) launch_integers<IntegerSums<Arch>>(p, staged, launch);
  else if (p.has_wide_zeros()) launch_wide_zeros(p, staged, launch);
  else if (p.is_integer()) launch_integers<IntegerGroups<Arch>>(p, staged, launch);
  else if (is_e4m3 && is_async<Fp8<Arch>>(p) && runs_fp8(p)) launch_math<Fp8<Arch>, true>(p, staged, launch);
  else launch_math<Halves<Arch>, false>(p, staged, launch);
}

}  // namespace quantfuse::product_mma_sm80
