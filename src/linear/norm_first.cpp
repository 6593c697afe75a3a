// SPDX-License-Identifier: Apache-2.0
#include "linear/norm_first.h"

#include <algorithm>

#include "rms_norm/rms_norm.h"

namespace quantfuse::linear {
namespace {

// The two steps, with the normalized x at the beginning of the workspace and each step's own behind it.
struct Steps {
  rms_norm::Problem norm;
  Problem rest;
  const Kernel<rms_norm::Problem>* norm_kernel;
  const Kernel<Problem>* rest_kernel;
  int64_t x_bytes;

  Steps(const Problem& p, void* x)
      : norm(), rest(p), x_bytes(round_up(p.m * p.k * dtype_bytes(p.x.dtype), 256)) {
    rest.x = {x, p.m, p.k, p.k, p.x.dtype};
    rest.x_gain = {};
    norm.x = p.x, norm.gain = p.x_gain, norm.eps = p.x_eps;
    norm.m = p.m, norm.n = p.k, norm.device = p.device;
    norm.out.y = rest.x, norm.out.format = QF_FORMAT_NONE;
    norm_kernel = select<rms_norm::Op>(norm, p.device, kDefaultCall).kernel;
    rest_kernel = select<Op>(rest, p.device, kDefaultCall).kernel;
  }
  size_t workspace_bytes() const {
    return static_cast<size_t>(x_bytes) +
           std::max(norm_kernel->workspace_bytes(norm), rest_kernel->workspace_bytes(rest));
  }
};

}  // namespace

Verdict accepts_norm_first(const Problem& p) {
  if (!p.x_gain) return no("x is not to be normalized");
  const Steps steps(p, nullptr);
  return Requirements()
      .require(steps.norm_kernel != nullptr, "no kernel of rms_norm takes this x")
      .require(steps.rest_kernel && steps.rest_kernel->target != Target::reference,
               "no other kernel takes the normalized x");
}

size_t norm_first_workspace_bytes(const Problem& p) { return Steps(p, nullptr).workspace_bytes(); }

void launch_norm_first(const Problem& p, const Launch& launch) {
  const Steps steps(p, launch.workspace);
  const Launch behind_x = {launch.stream, static_cast<char*>(launch.workspace) + steps.x_bytes};
  steps.norm_kernel->launch(steps.norm, behind_x);
  steps.rest_kernel->launch(steps.rest, behind_x);
}

}  // namespace quantfuse::linear
