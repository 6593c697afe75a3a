# SPDX-License-Identifier: Apache-2.0
"""The safetensors file format, as much of it as weights need.

A file is: 8 bytes, the little-endian length of the header; the header, JSON; the bytes of the tensors, one
    after another.
Reading trusts nothing: whatever does not fit raises ``ValueError``.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

_PARTS = ("codes", "scales", "zeros", "offsets", "g_idx")  # of a weight among others
_ALIGNMENT = 64  # of the data in the file, so that a mapped file has aligned tensors
_MAX_HEADER = 100_000_000  # what the safetensors library allows
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    # NumPy holds these as bytes.
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
}

Array = np.ndarray[Any, Any]


def write(
    path: str | os.PathLike[str], tensors: dict[str, tuple[str, Array]], metadata: dict[str, str]
) -> None:
    """Writes ``{name: (dtype, array)}``, whole or not at all: under another name first, then renamed."""
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    offset = checksum = 0
    for name, (dtype, array) in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        parts.append(data)
        offset += len(data)
        checksum = zlib.crc32(data, checksum)
    header["__metadata__"] = {**metadata, "crc32": f"{checksum:08x}"}
    header["__metadata__"]["header_crc32"] = _header_checksum(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)

    path = Path(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines([len(text).to_bytes(8, "little"), text, *parts])
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp gives 0600
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read(path: str | os.PathLike[str]) -> tuple[dict[str, tuple[str, Array]], dict[str, str]]:
    """The tensors and the metadata of a file that :func:`write` made."""
    with open(path, "rb") as file:
        content = bytearray(file.read())
    try:
        return _parse(content)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def read_named(
    path: str | os.PathLike[str], name: str
) -> tuple[dict[str, tuple[str, Array]], dict[str, str]]:
    """The tensors ``name.*`` of a file that ``quantfuse quantize --format quantfuse`` made, and the metadata
    of ``name.weight``. Nothing else of the file is read."""
    if os.path.getsize(path) == 0:
        raise ValueError(f"{os.fspath(path)}: the file is empty")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            header, all_metadata, begin = _parse_header(content)
            if name + ".weight" not in all_metadata:
                raise ValueError(f"there is no weight named {name!r}")
            metadata = json.loads(all_metadata[name + ".weight"])
            if not isinstance(metadata, dict):
                raise ValueError(f"the metadata of {name} are malformed")
            data = memoryview(content)[begin:]
            try:
                tensors = {}
                for key, entry in header.items():
                    if key.rpartition(".")[0] == name and key.rpartition(".")[2] in _PARTS:
                        dtype, array, _ = _tensor(key, entry, data, None)
                        tensors[key.rpartition(".")[2]] = (dtype, array)
            finally:
                data.release()  # or the file could not be unmapped
            return tensors, metadata
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None


def _parse_header(content: Any) -> tuple[dict[str, Any], dict[str, str], int]:
    """Tensors, metadata, and where the data begin."""
    if len(content) < 8:
        raise ValueError(f"the file has {len(content)} bytes, too few for a header")
    length = int.from_bytes(content[:8], "little")
    if length > _MAX_HEADER or 8 + length > len(content):
        raise ValueError(f"the header's length is {length}, and the file has {len(content)} bytes")
    try:
        header = json.loads(content[8 : 8 + length].decode())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the header is not JSON: {error}") from None
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("the header has no metadata")
    return header, metadata, 8 + length


def _header_checksum(header: dict[str, Any]) -> str:
    """Of all that the header says but itself, in whatever order."""
    others = {key: value for key, value in header["__metadata__"].items() if key != "header_crc32"}
    text = json.dumps({**header, "__metadata__": others}, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def _parse(content: bytearray) -> tuple[dict[str, tuple[str, Array]], dict[str, str]]:
    header, metadata, data_begin = _parse_header(content)
    data = memoryview(content)[data_begin:]
    if f"{zlib.crc32(data):08x}" != metadata.get("crc32"):
        raise ValueError("the data do not match their checksum")
    # Files of the first version have none.
    if metadata.get("header_crc32") not in (None, _header_checksum({**header, "__metadata__": metadata})):
        raise ValueError("the header does not match its checksum")
    tensors = {}
    expected_begin = 0
    for name, entry in header.items():
        dtype, array, end = _tensor(name, entry, data, expected_begin)
        tensors[name] = (dtype, array)
        expected_begin = end
    if expected_begin != len(data):
        raise ValueError(f"the tensors end at byte {expected_begin}, and there are {len(data)}")
    return tensors, metadata


def _tensor(name: str, entry: Any, data: memoryview, expected_begin: int | None) -> tuple[str, Array, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {name} is malformed")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{name} has the unknown type {dtype!r}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has a malformed shape or malformed offsets")
    begin, end = offsets
    if expected_begin is None:
        expected_begin = begin
    expected = math.prod(shape) * _DTYPES[dtype].itemsize
    if begin != expected_begin or end > len(data) or end - begin != expected:
        raise ValueError(
            f"{name} has offsets {offsets}, expected {[expected_begin, expected_begin + expected]}"
        )
    # A copy, because its memory is aligned and its own; in the file the tensors follow each other without
    # gaps.
    array = np.frombuffer(data[begin:end], _DTYPES[dtype]).reshape(shape).copy()
    return dtype, array, end


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
