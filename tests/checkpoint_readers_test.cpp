// SPDX-License-Identifier: Apache-2.0
//
// The readers of safetensors, sharded folders and GGUF on files made here, byte by byte.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "checkpoint/checkpoint.h"
#include "checkpoint/error.h"
#include "checkpoint_files.h"

namespace quantfuse::checkpoint {
namespace {

std::string error_of(const fs::path& path) {
  try {
    const Checkpoint checkpoint(path);
  } catch (const CheckpointError& e) {
    return e.what();
  }
  return "accepted";
}

#define EXPECT_SAYS(message, word) EXPECT_NE((message).find(word), std::string::npos) << (message)

template <class T>
std::string raw(T value) {
  std::string text(sizeof(T), '\0');
  std::memcpy(text.data(), &value, sizeof(T));
  return text;
}

// ---- safetensors ----

std::string safetensors_error(const std::string& header, const std::string& data = "") {
  TemporaryFolder folder;
  folder.write("a.safetensors", raw<uint64_t>(header.size()) + header + data);
  return error_of(folder / "a.safetensors");
}

TEST(Safetensors, TakesAnyAlignmentAndNoTensors) {
  EXPECT_EQ(safetensors_error("{}"), "accepted");
  EXPECT_EQ(safetensors_error(R"({"__metadata__":{"a":"b"}}   )"), "accepted");
  TemporaryFolder folder;
  const std::string header = R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}} )";
  ASSERT_NE(header.size() % 4, 0u);
  folder.write("a.safetensors", raw<uint64_t>(header.size()) + header + raw(1.5f));
  const Checkpoint checkpoint(folder / "a.safetensors");
  EXPECT_EQ(load<float>(*checkpoint.find("a"), 0), 1.5f);
}

