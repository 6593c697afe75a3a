#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# QuantFuse as its users meet it: installed, moved to another place, and built against from there.
#   tests/consumers/run.sh BUILD_DIR
set -euo pipefail
build=$(realpath "$1")
source=$(realpath "$(dirname "$0")/../..")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/moved
warnings=(-Wall -Wextra -pedantic -Werror)

echo "---- install, then move: nothing may remember where it was"
cmake --install "$build" --prefix "$work/installed" >"$work/log" || { cat "$work/log"; exit 1; }
mv "$work/installed" "$prefix"
if grep -rlF -e "$build" -e "$source/" -e "$work/installed" "$prefix"; then
  echo "these installed files hold paths of the build" >&2
  exit 1
fi
libdir=$(dirname "$(find "$prefix" -name libquantfuse.so)")
export LD_LIBRARY_PATH=$libdir PKG_CONFIG_PATH=$libdir/pkgconfig

echo "---- exported symbols: qf_* and nothing else"
exported=$(nm -D --defined-only "$libdir/libquantfuse.so" | awk '{print $3}' | sed 's/@.*//' | sort)
declared=$(grep -oE '\bqf_[a-z0-9_]+\(' "$source/include/quantfuse/quantfuse.h" | tr -d '(' | sort -u)
diff <(echo "$declared") <(echo "$exported")

echo "---- C11 by pkg-config"
read -ra flags <<<"$(pkg-config --cflags --libs quantfuse)"
cc -std=c11 "${warnings[@]}" "$source/examples/c_linear.c" "${flags[@]}" -lm -o "$work/c_linear"
"$work/c_linear"

echo "---- C++17 by pkg-config"
c++ -std=c++17 "${warnings[@]}" "$source/tests/consumers/cpp_interface.cpp" "${flags[@]}" \
  -o "$work/cpp_interface"
"$work/cpp_interface"

echo "---- the examples by CMake"
{
  cmake -S "$source/examples" -B "$work/examples" -DCMAKE_PREFIX_PATH="$prefix" &&
    cmake --build "$work/examples"
} >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
unset LD_LIBRARY_PATH
"$work/examples/c_linear"
"$work/examples/cpp_linear"

echo "---- the installed command"
"$prefix/bin/quantfuse" --version
echo "consumers: all well"
