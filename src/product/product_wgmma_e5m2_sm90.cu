// SPDX-License-Identifier: Apache-2.0
//
// product_wgmma.h for FP8 codes of which one operand's or both are E5M2: gradients are.
#include "core/choose.h"
#include "product/kernels.h"
#include "product/wgmma_tiles.h"

namespace quantfuse::product_wgmma_sm90 {
using namespace product;

void launch_e5m2(const Product& p, float* staged, const Launch& launch) {
  const auto launch_with = [&]<qf_format kA, qf_format kB>() {
    launch_tiles<Numbers<kA, kB>, Scaling::whole>("product_wgmma_sm90", p, staged, launch);
  };
  if (p.a.format == QF_FP8_E4M3) launch_with.template operator()<QF_FP8_E4M3, QF_FP8_E5M2>();
  else if (p.b.format == QF_FP8_E4M3) launch_with.template operator()<QF_FP8_E5M2, QF_FP8_E4M3>();
  else launch_with.template operator()<QF_FP8_E5M2, QF_FP8_E5M2>();
}

}  // namespace quantfuse::product_wgmma_sm90
