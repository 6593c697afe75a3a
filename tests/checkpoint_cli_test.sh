#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# checkpoint_cli_test.sh QUANTFUSE FIXTURES: exit codes, output and JSON of `inspect` and `dequantize`.
set -eu
. "$(dirname "$0")/cli.sh"

# inspect
expect 0 inspect "$fixtures/gptq_v1_w4_asym_g32" --json "$work/i.json"
says "LlamaForCausalLM"
says "gptq v1"
says "int4 asym"
says "saturated"
for word in '"format": "gptq v1"' '"bits": 4' '"group": 32' '"scale_max"' '"architecture": "LlamaForCausalLM"'; do
  grep -q "$word" "$work/i.json" || fail "no $word in the JSON"
done
expect 0 inspect "$fixtures/gguf_mixed/model.gguf" --data
says "Q4_K"
expect 0 inspect "$fixtures/gguf_mixed"
expect 0 inspect "$fixtures/awq_gemm_layers/expected.safetensors"
says "not quantized"
expect 2 inspect "$work/nothing"
expect 2 inspect
expect 1 inspect "$fixtures/hostile/q_gptq_missing_qzeros"
says "k_proj.qzeros is missing"
expect 2 inspect "$fixtures/gguf_mixed" --config checkpoint_format

# dequantize
out="$work/out.safetensors"
expect 0 dequantize "$fixtures/ct_pack_sharded_ignore" "$out" --dtype bf16
says "3 weights of compressed-tensors pack-quantized"
expect 0 inspect "$out"
says "not quantized"
expect 0 dequantize "$fixtures/gguf_mixed" "$out"
expect 2 dequantize "$fixtures/gguf_mixed" "$out" --dtype f64
expect 2 dequantize "$fixtures/gguf_mixed" "$work/no/such/folder/out.safetensors"
expect 2 dequantize "$work/nothing" "$out"
cp -r "$fixtures/ct_fp8_tensor" "$work/input"
expect 2 dequantize "$work/input" "$work/input/model.safetensors"
says "is a file of the checkpoint"
cmp -s "$work/input/model.safetensors" "$fixtures/ct_fp8_tensor/model.safetensors" || fail "the input was changed"
rm -f "$out"
for case in "$fixtures"/hostile/*; do
  case $case in *_ok_* | *.json) continue ;; esac
  expect 1 dequantize "$case" "$out"
  [ ! -e "$out" ] || fail "$case: something was written"
done
# A full disk: the message says so, and nothing has the final name.
if [ -w /dev/full ]; then
  expect 2 dequantize "$fixtures/gguf_mixed" /dev/full
  says "No space left"
fi

# What is ambiguous can be stated.
cp -r "$fixtures/gptq_v2_w4_asym_g64" "$work/gptq"
sed -e '/"checkpoint_format"/d' -e '/"format": "gptq/d' "$work/gptq/config.json" >"$work/gptq/c"
mv "$work/gptq/c" "$work/gptq/config.json"
expect 1 dequantize "$work/gptq" "$out"
says "checkpoint_format"
expect 0 dequantize "$work/gptq" "$out" --config checkpoint_format=gptq_v2
cp "$out" "$work/stated.safetensors"
expect 0 dequantize "$fixtures/gptq_v2_w4_asym_g64" "$out"
cmp "$out" "$work/stated.safetensors" || fail "stated and found differ"
ls "$work" | grep -q 'safetensors\.' && fail "a temporary file was left: $(ls "$work")"
exit 0
