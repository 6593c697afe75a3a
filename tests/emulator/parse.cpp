// SPDX-License-Identifier: Apache-2.0
//
// PTX to Program. Only what a compiler writes and what our own asm says is understood; anything else is a
// Fault.
#include <algorithm>
#include <charconv>
#include <cstring>
#include <deque>

#include "program.h"

namespace emulator {
namespace {

bool is_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%';
}
bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

std::string_view trim(std::string_view s) {
  while (!s.empty() && is_space(s.front())) s.remove_prefix(1);
  while (!s.empty() && is_space(s.back())) s.remove_suffix(1);
  return s;
}

std::string without_comments(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text.substr(i, 2) == "//") i = std::min(text.find('\n', i), text.size() - 1);
    else if (text.substr(i, 2) == "/*") i = text.find("*/", i) + 1;
    else out += text[i];
  }
  return out;
}

// At commas that are in no bracket.
std::vector<std::string_view> split(std::string_view s) {
  std::vector<std::string_view> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= s.size(); ++i) {
    if (i == s.size() || (s[i] == ',' && depth == 0)) {
      if (const auto part = trim(s.substr(begin, i - begin)); !part.empty()) parts.push_back(part);
      begin = i + 1;
    } else if (std::strchr("{[(", s[i])) {
      ++depth;
    } else if (std::strchr("}])", s[i])) {
      --depth;
    }
  }
  return parts;
}

uint32_t align_up(uint32_t at, uint32_t to) { return (at + to - 1) / to * to; }

uint32_t type_bytes(std::string_view type) {
  if (type == ".pred") return 0;
  const size_t digits = type.find_first_of("0123456789");
  if (digits == type.npos) throw Fault("no such type: " + std::string(type));
  return static_cast<uint32_t>(std::atoi(std::string(type.substr(digits)).c_str())) / 8;
}

// ".param .align 8 .b8 name[40]", without the space.
struct Variable {
  std::string_view name;
  uint32_t bytes = 0, align = 1;
};

Variable parse_variable(std::string_view s) {
  Variable v;
  uint32_t element = 0;
  while (!s.empty()) {
    s = trim(s);
    const size_t end = std::min(s.find_first_of(" \t\n"), s.size());
    std::string_view word = s.substr(0, end);
    s.remove_prefix(end);
    if (word == ".align") {
      s = trim(s);
      v.align = static_cast<uint32_t>(std::atoi(std::string(s.substr(0, 8)).c_str()));
      s.remove_prefix(std::min(s.find_first_of(" \t\n"), s.size()));
    } else if (word.substr(0, 1) == ".") {
      if (word != ".ptr" && word != ".global" && word != ".shared" && word != ".local" && word != ".param" &&
          word != ".extern" && word != ".weak" && word != ".visible")
        element = type_bytes(word);
    } else {
      const size_t bracket = word.find('[');
      v.name = word.substr(0, bracket);
      const int count = bracket == word.npos ? 1 : std::atoi(std::string(word.substr(bracket + 1)).c_str());
      v.bytes = element * static_cast<uint32_t>(count);
      v.align = std::max(v.align, element);
      break;
    }
  }
  return v;
}

const std::unordered_map<std::string_view, Special> kSpecials = {
    {"%tid", Special::tid},       {"%ntid", Special::ntid},
    {"%ctaid", Special::ctaid},   {"%nctaid", Special::nctaid},
    {"%laneid", Special::laneid}, {"%warpid", Special::warpid},
    {"%smid", Special::smid},     {"%cluster_ctarank", Special::cluster_rank},
    {"%clock", Special::clock},   {"%clock64", Special::clock}};

}  // namespace

class Parser {
 public:
  Parser(const Module& module, Program& program) : module_(module), program_(program) {}

