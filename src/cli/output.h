// SPDX-License-Identifier: Apache-2.0
//
// What every command prints with: colour, tables, progress, JSON files.
#pragma once

#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/new_file.h"

namespace quantfuse::cli {

using Json = nlohmann::ordered_json;

// Colour on standard output: only on a terminal, and not where NO_COLOR or TERM=dumb say otherwise.
enum class Style { plain, bold, dim, good, bad, note };
std::string styled(Style style, const std::string& text);

// The file of --json, which appears whole or not at all. The constructor throws UsageError where it cannot be
// written, so that a command finds out before its work. An empty path makes every method a no-op.
class JsonFile {
 public:
  explicit JsonFile(const std::string& path);
  void write(const Json& json);

 private:
  std::optional<checkpoint::NewFile> file_;
};

// Columns as wide as their widest cell; numbers to the right. Widths count characters on the screen.
class Table {
 public:
  enum class Align { left, right };
  struct Column {
    std::string title;
    Align align = Align::right;
    size_t width = 0;  // at least
  };
  explicit Table(std::vector<Column> columns);

  void fit(const std::vector<std::string>& cells);  // widens the columns
  void print_titles() const;
  void print_row(const std::vector<std::string>& cells, Style style = Style::plain) const;

 private:
  void print_cells(const std::vector<std::string>& cells, Style style) const;
  std::vector<Column> columns_;
};

// One line on standard error that is overwritten as work goes on; silent where standard error is not a
// terminal.
class Progress {
 public:
  explicit Progress(size_t total);
  ~Progress() { clear(); }
  void step(const std::string& what);  // about to do the next piece
  void clear();                        // before printing anything else

 private:
  bool is_shown_;
  size_t total_, done_ = 0;
};

// The same for work that is known in bytes: a bar, the rate and the time left.
class ByteProgress {
 public:
  explicit ByteProgress(int64_t total);
  ~ByteProgress() { clear(); }
  void step(const std::string& what,
            int64_t done);  // about to do the next piece, with so many bytes behind it
  void clear();

 private:
  bool is_shown_;
  int64_t total_, done_at_start_ = -1;  // what was done before the first step says nothing about the rate
  std::chrono::steady_clock::time_point start_;
};

std::string human_bytes(double bytes);   // "9.0 MB"
std::string human_time(double seconds);  // "1:05:09", "3:20"

}  // namespace quantfuse::cli
