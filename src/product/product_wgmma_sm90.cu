// SPDX-License-Identifier: Apache-2.0
//
// product_wgmma.h for INT8 and E4M3.
#include "core/choose.h"
#include "product/kernels.h"
#include "product/wgmma_tiles.h"

namespace quantfuse::product_wgmma_sm90 {
using namespace product;
namespace {

Requirements accepts(const Product& p) {
  Requirements requirements = accepts_wgmma_operands(p);
  require_tile_epilogue(p, requirements);
  return requirements;
}

void launch(const Product& p, float* staged, const Launch& launch) {
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
