# SPDX-License-Identifier: Apache-2.0
"""How ``flex_attention`` is to decode."""

from __future__ import annotations

from typing import Any

import torch


def flex_options(num_heads: int, device: torch.device) -> dict[str, Any]:
    """Of the kernel that decodes for so many heads of a cache. Left alone it keeps too little of the cache in
    flight; and to join more than 8 parts Inductor makes two kernels."""
    is_cuda = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 1
    parts = min(8, max(1, 2 * processors // num_heads))
    return {"BLOCK_N": 64, "num_stages": 3, "num_warps": 4, "SPLIT_KV": parts}
