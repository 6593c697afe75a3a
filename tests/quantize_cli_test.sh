#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# quantize_cli_test.sh QUANTFUSE FIXTURES: exit codes, output, JSON and files of `quantize`.
set -eu
. "$(dirname "$0")/cli.sh"
number() { sed -n "s/^ *\"$1\": \([0-9]*\).*/\1/p" "$2"; }

# A model of floating-point weights, with what lies beside one.
in="$work/in"
mkdir "$in"
"$quantfuse" dequantize "$fixtures/ct_pack_sharded_ignore" "$in/model.safetensors" --dtype bf16 >/dev/null
echo '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}' >"$in/config.json"
echo '{}' >"$in/tokenizer.json"
cp -r "$in" "$work/in.before"

# Every scheme, in each layout that has it, is read back by inspect and dequantize.
for scheme in int4 int8 fp8 fp8-block mxfp4 mxfp8 w8a8-int8 w8a8-fp8 w8a8-fp8-block w4a8; do
  group=
  case $scheme in int4 | w4a8) group="--group 32" ;; esac # inputs that the default of 128 does not divide
  expect 0 quantize "$in" "$work/$scheme" --scheme $scheme $group
  says "relative error"
  expect 0 inspect "$work/$scheme"
  says "compressed-tensors"
  expect 0 dequantize "$work/$scheme" "$work/back.safetensors"
done
for scheme in int4 int8 fp8 fp8-e5m2 fp4 mxfp4 w4a8; do
  expect 0 quantize "$in" "$work/own-$scheme" --scheme $scheme --format quantfuse
  expect 0 inspect "$work/own-$scheme"
  says "quantfuse"
  expect 0 dequantize "$work/own-$scheme" "$work/back.safetensors"
done
for file in tokenizer.json config.json model.safetensors; do
  [ -e "$work/int4/$file" ] || fail "$file is missing"
done
[ "$(ls -A "$work/int4" | wc -l)" = 3 ] || fail "more than the result: $(ls -A "$work/int4")"
grep -q '"model_type": "llama"' "$work/int4/config.json" || fail "config.json lost what it had"

# Options, the report, and its JSON.
expect 0 quantize "$in" "$work/mse" --scheme int4 --group 32 --method mse --asymmetric --exclude k_proj \
  --shard-size 20KB --json "$work/q.json"
says "left alone"
says "excluded"
for word in '"scheme": "int4"' '"relative_error"' '"why": "excluded"' '"symmetric": false' '"method": "mse"'; do
  grep -q "$word" "$work/q.json" || fail "no $word in the JSON"
done
[ -e "$work/mse/model.safetensors.index.json" ] || fail "no index beside the shards"
expect 0 inspect "$work/mse"
says "int4 asym"
expect 0 quantize "$in/model.safetensors" "$work/file" --scheme int8 --group channel

# Bad usage: nothing is written.
expect 2 quantize "$in" "$work/bad"
expect 2 quantize "$in" "$work/bad" --scheme int5
expect 2 quantize "$in" "$work/bad" --scheme fp8 --asymmetric
expect 2 quantize "$in" "$work/bad" --scheme fp4
says "format quantfuse"
expect 2 quantize "$in" "$work/bad" --scheme int8 --group many
expect 2 quantize "$in" "$work/bad" --scheme int8 --exclude '('
expect 2 quantize "$in" "$work/bad" --scheme int8 --shard-size 5XB
expect 2 quantize "$work/nothing" "$work/bad" --scheme int8
expect 2 quantize "$fixtures/gguf_mixed" "$work/bad" --scheme int8
expect 2 quantize "$in" "$in" --scheme int8
says "is the folder of the checkpoint"
expect 2 quantize "$in" "$work/int8" --scheme int8
says "is not empty"
expect 2 quantize "$in" "$work/no/such/folder" --scheme int8
expect 1 quantize "$fixtures/gptq_v1_w4_asym_g32" "$work/bad" --scheme int8
says "is quantized already"
expect 1 quantize "$in" "$work/bad" --scheme int8 --exclude .
says "nothing to quantize"
mkdir "$work/sealed"
chmod a-w "$work/sealed"
if [ ! -w "$work/sealed" ]; then
  expect 2 quantize "$in" "$work/sealed/bad" --scheme int8
  says "Permission denied"
fi
# A disk that takes no more, which a limit on the size of files stands in for.
(
  trap '' XFSZ
  ulimit -f 8
  expect 2 quantize "$in" "$work/bad" --scheme int8
  says "cannot write"
)
[ ! -e "$work/bad" ] || fail "something was written: $(ls -A "$work/bad")"

# Killed half-way: the same command finishes, another one is refused, and the result is that of one go.
expect 0 quantize "$in" "$work/whole" --scheme int4 --group 32 --shard-size 2KB
shards=$(ls "$work/whole" | grep -c 'of-.*safetensors$')
[ "$shards" -gt 2 ] || fail "too few shards to stop between: $shards"
for attempt in 1 2 3 4 5 6 7 8 9 10; do
  rm -rf "$work/killed"
  "$quantfuse" quantize "$in" "$work/killed" --scheme int4 --group 32 --shard-size 2KB >/dev/null 2>&1 &
  pid=$!
  while [ ! -e "$work/killed/model-00001-of-0000$shards.safetensors" ] && kill -0 $pid 2>/dev/null; do :; done
  kill -9 $pid 2>/dev/null || true
  wait $pid 2>/dev/null || true
  [ ! -e "$work/killed/.quantize" ] || break
done
if [ -e "$work/killed/.quantize" ]; then
  expect 2 quantize "$in" "$work/killed" --scheme int8 --shard-size 2KB
  says "unfinished work"
  expect 0 quantize "$in" "$work/killed" --scheme int4 --group 32 --shard-size 2KB
  says "files were there already"
else
  echo "the process was never caught half-way"
fi
diff -r "$work/whole" "$work/killed" || fail "what was resumed differs from what was done in one go"
diff -r "$in" "$work/in.before" || fail "the input was changed"
exit 0
