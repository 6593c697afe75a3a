// SPDX-License-Identifier: Apache-2.0
//
// The commands of the `quantfuse` tool. main.cpp fills an options struct from the command line; the command's
// own file does the work and returns the exit code. A command throws UsageError for what the user should have
// typed otherwise.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "problem.h"

namespace quantfuse::cli {

enum ExitCode : int { kSuccess = 0, kCheckFailed = 1, kBadUsage = 2 };

class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct InfoOptions {
  std::string json_path;
};
int run_info(const InfoOptions&);

struct ExplainOptions {
  std::string op, kernel, json_path;
  ProblemOptions problem;
  bool is_strict = false;
};
int run_explain(const ExplainOptions&);

struct BenchOptions {
  std::string op, suite, kernel, json_path;
  ProblemOptions problem;
  std::vector<int64_t> m;  // one row of results each
  int32_t threads = 0;     // 0: the library's own choice
  double seconds = 0.3;    // of measuring, per row
  bool has_baselines = true;
  bool has_energy = true;  // of a GPU that counts it
  bool runs_all_kernels = false;
};
int run_bench(const BenchOptions&);

struct VerifyOptions {
  std::string op, device, kernel, json_path;
  std::string part = "1/1";
  uint64_t seed = 1;
  bool verbose = false;
};
int run_verify(const VerifyOptions&);

struct DemoOptions {
  std::string json_path;
  int64_t n = 4096, k = 4096;
};
int run_demo(const DemoOptions&);

struct InspectOptions {
  std::string path, json_path;
  std::vector<std::string> stated;  // KEY=VALUE
  bool reads_data = false;
};
int run_inspect(const InspectOptions&);

struct DequantizeOptions {
  std::string in, out, json_path;
  std::string dtype = "f32";
  std::vector<std::string> stated;  // KEY=VALUE
};
int run_dequantize(const DequantizeOptions&);

struct QuantizeOptions {
  std::string in, out, json_path;
  std::string scheme;
  std::string group;  // "": the scheme's own
  std::string method = "rtn", format = "compressed-tensors", shard_size = "5GB";
  std::vector<std::string> exclude;
  std::string include;
  bool is_asymmetric = false;
};
int run_quantize(const QuantizeOptions&);

}  // namespace quantfuse::cli
