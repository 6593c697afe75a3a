// SPDX-License-Identifier: Apache-2.0
//
// product_wgmma.h for INT8 and E4M3; E5M2 is in product_wgmma_e5m2_sm90.cu, to be compiled beside it.
#include "product/kernels.h"
#include "product/wgmma_tiles.h"

namespace quantfuse::product_wgmma_sm90 {
using namespace product;
namespace {

Requirements accepts(const Product& p) {
  Requirements requirements = accepts_wgmma_operands(p);
  requirements.require(!has_e5m2(p) || is_whole(p), "the scales of E5M2 codes are of blocks");
  require_tile_epilogue(p, requirements);
  return requirements;
}

void launch(const Product& p, float* staged, const Launch& launch) {
  if (has_e5m2(p)) return launch_e5m2(p, staged, launch);
  using Int8 = Numbers<QF_INT8>;
  using E4m3 = Numbers<QF_FP8_E4M3>;
  const auto launch_with = [&]<class N, Scaling kScaling>() {
    launch_best_tiles<N, kScaling>("product_wgmma_sm90", p, staged, launch);
  };
  const bool is_int8 = p.a.format == QF_INT8;
  if (!is_whole(p)) {
    if (is_int8) launch_with.template operator()<Int8, Scaling::blocks>();
    else launch_with.template operator()<E4m3, Scaling::blocks>();
  } else if (is_int8) {
    launch_with.template operator()<Int8, Scaling::whole>();
  } else if (p.fast_accumulation) {
    launch_with.template operator()<Unpromoted<E4m3>, Scaling::whole>();
  } else {
    launch_with.template operator()<E4m3, Scaling::whole>();
  }
}

}  // namespace

extern const Choosy kernel = {accepts, tiles_quantize, launch};

}  // namespace quantfuse::product_wgmma_sm90
