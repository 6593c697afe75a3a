// SPDX-License-Identifier: Apache-2.0
//
// Words for the names and schemes of cases.
#pragma once

#include <string>

#include "cases/case.h"

namespace quantfuse::cases {

std::string format_word(qf_format format);  // "int4"
std::string dtype_word(qf_dtype dtype);     // "bf16"
std::string block_word(qf_block block);     // "tensor", "row", "column", "g128", "128x128"
std::string group_word(int64_t group);      // "row", "g128"
std::string activation_word(qf_activation activation);
std::string data_word(Data data);                   // "" for normal
std::string weight_word(const WeightSpec& weight);  // "int4 g128 asym"
// "" or what an output is quantized to: "out int8 g64", "out e4m3 static"
std::string out_word(qf_format format, qf_scale_mode mode, int64_t group);

// Words with spaces between; empty ones are left out.
class Words {
 public:
  Words& add(const std::string& word);
  Words& add_if(bool condition, const std::string& word) { return condition ? add(word) : *this; }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace quantfuse::cases
