# SPDX-License-Identifier: Apache-2.0
"""The binding: found, loaded and called here and nowhere else."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict

import tvm_ffi

_MODULE_NAME = "quantfuse_ffi.so"


def _find_module() -> Path:
    """In the folder of QUANTFUSE_LIBRARY_DIR; else beside this file (a wheel); else build/ of a checkout."""
    here = Path(__file__).resolve().parent
    named = os.environ.get("QUANTFUSE_LIBRARY_DIR")
    folders = [Path(named)] if named else [here, here.parents[1] / "build"]
    for folder in folders:
        if (folder / _MODULE_NAME).is_file():
            return folder / _MODULE_NAME
    searched = ", ".join(str(folder) for folder in folders)
    raise ImportError(
        f"quantfuse: {_MODULE_NAME} is not in {searched}; build it with `make build` or `pip install .`"
    )


tvm_ffi.register_error("NotImplementedError", NotImplementedError)
tvm_ffi.register_error("MemoryError", MemoryError)
_module = tvm_ffi.load_module(str(_find_module()))


def _function(name: str, release_gil: bool) -> Callable[..., Any]:
    function = getattr(_module, name)
    function.release_gil = release_gil
    return function  # type: ignore[no-any-return]


class Operation:
    """One C operation: its call and its explanation, which take the same arguments."""

    __slots__ = ("explain", "run")

    def __init__(self, name: str) -> None:
        self.run = _function(name, release_gil=True)
        self.explain = _function(name + "_explain", release_gil=False)


QUANTIZE = Operation("quantize")
DEQUANTIZE = Operation("dequantize")
DEQUANTIZE_WORDS = Operation("dequantize_words")
SCALED_MM = Operation("scaled_mm")
LINEAR = Operation("linear")
LINEAR_BACKWARD = Operation("linear_backward")
RMS_NORM = Operation("rms_norm")
GATED_ACT = Operation("gated_act")
GPTQ_QUANTIZE = Operation("gptq_quantize")
AWQ_SEARCH = Operation("awq_search")

weight_packed_bytes = _function("weight_packed_bytes", release_gil=False)
weight_pack = _function("weight_pack", release_gil=True)
with_dtype = _function("with_dtype", release_gil=False)
open_checkpoint = _function("checkpoint_open", release_gil=False)
_set_num_threads = _function("set_num_threads", release_gil=False)
_get_num_threads = _function("get_num_threads", release_gil=False)

# ---- Calls ----


class Explanation(TypedDict):
    """Which kernel a call runs, and for each kernel of the operation whether it accepts, or why not."""

    chosen: str | None
    candidates: list[dict[str, Any]]


class _Mode:
    """What :func:`options` and :func:`explain` ask of the calls made by their thread."""

    __slots__ = ("explanations", "kernel", "strict")

    def __init__(self, kernel: str | None, strict: bool, explanations: list[str] | None) -> None:
        self.kernel, self.strict, self.explanations = kernel, strict, explanations


class _ThreadState(threading.local):
    mode: _Mode | None = None


_thread = _ThreadState()


def invoke(operation: Operation, *args: Any) -> None:
    """Makes one C call. ``args`` are the fields of its args struct, in order."""
    if _torch_leads and "torch" in sys.modules:
        _follow_torch()
    mode = _thread.mode
    try:
        if mode is None:
            operation.run(None, False, *args)
        elif mode.explanations is not None:
            mode.explanations.append(operation.explain(mode.kernel, mode.strict, *args))
        else:
            operation.run(mode.kernel, mode.strict, *args)
    except BufferError as error:
        raise ValueError(f"a tensor cannot be handed over by DLPack: {error}") from error


@contextlib.contextmanager
def options(*, kernel: str | None = None, strict: bool = False) -> Iterator[None]:
    """How the calls of this thread choose their kernel, inside a ``with`` block.

    ``kernel`` runs that kernel and no other; ``strict`` refuses to fall back to the reference kernel. Where
    the wish cannot be met, the call raises ``NotImplementedError``.

    >>> import numpy as np, quantfuse as qf
    >>> with qf.options(kernel="quantize_ref"):
    ...     q, scale = qf.per_token_quant_int8(np.eye(2, dtype=np.float32))
    >>> q.tolist()
    [[127, 0], [0, 127]]
    """
    before = _thread.mode
    explanations = before.explanations if before is not None else None
    _thread.mode = _Mode(kernel, strict, explanations)
    try:
        yield
    finally:
        _thread.mode = before


def explain(operation: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which kernel a call would run, and why each other one would not; computes nothing.

    ``operation`` is a function of this package or its name; the other arguments are that function's own.

    >>> import numpy as np, quantfuse as qf
    >>> answer = qf.explain("per_token_quant_int8", np.zeros((4, 256), np.float32))
    >>> answer["chosen"] in [c["kernel"] for c in answer["candidates"] if c["accepts"]]
    True
    """
    function = operation
    if isinstance(function, str):
        package = sys.modules[__package__]
        if function not in package.__all__ or not callable(getattr(package, function)):
            raise ValueError(
                f"explain: operation is {function!r}, expected the name of a function of quantfuse"
            )
        function = getattr(package, function)
    before = _thread.mode
    kernel, strict = (before.kernel, before.strict) if before is not None else (None, False)
    explanations: list[str] = []
    _thread.mode = _Mode(kernel, strict, explanations)
    try:
        function(*args, **kwargs)
    finally:
        _thread.mode = before
    if not explanations:
        raise ValueError(f"explain: {getattr(function, '__name__', function)} runs no kernel")
    answer: Explanation = json.loads(explanations[-1])
    return answer


