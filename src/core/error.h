// SPDX-License-Identifier: Apache-2.0
//
// The three ways a call can fail. Inside the library they are exceptions; at the C border, a status and a
// message.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "quantfuse/quantfuse.h"

namespace quantfuse {

class Error : public std::runtime_error {
 public:
  Error(qf_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  qf_status status() const { return status_; }

 private:
  qf_status status_;
};

// Not inline: kernels are compiled for newer instruction sets than the code around them, and a copy of an
// inline function compiled there could be the one the linker keeps for everybody.
[[noreturn]] void fail_argument(const std::string& message);
[[noreturn]] void fail_unsupported(const std::string& message);
[[noreturn]] void fail_device(const std::string& message);
[[noreturn]] void fail_internal(const char* message);

// The message behind qf_last_error().
void set_last_error(const char* message) noexcept;

// Runs `body` at the C border: every exception becomes a status and a message, none crosses.
template <class Body>
qf_status guarded(Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return QF_OK;
  } catch (const Error& e) {
    set_last_error(e.what());
    return e.status();
  } catch (const std::exception& e) {
    set_last_error(e.what());
    return QF_DEVICE_ERROR;
  }
}

}  // namespace quantfuse
