# SPDX-License-Identifier: Apache-2.0
"""Decoding on a GPU: compiled, and a step as one CUDA graph."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ._decoding import Decoding
from ._llama import Llama


def release() -> None:
    """Gives back what is held no longer, and counts the peak of memory from here."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def measure(decoding: Decoding, inductor: dict[str, Any] | None, is_profiled: bool) -> dict[str, Any]:
    """A row of results; ``inductor`` holds settings of the compiler, None compiles nothing."""
    with _compiled(decoding.model, inductor):
        prefill, step = _captured(decoding.prefill), _captured(decoding.step)
        prefill_time = min(_timed(prefill) for _ in range(6))
        times, joules = _decode_times(prefill, step, decoding.tokens)
        more: dict[str, Any] = {}
        if joules is not None:
            more["joule_per_token"] = joules / (decoding.batch * decoding.tokens)
        peak = torch.cuda.max_memory_allocated()
        if is_profiled:
            more["prompt_kernels"] = _profiled(prefill, 1)
            more["kernels"] = _profiled(step, 4)
    return decoding.row(prefill_time, times, peak, **more)


def _timed(run: Callable[[], None], times: int = 1) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    seconds: float = start.elapsed_time(end) / 1e3
    return seconds


@contextlib.contextmanager
def _compiled(model: Llama, inductor: dict[str, Any] | None) -> Iterator[None]:
    """Every decoder layer runs the same compiled code: it is compiled once, in a tenth of the time. Nothing
    is compiled without ``inductor``, the settings."""
    around: Any = model
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "options": inductor or None}
    try:
        if inductor is not None:
            for layer in model.layers:
                layer.compile(**options)
            around.before_layers = torch.compile(model.before_layers, **options)
            around.after_layers = torch.compile(model.after_layers, **options)
        yield
    finally:
        for layer in model.layers:
            layer._compiled_call_impl = None
        for name in ("before_layers", "after_layers"):
            model.__dict__.pop(name, None)
        torch._dynamo.reset()  # holds the cache that it has seen


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


def _decode_times(
    prefill: Callable[[], None], step: Callable[[], None], tokens: int
) -> tuple[list[float], float | None]:
    times, joules = [], []
    meter = _energy_meter()
    for _ in range(4):
        prefill()
        torch.cuda.synchronize()
        before = meter()
        times.append(_timed(step, tokens))
        after = meter()
        if before is not None and after is not None:
            joules.append(after - before)
    return times, min(joules) if joules else None


def _profiled(run: Callable[[], None], times: int) -> list[dict[str, Any]]:
    """What a run launches, by name, the longest first: times launched and microseconds."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    return [
        {"kernel": event.key, "launches": event.count / times, "us": event.self_device_time_total / times}
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
