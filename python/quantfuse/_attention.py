# SPDX-License-Identifier: Apache-2.0
"""Attention of one token of each sequence over a cache of fixed size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


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


def _check(q: Any, keys: Any, values: Any, lengths: Any, mask: Any) -> None:
    def expect(is_right: bool, text: str) -> None:
        if not is_right:
            raise ValueError(f"decode_attention: {text}")

    expect(q.ndim == 4 and q.shape[2] == 1, f"q has shape {tuple(q.shape)}, expected [batch, heads, 1, width]")
    expect(keys.ndim == 4, f"keys has shape {tuple(keys.shape)}, expected [batch, kv_heads, size, width]")
    batch, heads, _, width = q.shape
    kv_heads, size = keys.shape[1:3]
    expect(
        keys.shape[0] == batch and keys.shape[3] == width and kv_heads > 0 and heads % kv_heads == 0,
        f"keys has shape {tuple(keys.shape)}, q {tuple(q.shape)}: batch and width are to be the same, and "
        "kv_heads is to divide heads",
    )
    expect(values.shape == keys.shape, f"values has shape {tuple(values.shape)}, keys {tuple(keys.shape)}")
    expect(
        q.dtype == keys.dtype == values.dtype, f"q, keys, values have types {q.dtype, keys.dtype, values.dtype}"
    )
    expect(q.dtype in (torch.float32, torch.float16, torch.bfloat16), f"q has type {q.dtype}")
    expect(
        lengths.dtype == torch.int32 and tuple(lengths.shape) in ((1,), (batch,)),
        f"lengths has type {lengths.dtype} and shape {tuple(lengths.shape)}, expected int32 [1] or [{batch}]",
    )
    if mask is not None:
        expect(
            mask.dtype == torch.bool and tuple(mask.shape) == (batch, size),
            f"mask has type {mask.dtype} and shape {tuple(mask.shape)}, expected bool [{batch}, {size}]",
        )


def _composed(q: Any, keys: Any, values: Any, lengths: Any, mask: Any, scale: float) -> torch.Tensor:
    """Of PyTorch's operators."""
    _check(q, keys, values, lengths, mask)
    group = q.shape[1] // keys.shape[1]
    seen = torch.arange(keys.shape[2], device=q.device) < lengths[:, None]
    seen = (seen if mask is None else seen & mask)[:, None, None]
    keys, values = (cache.repeat_interleave(group, 1) for cache in (keys, values))
    y = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=scale)
    return torch.where(seen.any(-1, keepdim=True), y, 0).transpose(1, 2).contiguous()


def _on_cuda(q: Any, keys: Any, values: Any, lengths: Any, mask: Any, scale: float) -> torch.Tensor:
    try:
        from . import _attention_triton
    except ImportError:
        return _composed(q, keys, values, lengths, mask, scale)
    _check(q, keys, values, lengths, mask)
    return _attention_triton.launch(q, keys, values, lengths, mask, scale)


def _fake(q: Any, keys: Any, values: Any, lengths: Any, mask: Any, scale: float) -> Any:
    batch, heads, _, width = q.shape
    return q.new_empty((batch, 1, heads, width))


_library = torch.library.Library("quantfuse", "FRAGMENT")
_library.define(
    "decode_attention(Tensor q, Tensor keys, Tensor values, Tensor lengths, Tensor? mask, float scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_library.impl("decode_attention", _composed, "CPU")
_library.impl("decode_attention", _on_cuda, "CUDA")
torch.library.register_fake("quantfuse::decode_attention", _fake, lib=_library)
