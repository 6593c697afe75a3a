# SPDX-License-Identifier: Apache-2.0
"""The kernel of ``decode_attention`` and ``append_and_attend``.

    parts of a head's tokens:   | block 0 | block 1 | ... | block 0 | ...      blocks of a split by turns
    each:  q, keys --dot--> scores --softmax so far--> p, values --dot--> acc       flash attention
    the last of a head's splits to arrive adds up what all have left in memory, in order: the same bits always
    where the token is appended, the first split rotates it, writes it to the cache and begins with its score

What takes time with few tokens is latency: all of a split's first keys and values are on their way at once,
and there is no second launch. As in all our kernels the next one may start at once and waits for this one to
end, and nothing is touched before the previous one has ended.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import triton
import triton.language as tl

_MOST_SPLITS = 16  # of a head: those that the last one adds up by one load


@triton.jit
def _kernel(
    q,
    keys,
    values,
    lengths,
    mask,
    k_new,
    v_new,
    cos,
    sin,
    y,
    sums,
    tops,
    arrived,
    scale,
    size,
    q_batch,
    q_head,
    new_k_batch,
    new_k_head,
    new_v_batch,
    new_v_head,
    rotation_batch,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    length_batch,
    mask_batch,
    HAS_MASK: tl.constexpr,
    APPENDS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.minimum(tl.load(lengths + batch * length_batch), size).to(tl.int32)
    rows, cols, tokens = tl.arange(0, ROWS), tl.arange(0, COLS), tl.arange(0, BLOCK)
    is_col = cols[None, :] < WIDTH
    is_x = (rows[:, None] < GROUP) & is_col
    q_row = q + batch * q_batch + (head * GROUP + rows)[:, None] * q_head
    x = tl.load(q_row + cols[None, :], mask=is_x, other=0.0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    if APPENDS:
        other = tl.where(cols < WIDTH // 2, cols + WIDTH // 2, cols - WIDTH // 2)
        c = tl.load(cos + batch * rotation_batch + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
        s = tl.load(sin + batch * rotation_batch + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
        s = tl.where(cols < WIDTH // 2, -s, s)
        x_other = tl.load(q_row + other[None, :], mask=is_x, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * c[None, :] + x_other * s[None, :]).to(q.dtype.element_ty)
        if (split == 0) & (length < size):
            k_row = k_new + batch * new_k_batch + head * new_k_head
            k_first = tl.load(k_row + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
            k_other = tl.load(k_row + other, mask=cols < WIDTH, other=0.0).to(tl.float32)
            v_first = tl.load(
                v_new + batch * new_v_batch + head * new_v_head + cols, mask=cols < WIDTH, other=0.0
            )
            k_first = (k_first * c + k_other * s).to(keys.dtype.element_ty)
            to_k = keys + batch * k_batch + head * k_head + length.to(tl.int64) * k_token
            to_v = values + batch * v_batch + head * v_head + length.to(tl.int64) * v_token
            tl.store(to_k + cols, k_first, mask=cols < WIDTH)
            tl.store(to_v + cols, v_first, mask=cols < WIDTH)
            score = tl.sum(x.to(tl.float32) * k_first.to(tl.float32)[None, :], 1)
            top = score * (scale * 1.4426950408889634)
            total += 1.0
            acc += v_first.to(tl.float32)[None, :]
    k_at = keys + batch * k_batch + head * k_head + cols[None, :]
    v_at = values + batch * v_batch + head * v_head + cols[None, :]
    for start in tl.range(split * BLOCK, length, SPLITS * BLOCK):
        token = start + tokens
        is_there = token < length
        k = tl.load(k_at + token[:, None] * k_token, mask=is_there[:, None] & is_col, other=0.0)
        v = tl.load(v_at + token[:, None] * v_token, mask=is_there[:, None] & is_col, other=0.0)
        is_seen = is_there
        if HAS_MASK:
            is_seen = tl.load(mask + batch * mask_batch + token, mask=is_there, other=0) != 0
        scores = tl.dot(x, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        p = tl.exp2(scores - base[:, None])
        shrunk = tl.exp2(top - base)
        total = total * shrunk + tl.sum(p, 1)
        acc = acc * shrunk[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = higher

    out = y + (batch * HEADS + head * GROUP) * WIDTH
    if SPLITS == 1:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + rows[:, None] * WIDTH + cols[None, :], result.to(y.dtype.element_ty), mask=is_x)
    else:
        of_head = batch * tl.num_programs(1) + head
        part = of_head * SPLITS + split
        tl.store(sums + (part * GROUP + rows)[:, None] * WIDTH + cols[None, :], acc, mask=is_x)
        tl.store(tops + (part * GROUP + rows) * 2, top, mask=rows < GROUP)
        tl.store(tops + (part * GROUP + rows) * 2 + 1, total, mask=rows < GROUP)
        tl.debug_barrier()  # all threads have stored, and one says so
        if tl.atomic_add(arrived + of_head, 1, sem="acq_rel") == SPLITS - 1:
            parts, members = tl.arange(0, SPLIT_ROWS), tl.arange(0, GROUP_ROWS)
            index = (of_head * SPLITS + parts)[:, None] * GROUP + members[None, :]
            is_part = (parts[:, None] < SPLITS) & (members[None, :] < GROUP)
            highs = tl.load(tops + index * 2, mask=is_part, other=float("-inf"), cache_modifier=".cg")
            totals = tl.load(tops + index * 2 + 1, mask=is_part, other=0.0, cache_modifier=".cg")
            from_ = sums + index[:, :, None] * WIDTH + cols[None, None, :]
            is_number = is_part[:, :, None] & (cols[None, None, :] < WIDTH)
            accs = tl.load(from_, mask=is_number, other=0.0, cache_modifier=".cg")
            highest = tl.max(highs, 0)
            highest = tl.where(highest == float("-inf"), 0.0, highest)
            weights = tl.exp2(highs - highest[None, :])
            whole = tl.sum(weights * totals, 0)
            result = tl.sum(weights[:, :, None] * accs, 0) / tl.where(whole > 0, whole, 1.0)[:, None]
            to = out + members[:, None] * WIDTH + cols[None, :]
            tl.store(to, result.to(y.dtype.element_ty), mask=(members[:, None] < GROUP) & is_col)
            tl.store(arrived + of_head, 0)  # for the next call


# By the id of a cache's keys: the tensor, and for each of its heads how many splits have arrived; 0 between
# calls. A cache is one sequence's: nobody attends to it twice at the same time.
_counters: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}


def _counter(keys: torch.Tensor) -> torch.Tensor:
    key, heads = id(keys), keys.shape[0] * keys.shape[1]
    known = _counters.get(key)
    if known is not None and known[0]() is keys and known[1].numel() == heads:
        return known[1]
    counter = torch.zeros(heads, dtype=torch.int32, device=keys.device)
    _counters[key] = (weakref.ref(keys, lambda _: _counters.pop(key, None)), counter)
    return counter


def plan(batch: int, kv_heads: int, size: int, width: int, processors: int) -> tuple[int, int]:
    """Tokens of a block, and how many splits share the blocks of a head: two on every processor."""
    block = 64 if width <= 128 else 32
    splits = min(-(-size // block), 2 * processors // (batch * kv_heads), _MOST_SPLITS)
    return block, max(1, splits)


def launch(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    mask: Any,
    scale: float,
    new: tuple[Any, Any] = (None, None),
    rotation: tuple[Any, Any] = (None, None),
) -> torch.Tensor:
    """With ``new``, the k and v of the token, and its ``rotation``, the token is appended: ``lengths`` do not
    count it, and rows of the cache are contiguous."""
    batch, heads, _, width = q.shape
    kv_heads, size = keys.shape[1:3]
    q, keys, values, k, v = (_with_whole_rows(tensor) for tensor in (q, keys, values, *new))
    cos, sin = (None if tensor is None else tensor.contiguous() for tensor in rotation)
    mask = mask if mask is None or mask.stride(1) == 1 else mask.contiguous()
    y = q.new_empty((batch, 1, heads, width))
    if y.numel() == 0:
        return y
    processors, overlaps = _device(q)
    block, splits = plan(batch, kv_heads, size, width, processors)
    group = heads // kv_heads
    partial = splits if splits > 1 else 0
    sums = q.new_empty((batch * kv_heads * partial * group, width), dtype=torch.float32)
    tops = q.new_empty((batch * kv_heads * partial * group, 2), dtype=torch.float32)
    arrived = _counter(keys) if splits > 1 else lengths
    more = {"launch_pdl": True} if overlaps else {}
    _kernel[(splits, kv_heads, batch)](
        q,
        keys,
        values,
        lengths,
        mask,
        k,
        v,
        cos,
        sin,
        y,
        sums,
        tops,
        arrived,
        scale,
        size,
        q.stride(0),
        q.stride(1),
        *(stride for tensor in (k, v) for stride in ((0, 0) if tensor is None else tensor.stride()[:2])),
        0 if cos is None or cos.shape[0] == 1 else width,
        *keys.stride()[:3],
        *values.stride()[:3],
        int(lengths.shape[0] > 1),
        0 if mask is None else mask.stride(0),
        HAS_MASK=mask is not None,
        APPENDS=cos is not None,
        HEADS=heads,
        GROUP=group,
        GROUP_ROWS=triton.next_power_of_2(group),
        ROWS=max(16, triton.next_power_of_2(group)),
        WIDTH=width,
        COLS=max(16, triton.next_power_of_2(width)),
        BLOCK=block,
        SPLITS=splits,
        SPLIT_ROWS=triton.next_power_of_2(splits),
        OVERLAPS=overlaps,
        num_warps=4,
        num_stages=3,
        **more,
    )
    return y


def _with_whole_rows(tensor: Any) -> Any:
    return tensor if tensor is None or tensor.stride(3) == 1 else tensor.contiguous()


def _device(q: torch.Tensor) -> tuple[int, bool]:
    """Processors, and whether a kernel may start before the one ahead of it has ended."""
    if q.device.type != "cuda":  # Triton's interpreter
        return 8, False
    properties = torch.cuda.get_device_properties(q.device)
    return properties.multi_processor_count, properties.major >= 9