  void parse_kernel(const std::string& name) {
    program_.name = name;
    const Module::Body& body = module_.bodies_.at(name);
    scopes_.emplace_back();
    shared_at_ = kSharedBegin;
    const size_t open = body.head.find('('), close = body.head.rfind(')');
    if (open != body.head.npos) {
      for (const auto& param : split(body.head.substr(open + 1, close - open - 1))) {
        const Variable v = parse_variable(param);
        program_.param_bytes = align_up(program_.param_bytes, v.align);
        name_variable(v.name, Space::param, program_.param_bytes);
        program_.params.emplace_back(program_.param_bytes, v.bytes);
        program_.param_bytes += v.bytes;
      }
    }
    constexpr std::string_view kCluster = ".reqnctapercluster";
    if (const size_t at = body.directives.find(kCluster); at != body.directives.npos)
      program_.cluster = static_cast<uint32_t>(
          std::atoi(std::string(body.directives.substr(at + kCluster.size(), 8)).c_str()));
    parse_body(body.code);
    // Functions that are called come behind, each once, whoever calls them.
    for (size_t i = 0; i < functions_.size(); ++i) parse_function(i);
    program_.shared_bytes = shared_at_;
    // Memory that the launch adds has one name in every kernel, and the largest alignment asked for.
    program_.dynamic_shared = align_up(shared_at_, 1024);
    finish();
  }

  // Shared memory that the launch adds, declared outside of functions.
  void name_dynamic(std::string_view declaration) {
    if (scopes_.empty()) scopes_.emplace_back();
    const Variable v = parse_variable(declaration);
    name_variable(v.name, Space::shared, 0);
    scopes_.back()[v.name].is_dynamic = true;
  }

 private:
  struct Name {
    Operand operand;          // a register, or the address of a variable
    bool is_dynamic = false;  // of shared memory that the launch adds
  };
  struct Function {
    std::string name;
    uint32_t entry = 0, return_slot = 0;    // where it begins; the register with where to go on
    uint32_t result = 0, result_bytes = 0;  // in local memory
    std::vector<std::pair<uint32_t, uint32_t>> params;
  };
  struct Branch {
    size_t instruction;
    std::string_view label;
    std::vector<size_t> scopes;  // in which it may be
  };

  [[noreturn]] void fail(std::string_view what) const {
    throw Fault(program_.name + ": not understood: " + std::string(what.substr(0, 200)));
  }

  // ---- Names ----

