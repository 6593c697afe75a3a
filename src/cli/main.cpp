// SPDX-License-Identifier: Apache-2.0
//
// The command line of `quantfuse`. Exit codes: 0 success, 1 a check failed, 2 bad usage.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <system_error>

#include "checkpoint/scheme.h"
#include "commands.h"
#include "quantfuse/quantfuse.h"

namespace quantfuse::cli {
namespace {

constexpr const char* kInfoExamples =
    "Example:\n"
    "  quantfuse info\n"
    "  QUANTFUSE_ISA=avx2 quantfuse info --json info.json";

constexpr const char* kExplainExamples =
    "Examples:\n"
    "  quantfuse explain linear --weight int4 --group 128 --act bf16 --m 1 --n 4096 --k 4096\n"
    "  quantfuse explain linear --weight int8 --act-quant int8 --gated --activation silu --m 64 --n 28672\n"
    "  quantfuse explain gemm --format fp8 --m 256\n"
    "  quantfuse explain quantize --format fp8 --group 128 --m 4096 --n 4096 --device cuda\n"
    "With --strict the exit code is 1 where no kernel but the reference accepts.";

constexpr const char* kBenchExamples =
    "Examples:\n"
    "  quantfuse bench linear --weight int4 --group 128 --m 1,16,256 --n 4096 --k 4096\n"
    "  quantfuse bench gemm --format int8 --out i32 --m 64,1024\n"
    "  quantfuse bench quantize --format int8 --m 4096 --n 4096 --device cuda\n"
    "  quantfuse bench norm --out-quant int8 --residual --m 512 --n 4096\n"
    "  quantfuse bench --suite cpu --json cpu.json\n"
    "  quantfuse bench checkpoint\n"
    "\n"
    "Times are medians, after a warm-up, of at least 20 calls and --seconds of time (fewer calls where\n"
    "one takes very long), over copies of the data that are together more than 4 times the last cache,\n"
    "so that a weight comes from memory as it does in a model. GFLOP/s counts 2 m n k; GB/s counts\n"
    "every input read once and every output written once. '% roofline' is the least time the machine\n"
    "could take over the time taken: the larger of bytes over the read bandwidth and, for products on\n"
    "the CPU, operations over the arithmetic peak, both measured in the same run. 'x baseline' is\n"
    "against the quickest of OpenBLAS and oneDNN FP32, or oneDNN INT8 for INT8 x INT8, on as many\n"
    "threads.";

constexpr const char* kVerifyExamples =
    "Examples:\n"
    "  quantfuse verify\n"
    "  quantfuse verify --op linear --device cpu --json verify.json\n"
    "  QUANTFUSE_ISA=avx2 quantfuse verify --device cpu\n"
    "  for i in $(seq 16); do quantfuse verify --op linear --part $i/16 & done; wait\n"
    "The last line is 'N passed, N failed, N skipped'; the exit code is 1 where one failed.";

constexpr const char* kDemoExamples =
    "Example:\n"
    "  quantfuse demo\n"
    "  quantfuse demo --n 28672 --k 4096";

constexpr const char* kInspectExamples =
    "Examples:\n"
    "  quantfuse inspect models/Llama-3-8B-AWQ\n"
    "  quantfuse inspect model.gguf --data --json model.json\n"
    "  quantfuse inspect old-gptq --config checkpoint_format=gptq\n"
    "Reads headers alone, and the data with --data or where all files together have less than 64 MB. The\n"
    "exit code is 1 where the checkpoint is broken, or is not what its config says.";

constexpr const char* kDequantizeExamples =
    "Examples:\n"
    "  quantfuse dequantize models/Llama-3-8B-GPTQ llama.safetensors --dtype bf16\n"
    "  quantfuse dequantize model.gguf model.safetensors\n"
    "Every quantized weight becomes NAME.weight [out, in], as the format's own tool gives it; everything "
    "else\n"
    "is copied. The exit code is 1, and nothing is written, where the checkpoint is broken.";

constexpr const char* kQuantizeExamples =
    "Examples:\n"
    "  quantfuse quantize models/Llama-3-8B models/Llama-3-8B-int4 --scheme int4 --group 128\n"
    "  quantfuse quantize models/Llama-3-8B out --scheme w8a8-fp8 --exclude 'layers\\.0\\.'\n"
    "  quantfuse quantize model.safetensors out --scheme fp4 --format quantfuse\n"
    "The 2-D weights of linear layers are quantized; embeddings, norms, the output head and routers are "
    "not.\n"
    "Patterns are for names of modules, and match anywhere in them. The result is a folder that Transformers "
    "and\n"
    "vLLM load (--format compressed-tensors), with everything else of IN. Killed half-way, the same command "
    "goes\n"
    "on with the first shard that is missing.";

// CLI11's own check for this prints the largest double in full.
const CLI::Validator kSize(
    [](const std::string& text) {
      return text.empty() || text[0] == '-' ? "expected 0 or more, not " + text : std::string();
    },
    "");

void add_json(CLI::App& app, std::string& path) {
  app.add_option("--json", path, "Write the results to this file too")->type_name("FILE");
}

void add_stated(CLI::App& app, std::vector<std::string>& stated) {
  app.add_option("--config", stated,
                 "State a field of quantization_config, as in checkpoint_format=gptq_v2; may be repeated")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
}

void add_words(CLI::App& app, const char* name, std::string& value, const std::vector<std::string>& words,
               const char* help) {
  app.add_option(name, value, help)->check(CLI::IsMember(words))->type_name("")->capture_default_str();
}

void add_problem(CLI::App& app, ProblemOptions& p) {
  const auto size = [&](const char* name, int64_t& value, const char* help) {
    app.add_option(name, value, help)->check(kSize)->type_name("INT")->capture_default_str();
  };
  size("--n", p.n, "Outputs of a layer, columns of a matrix");
  size("--k", p.k, "Inputs of a layer: the summed dimension");
  add_words(app, "--weight", p.weight, weight_words(), "linear: format of the weight");
  add_words(app, "--format", p.format, format_words(), "quantize, dequantize, gemm: format of the codes");
  app.add_option(
         "--group", p.group,
         "Numbers of a row that share a scale; 0 the whole row [int4 128, nf4 64, fp4 and mx 32, else 0]")
      ->check(kSize)
      ->type_name("INT");
  app.add_option("--block", p.block,
                 "2-D blocks of scales in place of --group, as in 128x128; 0 is a whole dimension")
      ->type_name("RxC");
  add_words(app, "--act", p.act, dtype_words(), "Type of the floating-point tensors");
  add_words(app, "--act-quant", p.act_quant, quant_words(), "linear: quantize the activations on the way in");
  app.add_flag("--codes", p.has_codes, "linear: the activations are quantized before the call, not in it");
  size("--act-group", p.act_group, "Activations of a row that share a scale; 0 the whole row");
  add_words(app, "--out", p.out, {"bf16", "f16", "f32", "i32"}, "gemm: type of the result");
  add_words(app, "--out-quant", p.out_quant, quant_words(), "Quantize the result on the way out");
  size("--out-group", p.out_group, "Results of a row that share a scale; 0 the whole row");
  add_words(app, "--activation", p.activation, activation_words(), "Activation function after a layer");
  app.add_flag("--asym", p.is_asymmetric, "With zero points");
  app.add_flag("--offset", p.has_offset, "With an offset for every scale, as GGUF's K-quants have");
  app.add_flag("--gated", p.is_gated, "linear: a merged gate|up weight, y = act(gate) * up");
  app.add_flag("--bias", p.has_bias, "Add a bias");
  app.add_flag("--residual", p.has_residual, "Add a residual");
  app.add_flag("--g-idx", p.has_g_idx, "Groups given per column (GPTQ's act-order)");
  app.add_flag("--static", p.has_static_scale, "Scales of the quantized result are given, not computed");
  app.add_flag("--mse", p.has_mse_scale, "quantize: search the scale of least squared error");
  app.add_flag("--row-sums", p.wants_row_sums, "quantize: write the sums of the codes too");
  app.add_option(
      "--hadamard", p.hadamard,
      "quantize, rms_norm, gated_act: columns that are rotated together before they are quantized");
  app.add_flag("--ungated", p.is_ungated, "gated_act: the activation alone, of n columns");
  app.add_flag("--batch-invariant", p.is_batch_invariant,
               "linear: the bits of a row must not depend on the number of rows");
  app.add_flag("--fast-accumulation", p.has_fast_accumulation,
               "gemm, linear: FP8 sums may stay in the tensor cores for all of k");
  app.add_flag("--norm", p.has_x_gain, "linear: x is normalized (RMSNorm) on the way in");
  app.add_flag("--kn", p.is_b_kn, "gemm: b lies in memory as [k, n]");
  app.add_option("--device", p.device, "cpu, cuda or cuda:ID")->type_name("")->capture_default_str();
}

// A command with its options struct, in one place: what is declared here is what runs.
template <class Options>
CLI::App& add_command(CLI::App& app, const char* name, const char* help, const char* examples,
                      Options& options, int (*run)(const Options&), std::function<int()>& chosen) {
  CLI::App& command = *app.add_subcommand(name, help);
  command.footer(examples);
  add_json(command, options.json_path);
  command.callback([&options, run, &chosen] { chosen = [&options, run] { return run(options); }; });
  return command;
}

int run(int argc, char** argv) {
  CLI::App app{"QuantFuse: quantized and fused kernels for LLM inference", "quantfuse"};
  app.set_version_flag("--version", std::string("quantfuse ") + qf_version());
  app.require_subcommand(0, 1);  // none is answered below, with the help; a wrong one is named by CLI11
  app.footer(
      "'quantfuse COMMAND --help' has each command's options and examples. Exit codes: 0 success, 1 a check "
      "failed,\n"
      "2 bad usage. Environment: QUANTFUSE_ISA=scalar|avx2|avx_vnni|avx512|avx512_bf16|amx, "
      "QUANTFUSE_NUM_THREADS, "
      "QUANTFUSE_MAX_SM,\n"
      "QUANTFUSE_NUM_SMS, NO_COLOR.");
  std::function<int()> chosen;

  InfoOptions info;
  add_command(app, "info", "Show the library, this machine, and which kernels run on it", kInfoExamples, info,
              run_info, chosen);

  VerifyOptions verify;
  CLI::App& verify_app =
      add_command(app, "verify", "Check every kernel against the reference on random and nasty cases",
                  kVerifyExamples, verify, run_verify, chosen);
  verify_app.add_option("--op", verify.op, "Only this operation")->type_name("OP");
  verify_app.add_option("--device", verify.device, "Only kernels of cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  verify_app.add_option("--kernel", verify.kernel, "Only this kernel")->type_name("NAME");
  verify_app.add_option("--part", verify.part, "Part I of N of the cases, for as many processes")
      ->type_name("I/N")
      ->capture_default_str();
  verify_app.add_option("--seed", verify.seed, "Of the random numbers")
      ->type_name("INT")
      ->capture_default_str();
  verify_app.add_flag("-v,--verbose", verify.verbose, "Name every case");

  ExplainOptions explain;
  CLI::App& explain_app =
      add_command(app, "explain", "Say which kernel runs for a call, and why each other one does not",
                  kExplainExamples, explain, run_explain, chosen);
  explain_app.add_option("op", explain.op, "Operation")
      ->required()
      ->check(CLI::IsMember(operation_words()))
      ->type_name("OP");
  explain_app.add_option("--m", explain.problem.m, "Tokens: rows of the activations")
      ->check(kSize)
      ->type_name("INT")
      ->capture_default_str();
  add_problem(explain_app, explain.problem);
  explain_app.add_option("--kernel", explain.kernel, "As if this kernel were asked for")->type_name("NAME");
  explain_app.add_flag("--strict", explain.is_strict, "As if the reference were not allowed");

  BenchOptions bench;
  CLI::App& bench_app =
      add_command(app, "bench", "Measure speed, against the machine's limits and against OpenBLAS and oneDNN",
                  kBenchExamples, bench, run_bench, chosen);
  std::vector<std::string> benches = operation_words();
  benches.push_back("checkpoint");
  CLI::Option* op = bench_app.add_option("op", bench.op, "Operation, or checkpoint")
                        ->check(CLI::IsMember(benches))
                        ->type_name("OP");
  bench_app.add_option("--suite", bench.suite, "A set of cases: the layers of Llama-3-8B and more")
      ->check(CLI::IsMember({"cpu", "h200", "producers", "products"}))
      ->type_name("")
      ->excludes(op);
  bench_app.add_option("--m", bench.m, "Tokens: rows of the activations; a list makes a row of results each")
      ->delimiter(',')
      ->check(kSize)
      ->type_name("INT,..")
      ->default_str("1");
  add_problem(bench_app, bench.problem);
  bench_app.add_option("--kernel", bench.kernel, "Run this kernel")->type_name("NAME");
  bench_app.add_flag("--all-kernels", bench.runs_all_kernels, "Run every kernel that accepts")
      ->excludes("--kernel");
  bench_app.add_option("--threads", bench.threads, "Threads, of the library and of the baselines [all CPUs]")
      ->check(CLI::Range(1, 1024))
      ->type_name("INT");
  bench_app.add_option("--seconds", bench.seconds, "Time to measure each row for")
      ->check(CLI::Range(0.01, 60.0))
      ->type_name("FLOAT")
      ->capture_default_str();
  bench_app.add_flag_callback(
      "--no-baselines", [&] { bench.has_baselines = false; }, "Leave out OpenBLAS, oneDNN and cuBLASLt");
  bench_app.add_flag_callback(
      "--no-energy", [&] { bench.has_energy = false; }, "Leave out a GPU's energy, 0.2 s a row");

  DemoOptions demo;
  CLI::App& demo_app = add_command(app, "demo", "Quantize a layer of a language model, check it, time it",
                                   kDemoExamples, demo, run_demo, chosen);
  demo_app.add_option("--n", demo.n, "Outputs of the layer")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  demo_app.add_option("--k", demo.k, "Inputs of the layer")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();

  InspectOptions inspect;
  CLI::App& inspect_app = add_command(app, "inspect", "Show what a checkpoint holds: format, layers, sizes",
                                      kInspectExamples, inspect, run_inspect, chosen);
  inspect_app.add_option("path", inspect.path, "A folder, a .safetensors or a .gguf file")
      ->required()
      ->type_name("PATH");
  inspect_app.add_flag("--data", inspect.reads_data,
                       "Read the data too: scale range, share of saturated codes");
  add_stated(inspect_app, inspect.stated);

  DequantizeOptions dequantize;
  CLI::App& dequantize_app =
      add_command(app, "dequantize", "Write a quantized checkpoint as floating-point safetensors",
                  kDequantizeExamples, dequantize, run_dequantize, chosen);
  dequantize_app.add_option("in", dequantize.in, "A folder, a .safetensors or a .gguf file")
      ->required()
      ->type_name("IN");
  dequantize_app.add_option("out", dequantize.out, "The file to write")
      ->required()
      ->type_name("OUT.safetensors");
  add_words(dequantize_app, "--dtype", dequantize.dtype, {"f32", "bf16"}, "Type of the dequantized weights");
  add_stated(dequantize_app, dequantize.stated);

  QuantizeOptions quantize;
  CLI::App& quantize_app =
      add_command(app, "quantize", "Quantize the weights of a safetensors checkpoint, without calibration",
                  kQuantizeExamples, quantize, run_quantize, chosen);
  quantize_app.add_option("in", quantize.in, "A folder or a .safetensors file")->required()->type_name("IN");
  quantize_app.add_option("out", quantize.out, "The folder to write")->required()->type_name("OUT");
  add_words(quantize_app, "--scheme", quantize.scheme, checkpoint::scheme_names(), "What the weights become");
  quantize_app.get_option("--scheme")->required();
  quantize_app
      .add_option("--group", quantize.group,
                  "Inputs that share a scale, or channel, or tensor [int4, w4a8 and fp4 128, else channel]")
      ->type_name("INT|channel|tensor");
  add_words(quantize_app, "--method", quantize.method, {"rtn", "mse"},
            "Scales that hold the largest number, or those of the least squared error");
  quantize_app.add_flag("--asymmetric", quantize.is_asymmetric, "Integers with zero points");
  quantize_app.add_option("--exclude", quantize.exclude, "Leave these modules as they are; may be repeated")
      ->type_name("REGEX")
      ->allow_extra_args(false);
  quantize_app.add_option("--include", quantize.include, "Quantize these modules alone")->type_name("REGEX");
  add_words(quantize_app, "--format", quantize.format, {"compressed-tensors", "quantfuse"},
            "Layout of the result");
  quantize_app.add_option("--shard-size", quantize.shard_size, "Most bytes of a file, as in 5GB or 500MB")
      ->type_name("SIZE")
      ->capture_default_str();

  try {
    app.parse(argc, argv);
    if (qf_get_num_threads() == 0) throw UsageError(qf_last_error());  // what the environment says
    if (chosen) return chosen();
    fmt::print(stderr, "{}", app.help());
    return kBadUsage;
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? kSuccess : kBadUsage;  // --help and --version also come this way
  }
}

}  // namespace
}  // namespace quantfuse::cli

int main(int argc, char** argv) {
  using namespace quantfuse::cli;
  try {
    const int code = run(argc, argv);
    // What was printed is lost where the output is full or closed, and a success would hide that.
    if (std::fflush(stdout) != 0 || std::ferror(stdout)) {
      fmt::print(stderr, "quantfuse: cannot write to the standard output\n");
      return kBadUsage;
    }
    return code;
  } catch (const UsageError& e) {
    fmt::print(stderr, "quantfuse: {}\n", e.what());
    return kBadUsage;
  } catch (const std::system_error& e) {  // a place that cannot be written to, or read
    fmt::print(stderr, "quantfuse: {}\n", e.what());
    return kBadUsage;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "quantfuse: not enough memory for this problem\n");
    return kBadUsage;
  } catch (const std::exception& e) {
    fmt::print(stderr, "quantfuse: {}\n", e.what());
    return kCheckFailed;
  }
}
