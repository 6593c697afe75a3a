// SPDX-License-Identifier: Apache-2.0
//
// The linear layers of a decoder block, one after the other in one graph: what a model's step is made of.
// Each kernel waits for the one before to end, as it does where its input is that one's output.
#include <algorithm>
#include <stdexcept>

#include "bench.h"

namespace quantfuse::cli {

Row measure_chain(const Chain& chain, const Machine& machine, double seconds) {
  Row row;
  row.op = "linear", row.name = chain.name, row.device = machine.device_name;
  std::vector<cases::CasePtr> links;
  std::vector<std::string> kernels;
  for (const Spec& spec : chain.specs) {
    links.push_back(case_from_spec(spec));
    const cases::Case& link = *links.back();
    row.scheme = link.scheme, row.m = link.m;
    row.flops += link.flops, row.bytes += link.bytes;
    kernels.push_back(selected_kernel(spec, machine.device, ""));
  }
  row.kernel = kernels.front();
  if (std::any_of(kernels.begin(), kernels.end(), [&](const auto& k) { return k != row.kernel; }))
    row.kernel = "several";
  row.copies = copies_beyond_cache(row.bytes, machine.cache_bytes);
  for (const cases::CasePtr& link : links) link->make(machine.device, /*seed=*/1, row.copies);
  row.timing = measure_on_gpu(
      machine.device.id,
      [&](int copy, void* stream) {
        for (size_t i = 0; i < links.size(); ++i) {
          if (links[i]->run(kernels[i].c_str(), copy, stream) != QF_OK)
            throw std::runtime_error(qf_last_error());
        }
      },
      row.copies, seconds);
  row.limit_us = row.bytes / machine.read_gbps() / 1e3;
  return row;
}

}  // namespace quantfuse::cli
