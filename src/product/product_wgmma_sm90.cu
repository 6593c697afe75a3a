// SPDX-License-Identifier: Apache-2.0
//
// product_wgmma.h for INT8 and E4M3; E5M2 is in product_wgmma_e5m2_sm90.cu, to be compiled beside it.
#include "core/choose.h"
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
  choose_bool(p.a.format == QF_INT8, [&](auto is_int8) {
    choose_bool(is_whole(p), [&](auto is_whole_k) {
      using N = Numbers<is_int8.value ? QF_INT8 : QF_FP8_E4M3>;
      launch_tiles<N, is_whole_k.value ? Scaling::whole : Scaling::blocks>("product_wgmma_sm90", p, staged,
                                                                           launch);
    });
  });
}

}  // namespace

extern const Choosy kernel = {accepts, tiles_quantize, launch};

}  // namespace quantfuse::product_wgmma_sm90
