#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# docs/adding-a-kernel.md, followed to the letter in a copy of the sources: the file as printed there, and the
# one line. Then `quantfuse verify` has to find the kernel and pass it.
#   tests/consumers/new_kernel.sh
set -euo pipefail
source=$(realpath "$(dirname "$0")/../..")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
kernel=quantize_int8_static_avx2

if ! grep -qw avx2 /proc/cpuinfo; then
  echo "this machine cannot run the example's kernel: no AVX2"
  exit 77  # skipped
fi
cp -r "$source"/{CMakeLists.txt,cmake,include,src} "$work"

# The one file: the first block of C++ in the text. The one line: before all other kernels.
sed -n '/^```cpp$/,/^```$/p' "$source/docs/adding-a-kernel.md" |
  sed '1d;/^```$/,$d' >"$work/src/quantize/$kernel.cc"
sed -i "0,/^[a-z]/s/^[a-z]/$kernel\n&/" "$work/src/quantize/kernels.list"

export CCACHE_BASEDIR=$work CCACHE_NOHASHDIR=1
cmake -S "$work" -B "$work/build" -G Ninja -DQUANTFUSE_CUDA=OFF -DQUANTFUSE_TESTS=OFF >"$work/cmake.log" ||
  { cat "$work/cmake.log"; exit 1; }
cmake --build "$work/build" -j "$(nproc)" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }

"$work/build/quantfuse" verify --op quantize --device cpu --kernel $kernel | tee "$work/verify.log"
grep -qE '^[1-9][0-9]* passed, 0 failed' "$work/verify.log"