# ---- The machine ----


def version() -> str:
    """The version of the library."""
    return str(_module.version())


def info() -> dict[str, Any]:
    """Version, CPU (model, ISA, threads, caches), CUDA devices and compiled architectures.

    >>> import quantfuse as qf
    >>> sorted(qf.info())
    ['cpu', 'cuda', 'version']
    """
    answer: dict[str, Any] = json.loads(_module.info())
    return answer


def kernels() -> list[dict[str, Any]]:
    """Every kernel of every operation, best first: ``op``, ``kernel``, ``target``, ``available`` and, if not,
    ``reason``.

    >>> import quantfuse as qf
    >>> "quantize_ref" in [k["kernel"] for k in qf.kernels()]
    True
    """
    answer: list[dict[str, Any]] = json.loads(_module.kernels())
    return answer


# ---- Threads ----

# Whether the number of threads is torch's, where torch is imported: until somebody says otherwise.
_torch_leads = "QUANTFUSE_NUM_THREADS" not in os.environ
_torch_threads = 0


def _follow_torch() -> None:
    global _torch_threads
    count = getattr(sys.modules["torch"], "get_num_threads", None)  # absent while torch is being imported
    if count is not None:
        threads = count()
        if threads != _torch_threads:
            _torch_threads = threads
            _set_num_threads(threads)


def set_num_threads(num_threads: int) -> None:
    """How many threads CPU kernels may use, in the whole process.

    0 goes back to the default: torch's own number where torch is imported (unless QUANTFUSE_NUM_THREADS is
    set), else QUANTFUSE_NUM_THREADS, else the number of CPUs this process may run on.

    >>> import quantfuse as qf
    >>> qf.set_num_threads(2); qf.get_num_threads()
    2
    >>> qf.set_num_threads(0)
    """
    global _torch_leads, _torch_threads
    with contextlib.suppress(TypeError):
        num_threads = operator.index(num_threads)
    if not isinstance(num_threads, int) or not 0 <= num_threads <= 1024:
        raise ValueError(f"num_threads is {num_threads!r}, expected an integer from 0 to 1024")
    _set_num_threads(num_threads)
    _torch_leads = num_threads == 0 and "QUANTFUSE_NUM_THREADS" not in os.environ
    _torch_threads = 0


def get_num_threads() -> int:
    """How many threads the next CPU call may use."""
    if _torch_leads and "torch" in sys.modules:
        _follow_torch()
    return int(_get_num_threads())