  Name* find(std::string_view name) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto it = scope->find(name); it != scope->end()) return &it->second;
    }
    return nullptr;
  }
  void name_variable(std::string_view name, Space space, uint32_t at) {
    Operand o;
    o.kind = Operand::Kind::address;
    o.space = space, o.value = at;
    scopes_.back()[name] = {o};
  }
  Operand new_register(std::string_view type) {
    Operand o;
    if (type == ".pred") {
      o.kind = Operand::Kind::predicate;
      o.slot = program_.num_predicates++;
      return o;
    }
    o.kind = Operand::Kind::reg;
    o.is_wide = type_bytes(type) == 8;
    o.slot = program_.register_bytes;
    program_.register_bytes += (o.is_wide ? 8 : 4) * kLanes;
    return o;
  }
  uint32_t new_local(uint32_t bytes, uint32_t align) {
    const uint32_t at = align_up(program_.local_bytes, std::max(align, 1u));
    program_.local_bytes = at + bytes;
    return at;
  }

  // ---- Statements ----

  void parse_body(std::string_view code) {
    while (!(code = trim(code)).empty()) {
      if (code.front() == '{') {
        scopes_.emplace_back();
        labels_.emplace_back();
        open_.push_back(labels_.size() - 1);
        code.remove_prefix(1);
        continue;
      }
      if (code.front() == '}') {
        scopes_.pop_back();
        open_.pop_back();
        code.remove_prefix(1);
        continue;
      }
      size_t end = 0;
      while (end < code.size() && is_name(code[end])) ++end;
      if (end < code.size() && end > 0 && code[end] == ':') {
        labels_[open_.back()][code.substr(0, end)] = static_cast<uint32_t>(program_.code.size());
        code.remove_prefix(end + 1);
        continue;
      }
      const size_t semicolon = code.find(';');
      if (semicolon == code.npos) fail(code);
      const auto statement = trim(code.substr(0, semicolon));
      code.remove_prefix(semicolon + 1);
      if (statement.empty()) continue;
      statement.front() == '.' ? parse_directive(statement) : parse_instruction(statement);
    }
  }

  void parse_directive(std::string_view s) {
    const size_t end = std::min(s.find_first_of(" \t"), s.size());
    const auto word = s.substr(0, end), rest = trim(s.substr(end));
    if (word == ".pragma" || word == ".loc" || word == ".file") return;
    if (word == ".reg") {
      const size_t type_end = rest.find_first_of(" \t");
      const auto type = rest.substr(0, type_end);
      for (const auto& name : split(rest.substr(type_end))) {
        const size_t angle = name.find('<');
        if (angle == name.npos) {
          scopes_.back()[name] = {new_register(type)};
          continue;
        }
        const int count = std::atoi(std::string(name.substr(angle + 1)).c_str());
        for (int i = 0; i < count; ++i) {
          scopes_.back()[names_.emplace_back(std::string(name.substr(0, angle)) + std::to_string(i))] = {
              new_register(type)};
        }
      }
      return;
    }
    const Variable v = parse_variable(rest);
    if (word == ".local" || word == ".param") {
      name_variable(v.name, Space::local, new_local(v.bytes, std::max(v.align, 8u)));
    } else if (word == ".shared") {
      shared_at_ = align_up(shared_at_, v.align);
      name_variable(v.name, Space::shared, shared_at_);
      shared_at_ += v.bytes;
    } else {
      fail(s);
    }
  }

  void parse_instruction(std::string_view s) {
    const std::string_view whole = s;
    Instruction i;
    i.text = whole.data(), i.text_bytes = static_cast<uint32_t>(whole.size());
    if (s.front() == '@') {
      s.remove_prefix(1);
      if (s.front() == '!') i.is_guard_negated = true, s.remove_prefix(1);
      size_t end = 0;
      while (is_name(s[end])) ++end;
      const Name* guard = find(s.substr(0, end));
      if (!guard) fail(whole);
      i.guard = static_cast<int32_t>(guard->operand.slot);
      s = trim(s.substr(end));
    }
    const size_t end = std::min(s.find_first_of(" \t\n"), s.size());
    const auto name = s.substr(0, end), rest = trim(s.substr(end));

    Mnemonic mnemonic;
    for (size_t at = 0; at < name.size();) {
      const size_t dot = std::min(name.find('.', at), name.size());
      mnemonic.parts.push_back(name.substr(at, dot - at));
      at = dot + 1;
    }
    const auto& op = mnemonic.parts[0];
    if (op == "bra") {
      branches_.push_back({program_.code.size(), rest, open_});
    } else if (op == "call") {
      return parse_call(rest, std::move(i));
    } else if (op == "ret" && in_function_ >= 0) {
      i.operands.push_back({});
      i.operands[0].slot = functions_[in_function_].return_slot;
      i.counts = {1};
      i.with[0] = 1;
    } else {
      for (const auto& text : split(rest)) parse_operand(text, i);
    }
    bind_arithmetic(mnemonic, i);
    if (!i.run) bind_conversion(mnemonic, i);
    if (!i.run) bind_memory(mnemonic, i);
    if (!i.run) bind_control(mnemonic, i);
    if (!i.run) bind_async(mnemonic, i);
    if (!i.run) bind_matrix(mnemonic, i);
    if (!i.run) fail(whole);
    program_.code.push_back(std::move(i));
  }

  // ---- Operands ----

  void parse_operand(std::string_view s, Instruction& i) {
    if (s.front() == '{') {
      const auto parts = split(s.substr(1, s.size() - 2));
      for (const auto& part : parts) i.operands.push_back(scalar(part));
      i.counts.push_back(static_cast<uint16_t>(parts.size()));
    } else if (s.front() == '[') {
      // An address, or that of a tensor map and coordinates.
      const auto parts = split(s.substr(1, s.size() - 2));
      i.operands.push_back(address(parts[0]));
      i.counts.push_back(1);
      for (size_t p = 1; p < parts.size(); ++p) parse_operand(parts[p], i);
    } else if (const size_t bar = s.find('|'); bar != s.npos) {
      i.operands.push_back(scalar(trim(s.substr(0, bar))));
      i.operands.push_back(scalar(trim(s.substr(bar + 1))));
      i.counts.push_back(2);
    } else {
      i.operands.push_back(scalar(s));
      i.counts.push_back(1);
    }
  }

  // Where 32 bits are wanted, the lower ones.
  Operand literal(uint64_t bits) {
    auto& known = program_.constants[bits];
    if (!known) {
      known = std::make_unique<Constant>();
      known->narrow.fill(static_cast<uint32_t>(bits));
      known->wide.fill(bits);
    }
    Operand o;
    o.kind = Operand::Kind::constant;
    o.constant = known.get();
    o.value = static_cast<int64_t>(bits);
    return o;
  }

  static bool parse_integer(std::string_view s, int64_t& value) {
    bool is_negative = false;
    if (!s.empty() && s.front() == '-') is_negative = true, s.remove_prefix(1);
    int base = 10;
    if (s.size() > 2 && s[0] == '0' && (s[1] == 'x' || s[1] == 'X')) base = 16, s.remove_prefix(2);
    if (!s.empty() && s.back() == 'U') s.remove_suffix(1);
    uint64_t magnitude = 0;
    const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), magnitude, base);
    if (error != std::errc() || end != s.data() + s.size()) return false;
    value = static_cast<int64_t>(is_negative ? 0 - magnitude : magnitude);
    return true;
  }

  Operand scalar(std::string_view s) {
    Operand o;
    if (s == "_") return o;
    if (s.front() == '!') {
      o = scalar(s.substr(1));
      o.is_negated = true;
      return o;
    }
    if (const Name* known = find(s)) {
      if (known->operand.kind != Operand::Kind::address) return known->operand;
      // The address of a variable as a number.
      o = literal(known->is_dynamic ? kDynamic : static_cast<uint64_t>(known->operand.value));
      o.space = known->operand.space;
      return o;
    }
    if (s.front() == '%') {
      const size_t dot = s.find('.');
      if (const auto it = kSpecials.find(s.substr(0, dot)); it != kSpecials.end()) {
        o.kind = Operand::Kind::special;
        o.special = it->second;
        o.slot = dot == s.npos ? 0 : static_cast<uint32_t>(s[dot + 1] - 'x');
        return o;
      }
      fail(s);
    }
    const bool is_float = s.size() == 10 && s[0] == '0' && (s[1] == 'f' || s[1] == 'F');
    const bool is_double = s.size() == 18 && s[0] == '0' && (s[1] == 'd' || s[1] == 'D');
    if (is_float || is_double) return literal(std::stoull(std::string(s.substr(2)), nullptr, 16));
    if (int64_t value; parse_integer(s, value)) return literal(static_cast<uint64_t>(value));
    if (s == "1.0") return literal(0x3f800000);
    fail(s);
  }

  // Where shared memory that the launch adds begins is known when all else has its place.
  static constexpr int64_t kDynamic = 1ll << 40;

  Operand address(std::string_view s) {
    Operand o;
    o.kind = Operand::Kind::address;
    const size_t plus = s.find('+');
    const auto base = trim(s.substr(0, plus));
    if (const Name* known = find(base)) {
      if (known->operand.kind == Operand::Kind::reg) {
        o.has_base = true, o.is_wide = known->operand.is_wide, o.slot = known->operand.slot;
      } else {
        o = known->operand;
        if (known->is_dynamic) o.value = kDynamic;
      }
    } else if (!parse_integer(base, o.value)) {
      fail(s);
    }
    if (plus != s.npos) {
      int64_t more = 0;
      if (!parse_integer(trim(s.substr(plus + 1)), more)) fail(s);
      o.value += more;
    }
    return o;
  }

  // ---- Functions ----

  // "(result), name, (arguments)": the arguments are copied, the address to return to is kept, and behind
  // the call the result is copied back.
  void parse_call(std::string_view s, Instruction call) {
    auto parts = split(s);
    auto names_in = [&](std::string_view p) { return split(p.substr(1, p.size() - 2)); };
    std::vector<std::string_view> results, arguments;
    if (parts.front().front() == '(') results = names_in(parts.front()), parts.erase(parts.begin());
    const std::string function_name(parts.at(0));
    if (parts.size() > 1) arguments = names_in(parts[1]);
    const size_t f = function(function_name);
    for (size_t a = 0; a < arguments.size(); ++a) {
      const Name* from = find(arguments[a]);
      if (!from || a >= functions_[f].params.size()) fail(s);
      copy_local(functions_[f].params[a].first, static_cast<uint32_t>(from->operand.value),
                 functions_[f].params[a].second, call);
    }
    call.operands.push_back({});
    call.operands[0].slot = functions_[f].return_slot;
    call.counts = {1};
    calls_.emplace_back(program_.code.size(), f);
    bind_control({{"call"}}, call);
    const Instruction model = call;
    program_.code.push_back(std::move(call));
    if (!results.empty()) {
      const Name* to = find(results[0]);
      if (!to) fail(s);
      copy_local(static_cast<uint32_t>(to->operand.value), functions_[f].result, functions_[f].result_bytes,
                 model);
    }
  }

  void copy_local(uint32_t to, uint32_t from, uint32_t bytes, const Instruction& model) {
    Instruction i;
    i.text = model.text, i.text_bytes = model.text_bytes;
    i.guard = model.guard, i.is_guard_negated = model.is_guard_negated;
    i.with = {to, from, bytes, 0};
    bind_memory({{"copy_local"}}, i);
    program_.code.push_back(std::move(i));
  }

  size_t function(const std::string& name) {
    for (size_t f = 0; f < functions_.size(); ++f)
      if (functions_[f].name == name) return f;
    const auto body = module_.bodies_.find(name);
    if (body == module_.bodies_.end() || body->second.code.empty()) fail(name);
    Function f;
    f.name = name;
    f.return_slot = new_register(".b32").slot;
    // ".func (.param .b32 func_retval0) name(.param .b32 name_param_0, ...)"
    std::string_view head = body->second.head;
    const size_t name_at = head.find(name);
    if (const size_t open = head.find('('); open < name_at) {
      const Variable v = parse_variable(head.substr(open + 1, head.find(')') - open - 1));
      f.result = new_local(v.bytes, 16), f.result_bytes = v.bytes;
    }
    const size_t open = head.find('(', name_at), close = head.rfind(')');
    if (open != head.npos) {
      for (const auto& param : split(head.substr(open + 1, close - open - 1))) {
        const Variable v = parse_variable(param);
        f.params.emplace_back(new_local(v.bytes, 16), v.bytes);
      }
    }
    functions_.push_back(std::move(f));
    return functions_.size() - 1;
  }

  void parse_function(size_t index) {
    functions_[index].entry = static_cast<uint32_t>(program_.code.size());
    in_function_ = static_cast<int>(index);
    const Module::Body& body = module_.bodies_.at(functions_[index].name);
    scopes_.emplace_back();
    const std::string_view head = body.head;
    const size_t name_at = head.find(functions_[index].name);
    if (const size_t open = head.find('('); open < name_at) {
      const Variable v = parse_variable(head.substr(open + 1, head.find(')') - open - 1));
      name_variable(v.name, Space::local, functions_[index].result);
    }
    const size_t open = head.find('(', name_at), close = head.rfind(')');
    if (open != head.npos) {
      size_t p = 0;
      for (const auto& param : split(head.substr(open + 1, close - open - 1)))
        name_variable(parse_variable(param).name, Space::local, functions_[index].params[p++].first);
    }
    parse_body(body.code);
    scopes_.pop_back();
  }

  // ---- When all is read ----

  void finish() {
    for (const Branch& b : branches_) program_.code[b.instruction].target = find_label(b);
    for (const auto& [at, f] : calls_) program_.code[at].target = functions_[f].entry;
    for (Instruction& i : program_.code) {
      for (Operand& o : i.operands) {
        if (o.space != Space::shared || o.value < kDynamic / 2) continue;
        const int64_t value = o.value - kDynamic + program_.dynamic_shared;
        if (o.kind == Operand::Kind::address) o.value = value;
        else o = literal(static_cast<uint64_t>(value));
      }
    }
  }
  uint32_t find_label(const Branch& b) const {
    for (auto scope = b.scopes.rbegin(); scope != b.scopes.rend(); ++scope)
      if (const auto it = labels_[*scope].find(b.label); it != labels_[*scope].end()) return it->second;
    fail(b.label);
  }

  const Module& module_;
  Program& program_;
  std::deque<std::string> names_;  // that views in the scopes point to
  std::vector<std::unordered_map<std::string_view, Name>> scopes_;
  std::vector<std::unordered_map<std::string_view, uint32_t>> labels_;
  std::vector<size_t> open_;  // the scopes of labels that are open
  std::vector<Branch> branches_;
  std::vector<Function> functions_;
  std::vector<std::pair<size_t, size_t>> calls_;
  int in_function_ = -1;
  uint32_t shared_at_ = 0;
};

