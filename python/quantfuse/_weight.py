# SPDX-License-Identifier: Apache-2.0
"""Quantized weights: canonical, packed, and on disk."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tvm_ffi

from . import _safetensors
from ._library import weight_pack, weight_packed_bytes
from ._quantize import dequantize_tensor, quantize_tensor
from ._tensors import (
    CODE_DTYPES,
    CODEBOOKS,
    FORMATS,
    FOUR_BIT,
    MICROSCALED,
    NUMPY,
    DTypeLike,
    Family,
    Tensor,
    adopt,
    adopt_like,
    blocks_of,
    ceil_div,
    integer,
    two_sizes,
)

_FILE_FORMAT = "quantfuse.weight.1"
_STORED_CODES = {"int8": "I8", "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2", "mxfp8": "F8_E4M3"}  # others U8
_DEFAULT_GROUP = {"int4": 128, "fp4_e2m1": 128, "nf4": 64, "mxfp4": 32, "mxfp8": 32}
_PACKED_ALIGNMENT = 64


class QuantizedWeight:
    """A weight matrix ``w[n, k] = (codes - zeros) * scales + offsets``, quantized.

    Its **canonical** tensors are what checkpoints hold. :meth:`pack` adds the bytes that the fast kernels of
    a device read; the canonical tensors may be dropped then, if neither :meth:`dequantize`, :meth:`save` nor
    :func:`linear_backward` is wanted. Neither the attributes nor the memory behind them, which is the
    caller's own, may change afterwards.

    Attributes:
        format: ``int4``, ``int8``, ``fp8_e4m3``, ``fp8_e5m2``, ``fp4_e2m1``, ``mxfp4``, ``mxfp8``; or a
            table of 16 numbers: ``nf4``, ``fp4_bnb`` (bitsandbytes), ``iq4_nl`` (GGUF).
        shape: ``(n, k)``.
        block: the rectangle of ``w`` that shares a scale, as in :func:`quantize_tensor`.
        codes: ``[n, k]`` int8 or FP8 (uint8 in NumPy), or ``[n, ceil(k / 2)]`` uint8 for 4-bit formats.
        scales: ``[ceil(n / block[0]), ceil(k / block[1])]`` float32, or E8M0 (uint8) for ``mxfp4`` and
            ``mxfp8``; with ``g_idx`` as many columns as there are groups.
        zeros: int8 or float32, shape of ``scales``, or None.
        offsets: float32, shape of ``scales``, or None: the minima of GGUF's Q4_K; integer formats.
        g_idx: ``[k]`` int32, the group of each column (act-order), or None.
        is_gated: the first half of the rows is the gate, the second the up projection.
        packed: the packed bytes, or None.

    >>> import numpy as np, quantfuse as qf
    >>> w = np.linspace(-1, 1, 64 * 256, dtype=np.float32).reshape(64, 256)
    >>> weight = qf.QuantizedWeight.from_float(w, "int4", group=128)
    >>> weight
    QuantizedWeight(int4, 64 x 256, block (1, 128), 8704 bytes)
    >>> bool(abs(weight.dequantize() - w).max() < 0.072)     # half a step of 1 / 7
    True
    """

    __slots__ = (
        "_arguments",
        "_family",
        "block",
        "codes",
        "format",
        "g_idx",
        "is_gated",
        "offsets",
        "packed",
        "scales",
        "shape",
        "zeros",
    )

    def __init__(
        self,
        format: str,
        shape: tuple[int, int],
        block: tuple[int, int],
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        g_idx: Tensor | None = None,
        is_gated: bool = False,
        offsets: Tensor | None = None,
    ) -> None:
        _check_format(format, "format")
        n, k = two_sizes(shape, "shape")
        if is_gated and n % 2 != 0:
            raise ValueError(f"is_gated is given for {n} rows, expected an even number")
        codes, family = adopt(codes, "codes")
        self.format = format
        self.shape = (n, k)
        self.block = two_sizes(block, "block")
        self.codes: Tensor | None = codes
        self.scales: Tensor | None = adopt_like(scales, "scales", family, "codes")
        self.zeros: Tensor | None = None if zeros is None else adopt_like(zeros, "zeros", family, "codes")
        self.offsets: Tensor | None = (
            None if offsets is None else adopt_like(offsets, "offsets", family, "codes")
        )
        self.g_idx: Tensor | None = None if g_idx is None else adopt_like(g_idx, "g_idx", family, "codes")
        self.is_gated = bool(is_gated)
        self.packed: Tensor | None = None
        self._family = family
        self._arguments: tuple[Any, ...] | None = None
        self._check_canonical()

    @staticmethod
    def from_float(
        w: Tensor,
        scheme: str = "int4",
        *,
        group: int | tuple[int, int] | None = None,
        symmetric: bool = True,
        mse: bool = False,
        gated: bool = False,
    ) -> QuantizedWeight:
        """Quantizes ``w`` ``[n, k]``, float32, float16 or bfloat16, by rounding to nearest.

        Args:
            scheme: the format; of the tables only ``nf4``.
            group: columns that share a scale; 0 gives one scale per output channel (row), a pair a 2-D block.
                By default 128 for ``int4`` and ``fp4_e2m1``, 64 for ``nf4``, 32 for ``mxfp4`` and ``mxfp8``
                (always), else 0.
            symmetric: False gives integer formats zero points.
            mse: search the scales that make the squared error least.
            gated: the weight is ``[gate; up]``.
        """
        _check_format(scheme, "scheme")
        w, _ = adopt(w, "w")
        if len(w.shape) != 2:
            raise ValueError(f"w has shape {tuple(w.shape)}, expected a matrix")
        if group is None:
            group = _DEFAULT_GROUP.get(scheme, 0)
        if scheme in MICROSCALED and group != 32:
            raise ValueError(f"group is {group}, and {scheme} has groups of 32")
        block = group if isinstance(group, tuple | list) else (1, integer(group, "group"))
        codes, scales, zeros, _ = quantize_tensor(w, scheme, block=block, symmetric=symmetric, mse=mse)
        return QuantizedWeight(scheme, tuple(w.shape), block, codes, scales, zeros, is_gated=gated)

    @staticmethod
    def from_packed(
        format: str, shape: tuple[int, int], block: tuple[int, int], packed: Tensor, *, is_gated: bool = False
    ) -> QuantizedWeight:
        """A weight of which the packed bytes alone are at hand, as after ``pack(drop_canonical=True)``."""
        _check_format(format, "format")
        weight = QuantizedWeight.__new__(QuantizedWeight)
        weight.format, weight.shape, weight.block = format, shape, block
        weight.codes = weight.scales = weight.zeros = weight.offsets = weight.g_idx = None
        weight.is_gated = is_gated
        weight.packed, weight._family = adopt(packed, "packed")
        weight._arguments = None
        return weight

    # ---- Use ----

    @property
    def out_features(self) -> int:
        """Columns of the layer's output: n, or n / 2 where the weight is gated."""
        return self.shape[0] // 2 if self.is_gated else self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is held."""
        tensors = (self.codes, self.scales, self.zeros, self.offsets, self.g_idx, self.packed)
        return sum(int(t.nbytes) for t in tensors if t is not None)

    def dequantize(self, out_dtype: DTypeLike = "float32", *, out: Tensor | None = None) -> Tensor:
        """``w`` ``[n, k]``, as it was rounded."""
        return dequantize_tensor(
            self._canonical("dequantize"),
            self.scales,
            self.format,
            block=self.block,
            zero=self.zeros,
            offset=self.offsets,
            g_idx=self.g_idx,
            cols=self.shape[1],
            out_dtype=out_dtype,
            out=out,
        )

    def pack(self, *, drop_canonical: bool = False) -> QuantizedWeight:
        """Makes the bytes that the fast kernels of the weight's device read, once, and returns the weight
        itself.

        They depend on the device and on what its processor can do: pack where you run, save the canonical
        form. ``drop_canonical`` lets go of codes, scales, zeros, offsets and g_idx. Where kernels read the
        canonical form only (a CPU without AVX2; on a CUDA device weights with groups that are
        neither multiples of 16 columns nor whole rows, or that differ in size by ``g_idx``) nothing
        changes. On a CUDA device this waits for the packing to end.
        """
        if self.packed is None:
            self.packed = pack_arguments(self._make_arguments(), self._family, self.codes)
            if self.packed is None:
                return self
        if drop_canonical:
            self.codes = self.scales = self.zeros = self.offsets = self.g_idx = None
        self._arguments = None
        return self

    def call_arguments(self, family: Family) -> tuple[Any, ...]:
        """The fields of the C struct, made once: a call must not pay for tensors that never change."""
        if family is not self._family:
            raise TypeError("weight and x are of different families, expected all NumPy or all torch")
        if self._arguments is None:
            self._arguments = self._make_arguments()
        return self._arguments

    def _make_arguments(self) -> tuple[Any, ...]:
        def borrow(tensor: Tensor | None, name: str) -> Any:
            return None if tensor is None else tvm_ffi.from_dlpack(self._family.argument(tensor, name))

        return (
            FORMATS[MICROSCALED.get(self.format, self.format)],
            *self.shape,
            *self.block,
            borrow(self.codes, "codes"),
            borrow(self.scales, "scales"),
            borrow(self.zeros, "zeros"),
            borrow(self.offsets, "offsets"),
            borrow(self.g_idx, "g_idx"),
            self.is_gated,
            borrow(self.packed, "packed"),
        )

    def _canonical(self, method: str) -> Tensor:
        if self.codes is None:
            raise ValueError(
                f"{method}: the canonical tensors of this weight were dropped when it was packed"
            )
        return self.codes

    def _check_canonical(self) -> None:
        n, k = self.shape
        if n < 0 or k < 0:
            raise ValueError(f"shape is {self.shape}, expected sizes of 0 or more")
        codes_format = MICROSCALED.get(self.format, self.format)
        code_types = {CODE_DTYPES[codes_format], "int8" if codes_format == "int8" else "uint8"}
        self._expect("codes", code_types, (n, ceil_div(k, 2) if codes_format in FOUR_BIT else k))

        row_blocks, col_blocks = blocks_of(n, k, self.block)
        if self.g_idx is not None:
            self._expect("g_idx", {"int32"}, (k,))
            col_blocks = self.scales.shape[-1] if self.scales is not None and len(self.scales.shape) else 1
        e8m0 = {"uint8", "float8_e8m0fnu"}
        self._expect(
            "scales", e8m0 if self.format in MICROSCALED else {"float32"} | e8m0, (row_blocks, col_blocks)
        )
        if self.zeros is not None:
            self._expect("zeros", {"int8", "float32"}, (row_blocks, col_blocks))
        if self.offsets is not None:
            self._expect("offsets", {"float32"}, (row_blocks, col_blocks))

    def _expect(self, name: str, dtypes: set[str], shape: tuple[int, ...]) -> None:
        """A dimension of 1 may be missing."""
        tensor = getattr(self, name)
        dtype = self._family.dtype_name(tensor)
        if dtype not in dtypes:
            raise ValueError(f"{name} has type {dtype}, expected {' or '.join(sorted(dtypes))}")
        given = tuple(tensor.shape)
        without = [shape[:i] + shape[i + 1 :] for i, size in enumerate(shape) if size == 1]
        if given not in (shape, *without) and (given or set(shape) != {1}):
            raise ValueError(f"{name} has shape {given}, expected {shape}")

    # ---- Files ----

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the canonical form as a safetensors file, whole or not at all.

        >>> import numpy as np, quantfuse as qf, tempfile, pathlib
        >>> weight = qf.QuantizedWeight.from_float(np.eye(4, dtype=np.float32), "int8")
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "eye.safetensors"
        >>> weight.save(path)
        >>> bool((qf.QuantizedWeight.load(path).codes == weight.codes).all())
        True
        """
        stored = {"codes": (_STORED_CODES.get(self.format, "U8"), _to_numpy(self._canonical("save")))}
        for name, byte_type in (("scales", "U8"), ("zeros", "I8"), ("offsets", "")):
            if getattr(self, name) is not None:
                array = _to_numpy(getattr(self, name))
                stored[name] = (byte_type if array.dtype.itemsize == 1 else "F32", array)
        if self.g_idx is not None:
            stored["g_idx"] = ("I32", _to_numpy(self.g_idx))
        metadata = {
            "format": _FILE_FORMAT,
            "quantization": self.format,
            "shape": f"{self.shape[0]} {self.shape[1]}",
            "block": f"{self.block[0]} {self.block[1]}",
            "is_gated": str(int(self.is_gated)),
        }
        _safetensors.write(path, stored, metadata)

    @staticmethod
    def load(path: str | os.PathLike[str], *, name: str | None = None, device: Any = None) -> QuantizedWeight:
        """Reads what :meth:`save` wrote, or with ``name`` one weight of a file that
        ``quantfuse quantize --format quantfuse`` wrote: ``name="model.layers.0.mlp.up_proj"``.

        NumPy arrays, or torch tensors on ``device`` where one is given. A file that is truncated, corrupted
        or no weight raises ``ValueError``, and so does a name that is not there.
        """
        stored, metadata = _safetensors.read(path) if name is None else _safetensors.read_named(path, name)
        try:
            weight = _from_stored(stored, metadata)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None
        return weight if device is None else _to_torch(weight, device)

    def __repr__(self) -> str:
        n, k = self.shape
        words = [self.format, f"{n} x {k}", f"block {self.block}", f"{self.nbytes} bytes"]
        words += ["gated"] * self.is_gated + ["packed"] * (self.packed is not None)
        return f"QuantizedWeight({', '.join(words)})"


def pack_arguments(arguments: tuple[Any, ...], family: Family, like: Tensor) -> Tensor | None:
    """The packed form of a weight given by the fields of the C struct; None where its device has none."""
    try:
        size = weight_packed_bytes(*arguments)
        if size == 0:
            return None
        packed = _aligned_bytes(size, family, like)
        weight_pack(*arguments[:-1], family.output(packed, "packed"))
    except NotImplementedError:
        return None
    return packed


def _check_format(format: str, name: str) -> None:
    known = (*FORMATS, *MICROSCALED)
    if format not in known:
        raise ValueError(f"{name} is {format!r}, expected one of: {', '.join(known)}")


def _aligned_bytes(size: int, family: Family, like: Tensor) -> Tensor:
    """torch aligns by itself; NumPy does not."""
    if family is not NUMPY:
        return family.empty((size,), "uint8", like)
    memory = np.empty(size + _PACKED_ALIGNMENT, np.uint8)
    skip = -memory.ctypes.data % _PACKED_ALIGNMENT
    return memory[skip : skip + size]


def _from_stored(
    stored: dict[str, tuple[str, _safetensors.Array]], metadata: dict[str, str]
) -> QuantizedWeight:
    """Checks what the constructor cannot: that the metadata are whole, and the values possible."""
    if metadata.get("format") != _FILE_FORMAT:
        raise ValueError(f"the file's format is {metadata.get('format')!r}, expected {_FILE_FORMAT!r}")
    format = metadata.get("quantization", "")
    _check_format(format, "quantization")
    shape, block = _pair(metadata, "shape"), _pair(metadata, "block")
    if metadata.get("is_gated") not in ("0", "1"):
        raise ValueError(f"is_gated is {metadata.get('is_gated')!r}, expected 0 or 1")
    names = set(stored)
    if not {"codes", "scales"} <= names or not names <= {"codes", "scales", "zeros", "offsets", "g_idx"}:
        raise ValueError(
            f"the tensors are {sorted(names)}, expected codes, scales and perhaps zeros, offsets, g_idx"
        )
    if stored["codes"][0] != _STORED_CODES.get(format, "U8"):
        raise ValueError(f"codes has type {stored['codes'][0]}, which {format} codes have not")
    arrays = {name: array for name, (_, array) in stored.items()}
    weight = QuantizedWeight(
        format,
        shape,
        block,
        arrays["codes"],
        arrays["scales"],
        arrays.get("zeros"),
        arrays.get("g_idx"),
        metadata["is_gated"] == "1",
        arrays.get("offsets"),
    )
    check_values(weight)
    return weight


def check_values(weight: QuantizedWeight) -> None:
    """Refuses values that no weight has; of canonical tensors of any family, on any device."""
    scales: Any = weight.scales
    groups = scales.shape[-1]
    if weight.format in MICROSCALED:
        is_good = scales != 255
    else:
        is_good = abs(scales) < float("inf")  # and no NaN
        is_good = is_good if weight.format in CODEBOOKS else is_good & (scales > 0)
    if not bool(is_good.all()):
        raise ValueError("scales has values that are not finite and positive")
    for name, tensor in (("zeros", weight.zeros), ("offsets", weight.offsets)):
        if tensor is not None and not bool((abs(tensor) < float("inf")).all()):
            raise ValueError(f"{name} has values that are not finite")
    if weight.g_idx is not None and not bool(((weight.g_idx >= 0) & (weight.g_idx < groups)).all()):
        raise ValueError(f"g_idx has values outside of the {groups} groups")


def _pair(metadata: dict[str, str], name: str) -> tuple[int, int]:
    words = metadata.get(name, "").split(" ")
    if len(words) != 2 or not all(word.isascii() and word.isdigit() and len(word) < 19 for word in words):
        raise ValueError(f"{name} is {metadata.get(name)!r}, expected two sizes")
    return int(words[0]), int(words[1])


def _to_numpy(tensor: Tensor) -> _safetensors.Array:
    """A host array of the same bytes, one-byte floats as uint8."""
    if not isinstance(tensor, np.ndarray):
        if tensor.is_floating_point() and tensor.element_size() == 1:
            import torch

            tensor = tensor.view(torch.uint8)
        tensor = tensor.detach().cpu().numpy()
    array: _safetensors.Array = tensor
    return array.view(np.uint8) if array.dtype.kind == "V" else array


def _to_torch(weight: QuantizedWeight, device: Any) -> QuantizedWeight:
    import torch

    def move(array: Tensor | None, is_fp8: bool = False) -> Any:
        if array is None:
            return None
        tensor = torch.from_numpy(array)
        if is_fp8:
            tensor = tensor.view(getattr(torch, CODE_DTYPES[MICROSCALED.get(weight.format, weight.format)]))
        return tensor.to(device)

    return QuantizedWeight(
        weight.format,
        weight.shape,
        weight.block,
        move(weight.codes, is_fp8="fp8" in weight.format),
        move(weight.scales),
        move(weight.zeros),
        move(weight.g_idx),
        weight.is_gated,
        move(weight.offsets),
    )
