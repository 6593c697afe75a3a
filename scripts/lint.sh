#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Format, types, and those rules of the code base that can be searched for. `--fix` formats and checks nothing.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
export PATH="$PWD/.venv/bin:$PATH"
failures=0

broken() {
  echo "lint: $1" >&2
  failures=$((failures + 1))
}

check() {  # check TEXT COMMAND...: the command must succeed
  local text=$1
  shift
  "$@" || broken "$text"
}

forbid() {  # forbid TEXT PATTERN FILE...: no line of the files may match
  local text=$1 pattern=$2
  shift 2
  [[ $# == 0 ]] || ! grep -nEH -e "$pattern" -- "$@" >&2 || broken "$text"
}

sources() {  # sources EXCEPT FOLDER...: C, C++ and CUDA files whose path does not match EXCEPT
  local except=$1
  shift
  find "$@" -type f -regex '.*\.\(c\|cc\|cpp\|cu\|cuh\|h\|hpp\)' -not -regex "$except" | sort
}

mapfile -t code < <(sources '' include src tests bench examples)
mapfile -t python < <(find python tests bench examples -name '*.py' | sort)
mapfile -t build < <(find Makefile CMakeLists.txt cmake scripts .ci src tests examples -type f \
  -regex '.*\(Makefile\|CMakeLists\.txt\|\.cmake\|\.sh\|\.ci/run\)' | sort)

# ---- Formatters and type checker ----
if [[ ${1:-} == --fix ]]; then
  clang-format -i "${code[@]}"
  ruff format --quiet "${python[@]}"
  exec ruff check --quiet --fix "${python[@]}"
fi
check "clang-format differs; run make format" clang-format --dry-run -Werror "${code[@]}"
check "ruff format differs; run make format" ruff format --quiet --check "${python[@]}"
check "ruff has findings" ruff check --quiet "${python[@]}"
check "mypy has findings" mypy --no-error-summary

# ---- Every file ----
for file in "${code[@]}" "${python[@]}" "${build[@]}"; do
  check "$file has no SPDX line on top" grep -qm1 'SPDX-License-Identifier: Apache-2.0' <(head -3 "$file")
done
forbid "longer than 110 columns" '^.{111}' "${code[@]}" "${python[@]}"
forbid "white space at the end of a line" '[[:space:]]$' "${code[@]}" "${python[@]}" "${build[@]}"

# ---- Where things may stand ----
mapfile -t files < <(sources 'src/\(cuda/ptx\|cli\)/.*' src)
forbid "asm outside src/cuda/ptx" '\<(asm|__asm__)\>[[:space:]]*(volatile|\()' "${files[@]}"
mapfile -t files < <(sources 'src/\(cuda/launch\.h\|cli/.*\)' src)
forbid "a kernel launch outside src/cuda/launch.h" '<<<|cudaLaunchKernel' "${files[@]}"
mapfile -t files < <(sources 'src/\(cli\|cases\|python\)/.*' src)
forbid "the library ends the process or prints" \
  '\<(exit|abort|printf|fprintf|puts)[[:space:]]*\(|std::(cout|cerr)' "${files[@]}"
# Packing a weight waits until it is done, because kernels may read it before the work ahead of them has ended.
mapfile -t files < <(sources 'src/\(cli/.*\|cases/.*\|python/.*\|linear/pack_strips.cu\)' src)
forbid "the library allocates device memory or synchronises" \
  '\<cuda(Malloc[A-Za-z]*|DeviceSynchronize|StreamSynchronize)[[:space:]]*\(' "${files[@]}"
mapfile -t files < <(sources '' src)
forbid "torch under src" '#include[[:space:]]*[<"](torch|ATen|c10)/' "${files[@]}"

# ---- Includes point one way: core <- formats <- cpu, cuda <- operations ----
operations=$(find src -name kernels.list -printf '%h\n' | sed 's|src/||' | paste -sd '|')
mapfile -t files < <(sources 'src/core/info.cpp' src/core src/formats)
forbid "core or formats include what stands on them" "#include \"(cpu|cuda|cli|cases|checkpoint|$operations)/" "${files[@]}"
mapfile -t files < <(sources '' src/cpu src/cuda)
forbid "cpu or cuda include what stands on them" "#include \"(cli|cases|checkpoint|$operations)/" "${files[@]}"
mapfile -t files < <(sources '' src/checkpoint)
forbid "checkpoint includes more than core and formats" "#include \"(cpu|cuda|cli|cases|$operations)/" "${files[@]}"

# ---- A kernel file is in its kernels.list, and the reverse; the reference comes last ----
for list in src/*/kernels.list; do
  folder=$(dirname "$list")
  listed=$(grep -E '^[a-z]' "$list")
  present=$(find "$folder" -type f -printf '%f\n' | sed -nE 's/^(.*_(ref|amx|avx[0-9a-z_]+))\.cc$|^(.*_sm[0-9]+)\.cu$/\1\3/p')
  check "$list and the kernel files beside it differ" diff <(sort <<<"$listed") <(sort <<<"$present")
  [[ $listed == *_ref ]] || broken "$list does not end with a reference kernel"
done

# ---- An importer is in importers.list, and the reverse ----
check "src/checkpoint/importers.list and the files in importers differ" \
  diff <(grep -E '^[a-z]' src/checkpoint/importers.list | sort) \
  <(find src/checkpoint/importers -name '*.cpp' -printf '%f\n' | sed 's/\.cpp$//' | sort)

if [[ $failures != 0 ]]; then
  echo "lint: $failures findings" >&2
  exit 1
fi
echo "lint: all well"
