# SPDX-License-Identifier: Apache-2.0
"""A whole model, quantized and not, in one run: ``python -m quantfuse.bench.model --shape llama3-8b``.

Random weights, a static cache, greedy decoding. On a GPU both models are compiled, layer by layer, and a
step of decoding is one CUDA graph. On a CPU all run eagerly, in turns. Baselines attend as Transformers does
by default (``sdpa``); the quantized model attends by ``append_and_attend``, which the first baseline (BF16 on
a GPU, FP32 on a CPU) may do as well and is measured with too.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch

from .. import compile_options, info, quantize_model, version
from .._scheme import SCHEMES, Scheme
from ..nn import QuantizedLinear
from . import _cpu, _cuda
from ._decoding import Decoding
from ._llama import SHAPES, Llama, LlamaDecoderLayer, random_llama


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    results = run(options)
    _print_table(results)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m quantfuse.bench.model", description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-160m")
    parser.add_argument("--scheme", default="int4", help=f"one or more of {', '.join(SCHEMES)}, with commas")
    parser.add_argument("--batch", default="1", help="one or more numbers of sequences, with commas")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=None)
    parser.add_argument("--prompt", type=int, help="tokens of context (default 512; on a CPU 128)")
    parser.add_argument("--tokens", type=int, default=None, help="tokens to decode")
    parser.add_argument("--group", type=int, default=None, help="group size of the scheme")
    parser.add_argument("--keep-head", action="store_true", help="leave the output layer unquantized")
    parser.add_argument("--no-compile", action="store_true", help="on a GPU: CUDA graphs alone")
    parser.add_argument("--inductor", default="", help="more settings of the compiler: NAME=VALUE,...")
    parser.add_argument("--profile", action="store_true", help="on a GPU: the kernels of prompt and step")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.tokens = options.tokens or (128 if options.device == "cuda" else 32)
    options.prompt = options.prompt or (512 if options.device == "cuda" else 128)
    try:
        options.batches = [int(word) for word in options.batch.split(",")]
        options.schemes = [Scheme(word, group=options.group) for word in options.scheme.split(",")]
        pairs = [word.split("=") for word in options.inductor.split(",") if word]
        options.inductor = {name: json.loads(value.lower()) for name, value in pairs}
    except ValueError as error:
        parser.error(str(error))
    if min(options.batches) < 1 or options.prompt < 1 or options.tokens < 1:
        parser.error("--batch, --prompt and --tokens are 1 or more")
    return options


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    """Baselines first, then every scheme, each from the same random weights."""
    is_cuda = options.device == "cuda"
    rows = _run_cuda(options) if is_cuda else _run_cpu(options)
    for row in rows:
        same_batch = [other for other in rows if other["batch"] == row["batch"]]
        base = same_batch[0]
        twin = next(other for other in same_batch if other["attention"] == row["attention"])
        row["speedup"] = row["decode_tokens_per_s"] / base["decode_tokens_per_s"]
        row["speedup_same_attention"] = row["decode_tokens_per_s"] / twin["decode_tokens_per_s"]
        row["prefill_speedup"] = base["first_token_ms"] / row["first_token_ms"]
        row["memory_ratio"] = row["resident_bytes"] / base["resident_bytes"]
        row["peak_ratio"] = row["peak_bytes"] / base["peak_bytes"]
    machine = torch.cuda.get_device_name() if is_cuda else info()["cpu"]["model"]
    return {
        "shape": options.shape,
        "prompt": options.prompt,
        "tokens": options.tokens,
        "device": machine,
        "driver": info()["cuda"]["driver"],
        "cuda": torch.version.cuda if is_cuda else None,
        "threads": None if is_cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "quantfuse": version(),
        "compiled": is_cuda and not options.no_compile,
        "inductor": _named(compile_options(**options.inductor)) if is_cuda else {},
        "baseline": rows[0]["model"],
        "rows": rows,
    }


def _named(settings: dict[str, Any]) -> dict[str, Any]:
    """As JSON takes them: what is no value by its type."""
    return {
        name: value if isinstance(value, (bool, int, float, str)) else type(value).__name__
        for name, value in settings.items()
    }


def _run_cuda(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One model at a time."""
    settings = None if options.no_compile else compile_options(**options.inductor)
    own_attention = "sdpa" if options.no_compile else "append"
    rows = []

    def measure(model: Llama, name: str, attention: str) -> None:
        for batch in options.batches:
            decoding = Decoding(model, name, attention, batch, options.prompt, options.tokens)
            _cuda.release()
            rows.append(_cuda.measure(decoding, settings, options.profile))
            _report(rows[-1])

    model = random_llama(SHAPES[options.shape], "cuda", torch.bfloat16)
    for attention in dict.fromkeys(("sdpa", own_attention)):
        measure(model, "bfloat16", attention)
    del model
    for scheme in options.schemes:
        measure(_quantized(scheme, torch.bfloat16, options), scheme.name, own_attention)
    return rows


