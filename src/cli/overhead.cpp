// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <fmt/format.h>

#include <chrono>
#include <filesystem>

#include "bench.h"
#include "library.h"
#include "tensor.h"

namespace quantfuse::cli {
namespace {

constexpr int64_t kTiny = 16;

// The smallest call that is still a whole one: checks, selection, launch.
struct TinyQuantize {
  Tensor x = Tensor(kF32, 1, kTiny).allocated(), q = Tensor(kI8, 1, kTiny).allocated();
  Tensor scale = Tensor(kF32, 1, 1).allocated();
  qf_quantize_args args = {x.get(), QF_INT8, {1, 0}, QF_SCALE_DYNAMIC, q.get(), scale.get(),
                           nullptr, nullptr, 0};
};

// A row of no work: only its time says something.
Row overhead_row(const Machine& machine, std::string name, const Spec& spec, const Timing& timing) {
  Row row;
  row.op = "overhead";
  row.name = std::move(name);
  row.kernel = selected_kernel(spec, machine.device, "");
  row.device = machine.device_name;
  row.timing = timing;
  return row;
}

// A copy of the library's file is another library to the loader, so it can be loaded afresh in this process.
// What it needs from the system (libstdc++, libm) is in memory already, as it is in a process of Python with
// NumPy.
std::optional<double> load_and_call_us(const TinyQuantize& problem) {
  namespace fs = std::filesystem;
  Dl_info where = {};
  if (dladdr(reinterpret_cast<void*>(&qf_version), &where) == 0 || !where.dli_fname) return std::nullopt;
  std::string directory = (fs::temp_directory_path() / "quantfuse.XXXXXX").string();
  if (!mkdtemp(directory.data())) return std::nullopt;
  const fs::path copy = fs::path(directory) / "libquantfuse_copy.so";
  std::optional<double> us;
  try {
    fs::copy_file(fs::canonical(where.dli_fname), copy);
    const auto start = std::chrono::steady_clock::now();
    // Never closed: the library's threads live as long as the process.
    if (void* library = dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      const auto quantize = reinterpret_cast<decltype(&qf_quantize)>(dlsym(library, "qf_quantize"));
      if (quantize && quantize(&problem.args, nullptr) == QF_OK) {
        us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
      }
    }
  } catch (const fs::filesystem_error&) {
    us = std::nullopt;  // no room for the copy: the row is left out
  }
  std::error_code ignored;
  fs::remove_all(directory, ignored);
  return us;
}

}  // namespace

std::vector<Row> measure_overheads(const Machine& machine, double seconds) {
  ProblemOptions o;
  o.n = o.k = kTiny;
  o.act = "f32";
  const Spec quantize_spec = spec_from_options("quantize", o), linear_spec = spec_from_options("linear", o);
  std::vector<Row> rows;

  const TinyQuantize tiny;
  std::vector<double> loads;
  for (int i = 0; i < 5; ++i) {
    if (const auto us = load_and_call_us(tiny)) loads.push_back(*us);
  }
  if (!loads.empty()) {
    rows.push_back(overhead_row(machine, "load the library and call it", quantize_spec, summarize(loads)));
  }
  const Timing quantize = measure({[&](int) { qf_quantize(&tiny.args, nullptr); }}, seconds);
  rows.push_back(
      overhead_row(machine, "call of quantize, " + size_text(1, kTiny, 0), quantize_spec, quantize));

  const cases::CasePtr linear = case_from_spec(linear_spec);
  linear->make({QF_CPU, 0}, 1, 1);
  const Timing layer = measure({[&](int) { linear->run(nullptr, 0, nullptr); }}, seconds);
  rows.push_back(overhead_row(machine, "call of linear, " + size_text(1, kTiny, kTiny), linear_spec, layer));
  return rows;
}

}  // namespace quantfuse::cli
