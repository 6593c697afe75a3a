// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/safetensors_writer.h"

#include <nlohmann/json.hpp>

namespace quantfuse::checkpoint {

void write_safetensors_header(NewFile& file, const std::vector<TensorHeader>& headers) {
  nlohmann::ordered_json json;
  json["__metadata__"] = {{"format", "pt"}};  // without it Transformers refuses the file
  int64_t offset = 0;
  for (const TensorHeader& header : headers) {
    const int64_t end = offset + declared_bytes(header.name, header.type, header.shape);
    json[header.name] = {
        {"dtype", type_name(header.type)}, {"shape", header.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = json.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data is aligned
  const uint64_t length = text.size();
  file.write({reinterpret_cast<const uint8_t*>(&length), sizeof(length)});
  file.write({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
}

}  // namespace quantfuse::checkpoint
