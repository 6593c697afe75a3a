// SPDX-License-Identifier: Apache-2.0
//
// A kernel as the emulator runs it: the instructions of its PTX, with registers, addresses and labels
// resolved.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace emulator {

// What the emulated GPU refuses: an instruction that it does not know, memory that is not there, a deadlock.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr int kLanes = 32;
// The first KiB of shared memory is the system's, as on the GPU.
constexpr uint32_t kSharedBegin = 1024;

// A literal, once for every lane, as a slot of 32 bits and as one of 64.
struct alignas(64) Constant {
  std::array<uint32_t, kLanes> narrow;
  std::array<uint64_t, kLanes> wide;
};

enum class Space : uint8_t { generic, global, shared, local, param };

enum class Special : uint8_t { tid, ntid, ctaid, nctaid, laneid, warpid, cluster_rank, smid, clock };

struct Operand {
  enum class Kind : uint8_t {
    none,       // "_": nothing is read or written
    reg,        // 32 slots at `slot` of the warp's registers
    predicate,  // word `slot` of the warp's predicates, a bit for each lane
    constant,
    special,  // dimension `slot` of `special`
    address,  // in brackets: a register or nothing, plus `value`
  };
  Kind kind = Kind::none;
  bool is_wide = false;     // slots of 64 bits: the register, or the base of the address
  bool has_base = false;    // of an address
  bool is_negated = false;  // of a predicate
  Special special = {};
  Space space = Space::generic;  // of the variable that an address names
  uint32_t slot = 0;
  int64_t value = 0;
  const Constant* constant = nullptr;
};

class Warp;
struct Instruction;
using Handler = void (*)(Warp&, const Instruction&);

struct Instruction {
  Handler run = nullptr;
  std::vector<Operand> operands;  // those in braces one after the other
  std::vector<uint16_t> counts;   // how many each comma of the text separates: 1, or what the braces hold
  int32_t guard = -1;             // its predicate
  bool is_guard_negated = false;
  uint32_t target = 0;            // of a branch or call
  std::array<int64_t, 4> with{};  // what the instruction's name says, as its handler keeps it
  const char* text = nullptr;     // for messages; lasts as long as the module
  uint32_t text_bytes = 0;

  // The first operand of group `i`.
  const Operand* group(int i) const {
    int first = 0;
    for (int j = 0; j < i; ++j) first += counts[j];
    return operands.data() + first;
  }
};

struct Program {
  std::string name;
  std::vector<Instruction> code;
  uint32_t register_bytes = 0;  // of a warp
  uint32_t num_predicates = 0;
  uint32_t local_bytes = 0;     // of a thread
  uint32_t shared_bytes = 0;    // of a block, without what the launch adds
  uint32_t dynamic_shared = 0;  // where that begins
  uint32_t param_bytes = 0;
  uint32_t cluster = 1;                               // blocks along x, where the kernel itself says so
  std::vector<std::pair<uint32_t, uint32_t>> params;  // offset and bytes of each argument
  std::unordered_map<uint64_t, std::unique_ptr<Constant>> constants;
};

// The PTX of a source file. Kernels are parsed when they are first asked for.
class Module {
 public:
  explicit Module(std::string_view ptx);
  bool has(const std::string& kernel) const { return bodies_.count(kernel) != 0; }
  const Program& program(const std::string& kernel);

 private:
  friend class Parser;
  struct Body {
    std::string_view head, directives, code;
    bool is_kernel = false;
  };
  std::string text_;  // without comments
  std::unordered_map<std::string, Body> bodies_;
  std::vector<std::string_view> variables_;  // declared outside functions
  std::unordered_map<std::string, std::unique_ptr<Program>> programs_;
};

// What an instruction does, by its name taken apart at the dots.
struct Mnemonic {
  std::vector<std::string_view> parts;
  bool has(std::string_view part) const {
    for (const auto& p : parts)
      if (p == part) return true;
    return false;
  }
  std::string_view last() const { return parts.back(); }
  std::string_view from_end(int i) const { return parts[parts.size() - 1 - i]; }
};

// Each sets `run` and `with`, or leaves `run` alone where the instruction is not of its kind.
void bind_arithmetic(const Mnemonic& name, Instruction& i);
void bind_conversion(const Mnemonic& name, Instruction& i);
void bind_control(const Mnemonic& name, Instruction& i);
void bind_memory(const Mnemonic& name, Instruction& i);
void bind_async(const Mnemonic& name, Instruction& i);
void bind_matrix(const Mnemonic& name, Instruction& i);

}  // namespace emulator
