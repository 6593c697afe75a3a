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

// `tiles`: of a strip; `cluster`: blocks of a cluster.
__device__ __forceinline__ StripShare share_of_block(int tiles, int cluster) {
  const int rank = cluster > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
  const int first = tiles * rank / cluster, end = tiles * (rank + 1) / cluster;
  return {static_cast<int>(blockIdx.x) / cluster, static_cast<int>(gridDim.x) / cluster, first, end - first,
          rank};
}

}  // namespace quantfuse::linear
