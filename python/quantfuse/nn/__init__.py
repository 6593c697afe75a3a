# SPDX-License-Identifier: Apache-2.0
"""Modules for PyTorch models. Needs torch, which ``import quantfuse`` does not."""

from .._scheme import SCHEMES, Scheme
from ._fused import FusedLinear, LinearGELU, LinearSiLU
from ._linear import QuantizedLinear
from ._mlp import GatedMLP
from ._norm import RMSNorm

__all__ = [
    "SCHEMES",
    "FusedLinear",
    "GatedMLP",
    "LinearGELU",
    "LinearSiLU",
    "QuantizedLinear",
    "RMSNorm",
    "Scheme",
]
