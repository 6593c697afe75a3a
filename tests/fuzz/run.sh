#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# run.sh BUILD SECONDS: every fuzzer of the build folder for that long, side by side. They start from the fixtures and
# from what was once found (regressions/); what they find new stays in BUILD/corpus, and an input that fails in BUILD.
#
# An input has at most 64 KB. What a reader makes of it is up to 16 times that (2-bit codes as float32), and the JSON of
# a header as a tree about as much, so that one allocation of more than 4 MB is one that the file does not justify.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=$(cd "$1" && pwd)
readonly here build seconds=$2 fixtures="$here/../fixtures"
readonly limits=(-max_len=65536 -malloc_limit_mb=4 -rss_limit_mb=1024 -timeout=20)

# Every input is written to a file: better one that no disk sees.
[[ -w /dev/shm ]] && export TMPDIR=/dev/shm

make_seeds() {
  mkdir -p "$build"/{seeds,corpus}/{safetensors,gguf,quantization_config}
  local file folder
  while read -r file; do
    folder=$(dirname "$file")
    cp "$file" "$build/seeds/safetensors/$(basename "$folder")-$(basename "$file")"
    [[ -f $folder/config.json && $file == */model.safetensors ]] || continue
    { cat "$folder/config.json"; printf '\0'; cat "$file"; } >"$build/seeds/quantization_config/$(basename "$folder")"
  done < <(find "$fixtures" -name '*.safetensors' -size -64k)
  while read -r file; do
    cp "$file" "$build/seeds/gguf/$(basename "$(dirname "$file")")-$(basename "$file")"
  done < <(find "$fixtures" -name '*.gguf')
  # The words of configs and headers, in quotes as JSON has them.
  find "$build/seeds" -type f -exec grep -aohE '"[A-Za-z0-9_.]{2,40}"' {} + | sort -u |
    sed -E 's/"(.*)"/"\\"\1\\""/' >"$build/words.dict"
}

fuzz() {  # fuzz READER
  local regressions=()
  [[ -d $here/regressions/$1 ]] && regressions=("$here/regressions/$1")
  "$build/fuzz_$1" "${limits[@]}" -max_total_time="$seconds" -print_final_stats=1 -dict="$build/words.dict" \
    -artifact_prefix="$build/failed-$1-" "$build/corpus/$1" "$build/seeds/$1" "${regressions[@]}" \
    >"$build/fuzz_$1.log" 2>&1
}

make_seeds
declare -A running
for reader in safetensors gguf quantization_config; do
  fuzz "$reader" &
  running[$reader]=$!
done
failures=0
for reader in "${!running[@]}"; do
  if wait "${running[$reader]}"; then
    echo "fuzz: $reader: $(awk '/number_of_executed_units/ {print $2}' "$build/fuzz_$reader.log") inputs, nothing found"
  else
    tail -40 "$build/fuzz_$reader.log" >&2
    echo "fuzz: $reader FAILED: the input is $(ls -t "$build"/failed-"$reader"-* | head -1)" >&2
    failures=$((failures + 1))
  fi
done
exit $((failures > 0))
