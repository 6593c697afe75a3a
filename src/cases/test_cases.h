// SPDX-License-Identifier: Apache-2.0
//
// How an operation's list of test cases is put together: by hand where a corner is known, then at random
// (from a fixed seed) over every combination of options until the list is long enough that each pair of
// options has met.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cases/case.h"

namespace quantfuse::cases {

class CaseList {
 public:
  // Adds the case unless one of the same name is there already: names are made of everything that is special.
  template <class Spec>
  void add(const Spec& spec) {
    CasePtr c = make_case(spec);
    if (names_.insert(c->name).second) list_.push_back(std::move(c));
  }

  template <class Draw>
  void fill_up(size_t count, Draw draw) {
    while (list_.size() < count) add(draw());
  }

  std::vector<CasePtr> take() { return std::move(list_); }

 private:
  std::vector<CasePtr> list_;
  std::set<std::string> names_;
};

std::vector<CasePtr> quantize_test_cases();
std::vector<CasePtr> dequantize_test_cases();
std::vector<CasePtr> dequantize_words_test_cases();
std::vector<CasePtr> scaled_mm_test_cases();
std::vector<CasePtr> linear_test_cases();
std::vector<CasePtr> linear_backward_test_cases();
std::vector<CasePtr> rms_norm_test_cases();
std::vector<CasePtr> gated_act_test_cases();
std::vector<CasePtr> gptq_quantize_test_cases();
std::vector<CasePtr> awq_search_test_cases();

}  // namespace quantfuse::cases
