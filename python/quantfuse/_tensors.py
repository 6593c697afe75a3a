# SPDX-License-Identifier: Apache-2.0
"""The two families of tensors, NumPy's and torch's, behind one small interface.

torch is never imported here: a torch tensor can only come from a caller who has imported it.
"""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from typing import Any, Protocol, TypeAlias

import numpy as np

from ._library import with_dtype

#: A NumPy array, a torch tensor, or (as an input) any CPU object with ``__dlpack__``.
Tensor: TypeAlias = Any
#: A name such as "float32" or "bfloat16", a NumPy dtype or a torch dtype.
DTypeLike: TypeAlias = Any


class Family(Protocol):
    """What operations need of tensors. Shapes are tuples, types are names such as "float32"."""

    def empty(self, shape: tuple[int, ...], dtype: str, like: Tensor) -> Tensor:
        """A new contiguous tensor on the device of ``like``."""

    def empty_as(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A new contiguous tensor with type and device of ``like``."""

    def dtype_name(self, x: Tensor) -> str: ...

    def rows(self, x: Tensor, name: str) -> Tensor:
        """``x`` as a matrix: all dimensions but the last made one, without a copy."""

    def argument(self, x: Tensor, name: str) -> Any:
        """What the binding takes for an input."""

    def output(self, x: Tensor, name: str) -> Any:
        """What the binding takes for memory that is written to."""


# ---- NumPy ----

_NUMPY_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "int32": np.dtype(np.int32),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
}
_PASSED_AS_THEY_ARE = frozenset(_NUMPY_DTYPES.values())

# Types of ml_dtypes: the integer type that NumPy can export, and the DLPack type code to put in its place.
_PASSED_BY_CODE = {
    "bfloat16": (np.uint16, 4),
    "float8_e4m3fn": (np.uint8, 10),
    "float8_e5m2": (np.uint8, 12),
    "float8_e8m0fnu": (np.uint8, 14),
}
_numpy_names = {dtype: name for name, dtype in _NUMPY_DTYPES.items() if not name.startswith("float8")}


def _numpy_name(dtype: np.dtype[Any]) -> str:
    """dtype.name, remembered for the types we take: NumPy makes it anew, which costs as much as a call."""
    name = _numpy_names.get(dtype)
    if name is None:
        name = str(dtype.name)
        if name in _PASSED_BY_CODE and dtype.isnative:
            _numpy_names[dtype] = name
    return name


class _Writable:
    """The memory of a read-only input, for NumPy to see as writable: DLPack exports nothing else."""

    def __init__(self, x: np.ndarray[Any, Any]) -> None:
        interface = dict(x.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.source = x


class _NumpyFamily:
    def empty(self, shape: tuple[int, ...], dtype: str, like: Tensor) -> Tensor:
        known = _NUMPY_DTYPES.get(dtype)
        if known is None:
            known = _ml_dtype(dtype)
        return np.empty(shape, known)

    def empty_as(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return np.empty(shape, like.dtype)

    def dtype_name(self, x: Tensor) -> str:
        return _numpy_name(x.dtype)

    def rows(self, x: Tensor, name: str) -> Tensor:
        if x.ndim == 2:
            return x
        if x.ndim == 0:
            raise ValueError(f"{name} has shape (), expected at least one dimension")
        matrix = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        if x.size > 0 and not np.may_share_memory(x, matrix):
            raise _not_rows(name, x.shape, x.strides)
        return matrix

    def argument(self, x: Tensor, name: str) -> Any:
        if x.dtype in _PASSED_AS_THEY_ARE and x.flags.writeable:
            return x
        code = None
        if x.dtype not in _PASSED_AS_THEY_ARE:
            known = _PASSED_BY_CODE.get(_numpy_name(x.dtype))
            if known is None or not x.dtype.isnative:
                raise ValueError(f"{name} has type {x.dtype}, which no operation takes")
            integer, code = known
            x = x.view(integer)
        if not x.flags.writeable:
            x = np.asarray(_Writable(x))
        return x if code is None else with_dtype(x, code)

    def output(self, x: Tensor, name: str) -> Any:
        if not x.flags.writeable:
            raise ValueError(f"{name} is read-only, expected memory to write to")
        return self.argument(x, name)


def _ml_dtype(name: str) -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(f"NumPy arrays of type {name} need the package ml_dtypes") from error
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


# ---- torch ----


class _TorchFamily:
    def __init__(self, torch: Any) -> None:
        self._empty = torch.empty
        self._strided = torch.strided
        names = ("float32", "float16", "bfloat16", "int32", "int8", "uint8", "float8_e4m3fn", "float8_e5m2")
        self._dtypes = {name: getattr(torch, name) for name in names if hasattr(torch, name)}

    def empty(self, shape: tuple[int, ...], dtype: str, like: Tensor) -> Tensor:
        return self._empty(shape, dtype=self._dtypes[dtype], device=like.device)

    def empty_as(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return self._empty(shape, dtype=like.dtype, device=like.device)

    def dtype_name(self, x: Tensor) -> str:
        return str(x.dtype).removeprefix("torch.")

    def rows(self, x: Tensor, name: str) -> Tensor:
        if x.ndim == 2:
            return x
        if x.ndim == 0:
            raise ValueError(f"{name} has shape (), expected at least one dimension")
        try:
            return x.view(math.prod(x.shape[:-1]), x.shape[-1])
        except RuntimeError:
            raise _not_rows(name, tuple(x.shape), x.stride()) from None

    def argument(self, x: Tensor, name: str) -> Any:
        # DLPack hands these over without saying what they are.
        if x.is_neg() or x.layout is not self._strided:
            raise ValueError(
                f"{name} is a negative view or not strided, expected a plain tensor: pass x.resolve_neg()"
            )
        if not (x.is_cpu or x.is_cuda):
            raise ValueError(f"{name} is on {x.device}, expected cpu or cuda")
        return x

    output = argument


# ---- Telling them apart ----

NUMPY = _NumpyFamily()
_FAMILIES: dict[type, Family] = {np.ndarray: NUMPY, np.memmap: NUMPY}


def adopt(x: Tensor, name: str) -> tuple[Tensor, Family]:
    """``x`` as a tensor of one of the families."""
    family = _FAMILIES.get(type(x))
    return (x, family) if family is not None else _meet(x, name)


def _meet(x: Any, name: str) -> tuple[Tensor, Family]:
    """A type that was not seen before: torch's own, some other DLPack producer, or nothing we can take."""
    kind = f"{type(x).__module__}.{type(x).__qualname__}"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        # Subclasses with a dispatch of their own (FakeTensor, DTensor) have no memory to hand over.
        if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise TypeError(f"{name} is a {kind}, expected a torch.Tensor with memory of its own")
        if torch.Tensor not in _FAMILIES:
            family = _TorchFamily(torch)
            _FAMILIES.update({torch.Tensor: family, torch.nn.Parameter: family})
        if type(x) not in _FAMILIES:
            with torch._C.DisableTorchFunctionSubclass():
                x = x.as_subclass(torch.Tensor)
        return x, _FAMILIES[torch.Tensor]
    if isinstance(x, np.ndarray):
        raise TypeError(f"{name} is a {kind}, expected a plain array: pass numpy.asarray({name})")
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        raise TypeError(
            f"{name} is a {kind}, expected a NumPy array, a torch tensor or an object with __dlpack__"
        )
    if x.__dlpack_device__()[0] != 1:
        raise TypeError(f"{name} is a {kind} on a device, expected a torch tensor there")
    try:
        return np.from_dlpack(x), NUMPY
    except (BufferError, RuntimeError) as error:
        raise ValueError(f"{name} is a {kind} that cannot be imported: {error}") from error


def adopt_like(x: Tensor, name: str, family: Family, leader: str) -> Tensor:
    """``x`` in the family of the call's first tensor, so that all share one device and one stream."""
    x, own = adopt(x, name)
    if own is not family:
        raise TypeError(f"{name} and {leader} are of different families, expected all NumPy or all torch")
    return x


def argument_like(x: Tensor | None, name: str, family: Family, leader: str) -> Any:
    """What the binding takes for an input, or None."""
    return None if x is None else family.argument(adopt_like(x, name, family, leader), name)


def _not_rows(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"{name} has shape {shape} and strides {strides}, which are not rows of one matrix without a copy; "
        "pass a contiguous tensor"
    )


# ---- Names and numbers of the C interface ----

FORMATS = {
    "int8": 1,
    "int4": 2,
    "fp8_e4m3": 3,
    "fp8_e5m2": 4,
    "fp4_e2m1": 5,
    "nf4": 6,
    "fp4_bnb": 7,
    "iq4_nl": 8,
}
#: Weights that are not quantized, by their type.
PLAIN_FORMATS = {"float32": 9, "float16": 10, "bfloat16": 11}
#: Formats that are a table of 16 numbers. Their scales may be any finite numbers.
CODEBOOKS = ("nf4", "fp4_bnb", "iq4_nl")
#: Formats with one E8M0 scale per 32 numbers of a row, as OCP microscaling has them: the format of their
# codes.
MICROSCALED = {"mxfp8": "fp8_e4m3", "mxfp4": "fp4_e2m1"}
FOUR_BIT = ("int4", "fp4_e2m1", "mxfp4", *CODEBOOKS)
CODE_DTYPES = {
    "int8": "int8",
    "int4": "uint8",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp4_e2m1": "uint8",
    **dict.fromkeys(CODEBOOKS, "uint8"),
}
_FORMAT_OF_DTYPE = {"int8": "int8", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
ACTIVATIONS = {None: 0, "identity": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
ACT_FORMATS = {None: 0, "int8": 1, "fp8": 3, "fp8_e4m3": 3, "fp8_e5m2": 4}
_ACT_FORMAT_NAMES = {1: "int8", 3: "fp8_e4m3", 4: "fp8_e5m2"}
DYNAMIC, STATIC, MSE = 0, 1, 2


def choice(table: dict[Any, int], value: Any, name: str) -> int:
    """The number of an option by its name."""
    try:
        return table[value]
    except (KeyError, TypeError):
        names = ", ".join(repr(key) for key in table)
        raise ValueError(f"{name} is {value!r}, expected one of: {names}") from None


def dtype_of(value: DTypeLike, name: str) -> str:
    """The name of a type of outputs."""
    text = value if isinstance(value, str) else str(value).removeprefix("torch.")
    if text not in ("float32", "float16", "bfloat16"):
        with contextlib.suppress(TypeError):
            text = np.dtype(value).name
    if text not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"{name} is {value!r}, expected float32, float16 or bfloat16")
    return text


def format_of(x: Tensor, family: Family, name: str) -> str:
    """The format that codes have by their own type; uint8 does not say."""
    dtype = family.dtype_name(x)
    known = _FORMAT_OF_DTYPE.get(dtype)
    if known is None:
        raise ValueError(f"{name} has type {dtype}, which does not tell the format of its codes: name it")
    return known


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def integer(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}, expected an integer") from None


def two_sizes(value: Any, name: str) -> tuple[int, int]:
    try:
        rows, cols = (operator.index(size) for size in value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}, expected two sizes") from None
    return rows, cols


def blocks_of(rows: int, cols: int, block: tuple[int, int]) -> tuple[int, int]:
    """How many scales a matrix has each way; 0 in a block is the whole dimension."""
    block_rows, block_cols = two_sizes(block, "block")
    if block_rows < 0 or block_cols < 0:
        raise ValueError(f"block is {tuple(block)}, expected sizes of 0 (the whole dimension) or more")
    return -(-rows // (block_rows or rows or 1)), -(-cols // (block_cols or cols or 1))


def hadamard_size(value: int | bool, cols: int) -> int:
    """The columns that are rotated together; True is the largest power of two that divides ``cols``."""
    return cols & -cols if value is True else integer(value, "hadamard")


def plan_output(
    family: Family,
    like: Tensor,
    leading: tuple[int, ...],
    cols: int,
    dtype: DTypeLike | None,
    quant: str | None,
    group: int,
    scale: Tensor | None,
    out: Any,
) -> tuple[tuple[Any, ...], Any]:
    """The output of an operation that may quantize it: ``y, out_format, out_mode, out_group, out_scale``
    for the binding, with what the caller did not give allocated; and what the caller gets."""
    if quant is None:
        if scale is not None:
            raise ValueError("out_scale is given without out_quant")
        if group != 0:
            raise ValueError(f"out_group is {group!r}, and out_quant is not given")
        if out is not None:
            y = adopt_like(out, "out", family, "x")
        elif dtype is None:
            y = family.empty_as((*leading, cols), like)
        else:
            y = family.empty((*leading, cols), dtype_of(dtype, "out_dtype"), like)
        name = "out" if out is not None or dtype is not None else "x"  # whose type it has
        return (family.output(family.rows(y, name), name), 0, DYNAMIC, 0, None), y

    number = choice(ACT_FORMATS, quant, "out_quant")
    if dtype is not None:
        raise ValueError("out_dtype is given with out_quant, which determines it")
    if integer(group, "out_group") < 0:
        raise ValueError(f"out_group is {group}, expected 0 (the whole row) or more")
    groups = ceil_div(cols, group or cols or 1)
    if isinstance(out, tuple | list) and len(out) != 2:
        raise ValueError(f"out has {len(out)} parts, expected two: codes and scales")
    y, y_scale = out if isinstance(out, tuple | list) else (out, None)
    if y is None:
        y = family.empty((*leading, cols), CODE_DTYPES[_ACT_FORMAT_NAMES[number]], like)
    y = adopt_like(y, "out", family, "x")
    y_argument = family.output(family.rows(y, "out"), "out")
    if scale is not None:
        scale = adopt_like(scale, "out_scale", family, "x")
        return (y_argument, number, STATIC, group, family.argument(scale, "out_scale")), y
    if y_scale is None:
        y_scale = family.empty((*leading, groups), "float32", like)
    y_scale = adopt_like(y_scale, "out[1]", family, "x")
    matrix = y_scale if y_scale.ndim <= 2 else family.rows(y_scale, "out[1]")
    return (y_argument, number, DYNAMIC, group, family.output(matrix, "out[1]")), (y, y_scale)
