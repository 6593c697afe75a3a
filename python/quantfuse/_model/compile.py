# SPDX-License-Identifier: Apache-2.0
"""What ``torch.compile`` is to know of quantized layers."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from .. import _operators as _operators  # defines the operators

_LINEAR = torch.ops.quantfuse.linear.default
_RESIDUAL = 11  # its place among the arguments of the operator


def compile_options(**more: Any) -> dict[str, Any]:
    """Options under which ``torch.compile`` makes the fewest kernels of a quantized model.

    What a model adds to the output of a quantized layer becomes the layer's ``residual``, which costs
    nothing there, and elementwise kernels that do not depend on each other become one. For models that are
    not quantized the former changes nothing.

    Args:
        more: options of Inductor, which take precedence.

    >>> import torch, quantfuse as qf
    >>> layer = qf.nn.QuantizedLinear.from_linear(torch.nn.Linear(64, 64), "int4")
    >>> forward = torch.compile(lambda x: x + layer(x), options=qf.compile_options())
    """
    return {"combo_kernels": True, "post_grad_custom_pre_pass": FoldResiduals(), **more}


class FoldResiduals(CustomGraphPass):
    """``add(linear(x), r)`` becomes ``linear(x, residual=r)``: one kernel, and one rounding, less."""

    def __call__(self, graph: Graph) -> None:
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
