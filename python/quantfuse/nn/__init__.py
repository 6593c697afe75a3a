# SPDX-License-Identifier: Apache-2.0
"""Modules for PyTorch models. Needs torch, which ``import quantfuse`` does not."""

from .._scheme import SCHEMES, Scheme
from ._linear import LinearGELU, LinearSiLU, QuantizedLinear
from ._mlp import GatedMLP
from ._norm import RMSNorm

__all__ = ["SCHEMES", "GatedMLP", "LinearGELU", "LinearSiLU", "QuantizedLinear", "RMSNorm", "Scheme"]