def _run_cpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All models by turns, so that what else the machine does meets all of them."""
    shape = SHAPES[options.shape]
    base = random_llama(shape, "cpu", torch.float32)
    twin = copy.deepcopy(base, {id(weight): weight for weight in base.parameters()})  # a cache of its own
    models = [
        ("float32", "sdpa", base),
        ("float32", "append", twin),
        ("bfloat16", "sdpa", random_llama(shape, "cpu", torch.bfloat16)),
    ]
    for scheme in options.schemes:
        models.append((scheme.name, "append", _quantized(scheme, torch.float32, options)))
    rows = []
    for batch in options.batches:
        decodings = [
            Decoding(model, name, attention, batch, options.prompt, options.tokens)
            for name, attention, model in models
        ]
        for row in _cpu.measure(decodings):
            _report(row)
            rows.append(row)
    return rows


def _quantized(scheme: Scheme, dtype: torch.dtype, options: argparse.Namespace) -> Llama:
    model: Llama = random_llama(SHAPES[options.shape], options.device, dtype)
    quantize_model(model, scheme, exclude=("lm_head",) if options.keep_head else (), show_progress=False)
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.drop_canonical()
        elif isinstance(module, LlamaDecoderLayer):
            module.adds_late = False
    return model


def _report(row: dict[str, Any]) -> None:
    print(
        f"{row['model']}, {row['attention']}, batch {row['batch']}: "
        f"{row['decode_tokens_per_s']:.1f} tokens/s, first token {row['first_token_ms']:.1f} ms",
        file=sys.stderr,
    )


def _print_table(results: dict[str, Any]) -> None:
    what = "compiled, CUDA graphs" if results["compiled"] else "eager"
    print(
        f"{results['shape']}, prompt {results['prompt']}, {results['tokens']} tokens decoded, "
        f"{results['device']}, torch {results['torch']}, {what}"
    )
    baseline = results["baseline"]
    header = (
        *("model", "attention", "batch", "first token", "tokens/s", f"x {baseline}", "same attention"),
        *("resident", "peak", "J/token"),
    )
    lines = [header]
    for row in results["rows"]:
        energy = row["joule_per_token"]
        lines.append(
            (
                row["model"],
                row["attention"],
                str(row["batch"]),
                f"{row['first_token_ms']:.1f} ms",
                f"{row['decode_tokens_per_s']:.1f}",
                f"{row['speedup']:.2f}",
                f"{row['speedup_same_attention']:.2f}",
                f"{row['resident_bytes'] / 2**30:.2f} GiB",
                f"{row['peak_bytes'] / 2**30:.2f} GiB",
                "" if energy is None else f"{energy:.2f}",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    for row in results["rows"]:
        for name, what in (("prompt_kernels", "the prompt"), ("kernels", "a step")):
            if kernels := row.get(name):
                print(f"\n{row['model']}, {row['attention']}, batch {row['batch']}: kernels of {what}")
                for kernel in kernels[:16]:
                    print(f"{kernel['us']:9.1f} us {kernel['launches']:7.1f} x  {kernel['kernel'][:80]}")


if __name__ == "__main__":
    sys.exit(main())
