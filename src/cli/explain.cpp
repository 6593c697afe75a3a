// SPDX-License-Identifier: Apache-2.0
//
// `quantfuse explain OP ...`: which kernel runs, and why each other one does not.
#include <fmt/format.h>

#include "commands.h"
#include "library.h"

namespace quantfuse::cli {
namespace {

bool is_fp8(qf_format format) { return format == QF_FP8_E4M3 || format == QF_FP8_E5M2; }
bool is_codebook(qf_format format) { return format == QF_NF4 || format == QF_FP4_BNB || format == QF_IQ4_NL; }

// What a user would not guess from the kernel's name.
std::vector<std::string> notes_on(const Spec& spec, qf_device device, const std::string& chosen) {
  std::vector<std::string> notes;
  const bool is_cpu = device.type == QF_CPU;
  if (chosen.size() > 4 && chosen.compare(chosen.size() - 4, 4, "_ref") == 0) {
    notes.push_back("this is the scalar reference, which is made to be right and not to be quick");
  }
  if (const auto* s = std::get_if<cases::LinearSpec>(&spec)) {
    if (is_cpu && is_fp8(s->act_format)) {
      notes.push_back(
          "CPUs have no FP8 units: the activations are rounded to FP8 and the product is taken by "
          "conversion");
    } else if (is_cpu && is_fp8(s->weight.format)) {
      notes.push_back("CPUs have no FP8 units: the weight is converted as it is read");
    }
    if (s->weight.format == QF_FP4_E2M1 && is_cpu) {
      notes.push_back("CPUs have no FP4 units: the weight is converted as it is read");
    }
    if (is_codebook(s->weight.format)) {
      notes.push_back("the weight's numbers are looked up in the format's table as it is read");
    }
    notes.push_back("the weight is taken to be packed by qf_weight_pack, as a loaded layer's is");
  }
  if (const auto* s = std::get_if<cases::ScaledMmSpec>(&spec); s && is_cpu && is_fp8(s->a_format)) {
    notes.push_back("CPUs have no FP8 units: both operands are converted before the product");
  }
  return notes;
}

std::string describe(const std::string& op, const ProblemOptions& p) {
  const bool has_weight = op == "linear" || op == "linear_backward";
  const bool has_k = has_weight || op == "scaled_mm";
  std::string s = op;
  if (has_weight) s += ", weight " + p.weight;
  if (op == "scaled_mm" || op == "quantize" || op == "dequantize") s += ", " + p.format;
  if (op != "scaled_mm") s += ", " + p.act;
  if (op == "linear" && p.act_quant != "none") s += " quantized to " + p.act_quant;
  return s + ", " + size_text(p.m, p.n, has_k ? p.k : 0) + ", on " + p.device;
}

}  // namespace

int run_explain(const ExplainOptions& options) {
  JsonFile file(options.json_path);
  const std::string op = operation_name(options.op);
  const qf_device device = device_from_word(options.problem.device);
  const Spec spec = spec_from_options(op, options.problem);
  const char* kernel = options.kernel.empty() ? nullptr : options.kernel.c_str();
  Json json = Json::parse(explain_spec(spec, device, kernel, options.is_strict));

  const bool is_any_chosen = !json["chosen"].is_null();
  const std::string chosen = is_any_chosen ? json["chosen"].get<std::string>() : "";
  json["op"] = op;
  json["device"] = device_text(device);
  json["notes"] = is_any_chosen ? notes_on(spec, device, chosen) : std::vector<std::string>{};

  fmt::print("{}\n", describe(op, options.problem));
  if (is_any_chosen) {
    fmt::print("runs {}\n\n", styled(Style::good, chosen));
  } else {
    fmt::print("{}\n\n", styled(Style::bad, "no kernel accepts it"));
  }
  Table table(
      {{"kernel", Table::Align::left}, {"accepts", Table::Align::left}, {"reason", Table::Align::left}});
  std::vector<std::vector<std::string>> rows;
  for (const Json& c : json["candidates"]) {
    rows.push_back({c["kernel"].get<std::string>(), c["accepts"].get<bool>() ? "yes" : "no",
                    c["reason"].get<std::string>()});
    table.fit(rows.back());
  }
  table.print_titles();
  for (const auto& row : rows) {
    table.print_row(row, row[0] == chosen ? Style::good : row[1] == "yes" ? Style::plain : Style::dim);
  }
  for (const Json& note : json["notes"])
    fmt::print("\n{} {}", styled(Style::note, "note:"), note.get<std::string>());
  if (!json["notes"].empty()) fmt::print("\n");
  file.write(json);
  return options.is_strict && !is_any_chosen ? kCheckFailed : kSuccess;
}

}  // namespace quantfuse::cli
