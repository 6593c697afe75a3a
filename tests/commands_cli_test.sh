#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# commands_cli_test.sh QUANTFUSE FIXTURES: what `quantfuse info`, `explain` and `bench` print, their JSON, and
# what they say of an environment that makes no sense.
set -eu
. "$(dirname "$0")/cli.sh"

# json FILE EXPRESSION: of d, what the file holds
json() { python3 -c "import json, sys; d = json.load(open('$1')); assert $2, d" || fail "$1: not $2"; }

expect 0 info --json "$work/info.json"
says linear_ref
json "$work/info.json" "{'version', 'cpu', 'kernels'} <= d.keys()"

# Of shapes alone, explain says what a call will do.
layer="--weight int4 --m 3 --n 64 --k 128"
expect 0 explain linear $layer --json "$work/explain.json"
json "$work/explain.json" "d['chosen'] in [c['kernel'] for c in d['candidates'] if c['accepts']]"
json "$work/explain.json" "all(c['accepts'] or c['reason'] for c in d['candidates'])"
expect 0 bench linear $layer --threads 1 --seconds 0.01 --no-baselines --all-kernels --json "$work/all.json"
python3 - "$work/explain.json" "$work/all.json" <<'END' || fail "explain and bench --all-kernels differ"
import json, sys
explained, benched = (json.load(open(path)) for path in sys.argv[1:])
accepting = {c["kernel"] for c in explained["candidates"] if c["accepts"]}
assert {row["kernel"] for row in benched["rows"]} == accepting, (accepting, benched["rows"])
END
expect 2 explain linear --weight int5
says int5
expect 2 explain sort
expect 2 explain linear --kernel no_such_kernel

expect 0 bench quantize --m 8 --n 64 --threads 1 --seconds 0.01 --no-baselines --json "$work/bench.json"
json "$work/bench.json" "len(d['rows']) == 1 and d['rows'][0]['us'] > 0"
json "$work/bench.json" "{'op', 'case', 'scheme', 'm', 'n', 'k', 'device', 'kernel', 'us', 'us_p10', 'us_p90', \
'gflops', 'gbps', 'roofline', 'baseline', 'baseline_us', 'speedup', 'bytes'} <= d['rows'][0].keys()"
json "$work/bench.json" "d['header']['commit']"
expect 2 bench --suite no_such_suite
expect 2 bench linear --m 0x
expect 2 bench quantize --m 8 --n 64 --json "$work/no/such/folder/bench.json"

for setting in QUANTFUSE_NUM_THREADS=many QUANTFUSE_NUM_THREADS=-3 QUANTFUSE_NUM_THREADS=2x QUANTFUSE_ISA=sse; do
  export "$setting"
  expect 2 explain linear $layer
  says "${setting%%=*} is '${setting#*=}'"
  unset "${setting%%=*}"
done
