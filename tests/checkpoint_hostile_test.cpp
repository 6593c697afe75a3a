// SPDX-License-Identifier: Apache-2.0
//
// Malformed files. Every one ends in an error that names what is wrong, and leaves nothing behind; the ones
// with _ok_ in their names are valid.
#include <gtest/gtest.h>

#include <map>

#include "checkpoint/dequantize.h"
#include "checkpoint/error.h"
#include "checkpoint_files.h"

namespace quantfuse::checkpoint {
namespace {

// What the message of each case must have.
const std::map<std::string, std::vector<std::string>>& expected_words() {
  static const std::map<std::string, std::vector<std::string>> words = {
      {"s_zero_length", {"too small", "no header"}},
      {"s_truncated_data", {"b:", "past the end", "incomplete data"}},
      {"s_header_len_gt_file", {"header length", "exceeds the file"}},
      {"s_overlap", {"b:", "overlap"}},
      {"s_offset_past_end", {"b:", "past the end"}},
      {"s_bad_dtype", {"b:", "F33"}},
      {"s_shape_overflow_32x32", {"a:", "overflow"}},
      {"s_duplicate_key", {"'a'", "duplicate"}},
      {"s_not_utf8", {"header", "UTF-8"}},
      {"s_size_mismatch", {"a:", "24 bytes", "20"}},
      {"s_negative_dim", {"a:", "negative"}},
      {"s_header_array", {"header", "not a JSON object"}},
      {"s_header_cut_json", {"header", "JSON"}},
      {"s_dup_field", {"'a'", "dtype", "duplicate"}},
      {"s_trailing", {"longer than the header says"}},
      {"s_missing_dtype", {"a:", "dtype missing"}},
      {"q_gptq_missing_qzeros", {"model.layers.0.self_attn.k_proj.qzeros", "missing"}},
      {"q_gptq_shape_mismatch", {"k_proj.scales", "group_size", "qweight"}},
      {"q_gptq_extra_tensor", {"foo.qweight"}},
      {"q_gptq_scale_nan", {"q_proj.scales", "not finite"}},
      {"q_gptq_gidx_oob", {"q_proj.g_idx", "out of range"}},
      {"q_gptq_bits_lie", {"q_proj.qweight", "8 bits", "64 inputs"}},
      {"q_awq_group_lie", {"q_proj", "group_size is 128"}},
      {"q_fp8_scale_grid", {"q_proj.weight_scale_inv", "[1, 2]", "[2, 2]"}},
      {"q_index_missing_shard", {"model-00002-of-00002.safetensors", "missing"}},
      {"q_awq_out_not_8", {"q_proj.scales", "32 outputs"}},
      {"q_awq_gemv", {"version", "gemv", "not supported"}},
      {"q_gptq_group_zero", {"group_size", "0"}},
      {"q_ct_shape_lie", {"q_proj.weight_shape", "[32, 4096]"}},
      {"q_bnb_absmax_short", {"q_proj.weight.absmax", "[31]"}},
      {"q_fp8_missing_scale", {"q_proj.weight_scale_inv", "missing"}},
      {"q_config_unknown_method", {"quant_method", "foo"}},
      {"q_index_traversal", {"../outside.safetensors"}},
      {"g_zero_length", {"too small"}},
      {"g_wrong_magic", {"magic"}},
      {"g_truncated_data", {"b.weight", "past the end"}},
      {"g_tensor_count_2_60", {"tensor count"}},
      {"g_string_len_huge", {"general.architecture", "string length"}},
      {"g_offset_past_end", {"b.weight", "65536", "past the end"}},
      {"g_unknown_type", {"b.weight", "999"}},
      {"g_k_not_block", {"a.weight", "not a multiple", "32"}},
      {"g_version_99", {"version 99"}},
      {"g_kv_type_bad", {"fixture.x", "77"}},
      {"g_dim_overflow", {"b.weight", "overflow"}},
      {"g_alignment_zero", {"general.alignment"}},
      {"g_truncated_header", {"truncated"}},
  };
  return words;
}

std::vector<fs::path> hostile_cases() {
  std::vector<fs::path> paths;
  for (const fs::path& root : fixture_roots()) {
    const fs::path folder = root / "hostile";
    if (!fs::exists(folder / "meta.json")) continue;
    const nlohmann::json meta = read_json(folder / "meta.json");
    for (const auto& c : meta["cases"]) {
      paths.push_back(folder / c["path"].get<std::string>());
    }
  }
  return paths;
}

class Hostile : public testing::TestWithParam<fs::path> {};

TEST_P(Hostile, EndsInItsError) {
  const std::string name = GetParam().stem().string();
  TemporaryFolder folder;
  const auto run = [&] {
    const Checkpoint checkpoint(GetParam());
    const Import import = import_checkpoint(checkpoint);
    for (const auto& layer : import.layers) layer->values();
    NewFile file(folder / "out.safetensors");
    write_dequantized(import, file, Type::f32, [](const std::string&) {});
  };
  if (name.find("_ok_") != std::string::npos) {
    EXPECT_NO_THROW(run());
    EXPECT_EQ(folder.num_files(), 1);
    return;
  }
  try {
    run();
    FAIL() << name << " was accepted";
  } catch (const CheckpointError& e) {
    const std::string message = e.what();
    const auto words = expected_words().find(name);
    if (words == expected_words().end()) return;  // a case of QUANTFUSE_FIXTURES alone: any error will do
    for (const std::string& word : words->second) {
      EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' is not in: " << message;
    }
  }
  EXPECT_EQ(folder.num_files(), 0);
}

INSTANTIATE_TEST_SUITE_P(Cases, Hostile, testing::ValuesIn(hostile_cases()),
                         [](const auto& info) { return test_name(info.param, info.index); });

TEST(HostileCases, AreAllThere) { EXPECT_GE(hostile_cases().size(), 50u); }

// Any prefix of a valid file, and any byte of its header changed: an error or not, but never a crash, and
// never more memory than the file has. Run under the sanitizers, this is what finds a check that is missing.
void expect_no_crash(const fs::path& source, const std::string& name, size_t header_bytes) {
  std::ifstream stream(source, std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  TemporaryFolder folder;
  const auto read = [&](const std::string& bytes) {
    folder.write(name, bytes);
    try {
      const Checkpoint checkpoint(folder / name);
      const Import import = import_checkpoint(checkpoint);
      for (const auto& layer : import.layers) {
        if (layer->info().numel() < 1 << 20) layer->values();
      }
    } catch (const CheckpointError&) {
    }
  };
  const size_t end = std::min(header_bytes, whole.size());
  for (size_t length = 0; length <= end; length += 7) read(whole.substr(0, length));
  for (size_t i = 0; i < end; i += 3) {
    for (const int flip : {0x01, 0x80, 0xff}) {
      std::string bytes = whole;
      bytes[i] = static_cast<char>(bytes[i] ^ flip);
      read(bytes);
    }
  }
}

TEST(Mutations, OfSafetensorsNeverCrash) {
  expect_no_crash(fs::path(QF_TEST_FIXTURES) / "hostile/s_ok_padded.safetensors", "a.safetensors", 400);
}
TEST(Mutations, OfGgufNeverCrash) {
  expect_no_crash(fs::path(QF_TEST_FIXTURES) / "hostile/g_ok_minimal.gguf", "a.gguf", 400);
  expect_no_crash(fs::path(QF_TEST_FIXTURES) / "gguf_align64/model.gguf", "a.gguf", 640);
}

// A config with any one value replaced by something else.
TEST(Mutations, OfConfigsNeverCrash) {
  const std::vector<nlohmann::json> others = {
      nullptr,         -1, 0, 1, 1e300, "x", true, nlohmann::json::array(), nlohmann::json::object(), {1, -1},
      int64_t{1} << 62};
  for (const char* set :
       {"awq_gemm_w4_g32", "gptq_v1_w4_actorder_g64", "ct_pack_w4a16_asym_g32", "ct_fp8_block", "ct_nvfp4a16",
        "deepseek_fp8_ragged", "bnb_nf4_double", "torchao_intx4_g32"}) {
    const fs::path source = fs::path(QF_TEST_FIXTURES) / set;
    nlohmann::json config = read_json(source / "config.json");
    config["quantization_config"].erase("meta");  // GPTQModel's notes, which are not read
    TemporaryFolder folder;
    fs::copy(source / "model.safetensors", folder / "model.safetensors");
    const nlohmann::json flat = config["quantization_config"].flatten();
    for (const auto& [pointer, value] : flat.items()) {
      for (const nlohmann::json& other : others) {
        nlohmann::json changed = config;
        changed["quantization_config"][nlohmann::json::json_pointer(pointer)] = other;
        folder.write("config.json", changed.dump());
        try {
          const Checkpoint checkpoint(folder.path());
          for (const auto& layer : import_checkpoint(checkpoint).layers) layer->values();
        } catch (const CheckpointError&) {
        }
      }
    }
  }
}

}  // namespace
}  // namespace quantfuse::checkpoint
