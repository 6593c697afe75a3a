#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# symbols_test.sh LIBRARY "OBJECT OBJECT ..."
#
# 1. LIBRARY exports qf_* and nothing else.
# 2. Objects compiled for AVX2 or AVX-512 define no weak function that other files may define too. The linker
#    keeps one copy of such a function for the whole library; if it kept the AVX-512 one, older CPUs would die
#    of it in baseline code. Templates on the vector type have that type in their names, and no other file
#    instantiates them. Weak data (V, u) are the same bytes everywhere and do no harm.
set -eu
library=$1
objects=$2
failed=0

exported=$(nm -D --defined-only "$library" | awk '{ print $3 }')
others=$(printf '%s\n' "$exported" | grep -v '^qf_' || true)
if [ -n "$others" ]; then
  echo "exported, and not qf_*:" $others
  failed=1
fi
if ! printf '%s\n' "$exported" | grep -q '^qf_quantize$'; then
  echo "qf_quantize is not exported"
  failed=1
fi

num_checked=0
for object in $objects; do
  case $object in
    *_amx.cc.o) own='amx' ;;
    *_avx512*.cc.o) own='avx512' ;;
    *_avx2*.cc.o) own='avx2' ;;
    *_avx_vnni.cc.o) own='avx_*vnni' ;;
    *) continue ;;
  esac
  num_checked=$((num_checked + 1))
  weak=$(nm -C --defined-only "$object" | grep -E '^[0-9a-f]* W ' | grep -iv "$own" || true)
  if [ -n "$weak" ]; then
    echo "$object defines weak functions that are not its own:"
    printf '%s\n' "$weak"
    failed=1
  fi
done
echo "$(printf '%s\n' "$exported" | wc -l) exported symbols, $num_checked objects of newer instruction sets"
exit $failed
