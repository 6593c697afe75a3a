// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/safetensors_writer.h"

#include <nlohmann/json.hpp>

namespace quantfuse::checkpoint {

std::vector<int64_t> write_safetensors_header(NewFile& file, const std::vector<TensorHeader>& headers,
                                              const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json json;
  json["__metadata__"] = metadata;
  json["__metadata__"]["format"] = "pt";  // without it Transformers refuses the file
  std::vector<int64_t> offsets = {0};
  for (const TensorHeader& header : headers) {
    const int64_t begin = offsets.back(),
                  end = begin + declared_bytes(header.name, header.type, header.shape);
    json[header.name] = {
        {"dtype", type_name(header.type)}, {"shape", header.shape}, {"data_offsets", {begin, end}}};
    offsets.push_back(end);
  }
  std::string text = json.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data is aligned
  const uint64_t length = text.size();
  file.write({reinterpret_cast<const uint8_t*>(&length), sizeof(length)});
  file.write({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  for (int64_t& offset : offsets) offset += static_cast<int64_t>(sizeof(length) + text.size());
  return offsets;
}

}  // namespace quantfuse::checkpoint
