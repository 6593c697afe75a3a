// SPDX-License-Identifier: Apache-2.0
//
// A run-time value becomes a template argument. The legal values are the call itself, and the branch for
// every other value cannot be forgotten:
//
//   choose_float(x.dtype, [&](auto type) { using T = typename decltype(type)::type; run<T>(); });
//   choose_value<QF_INT8, QF_FP8_E4M3>(p.format, [&](auto f) { run<f.value>(); });
#pragma once

#include <type_traits>

#include "core/dtype.h"
#include "core/error.h"
#include "formats/numbers.h"

namespace quantfuse {

template <class T>
struct TypeTag {
  using type = T;
};

template <class Body>
inline __attribute__((always_inline)) void choose_float(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f32: return body(TypeTag<float>{});
    case DType::f16: return body(TypeTag<f16>{});
    case DType::bf16: return body(TypeTag<bf16>{});
    default: fail_internal("a tensor is not f32, f16 or bf16 where parse() should have said so");
  }
}

template <auto... Values, class V, class Body>
inline __attribute__((always_inline)) void choose_value(V value, Body&& body) {
  const bool found =
      ((value == Values ? (body(std::integral_constant<decltype(Values), Values>{}), true) : false) || ...);
  if (!found) fail_internal("a value outside a kernel's list where accepts() should have said so");
}

template <class Body>
inline __attribute__((always_inline)) void choose_bool(bool value, Body&& body) {
  value ? body(std::true_type{}) : body(std::false_type{});
}

}  // namespace quantfuse
