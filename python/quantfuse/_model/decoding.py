# SPDX-License-Identifier: Apache-2.0
"""How ``flex_attention`` is to decode."""

from __future__ import annotations

from typing import Any

import torch


def flex_options(cache: torch.Tensor) -> dict[str, Any]:
    """Of the kernel that decodes over ``cache`` ``[batch, heads, length, width]``, which by itself keeps too
    little of it in flight. Each head is read in parts of 128 tokens or more, two on every processor."""
    batch, heads, length, _ = cache.shape
    is_cuda = cache.device.type == "cuda"
    processors = torch.cuda.get_device_properties(cache.device).multi_processor_count if is_cuda else 1
    parts = min(-(-length // 128), 2 * processors // (batch * heads))
    return {"BLOCK_N": 64, "num_stages": 3, "num_warps": 4, "SPLIT_KV": max(1, parts)}
