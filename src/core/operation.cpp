// SPDX-License-Identifier: Apache-2.0
#include "core/operation.h"

#include <algorithm>
#include <cstring>

namespace quantfuse {
namespace {

thread_local std::string last_error;

}  // namespace

void set_last_error(const char* message) noexcept {
  try {
    last_error = message;
  } catch (...) {  // out of memory: an empty message is better than none of the status
    last_error.clear();
  }
}

void fail_argument(const std::string& message) { throw Error(QF_BAD_ARGUMENT, message); }
void fail_unsupported(const std::string& message) { throw Error(QF_UNSUPPORTED, message); }
void fail_device(const std::string& message) { throw Error(QF_DEVICE_ERROR, message); }
void fail_internal(const char* message) { throw Error(QF_DEVICE_ERROR, message); }

void fail_no_kernel(const char* op, std::span<const Candidate> candidates) {
  std::string text = std::string(op) + ": no kernel accepts this call:";
  for (const Candidate& c : candidates) text += std::string("\n  ") + c.kernel + ": " + c.verdict.reason;
  fail_unsupported(text);
}

std::string explain_json(int chosen, std::span<const Candidate> candidates) {
  // Names and reasons are our own literals without characters that JSON escapes.
  std::string s = "{\"chosen\": ";
  s += chosen < 0 ? "null" : std::string("\"") + candidates[chosen].kernel + "\"";
  s += ", \"candidates\": [";
  for (size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& c = candidates[i];
    const bool accepts = static_cast<bool>(c.verdict);
    const char* reason =
        !accepts ? c.verdict.reason
                 : (static_cast<int>(i) == chosen ? "chosen" : "a kernel before it in the list accepts");
    s += std::string(i ? ", " : "") + "{\"kernel\": \"" + c.kernel +
         "\", \"accepts\": " + (accepts ? "true" : "false") + ", \"reason\": \"" + reason + "\"}";
  }
  return s + "]}";
}

size_t copy_text(const std::string& text, char* out, size_t capacity) {
  if (out && capacity > 0) {
    const size_t n = std::min(capacity - 1, text.size());
    std::memcpy(out, text.data(), n);
    out[n] = '\0';
  }
  return text.size();
}

void check_workspace(const char* op, size_t needed, const qf_call& call) {
  if (needed == 0) return;
  if (!call.workspace || call.workspace_bytes < needed) {
    fail_argument(std::string(op) + ": workspace has " +
                  std::to_string(call.workspace ? call.workspace_bytes : 0) + " bytes, expected at least " +
                  std::to_string(needed));
  }
  if (reinterpret_cast<uintptr_t>(call.workspace) % 64 != 0) {
    fail_argument(std::string(op) + ": workspace is not aligned to 64 bytes");
  }
}

}  // namespace quantfuse

extern "C" const char* qf_last_error(void) { return quantfuse::last_error.c_str(); }
