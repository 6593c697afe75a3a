# SPDX-License-Identifier: Apache-2.0
"""Attention of one token of each sequence over a cache of fixed size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ._operators import is_plain


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """``softmax(scale * q @ keys.T) @ values`` of one token of each sequence, over what is filled of a cache.

    On a CUDA device it is one kernel, which reads every head of the cache once and no further than it is
    filled; it lets a quantized layer behind it fetch its weight meanwhile. The first call with a cache
    allocates: make one ahead of a capture. The kernel is Triton's; without it, and on other devices, the call
    is made of PyTorch's own operators.

    Args:
        q: ``[batch, heads, 1, width]`` float32, float16 or bfloat16.
        keys, values: ``[batch, kv_heads, size, width]``, type of ``q``; ``kv_heads`` divides ``heads``.
        lengths: ``[batch]`` int32, or ``[1]`` for all: how many tokens of the cache are filled. A sequence
            whose length is 0 gets zeros.
        mask: ``[batch, size]`` bool: of these, the tokens that are seen; None sees all of them.
        scale: by default ``width ** -0.5``.

    Returns:
        ``[batch, 1, heads, width]``: heads side by side, as the layer behind wants them.

    >>> import torch, quantfuse as qf
    >>> q, cache = torch.ones(1, 4, 1, 16), torch.ones(1, 2, 8, 16)
    >>> qf.decode_attention(q, cache, 3 * cache, torch.tensor([5], dtype=torch.int32)).shape
    torch.Size([1, 1, 4, 16])
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    result: torch.Tensor = torch.ops.quantfuse.decode_attention(q, keys, values, lengths, mask, scale)
    return result


def append_and_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """All that a decoder does between its projections, for one token of each sequence: rotates ``q`` and
    ``k``, **writes** ``k`` and ``v`` to the cache, and attends to all tokens up to and with the new one; on a
    CUDA device in the one kernel of :func:`decode_attention`. On a CPU it is PyTorch's own operators, and few
    of them where float32 goes to one place in all sequences.

    Args:
        q: ``[batch, heads, 1, width]`` float32, float16 or bfloat16.
        k, v: ``[batch, kv_heads, 1, width]``, type of ``q``.
        rotation: cosines and sines, each ``[batch, width]``, or ``[1, width]`` for all, of any floating type:
            ``x * cos + concatenate(-x[width / 2:], x[:width / 2]) * sin``, as in Llama.
        keys, values: ``[batch, kv_heads, size, width]``, the cache, rows contiguous; changed in place.
        positions: ``[batch]`` int32 or int64, or ``[1]`` for all: where in the cache the token goes. Beyond
            the cache's end nothing is written, and the token sees what is there.
        scale: by default ``width ** -0.5``.

    Returns:
        ``[batch, 1, heads, width]``.

    >>> import torch, quantfuse as qf
    >>> q, kv, cache = torch.ones(1, 4, 1, 16), torch.ones(1, 2, 1, 16), torch.zeros(1, 2, 8, 16)
    >>> rotation = torch.ones(1, 16), torch.zeros(1, 16)
    >>> y = qf.append_and_attend(q, kv, kv, rotation, cache, cache.clone(), torch.tensor([0]))
    >>> y.shape, cache[0, 0, :2, 0].tolist()
    (torch.Size([1, 1, 4, 16]), [1.0, 0.0])
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    is_direct = q.is_cpu and is_plain(q, k) and not v.requires_grad
    append = _composed_append if is_direct else torch.ops.quantfuse.append_and_attend
    result: torch.Tensor = append(q, k, v, *rotation, keys, values, positions, scale)
    return result


def _check(q: Any, keys: Any, values: Any, lengths: Any, mask: Any) -> None:
    def refuse(text: str) -> None:
        raise ValueError(f"decode_attention: {text}")

    if q.ndim != 4 or q.shape[2] != 1:
        refuse(f"q has shape {tuple(q.shape)}, expected [batch, heads, 1, width]")
    if keys.ndim != 4:
        refuse(f"keys has shape {tuple(keys.shape)}, expected [batch, kv_heads, size, width]")
    batch, heads, _, width = q.shape
    key_batch, kv_heads, size, key_width = keys.shape
    if key_batch != batch or key_width != width or kv_heads == 0 or heads % kv_heads != 0:
        refuse(
            f"keys has shape {tuple(keys.shape)}, q {tuple(q.shape)}: batch and width are to be the same, "
            "and kv_heads is to divide heads"
        )
    if values.shape != keys.shape:
        refuse(f"values has shape {tuple(values.shape)}, keys {tuple(keys.shape)}")
    if not q.dtype == keys.dtype == values.dtype:
        refuse(f"q, keys, values have types {q.dtype, keys.dtype, values.dtype}")
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        refuse(f"q has type {q.dtype}")
    if lengths is not None and (lengths.dtype != torch.int32 or tuple(lengths.shape) not in ((1,), (batch,))):
        refuse(
            f"lengths has type {lengths.dtype} and shape {tuple(lengths.shape)}, "
            f"expected int32 [1] or [{batch}]"
        )
    if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != (batch, size)):
        refuse(f"mask has type {mask.dtype} and shape {tuple(mask.shape)}, expected bool [{batch}, {size}]")


def _composed(q: Any, keys: Any, values: Any, lengths: Any, mask: Any, scale: float) -> torch.Tensor:
    """Of PyTorch's operators."""
    _check(q, keys, values, lengths, mask)
    group = q.shape[1] // keys.shape[1]
    seen = torch.arange(keys.shape[2], device=q.device) < lengths[:, None]
    seen = (seen if mask is None else seen & mask)[:, None, None]
    # What lies beyond may be anything, and a NaN times no weight is a NaN.
    unseen = ~seen.transpose(-1, -2)
    keys, values = (cache.masked_fill(unseen, 0).repeat_interleave(group, 1) for cache in (keys, values))
    y = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=scale)
    return torch.where(seen.any(-1, keepdim=True), y, 0).transpose(1, 2).contiguous()


