# SPDX-License-Identifier: Apache-2.0
"""What ``torch.compile`` is to know of quantized layers."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from .. import _operators as _operators  # defines the operators

_LINEAR = torch.ops.quantfuse.linear.default
_RMS_NORM = torch.ops.quantfuse.rms_norm.default
# Places among the arguments of the operator.
_RESIDUAL, _ACT_QUANT, _X_SCALE, _BATCH_INVARIANT = 11, 12, 14, 16


def compile_options(**more: Any) -> dict[str, Any]:
    """Options under which ``torch.compile`` makes the fewest kernels of a quantized model.

    What a model adds to the output of a quantized layer becomes the layer's ``residual``, which costs
    nothing there, an ``RMSNorm`` that only one layer reads becomes its ``x_gain``, and elementwise kernels
    that do not depend on each other become one. For models that are not quantized only the last changes
    anything.

    Args:
        more: options of Inductor, which take precedence.

    >>> import torch, quantfuse as qf
    >>> layer = qf.nn.QuantizedLinear.from_linear(torch.nn.Linear(64, 64), "int4")
    >>> forward = torch.compile(lambda x: x + layer(x), options=qf.compile_options())
    """
    return {"combo_kernels": True, "post_grad_custom_pre_pass": FoldIntoLinears(), **more}


class FoldIntoLinears(CustomGraphPass):
    """What stands around quantized layers becomes part of them."""

    def __call__(self, graph: Graph) -> None:
        self.fold_residuals(graph)
        self.fold_norms(graph)

    def fold_residuals(self, graph: Graph) -> None:
        """``add(linear(x), r)`` becomes ``linear(x, residual=r)``: one kernel, and one rounding, less."""
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
            for product, residual in (node.args, node.args[::-1]):
                if _is_foldable(node, product, residual):
                    with graph.inserting_before(node):
                        arguments = [*product.args]
                        arguments[_RESIDUAL] = residual
                        folded = graph.call_function(_LINEAR, tuple(arguments))
                    folded.meta.update(product.meta, val=node.meta["val"])
                    node.replace_all_uses_with(folded)
                    graph.erase_node(node)
                    graph.erase_node(product)
                    break

    def fold_norms(self, graph: Graph) -> None:
        """``linear(rms_norm(x, gain))`` becomes ``linear(x, x_gain=gain)``: a kernel less for few tokens."""
        for node in graph.find_nodes(op="call_function", target=_LINEAR):
            norm = node.args[0]
            if not _is_norm_of(norm, node):
                continue
            x, gain, eps = norm.args
            batch_invariant = node.args[_BATCH_INVARIANT] if len(node.args) > _BATCH_INVARIANT else False
            node.args = (x, *node.args[1:_BATCH_INVARIANT], batch_invariant, gain, eps)
            graph.erase_node(norm)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _is_foldable(add: Node, product: Any, residual: Any) -> bool:
    if not (isinstance(product, Node) and isinstance(residual, Node)) or add.kwargs:
        return False
    if product.target is not _LINEAR or product.kwargs or len(product.users) != 1:
        return False
    sum_, terms = add.meta["val"], (product.meta["val"], residual.meta["val"])
    return product.args[_RESIDUAL] is None and all(
        term.shape == sum_.shape and term.dtype == sum_.dtype for term in terms
    )


def _is_norm_of(norm: Any, product: Node) -> bool:
    if not isinstance(norm, Node) or norm.target is not _RMS_NORM or norm.kwargs or len(norm.users) != 1:
        return False
    is_quantized = product.args[_ACT_QUANT] is not None or product.args[_X_SCALE] is not None
    return not (is_quantized or product.kwargs or norm.args[1] is None)
