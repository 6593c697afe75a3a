// SPDX-License-Identifier: Apache-2.0
#include "output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <system_error>

#include "commands.h"

namespace quantfuse::cli {
namespace {

bool has_colour() {
  static const bool answer = [] {
    const char* no_color = std::getenv("NO_COLOR");
    const char* term = std::getenv("TERM");
    return isatty(STDOUT_FILENO) && !(no_color && *no_color) && term && std::strcmp(term, "dumb") != 0;
  }();
  return answer;
}

const char* escape_code(Style style) {
  switch (style) {
    case Style::plain: return "";
    case Style::bold: return "\033[1m";
    case Style::dim: return "\033[2m";
    case Style::good: return "\033[32m";
    case Style::bad: return "\033[31m";
    case Style::note: return "\033[33m";
  }
  return "";
}

// Characters on the screen: all bytes but the continuation bytes of UTF-8.
size_t screen_width(const std::string& text) {
  size_t width = 0;
  for (const char c : text) width += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return width;
}

}  // namespace

std::string styled(Style style, const std::string& text) {
  if (style == Style::plain || !has_colour()) return text;
  return escape_code(style) + text + "\033[0m";
}

JsonFile::JsonFile(const std::string& path) {
  if (path.empty()) return;
  try {
    file_.emplace(path);
  } catch (const std::system_error& e) {
    throw UsageError(std::string("--json: ") + e.what());
  }
}

void JsonFile::write(const Json& json) {
  if (!file_) return;
  const std::string text = json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  try {
    file_->write({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
    file_->finish();
  } catch (const std::system_error& e) {
    throw UsageError(std::string("--json: ") + e.what());
  }
  file_.reset();
}

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {
  for (Column& c : columns_) c.width = std::max(c.width, screen_width(c.title));
}

void Table::fit(const std::vector<std::string>& cells) {
  for (size_t i = 0; i < cells.size(); ++i)
    columns_[i].width = std::max(columns_[i].width, screen_width(cells[i]));
}

void Table::print_cells(const std::vector<std::string>& cells, Style style) const {
  std::string line;
  for (size_t i = 0; i < cells.size(); ++i) {
    const size_t width = screen_width(cells[i]);
    const std::string padding(width < columns_[i].width ? columns_[i].width - width : 0, ' ');
    const bool is_left = columns_[i].align == Align::left;
    line += (i ? "  " : "") + (is_left ? cells[i] + padding : padding + cells[i]);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  fmt::print("{}\n", styled(style, line));
  std::fflush(stdout);
}

void Table::print_titles() const {
  std::vector<std::string> titles;
  for (const Column& c : columns_) titles.push_back(c.title);
  print_cells(titles, Style::bold);
}

void Table::print_row(const std::vector<std::string>& cells, Style style) const { print_cells(cells, style); }

Progress::Progress(size_t total) : is_shown_(isatty(STDERR_FILENO)), total_(total) {}

void Progress::step(const std::string& what) {
  ++done_;
  if (!is_shown_) return;
  fmt::print(stderr, "\r\033[K[{}/{}] {}", done_, total_, what.substr(0, 68));
  std::fflush(stderr);
}

void Progress::clear() {
  if (!is_shown_) return;
  fmt::print(stderr, "\r\033[K");
  std::fflush(stderr);
}

ByteProgress::ByteProgress(int64_t total) : is_shown_(isatty(STDERR_FILENO)), total_(total) {}

void ByteProgress::step(const std::string& what, int64_t done) {
  if (!is_shown_) return;
  if (done_at_start_ < 0) done_at_start_ = done, start_ = std::chrono::steady_clock::now();
  constexpr int kWidth = 24;
  const double share = total_ > 0 ? static_cast<double>(done) / static_cast<double>(total_) : 1;
  const auto filled = static_cast<size_t>(share * kWidth);
  std::string line = fmt::format("[{}{}] {:3.0f}%", std::string(filled, '#'),
                                 std::string(kWidth - filled, '.'), 100 * share);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const auto done_here = static_cast<double>(done - done_at_start_);
  if (done_here > 0 && seconds > 0) {
    const double rate = done_here / seconds;
    line += fmt::format("  {}/s  {} left", human_bytes(rate),
                        human_time(static_cast<double>(total_ - done) / rate));
  }
  fmt::print(stderr, "\r\033[K{}  {}", line, what.substr(0, 48));
  std::fflush(stderr);
}

void ByteProgress::clear() {
  if (!is_shown_) return;
  fmt::print(stderr, "\r\033[K");
  std::fflush(stderr);
}

std::string human_time(double seconds) {
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  if (whole >= 3600) return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

std::string human_bytes(double bytes) {
  if (bytes >= 1e9) return fmt::format("{:.2f} GB", bytes / 1e9);
  if (bytes >= 1e6) return fmt::format("{:.1f} MB", bytes / 1e6);
  if (bytes >= 1e3) return fmt::format("{:.1f} kB", bytes / 1e3);
  return fmt::format("{:.0f} B", bytes);
}

}  // namespace quantfuse::cli
