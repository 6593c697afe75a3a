# SPDX-License-Identifier: Apache-2.0
"""Quantized and fused kernels for LLM inference.

Every function takes NumPy arrays, torch tensors or any CPU object that speaks DLPack, copies none of them,
and returns outputs of the same family: torch tensors for torch tensors, NumPy arrays for everything else.

* **Layout.** Rows, the last dimension, are contiguous; any number of leading dimensions is allowed as long as
  they can be seen as one without a copy. 4-bit codes are two per byte along the last dimension, the low
  nibble first.
* **Types.** NumPy has no bfloat16 and no FP8: arrays of ``ml_dtypes`` types are taken as they are, FP8 codes
  also as ``uint8``. FP8 outputs are ``uint8`` in NumPy and ``torch.float8_*`` in torch; E8M0 scales are
  ``uint8`` in both.
* **Aliasing.** ``out=`` gives the memory of the outputs, and it overlaps no input unless a function says so.
* **Streams.** On a CUDA device the work is queued on torch's current stream and the call returns at once;
  nothing but ``pack`` synchronises, and every other call may be captured in a CUDA graph. On the CPU a call
  returns when its work is done. Other Python threads run meanwhile: the GIL is released.
* **Errors.** ``ValueError`` names the argument, what was given and what was expected; ``NotImplementedError``
  gives every kernel's reason; ``RuntimeError`` comes from the device. On an error nothing has been written.
* **Gradients.** The functions stand outside autograd; :func:`linear_backward` is the gradient of
  :func:`linear`.
"""

from typing import TYPE_CHECKING, Any

from ._calibrate import AwqResult, GptqResult, awq_search, gptq_quantize
from ._dequantize_words import awq_dequantize, gptq_dequantize
from ._library import (
    Explanation,
    explain,
    get_num_threads,
    info,
    kernels,
    options,
    set_num_threads,
    version,
)
from ._linear import linear, linear_backward
from ._norm import activate, gated_act, rms_norm, silu_and_mul
from ._plain_weight import PlainWeight
from ._products import int4_matmul, int8_matmul, scaled_mm, w8a8_block_fp8_matmul, w8a8_block_int8_matmul
from ._quantize import (
    Quantized,
    dequantize_tensor,
    per_token_group_quant_fp8,
    per_token_group_quant_int8,
    per_token_quant_int8,
    quantize_tensor,
    static_quant_fp8,
)
from ._scheme import SCHEMES, Scheme
from ._weight import QuantizedWeight
from .calibration import calibrate_and_quantize

if TYPE_CHECKING:
    from . import nn as nn
    from ._attention import append_and_attend as append_and_attend
    from ._attention import decode_attention as decode_attention
    from ._model.compile import compile_options as compile_options
    from ._model.load import load_quantized as load_quantized
    from ._model.quantize import quantize_model as quantize_model
    from ._model.quantize import replace_linear_with_quantized as replace_linear_with_quantized
    from .integrations.transformers import QuantFuseConfig as QuantFuseConfig

__version__ = version()

# What needs torch is imported when it is asked for.
_LAZY = {
    "QuantFuseConfig": "integrations.transformers",
    "nn": "nn",
    "append_and_attend": "_attention",
    "compile_options": "_model.compile",
    "decode_attention": "_attention",
    "load_quantized": "_model.load",
    "quantize_model": "_model.quantize",
    "replace_linear_with_quantized": "_model.quantize",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'quantfuse' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f".{_LAZY[name]}", __name__)
    thing = module if name == _LAZY[name] else getattr(module, name)
    globals()[name] = thing
    return thing


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "SCHEMES",
    "AwqResult",
    "Explanation",
    "GptqResult",
    "PlainWeight",
    "Quantized",
    "QuantizedWeight",
    "Scheme",
    "activate",
    "awq_dequantize",
    "awq_search",
    "calibrate_and_quantize",
    "dequantize_tensor",
    "explain",
    "gated_act",
    "get_num_threads",
    "gptq_dequantize",
    "gptq_quantize",
    "info",
    "int4_matmul",
    "int8_matmul",
    "kernels",
    "linear",
    "linear_backward",
    "options",
    "per_token_group_quant_fp8",
    "per_token_group_quant_int8",
    "per_token_quant_int8",
    "quantize_tensor",
    "rms_norm",
    "scaled_mm",
    "set_num_threads",
    "silu_and_mul",
    "static_quant_fp8",
    "version",
    "w8a8_block_fp8_matmul",
    "w8a8_block_int8_matmul",
]
