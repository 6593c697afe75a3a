// SPDX-License-Identifier: Apache-2.0
//
// One row of a bench: a case in as many copies as the cache does not hold, timed, beside its limit and its
// baselines.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <stdexcept>

#include "bench.h"
#include "commands.h"

namespace quantfuse::cli {
namespace {

bool is_integer(qf_format format) { return format == QF_INT8 || format == QF_INT4; }

// Operations a second of the units that this product runs on; 0 where it is not a product.
double peak_gops(const Spec& spec, const CpuLimits& limits) {
  const auto float_peak = [&](qf_dtype dtype) {
    const bool is_bf16 = dtype.code == 4;
    return is_bf16 ? std::max(limits.f32_gflops, limits.bf16_gflops) : limits.f32_gflops;
  };
  if (const auto* s = std::get_if<cases::LinearSpec>(&spec)) {
    return is_integer(s->act_format) ? limits.int8_gops : float_peak(s->dtype);
  }
  if (const auto* s = std::get_if<cases::LinearBackwardSpec>(&spec)) return float_peak(s->dtype);
  if (const auto* s = std::get_if<cases::ScaledMmSpec>(&spec)) {
    // FP8 codes are exact in BF16.
    return is_integer(s->a_format) ? limits.int8_gops : std::max(limits.f32_gflops, limits.bf16_gflops);
  }
  return 0;
}

double arithmetic_limit_us(const Spec& spec, const Machine& machine, double flops) {
  const double peak = machine.device.type == QF_CPU ? peak_gops(spec, machine.cpu) : 0;
  return peak > 0 ? flops / peak / 1e3 : 0;
}

// All of its times, multiplied.
Timing scaled(Timing timing, double factor) {
  for (double* us : {&timing.us, &timing.us_p10, &timing.us_p90}) *us *= factor;
  for (double& us : timing.turns_us) us *= factor;
  return timing;
}

struct Comparison {
  Shape shape;
  Arithmetic arithmetic;  // what the row is compared with
  bool has_int8 = false;  // oneDNN INT8 is of interest too
};

std::optional<Comparison> comparison_of(const Spec& spec) {
  if (const auto* s = std::get_if<cases::LinearSpec>(&spec)) {
    const bool is_int8 = s->act_format == QF_INT8 && s->weight.format == QF_INT8;
    return Comparison{
        {s->m, s->n, s->k}, is_int8 ? Arithmetic::int8 : Arithmetic::f32, is_integer(s->act_format)};
  }
  if (const auto* s = std::get_if<cases::LinearBackwardSpec>(&spec)) {
    return Comparison{{s->m, s->k, s->n}, Arithmetic::f32};
  }
  if (const auto* s = std::get_if<cases::ScaledMmSpec>(&spec)) {
    const bool is_int8 = is_integer(s->a_format);
    const WeightOrder order = s->b_order == QF_NK ? WeightOrder::nk : WeightOrder::kn;
    return Comparison{{s->m, s->n, s->k, order}, is_int8 ? Arithmetic::int8 : Arithmetic::f32, is_int8};
  }
  return std::nullopt;
}

// What a product on a GPU is compared with, the numbers of its own kind first.
std::vector<GpuNumbers> gpu_numbers_of(const Spec& spec) {
  const auto of_codes = [](qf_format format, int64_t act_group, qf_block block) -> std::vector<GpuNumbers> {
    if (is_integer(format)) return {GpuNumbers::int8, GpuNumbers::bf16};
    if (act_group == 128 && block.rows == 128 && block.cols == 128)
      return {GpuNumbers::e4m3_blocks, GpuNumbers::e4m3, GpuNumbers::bf16};
    return {GpuNumbers::e4m3, GpuNumbers::bf16};
  };
  if (const auto* s = std::get_if<cases::ScaledMmSpec>(&spec))
    return of_codes(s->a_format, s->a_block.cols, s->b_block);
  const auto* s = std::get_if<cases::LinearSpec>(&spec);
  if (!s || s->dtype.bits != 16) return {};
  if (s->act_format != QF_FORMAT_NONE) return of_codes(s->act_format, s->act_group, s->weight.block);
  return {s->dtype.code == 4 ? GpuNumbers::bf16 : GpuNumbers::f16};
}

// Those that the row is compared with come first; their number goes to num_compared.
std::vector<NamedContender> prepare_baselines(const Spec& spec, const Baselines& baselines,
                                              size_t& num_compared) {
  const std::optional<Comparison> comparison = comparison_of(spec);
  if (!comparison) return {};
  auto prepared = baselines.prepare(comparison->arithmetic, comparison->shape);
  num_compared = prepared.size();
  const Arithmetic other = comparison->arithmetic == Arithmetic::int8 ? Arithmetic::f32 : Arithmetic::int8;
  if (other == Arithmetic::f32 || comparison->has_int8) {
    auto more = baselines.prepare(other, comparison->shape);
    std::move(more.begin(), more.end(), std::back_inserter(prepared));
  }
  return prepared;
}

// The same product without its epilogue, where it has one, and what runs it: the row's kernel, or the best of
// those that take it where the row's is for epilogues alone.
struct Plain {
  cases::CasePtr product;
  std::string kernel;
};
std::optional<Plain> plain_of(const Spec& spec, qf_device device, const std::string& kernel) {
  const auto* s = std::get_if<cases::LinearSpec>(&spec);
  if (!s || s->weight.is_gated || (s->activation == QF_IDENTITY && !s->has_bias && !s->has_residual))
    return std::nullopt;
  cases::LinearSpec plain = *s;
  plain.activation = QF_IDENTITY;
  plain.has_bias = plain.has_residual = plain.has_residual_in_y = false;
  const std::vector<std::string> accepting = accepting_kernels(plain, device);
  if (accepting.empty()) return std::nullopt;
  const bool takes_it = std::find(accepting.begin(), accepting.end(), kernel) != accepting.end();
  return Plain{case_from_spec(plain), takes_it ? kernel : accepting.front()};
}

void check_status(qf_status status) {
  if (status != QF_OK) throw std::runtime_error(qf_last_error());
}

// Numbers in all matrices of the problem.
template <class AnySpec>
double elements_of(const AnySpec& s) {
  if constexpr (requires { s.rows; }) {
    return 2.0 * static_cast<double>(s.rows) * static_cast<double>(s.cols);
  } else {
    const auto m = static_cast<double>(s.m), n = static_cast<double>(s.n);
    if constexpr (requires { s.k; }) {
      return m * n + (m + n) * static_cast<double>(s.k);
    } else {
      return 3 * m * n;
    }
  }
}

}  // namespace

void check_memory(const Spec& spec) {
  const double memory =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  const double needed = 4 * std::visit([](const auto& s) { return elements_of(s); }, spec);
  if (needed > 0.8 * memory) {
    throw UsageError(fmt::format("this problem takes about {}, and the machine has {}", human_bytes(needed),
                                 human_bytes(memory)));
  }
}

std::string selected_kernel(const Spec& spec, qf_device device, const std::string& forced) {
  const Json json = Json::parse(explain_spec(spec, device, forced.empty() ? nullptr : forced.c_str(), false));
  if (!json["chosen"].is_null()) return json["chosen"];
  std::string reasons = "no kernel accepts it:";
  for (const Json& c : json["candidates"]) {
    reasons += fmt::format("\n  {}: {}", c["kernel"].get<std::string>(), c["reason"].get<std::string>());
  }
  throw std::runtime_error(reasons);
}

std::vector<std::string> accepting_kernels(const Spec& spec, qf_device device) {
  const Json json = Json::parse(explain_spec(spec, device, nullptr, false));
  std::vector<std::string> names;
  for (const Json& c : json["candidates"]) {
    if (c["accepts"]) names.push_back(c["kernel"]);
  }
  return names;
}

Row measure_row(const Spec& spec, const Machine& machine, const RowOptions& options) {
  Row row;
  row.kernel = selected_kernel(spec, machine.device, options.kernel);
  row.device = machine.device_name;
  {
    const cases::CasePtr c = case_from_spec(spec);
    row.op = c->op, row.name = c->name, row.scheme = c->scheme;
    row.m = c->m, row.n = c->n, row.k = c->k;
    row.flops = c->flops, row.bytes = c->bytes;
    row.copies = copies_beyond_cache(c->bytes, machine.cache_bytes);
    c->make(machine.device, /*seed=*/1, row.copies);
    const char* kernel = row.kernel.c_str();
    const std::optional<Plain> plain = plain_of(spec, machine.device, row.kernel);
    if (plain) plain->product->make(machine.device, /*seed=*/1, row.copies);
    const auto run_plain = [&](int copy, void* stream) {
      check_status(plain->product->run(plain->kernel.c_str(), copy, stream));
    };
    if (machine.device.type == QF_CPU) {
      size_t num_compared = 0;
      std::vector<NamedContender> others;
      if (options.baselines) others = prepare_baselines(spec, *options.baselines, num_compared);
      std::vector<Contender> contenders = {
          {[&](int copy) { check_status(c->run(kernel, copy, nullptr)); }, row.copies}};
      for (NamedContender& other : others) contenders.push_back(std::move(other.contender));
      if (plain) contenders.push_back({[&](int copy) { run_plain(copy, nullptr); }, row.copies});
      // The rate of a shared machine's memory changes by the minute: where it may be the limit, it takes
      // turns with the row.
      const double arithmetic_us = arithmetic_limit_us(spec, machine, row.flops);
      const bool may_wait_for_memory = row.bytes / machine.read_gbps() / 1e3 > 0.5 * arithmetic_us;
      if (may_wait_for_memory) contenders.push_back({[&](int) { machine.memory->run(); }, 1});
      std::vector<Timing> timings = measure_in_turns(std::move(contenders), options.seconds);
      if (may_wait_for_memory) {
        Timing read = scaled(std::move(timings.back()), row.bytes / machine.memory->bytes());
        timings.pop_back();
        if (read.us > arithmetic_us) row.read = std::move(read);
      }
      row.timing = timings[0];
      for (size_t i = 0; i < others.size(); ++i) {
        row.baselines.push_back({others[i].name, timings[i + 1]});
        if (i + 1 == num_compared) row.baseline = *quickest(row.baselines);
      }
      if (plain) row.plain = timings.back();
    } else {
      row.timing = measure_on_gpu(
          machine.device.id, [&](int copy, void* stream) { check_status(c->run(kernel, copy, stream)); },
          row.copies, options.seconds, options.has_energy);
      if (plain) row.plain = measure_on_gpu(machine.device.id, run_plain, row.copies, options.seconds);
      if (options.has_gpu_baselines) {
        for (const GpuNumbers numbers : gpu_numbers_of(spec)) {
          const auto baseline =
              make_gpu_baseline(machine.device.id, {row.m, row.n, row.k}, numbers, machine.cache_bytes);
          if (!baseline) continue;
          const auto run = [&](int copy, void* stream) { baseline->run(copy, stream); };
          row.baselines.push_back(
              {baseline->name, measure_on_gpu(machine.device.id, run, baseline->copies, options.seconds)});
        }
        if (!row.baselines.empty()) row.baseline = row.baselines.front();
      }
    }
  }

  row.limit_us = row.read ? row.read->us
                          : std::max(row.bytes / machine.read_gbps() / 1e3,
                                     arithmetic_limit_us(spec, machine, row.flops));
  return row;
}

Json row_json(const Row& row) {
  Json json;
  json["op"] = row.op;
  json["case"] = row.label();
  json["scheme"] = row.scheme;
  json["m"] = row.m, json["n"] = row.n, json["k"] = row.k;
  json["device"] = row.device;
  json["kernel"] = row.kernel;
  json["us"] = row.timing.us, json["us_p10"] = row.timing.us_p10, json["us_p90"] = row.timing.us_p90;
  json["gflops"] = row.flops / row.timing.us / 1e3;
  json["gbps"] = row.bytes / row.timing.us / 1e3;
  json["roofline"] = row.limit_us > 0 ? Json(row.roofline()) : Json();
  json["read_gbps"] = row.read ? Json(row.bytes / row.read->us / 1e3) : Json();
  json["baseline"] = row.baseline ? Json(row.baseline->name) : Json();
  json["baseline_us"] = row.baseline ? Json(row.baseline->timing.us) : Json();
  json["speedup"] = row.baseline ? Json(times_as_long(row.baseline->timing, row.timing)) : Json();
  json["plain_us"] = row.plain ? Json(row.plain->us) : Json();
  json["epilogue_cost"] = row.plain ? Json(times_as_long(row.timing, *row.plain) - 1) : Json();
  json["bytes"] = static_cast<int64_t>(row.bytes);
  json["limit_us"] = row.limit_us > 0 ? Json(row.limit_us) : Json();
  json["samples"] = row.timing.samples;
  json["copies"] = row.copies;
  if (row.timing.joules > 0) {
    json["joule_per_call"] = row.timing.joules;
    json["calls_per_joule"] = 1 / row.timing.joules;
  }
  json["baselines"] = Json::object();
  for (const BaselineTiming& b : row.baselines) json["baselines"][b.name] = b.timing.us;
  return json;
}

}  // namespace quantfuse::cli