TEST(Safetensors, NamesWhatIsWrong) {
  const auto entry = [](const std::string& fields) { return R"({"a":{)" + fields + "}}"; };
  EXPECT_SAYS(safetensors_error(entry(R"("dtype":"U8","shape":[2],"data_offsets":[1,3])"), "123"),
              "belong to no tensor");
  EXPECT_SAYS(safetensors_error(entry(R"("dtype":"U8","shape":[2],"data_offsets":[2,0])"), "12"),
              "backwards");
  EXPECT_SAYS(safetensors_error(entry(R"("dtype":"U8","shape":[2],"data_offsets":[0])"), "12"), "not a pair");
  EXPECT_SAYS(safetensors_error(entry(R"("dtype":"U8","shape":[2.5],"data_offsets":[0,2])"), "12"),
              "not an integer");
  EXPECT_SAYS(
      safetensors_error(entry(R"("dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,2])"), "12"),
      "overflow");
  EXPECT_SAYS(
      safetensors_error(entry(R"("dtype":"U8","shape":[0,9223372036854775807],"data_offsets":[0,0])")),
      "overflow");
  EXPECT_SAYS(safetensors_error(entry(R"("dtype":"U8","shape":2,"data_offsets":[0,2])"), "12"), "not a list");
  EXPECT_SAYS(safetensors_error(entry(R"("dtype":8,"shape":[2],"data_offsets":[0,2])"), "12"),
              "dtype is not a string");
  EXPECT_SAYS(safetensors_error(entry(R"("dtype":"F4","shape":[3],"data_offsets":[0,2])"), "12"), "F4");
  EXPECT_SAYS(safetensors_error(R"({"a":7})"), "not an object");
  EXPECT_SAYS(safetensors_error(R"({"__metadata__":{"a":1}})"), "not a string");
  EXPECT_SAYS(safetensors_error(R"({"__metadata__":[]})"), "not an object");
  EXPECT_SAYS(safetensors_error(""), "JSON");
  EXPECT_SAYS(safetensors_error(R"({"a\u001b[31m":7})"), "a\\x1b[31m");
}

TEST(Safetensors, BoundsTheDepthOfItsHeader) {
  EXPECT_SAYS(safetensors_error(R"({"a":)" + std::string(1'000'000, '[')), "deep");
  EXPECT_SAYS(safetensors_error(R"({"a":)" + std::string(1000, '[') + std::string(1000, ']') + "}"), "deep");
}

// A header of very many tensors takes time in proportion.
TEST(Safetensors, ReadsManyTensors) {
  constexpr int kCount = 200'000;
  std::string header = "{";
  for (int i = 0; i < kCount; ++i) {
    header += (i ? ",\"" : "\"") + std::to_string(i) + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  }
  EXPECT_EQ(safetensors_error(header + "}"), "accepted");
}

TEST(Checkpoints, NeedAFileThatIsOne) {
  TemporaryFolder folder;
  folder.write("a.bin", "x");
  EXPECT_SAYS(error_of(folder / "a.bin"), "expected a folder");
  EXPECT_SAYS(error_of(folder.path()), "no index");
  fs::create_directory(folder / "b.safetensors");
  folder.write("a.safetensors", "x");
  EXPECT_SAYS(error_of(folder / "a.safetensors"), "too small");
  fs::create_directory(folder / "c");
  fs::create_directory(folder / "c/model.safetensors");
  EXPECT_SAYS(error_of(folder / "c"), "not a regular file");
}

// ---- Shards ----

class Shards : public testing::Test {
 protected:
  void write(const std::string& shard, const std::vector<std::string>& names) {
    std::vector<NewTensor> tensors;
    for (const std::string& name : names) tensors.push_back({{name, Type::u8, {1}}, {7}});
    write_safetensors(folder / shard, tensors);
  }
  std::string error_with(const nlohmann::json& index) {
    folder.write("model.safetensors.index.json", index.dump());
    return error_of(folder.path());
  }
  TemporaryFolder folder;
};

TEST_F(Shards, AreHeldAgainstTheIndex) {
  write("1.safetensors", {"a", "b"});
  write("2.safetensors", {"c"});
  const nlohmann::json good = {
      {"weight_map", {{"a", "1.safetensors"}, {"b", "1.safetensors"}, {"c", "2.safetensors"}}}};
  EXPECT_EQ(error_with(good), "accepted");
  auto index = good;
  index["weight_map"].erase("b");
  EXPECT_SAYS(error_with(index), "b is in 1.safetensors");
  index = good;
  index["weight_map"]["d"] = "2.safetensors";
  EXPECT_SAYS(error_with(index), "d is missing from 2.safetensors");
  index = good;
  index["weight_map"]["c"] = "1.safetensors";
  EXPECT_SAYS(error_with(index), "c is missing from 1.safetensors");
  index = good;
  index["weight_map"]["c"] = 7;
  EXPECT_SAYS(error_with(index), "not a string");
  EXPECT_SAYS(error_with({{"weight_map", 7}}), "no weight_map");
  EXPECT_SAYS(error_with(nlohmann::json::array()), "no weight_map");
  write("2.safetensors", {"a", "c"});
  EXPECT_SAYS(error_with(good), "a is");
}

TEST_F(Shards, StayInTheFolder) {
  write("1.safetensors", {"a"});
  for (const char* name : {"../1.safetensors", "/etc/passwd", "x/1.safetensors", "..", ".", ""}) {
    EXPECT_SAYS(error_with({{"weight_map", {{"a", name}}}}), "not the name of a file");
  }
}

// ---- GGUF ----

std::string gguf_string(const std::string& text) { return raw<uint64_t>(text.size()) + text; }

struct GgufTensor {
  std::string name;
  std::vector<uint64_t> dims;
  uint32_t type;
  uint64_t offset;
};

std::string gguf_file(const std::vector<std::string>& kvs, const std::vector<GgufTensor>& tensors,
                      size_t alignment, const std::string& data) {
  std::string file = "GGUF" + raw<uint32_t>(3) + raw<uint64_t>(tensors.size()) + raw<uint64_t>(kvs.size());
  for (const std::string& kv : kvs) file += kv;
  for (const GgufTensor& tensor : tensors) {
    file += gguf_string(tensor.name) + raw<uint32_t>(static_cast<uint32_t>(tensor.dims.size()));
    for (const uint64_t dim : tensor.dims) file += raw(dim);
    file += raw(tensor.type) + raw(tensor.offset);
  }
  file.resize((file.size() + alignment - 1) / alignment * alignment);
  return file + data;
}

std::string gguf_error(const std::string& bytes) {
  TemporaryFolder folder;
  folder.write("a.gguf", bytes);
  return error_of(folder / "a.gguf");
}

std::string gguf_kv(const std::string& key, uint32_t type, const std::string& value) {
  return gguf_string(key) + raw(type) + value;
}

TEST(Gguf, ReadsKeyValues) {
  const std::string nested = raw<uint32_t>(9) + raw<uint64_t>(2) + raw<uint32_t>(0) + raw<uint64_t>(1) + "x" +
                             raw<uint32_t>(8) + raw<uint64_t>(1) + gguf_string("y");
  TemporaryFolder folder;
  folder.write("a.gguf",
               gguf_file({gguf_kv("u", 10, raw<uint64_t>(1ull << 63)), gguf_kv("i", 1, raw<int8_t>(-3)),
                          gguf_kv("b", 7, std::string(1, '\1')), gguf_kv("s", 8, gguf_string("")),
                          gguf_kv("a", 9, nested), gguf_kv("f", 12, raw(0.25)),
                          gguf_kv("general.alignment", 4, raw<uint32_t>(128))},
                         {{"t", {3, 2}, 0, 0}}, 128, std::string(24, '\0')));
  const Checkpoint checkpoint(folder / "a.gguf");
  const Json& kv = checkpoint.config();
  EXPECT_EQ(kv["u"].get<uint64_t>(), 1ull << 63);
  EXPECT_EQ(kv["i"], -3);
  EXPECT_EQ(kv["b"], true);
  EXPECT_EQ(kv["s"], "");
  EXPECT_EQ(kv["a"], (Json{{"array", "array"}, {"count", 2}}));
  EXPECT_EQ(kv["f"], 0.25);
  EXPECT_EQ(checkpoint.tensors()[0].shape, (std::vector<int64_t>{2, 3}));
}

TEST(Gguf, NamesWhatIsWrong) {
  const std::string data(128, '\0');
  const auto with_tensors = [&](const std::vector<GgufTensor>& tensors) {
    return gguf_error(gguf_file({}, tensors, 32, data));
  };
  EXPECT_EQ(with_tensors({{"a", {8}, 0, 0}, {"b", {8}, 0, 32}}), "accepted");
  EXPECT_SAYS(with_tensors({{"a", {8}, 0, 4}}), "a: its offset 4 is not a multiple");
  EXPECT_SAYS(with_tensors({{"a", {8}, 0, ~uint64_t{31}}}), "a: its 32 bytes");
  EXPECT_SAYS(with_tensors({{"a", {16}, 0, 0}, {"b", {8}, 0, 32}}), "a and b overlap");
  EXPECT_SAYS(with_tensors({{"a", {8}, 0, 0}, {"a", {8}, 0, 32}}), "two tensors are named a");
  EXPECT_SAYS(with_tensors({{"a", {1, 1, 1, 1, 1}, 0, 0}}), "a has 5 dimensions");
  EXPECT_SAYS(with_tensors({{"a", {~uint64_t{0}}, 0, 0}}), "a: dimension");
  EXPECT_SAYS(with_tensors({{"a", {uint64_t{1} << 62, 0}, 0, 0}}), "a: shape");
  EXPECT_SAYS(with_tensors({{"a\xff", {8}, 0, 0}}), "not UTF-8: a\\xff");
  EXPECT_SAYS(with_tensors({{"a", {32}, 16, 0}}), "a has ggml type 16");  // IQ2_XXS
  EXPECT_SAYS(with_tensors({{"a", {128}, 12, 0}}), "a: shape [128]");     // half a block of Q4_K
  const auto with_kvs = [&](const std::vector<std::string>& kvs) {
    return gguf_error(gguf_file(kvs, {}, 32, ""));
  };
  EXPECT_SAYS(with_kvs({gguf_kv("k", 0, "x"), gguf_kv("k", 0, "x")}), "k appears twice");
  EXPECT_SAYS(with_kvs({gguf_kv("general.alignment", 4, raw<uint32_t>(48))}), "general.alignment is 48");
  EXPECT_SAYS(with_kvs({gguf_kv("general.alignment", 5, raw<int32_t>(-32))}), "general.alignment");
  EXPECT_SAYS(with_kvs({gguf_kv("k", 9, raw<uint32_t>(4) + raw<uint64_t>(1ull << 62))}), "k: array count");
  EXPECT_SAYS(with_kvs({gguf_kv("k", 9, raw<uint32_t>(8) + raw<uint64_t>(1ull << 61))}), "k: array count");
  std::string deep;
  for (int i = 0; i < 20; ++i) deep += raw<uint32_t>(9) + raw<uint64_t>(1);
  EXPECT_SAYS(with_kvs({gguf_kv("k", 9, deep)}), "nested too deep");
  EXPECT_SAYS(with_kvs({gguf_kv("split.count", 2, raw<uint16_t>(3))}), "one of 3 parts");
}

// ---- What is written ----

TEST(NewFiles, AppearWholeOrNotAtAll) {
  TemporaryFolder folder;
  folder.write("a", "old");
  {
    NewFile file(folder / "a");
    file.write(bytes_of(std::string("new")));
  }
  EXPECT_EQ(fs::file_size(folder / "a"), 3u);
  EXPECT_EQ(folder.num_files(), 1u);
  NewFile file(folder / "a");
  file.write(bytes_of(std::string("newer")));
  file.finish();
  EXPECT_EQ(fs::file_size(folder / "a"), 5u);
  EXPECT_EQ(folder.num_files(), 1u);
  EXPECT_THROW(NewFile(folder / "no/such/folder"), std::system_error);
  EXPECT_THROW(NewFile(folder.path()), std::system_error);
  EXPECT_THROW(NewFile(""), std::system_error);
}

// A file without a name goes with its process.
TEST(NewFiles, LeaveNothingWhenTheirProcessIsKilled) {
  TemporaryFolder folder;
  const int unnamed = open(folder.path().c_str(), O_TMPFILE | O_WRONLY, 0600);
  if (unnamed < 0) GTEST_SKIP() << "this file system has no files without names";
  close(unnamed);
  const pid_t child = fork();
  if (child == 0) {
    NewFile file(folder / "a");
    file.write(bytes_of(std::string("half")));
    raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(folder.num_files(), 0u);
}

}  // namespace
}  // namespace quantfuse::checkpoint