def _on_cuda(q: Any, keys: Any, values: Any, lengths: Any, mask: Any, scale: float) -> torch.Tensor:
    try:
        from . import _attention_triton
    except ImportError:
        return _composed(q, keys, values, lengths, mask, scale)
    _check(q, keys, values, lengths, mask)
    return _attention_triton.launch(q, keys, values, lengths, mask, scale)


def _check_append(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any) -> None:
    _check(q, keys, values, None, None)
    batch, kv_heads, _, width = keys.shape

    def expect(name: str, tensor: Any, *shapes: tuple[int, ...]) -> None:
        if tuple(tensor.shape) not in shapes:
            raise ValueError(
                f"append_and_attend: {name} has shape {tuple(tensor.shape)}, expected {shapes[-1]}"
            )

    for name, tensor in (("k", k), ("v", v)):
        expect(name, tensor, (batch, kv_heads, 1, width))
        if tensor.dtype != q.dtype:
            raise ValueError(f"append_and_attend: {name} has type {tensor.dtype}, q {q.dtype}")
    for name, tensor in (("cos", cos), ("sin", sin)):
        expect(name, tensor, (1, width), (batch, width))
    if cos.shape != sin.shape or width % 2 != 0:
        raise ValueError("append_and_attend: cos and sin are to have the same, even width and batch")
    expect("positions", positions, (1,), (batch,))
    if positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"append_and_attend: positions has type {positions.dtype}, expected int32 or int64")
    if keys.stride(3) != 1 or values.stride(3) != 1:
        raise ValueError("append_and_attend: the rows of keys and values are to be contiguous")


def _rotated(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.float().chunk(2, -1)
    cos, sin = (table.float()[:, None, None] for table in (cos, sin))
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def _composed_append(
    q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any, scale: float
) -> Any:
    _check_append(q, k, v, cos, sin, keys, values, positions)
    if q.dtype == torch.float32 and len(positions) == 1 and int(positions) >= 0:
        return _append_at_one_place(q, k, v, cos, sin, keys, values, positions, scale)
    if int(positions.min()) < 0:
        raise ValueError(f"positions has the value {int(positions.min())}, expected 0 or more")
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    places = positions.expand(q.shape[0])
    for b, place in enumerate(places.tolist()):
        if place < keys.shape[2]:
            keys[b, :, place], values[b, :, place] = k[b, :, 0], v[b, :, 0]
    return _composed(q, keys, values, (places + 1).to(torch.int32), None, scale)


def _append_at_one_place(
    q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any, scale: float
) -> Any:
    """All sequences have the same length, so that a view of the cache is the mask. By few operators: with a
    layer's weight gone through the caches each takes longer than its arithmetic."""
    batch, heads, _, width = q.shape
    kv_heads, size = keys.shape[1:3]
    cos, sin = cos.to(q.dtype), sin.to(q.dtype)
    if len(cos) > 1:
        cos, sin = cos[:, None, None], sin[:, None, None]
    both = torch.cat((q, k), 1)
    first, second = both.chunk(2, -1)
    both = torch.addcmul(both * cos, torch.cat((-second, first), -1), sin)
    q, k = both.split((heads, kv_heads), 1)
    length = int(positions) + 1
    if length <= size:
        positions = positions.long()
        keys.index_copy_(2, positions, k)
        values.index_copy_(2, positions, v)
    if length < size:
        keys, values = keys.narrow(2, 0, length), values.narrow(2, 0, length)
    if heads != kv_heads:  # those that share keys are rows of one product
        q = q.reshape(batch, kv_heads, heads // kv_heads, width)
    y = nn.functional.scaled_dot_product_attention(q, keys, values, scale=scale)
    return y.reshape(batch, 1, heads, width)


def _append_on_cuda(
    q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any, scale: float
) -> Any:
    try:
        from . import _attention_triton
    except ImportError:
        return _composed_append(q, k, v, cos, sin, keys, values, positions, scale)
    _check_append(q, k, v, cos, sin, keys, values, positions)
    return _attention_triton.launch(q, keys, values, positions, None, scale, (k, v), (cos, sin))


def _append_fake(
    q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any, scale: float
) -> Any:
    return _fake(q, keys, values, None, None, scale)


def _fake(q: Any, keys: Any, values: Any, lengths: Any, mask: Any, scale: float) -> Any:
    batch, heads, _, width = q.shape
    return q.new_empty((batch, 1, heads, width))


_library = torch.library.Library("quantfuse", "FRAGMENT")
_library.define(
    "decode_attention(Tensor q, Tensor keys, Tensor values, Tensor lengths, Tensor? mask, float scale) "
    "-> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_library.define(
    "append_and_attend(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) keys, "
    "Tensor(b!) values, Tensor positions, float scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
for _name, _on_cpu, _on_gpu, _shape in (
    ("decode_attention", _composed, _on_cuda, _fake),
    ("append_and_attend", _composed_append, _append_on_cuda, _append_fake),
):
    _library.impl(_name, _on_cpu, "CPU")
    _library.impl(_name, _on_gpu, "CUDA")
    torch.library.register_fake(f"quantfuse::{_name}", _shape, lib=_library)
