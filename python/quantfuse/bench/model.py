# SPDX-License-Identifier: Apache-2.0
"""A whole model, quantized and not, in one run: ``python -m quantfuse.bench.model --shape llama3-8b``.

Random weights, a static cache, greedy decoding. On a GPU both models are compiled, layer by layer, and a
step of decoding is one CUDA graph. The baseline there attends as Transformers does by default (``sdpa``); the
quantized model attends by ``flex_attention``, which BF16 may do as well and is measured with too. On a CPU
all run eagerly, and the baselines are FP32 and BF16.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .. import info, quantize_model, version
from .._scheme import SCHEMES, Scheme
from ..nn import QuantizedLinear
from ._llama import SHAPES, Llama, random_llama


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
    parser.add_argument("--profile", action="store_true", help="on a GPU: the kernels of a step of decoding")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.tokens = options.tokens or (128 if options.device == "cuda" else 32)
    options.prompt = options.prompt or (512 if options.device == "cuda" else 128)
    try:
        options.batches = [int(word) for word in options.batch.split(",")]
        options.schemes = [Scheme(word, group=options.group) for word in options.scheme.split(",")]
    except ValueError as error:
        parser.error(str(error))
    if min(options.batches) < 1 or options.prompt < 1 or options.tokens < 1:
        parser.error("--batch, --prompt and --tokens are 1 or more")
    return options


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    """Baselines first, then every scheme, each from the same random weights."""
    is_cuda = options.device == "cuda"
    dtypes = [torch.bfloat16] if is_cuda else [torch.float32, torch.bfloat16]
    own_attention = "flex" if is_cuda and not options.no_compile else "sdpa"
    rows: list[dict[str, Any]] = []
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        model = random_llama(SHAPES[options.shape], options.device, dtype)
        for attention in dict.fromkeys(("sdpa", own_attention)):
            rows += _measure(model, name, attention, options)
        del model
    for scheme in options.schemes:
        model = random_llama(SHAPES[options.shape], options.device, dtypes[0])
        exclude = ("lm_head",) if options.keep_head else ()
        quantize_model(model, scheme, exclude=exclude, show_progress=False)
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                module.drop_canonical()
        rows += _measure(model, scheme.name, own_attention, options)
        del model
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
        "threads": None if is_cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "quantfuse": version(),
        "compiled": is_cuda and not options.no_compile,
        "baseline": rows[0]["model"],
        "rows": rows,
    }


def _measure(model: Llama, name: str, attention: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for batch in options.batches:
        _release(options.device)
        model.make_cache(batch, options.prompt + options.tokens, attention)
        measured = _measure_batch(model, batch, options)
        row = {"model": name, "attention": attention, "batch": batch, **measured}
        print(
            f"{name}, {attention}, batch {batch}: {row['decode_tokens_per_s']:.1f} tokens/s, "
            f"first token {row['first_token_ms']:.1f} ms",
            file=sys.stderr,
        )
        rows.append(row)
    return rows


def _measure_batch(model: Llama, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    device = options.device
    tokens = torch.randint(0, model.shape.vocabulary, (batch, options.prompt), device=device)
    positions = torch.arange(options.prompt, device=device)
    token, position = tokens[:, -1:].clone(), torch.zeros(1, dtype=torch.int64, device=device)

    def prefill() -> None:
        token.copy_(model(tokens, positions))
        position.fill_(options.prompt)

    def step() -> None:
        token.copy_(model(token, position))
        position.add_(1)

    resident = _held_bytes(model)
    kernels: list[dict[str, Any]] = []
    if device == "cuda":
        with _compiled(model, not options.no_compile):
            prefill_time = _best_time(_captured(prefill), 5)
            decode = _captured(step)
            times, energy = _cuda_decode(prefill, decode, options.tokens)
        if options.profile:
            kernels = _profiled(prefill, decode)
        peak = torch.cuda.max_memory_allocated()
    else:
        prefill_time = _best_time(prefill, 2)
        times, energy = [], None
        for _ in range(3):
            position.fill_(options.prompt)
            start = time.perf_counter()
            for _ in range(options.tokens):
                step()
            times.append(time.perf_counter() - start)
        peak = resident
    produced = batch * options.tokens
    return {
        "first_token_ms": prefill_time * 1e3,
        "decode_tokens_per_s": produced / min(times),
        "decode_ms_per_step": min(times) / options.tokens * 1e3,
        "spread": max(times) / min(times) - 1,
        "resident_bytes": resident,
        "peak_bytes": peak,
        "joule_per_token": None if energy is None else energy / produced,
        **({"kernels": kernels} if kernels else {}),
    }


# ---- CPU ----


def _held_bytes(model: Llama) -> int:
    """Of all weights and of the cache."""
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    total: int = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return total


def _best_time(run: Callable[[], None], repetitions: int) -> float:
    is_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    best = float("inf")
    for i in range(repetitions + 1):
        if is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start) if i > 0 else best
    return best


# ---- CUDA ----


def _release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def _compiled(model: Llama, is_compiled: bool) -> Iterator[None]:
    """Every decoder layer runs the same compiled code: it is compiled once, in a tenth of the time."""
    torch._dynamo.reset()
    around: Any = model
    try:
        if is_compiled:
            for layer in model.layers:
                layer.compile(fullgraph=True, dynamic=False)
            around.before_layers = torch.compile(model.before_layers, fullgraph=True, dynamic=False)
            around.after_layers = torch.compile(model.after_layers, fullgraph=True, dynamic=False)
        yield
    finally:
        for layer in model.layers:
            layer._compiled_call_impl = None
        for name in ("before_layers", "after_layers"):
            model.__dict__.pop(name, None)


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay  # type: ignore[no-any-return]


def _cuda_decode(
    prefill: Callable[[], None], step: Callable[[], None], tokens: int
) -> tuple[list[float], float | None]:
    times, joules = [], []
    meter = _energy_meter()
    for _ in range(4):
        prefill()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        before = meter()
        start.record()
        for _ in range(tokens):
            step()
        end.record()
        torch.cuda.synchronize()
        after = meter()
        times.append(start.elapsed_time(end) / 1e3)
        if before is not None and after is not None:
            joules.append(after - before)
    return times, min(joules) if joules else None


def _profiled(prefill: Callable[[], None], step: Callable[[], None]) -> list[dict[str, Any]]:
    """What a step of decoding launches, by name, the longest first: times launched and microseconds."""
    steps = 4
    prefill()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return [
        {"kernel": event.key, "launches": event.count / steps, "us": event.self_device_time_total / steps}
        for event in sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
        if event.self_device_time_total > 0
    ]


def _energy_meter() -> Callable[[], float | None]:
    """Joules since the driver was loaded, by NVML; None where it is not there or does not count."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return lambda: None
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    index = torch.cuda.current_device()
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return lambda: None

    def read() -> float | None:
        failed = nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return None if failed else millijoules.value / 1e3

    return read


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
        if kernels := row.get("kernels"):
            print(f"\n{row['model']}, {row['attention']}, batch {row['batch']}: kernels of a step")
            for kernel in kernels[:16]:
                print(f"{kernel['us']:9.1f} us {kernel['launches']:7.1f} x  {kernel['kernel'][:80]}")


if __name__ == "__main__":
    sys.exit(main())
