// SPDX-License-Identifier: Apache-2.0
//
// How the kernels that stream a weight divide it: a cluster takes strips c, c + clusters, ..., and its blocks
// split k.
#pragma once

#include "cuda/ptx/cluster.h"

namespace quantfuse::linear {

// A block's part of the work.
struct StripShare {
  int first_strip, strip_step, first_tile, tiles, rank;
};

// `tiles`: of a strip; `cluster`: blocks of a cluster, a power of two, so that nothing is divided: a division
// would take longer than all else here.
__device__ __forceinline__ StripShare share_of_block(int tiles, int cluster) {
  const int rank = cluster > 1 ? static_cast<int>(ptx::cluster_rank()) : 0, bits = __popc(cluster - 1);
  const int first = tiles * rank >> bits, end = tiles * (rank + 1) >> bits;
  return {static_cast<int>(blockIdx.x) >> bits, static_cast<int>(gridDim.x) >> bits, first, end - first,
          rank};
}

}  // namespace quantfuse::linear