Module::Module(std::string_view ptx) : text_(without_comments(ptx)) {
  std::string_view s = text_;
  while (!(s = trim(s)).empty()) {
    // Up to a body, or to the end of a declaration; a head has neither in it.
    const size_t brace = s.find('{'), semicolon = s.find(';');
    const size_t line = std::min(s.find('\n'), s.size());
    const auto first = s.substr(0, line);
    if (first.substr(0, 8) == ".version" || first.substr(0, 7) == ".target" ||
        first.substr(0, 13) == ".address_size") {
      s.remove_prefix(line);
      continue;
    }
    if (semicolon < brace) {
      const auto declaration = trim(s.substr(0, semicolon));
      if (declaration.find(".func") == declaration.npos) variables_.push_back(declaration);
      s.remove_prefix(semicolon + 1);
      continue;
    }
    if (brace == s.npos) throw Fault("PTX ends in the middle");
    size_t end = brace;
    for (int depth = 0; end < s.size(); ++end) {
      if (s[end] == '{') ++depth;
      if (s[end] == '}' && --depth == 0) break;
    }
    Body body;
    body.head = s.substr(0, brace);
    body.code = s.substr(brace, end + 1 - brace);
    const size_t entry = body.head.find(".entry");
    body.is_kernel = entry != body.head.npos;
    size_t at = body.is_kernel ? entry + 6 : body.head.find(".func") + 5;
    while (is_space(body.head[at])) ++at;
    if (body.head[at] == '(') at = body.head.find(')', at) + 1;  // of its result
    while (is_space(body.head[at])) ++at;
    size_t name_end = at;
    while (name_end < body.head.size() && is_name(body.head[name_end])) ++name_end;
    // Behind the arguments come directives such as .maxntid.
    const size_t close = body.head.find(')', name_end);
    if (close != body.head.npos) {
      body.directives = body.head.substr(close + 1);
      body.head = body.head.substr(0, close + 1);
    }
    bodies_[std::string(body.head.substr(at, name_end - at))] = body;
    s.remove_prefix(end + 1);
  }
}

const Program& Module::program(const std::string& kernel) {
  auto& known = programs_[kernel];
  if (!known) {
    auto made = std::make_unique<Program>();
    Parser parser(*this, *made);
    for (const auto& variable : variables_) {
      if (variable.find(".shared") == variable.npos)
        throw Fault("not understood: " + std::string(variable.substr(0, 200)));
      parser.name_dynamic(variable);
    }
    parser.parse_kernel(kernel);
    known = std::move(made);
  }
  return *known;
}

}  // namespace emulator
