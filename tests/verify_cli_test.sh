#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# verify_cli_test.sh QUANTFUSE FIXTURES: the exit codes and the last line of `quantfuse verify`, and its JSON.
set -eu
. "$(dirname "$0")/cli.sh"

expect 0 verify --op rms_norm --device cpu --json "$work/verify.json"
last=$(tail -n 1 "$work/out")
echo "$last" | grep -Eq '^[1-9][0-9]* passed, 0 failed, [0-9]+ skipped$' || fail "last line: $last"
grep -q rms_norm_ref "$work/out" || fail "no line for the reference kernel"
grep -q '"failed": 0' "$work/verify.json" || fail "no results in the JSON file"
[ ! -s "$work/err" ] || fail "progress is for terminals only: $(cat "$work/err")"

expect 0 verify --kernel gated_act_ref --seed 7
expect 0 verify --op rms_norm --device cpu --part 3/40
for part in 0/4 5/4 2 2/ 2/3x a/b; do
  expect 2 verify --op rms_norm --part $part
  says "part is '$part'"
done
expect 2 verify --op sort
says sort
expect 2 verify --kernel no_such_kernel
expect 2 verify --op quantize --kernel gated_act_ref
expect 2 verify --device tpu
expect 2 verify --op rms_norm --json "$work/no/such/folder/verify.json"
if ! "$quantfuse" info | grep -qi "nvidia"; then
  expect 2 verify --device cuda
fi
