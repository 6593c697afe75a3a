# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.quantfuse.*``: what torch.compile, torch.export and autograd see of the library.

A weight is given by its tensors: ``packed``, or the canonical ones, or both. What the binding makes of them
is kept beside the tensor for as long as it lives, so that a call pays for none of it; canonical tensors that
come without packed ones are packed then, once.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ._library import LINEAR, RMS_NORM, invoke
from ._linear import linear as _call_linear
from ._linear import linear_backward as _call_linear_backward
from ._norm import rms_norm as _call_rms_norm
from ._plain_weight import PlainWeight
from ._tensors import ACT_FORMATS, ACTIVATIONS, DYNAMIC, adopt, argument_like, choice
from ._weight import QuantizedWeight

_WEIGHT = (
    "Tensor? packed, Tensor? codes, Tensor? scales, Tensor? zeros, Tensor? offsets, Tensor? g_idx, "
    "str format, int[] geometry"
)
_library = torch.library.Library("quantfuse", "DEF")
_library.define(
    f"linear(Tensor x, {_WEIGHT}, Tensor? bias, str activation, Tensor? residual, str? act_quant, "
    "int act_group, Tensor? x_scale, ScalarType? out_dtype, bool batch_invariant=False, "
    "Tensor? x_gain=None, float x_eps=1e-6, bool fast_accumulation=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_library.define(
    f"linear_quantized(Tensor x, {_WEIGHT}, Tensor? bias, str activation, str? act_quant, int act_group, "
    "Tensor? x_scale, str out_quant, int out_group, bool batch_invariant=False, "
    "bool fast_accumulation=False) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_library.define(
    f"linear_backward(Tensor dy, {_WEIGHT}) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_library.define(
    "linear_plain(Tensor x, Tensor weight, Tensor? bias, str activation, bool batch_invariant) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_library.define(
    "rms_norm(Tensor x, Tensor? gain, float eps) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_library.define(
    "rms_norm_quantized(Tensor x, Tensor? gain, float eps, str out_quant, int out_group) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)


def geometry_of(weight: QuantizedWeight) -> list[int]:
    """``n, k, block rows, block columns, is_gated``: what the tensors of a weight do not say."""
    return [*weight.shape, *weight.block, int(weight.is_gated)]


# ---- Weights ----

# By a tensor's id and its use: the tensor, what the weight was made of, and a weight that borrows the memory
# of tensors through aliases, so that it does not keep them alive, and no other tensor has the same address.
_weights: dict[tuple[int, bool, bool, bool], tuple[weakref.ref[torch.Tensor], Any, QuantizedWeight]] = {}


def _weight(
    packed: Any,
    codes: Any,
    scales: Any,
    zeros: Any,
    offsets: Any,
    g_idx: Any,
    format: str,
    geometry: list[int],
    for_backward: bool = False,
) -> QuantizedWeight:
    owner = codes if packed is None or for_backward else packed
    if owner is None:
        raise ValueError("quantfuse: packed and codes are both None, expected one of them")
    key = (id(owner), bool(geometry[4]), codes is None, for_backward)
    state: tuple[Any, ...] = (format, geometry)
    if packed is None:  # else the packed form is all that is read
        state = (format, geometry, _state_of(codes), _state_of(scales))
        if zeros is not None or offsets is not None or g_idx is not None:
            rest = (zeros, offsets, g_idx)
            state += tuple(None if tensor is None else _state_of(tensor) for tensor in rest)
    known = _weights.get(key)
    if known is not None and known[0]() is owner and known[1] == state:
        return known[2]
    weight = _make_weight(packed, codes, scales, zeros, offsets, g_idx, format, geometry)
    if packed is None and not for_backward:
        weight.pack()
    _weights[key] = (weakref.ref(owner, lambda _: _weights.pop(key, None)), state, weight)
    return weight


def _state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where it is, and how often it was written to, which inference mode does not count."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _make_weight(
    packed: Any,
    codes: Any,
    scales: Any,
    zeros: Any,
    offsets: Any,
    g_idx: Any,
    format: str,
    geometry: list[int],
) -> QuantizedWeight:
    n, k, block_rows, block_cols, is_gated = geometry
    block = (block_rows, block_cols)
    if codes is None:
        return QuantizedWeight.from_packed(format, (n, k), block, packed.detach(), is_gated=bool(is_gated))
    tensors = (codes, scales, zeros, g_idx, offsets)
    aliases = [None if tensor is None else tensor.detach() for tensor in tensors]
    weight = QuantizedWeight(
        format, (n, k), block, aliases[0], aliases[1], aliases[2], aliases[3], bool(is_gated), aliases[4]
    )
    weight.packed = None if packed is None else packed.detach()
    return weight


# ---- linear ----


def _linear(
    x: torch.Tensor,
    packed: Any,
    codes: Any,
    scales: Any,
    zeros: Any,
    offsets: Any,
    g_idx: Any,
    format: str,
    geometry: list[int],
    bias: Any,
    activation: str,
    residual: Any,
    act_quant: str | None,
    act_group: int,
    x_scale: Any,
    out_dtype: Any,
    batch_invariant: bool = False,
    x_gain: Any = None,
    x_eps: float = 1e-6,
    fast_accumulation: bool = False,
) -> Any:
    x = x if x.is_contiguous() else x.contiguous()
    weight = _weight(packed, codes, scales, zeros, offsets, g_idx, format, geometry)
    if residual is None and x_scale is None and out_dtype is None and x_gain is None:
        return _call_shortly(
            x, weight, bias, activation, act_quant, act_group, batch_invariant, fast_accumulation
        )
    return _call_linear(
        x,
        weight,
        bias,
        activation=activation,
        residual=residual if residual is None else residual.contiguous(),
        act_quant=act_quant,
        act_group=act_group,
        x_scale=x_scale,
        out_dtype=out_dtype,
        batch_invariant=batch_invariant,
        x_gain=x_gain,
        x_eps=x_eps,
        fast_accumulation=fast_accumulation,
    )


def _call_shortly(
    x: torch.Tensor,
    weight: QuantizedWeight | PlainWeight,
    bias: Any,
    activation: str,
    act_quant: str | None,
    act_group: int,
    batch_invariant: bool,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    """The common call by the shortest way: for one token the kernel takes less than general checks do."""
    cols = weight.out_features
    x, family = adopt(x, "x")
    y = x.new_empty((*x.shape[:-1], cols))
    invoke(
        LINEAR,
        family.argument(x, "x"),
        None,
        ACT_FORMATS[act_quant],
        act_group,
        *weight.call_arguments(family),
        bias,
        ACTIVATIONS[activation],
        None,
        y,
        0,
        DYNAMIC,
        0,
        None,
        batch_invariant,
        None,
        0.0,
        fast_accumulation,
    )
    return y


def _linear_fake(x: Any, *args: Any) -> Any:
    geometry, (x_scale, out_dtype) = args[7], args[13:15]
    dtype = out_dtype or (torch.float32 if x_scale is not None else x.dtype)
    return x.new_empty((*x.shape[:-1], _out_features(x, geometry)), dtype=dtype)


def _out_features(x: Any, geometry: list[int]) -> int:
    n, k, _, _, is_gated = geometry
    torch._check(x.ndim > 0, lambda: "linear: x has shape (), expected at least one dimension")
    torch._check(x.shape[-1] == k, lambda: f"linear: x has {x.shape[-1]} columns, expected k={k}")
    return n // 2 if is_gated else n


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, *tensors, ctx.format, ctx.geometry, bias, ctx.activation, residual = inputs[:12]
    ctx.act_quant, ctx.act_group, x_scale, ctx.out_dtype = inputs[12:16]
    ctx.batch_invariant, ctx.fast_accumulation = inputs[16], inputs[19]
    if inputs[17] is not None:
        raise NotImplementedError("linear: x_gain has no gradient; call rms_norm before it")
    needs_input = ctx.activation != "identity" or ctx.geometry[4]
    ctx.save_for_backward(x if needs_input else None, *tensors, bias, x_scale)
    ctx.x_dtype = x.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype


def _linear_gradient(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    """Quantizing x counts as the identity: the gradient goes straight through it."""
    x, packed, *canonical, bias, x_scale = ctx.saved_tensors
    *sizes, is_gated = ctx.geometry
    plain = (None if is_gated else packed, *canonical, ctx.format, [*sizes, 0])
    dz = dy
    if x is not None:
        quantization = (ctx.act_quant, ctx.act_group, x_scale, ctx.out_dtype)
        permissions = (ctx.batch_invariant, None, 1e-6, ctx.fast_accumulation)
        z = torch.ops.quantfuse.linear(x, *plain, bias, "identity", None, *quantization, *permissions)
        dz = _through_activation(dy, z, ctx.activation, bool(is_gated))
    needs_x, needs_bias, needs_residual = (ctx.needs_input_grad[i] for i in (0, 9, 11))
    dx = torch.ops.quantfuse.linear_backward(dz, *plain).to(ctx.x_dtype) if needs_x else None
    dbias = dz.reshape(-1, dz.shape[-1]).sum(0).to(bias.dtype) if needs_bias else None
    dresidual = dy.to(ctx.residual_dtype) if needs_residual else None
    return (dx, *[None] * 8, dbias, None, dresidual, *[None] * 8)


_ACTIVATIONS: dict[str, Any] = {
    "identity": lambda z: z,
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}
_DERIVATIVES: dict[str, Any] = {
    "identity": lambda dy, z: dy,
    "relu": lambda dy, z: dy * (z > 0),
    "gelu": torch.ops.aten.gelu_backward.default,
    "gelu_tanh": lambda dy, z: torch.ops.aten.gelu_backward.default(dy, z, approximate="tanh"),
    "silu": torch.ops.aten.silu_backward.default,
}


def _through_activation(dy: Any, z: Any, activation: str, is_gated: bool) -> Any:
    derivative = _DERIVATIVES[activation]
    if not is_gated:
        return derivative(dy.to(z.dtype), z)
    gate, up = z.chunk(2, dim=-1)
    dy = dy.to(z.dtype)
    return torch.cat([derivative(dy * up, gate), dy * _ACTIVATIONS[activation](gate)], dim=-1)


# ---- linear with a quantized output ----


def _linear_quantized(
    x: torch.Tensor,
    packed: Any,
    codes: Any,
    scales: Any,
    zeros: Any,
    offsets: Any,
    g_idx: Any,
    format: str,
    geometry: list[int],
    bias: Any,
    activation: str,
    act_quant: str | None,
    act_group: int,
    x_scale: Any,
    out_quant: str,
    out_group: int,
    batch_invariant: bool = False,
    fast_accumulation: bool = False,
) -> Any:
    return _call_linear(
        x.contiguous(),
        _weight(packed, codes, scales, zeros, offsets, g_idx, format, geometry),
        bias,
        activation=activation,
        act_quant=act_quant,
        act_group=act_group,
        x_scale=x_scale,
        out_quant=out_quant,
        out_group=out_group,
        batch_invariant=batch_invariant,
        fast_accumulation=fast_accumulation,
    )


_OUT_DTYPES = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def _quantized_like(x: Any, cols: int, out_quant: str, out_group: int) -> Any:
    leading = x.shape[:-1]
    codes = x.new_empty((*leading, cols), dtype=_OUT_DTYPES[out_quant])
    return codes, x.new_empty((*leading, -(-cols // (out_group or cols or 1))), dtype=torch.float32)


def _linear_quantized_fake(x: Any, *args: Any) -> Any:
    geometry, (out_quant, out_group) = args[7], args[13:15]
    return _quantized_like(x, _out_features(x, geometry), out_quant, out_group)


# ---- linear_backward ----


def _linear_backward(
    dy: torch.Tensor,
    packed: Any,
    codes: Any,
    scales: Any,
    zeros: Any,
    offsets: Any,
    g_idx: Any,
    format: str,
    geometry: list[int],
) -> Any:
    if codes is None:
        raise ValueError(
            "linear_backward: the canonical tensors of the weight are needed; call keep_canonical()"
        )
    return _call_linear_backward(
        dy.contiguous(),
        _weight(None, codes, scales, zeros, offsets, g_idx, format, geometry, for_backward=True),
    )


def _linear_backward_fake(dy: Any, *args: Any) -> Any:
    return dy.new_empty((*dy.shape[:-1], args[7][1]))


# ---- linear over a weight that is not quantized ----

# By a tensor's id: the tensor, what of it was packed, and the weight.
_plain_weights: dict[int, tuple[weakref.ref[torch.Tensor], Any, PlainWeight]] = {}


def _plain_weight(w: torch.Tensor) -> PlainWeight:
    key = id(w)
    state = _state_of(w)
    known = _plain_weights.get(key)
    if known is not None and known[0]() is w and known[1] == state:
        return known[2]
    weight = PlainWeight(w.detach() if w.is_contiguous() else w.detach().contiguous())
    if not w.is_cuda:
        weight.pack()
    _plain_weights[key] = (weakref.ref(w, lambda _: _plain_weights.pop(key, None)), state, weight)
    return weight


def _linear_plain(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, activation: str, batch_invariant: bool
) -> Any:
    x = x if x.is_contiguous() else x.contiguous()
    return _call_shortly(x, _plain_weight(weight), bias, activation, None, 0, batch_invariant)


def _linear_plain_fake(x: Any, weight: Any, bias: Any, activation: str, batch_invariant: bool) -> Any:
    return x.new_empty((*x.shape[:-1], _out_features(x, [*weight.shape, 0, 0, 0])))


def _save_linear_plain(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, ctx.activation, ctx.batch_invariant = inputs
    ctx.save_for_backward(x, weight, bias)


def _linear_plain_gradient(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    """Nothing is left to fuse: the products are torch's own."""
    x, weight, bias = ctx.saved_tensors
    dz = dy
    if ctx.activation != "identity":
        z = torch.ops.quantfuse.linear_plain(x, weight, bias, "identity", ctx.batch_invariant)
        dz = _through_activation(dy, z, ctx.activation, is_gated=False)
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    rows = dz.reshape(-1, dz.shape[-1])
    dx = (dz.to(weight.dtype) @ weight).to(x.dtype) if needs_x else None
    dweight = None
    if needs_weight:
        dweight = rows.T.to(weight.dtype) @ x.reshape(-1, x.shape[-1]).to(weight.dtype)
    dbias = rows.sum(0).to(bias.dtype) if needs_bias else None
    return dx, dweight, dbias, None, None


# ---- rms_norm ----


def _rms_norm(x: torch.Tensor, gain: Any, eps: float) -> Any:
    """By the shortest way too."""
    x, family = adopt(x if x.is_contiguous() else x.contiguous(), "x")
    y = torch.empty_like(x)
    gain = argument_like(gain, "gain", family, "x")
    invoke(RMS_NORM, family.argument(x, "x"), None, gain, eps, y, 0, DYNAMIC, 0, None, 0)
    return y


def _rms_norm_fake(x: Any, gain: Any, eps: float) -> Any:
    return x.new_empty(x.shape)


def _save_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, gain, ctx.eps = inputs
    ctx.save_for_backward(x, gain)


def _rms_norm_gradient(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, gain = ctx.saved_tensors
    h, dy = x.float(), dy.float()
    rate = torch.rsqrt(h.square().mean(-1, keepdim=True) + ctx.eps)
    dgain = None
    if ctx.needs_input_grad[1]:
        dgain = (dy * h * rate).reshape(-1, h.shape[-1]).sum(0).to(gain.dtype)
    scaled = dy if gain is None else dy * gain.float()
    dx = rate * (scaled - h * rate.square() * (scaled * h).mean(-1, keepdim=True))
    return dx.to(x.dtype), dgain, None


def _rms_norm_quantized(x: torch.Tensor, gain: Any, eps: float, out_quant: str, out_group: int) -> Any:
    return _call_rms_norm(x.contiguous(), gain, eps, out_quant=out_quant, out_group=out_group)


def _rms_norm_quantized_fake(x: Any, gain: Any, eps: float, out_quant: str, out_group: int) -> Any:
    return _quantized_like(x, x.shape[-1], out_quant, out_group)


for _name, _kernel, _fake in (
    ("linear", _linear, _linear_fake),
    ("linear_quantized", _linear_quantized, _linear_quantized_fake),
    ("linear_backward", _linear_backward, _linear_backward_fake),
    ("linear_plain", _linear_plain, _linear_plain_fake),
    ("rms_norm", _rms_norm, _rms_norm_fake),
    ("rms_norm_quantized", _rms_norm_quantized, _rms_norm_quantized_fake),
):
    _library.impl(_name, _kernel, "CPU")
    _library.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"quantfuse::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    "quantfuse::linear", _linear_gradient, setup_context=_save_linear, lib=_library
)
torch.library.register_autograd(
    "quantfuse::linear_plain", _linear_plain_gradient, setup_context=_save_linear_plain, lib=_library
)
torch.library.register_autograd(
    "quantfuse::rms_norm", _rms_norm_gradient, setup_context=_save_rms_norm, lib=_library
)


# ---- Eager calls ----

_linear_op = torch.ops.quantfuse.linear.default
_linear_quantized_op = torch.ops.quantfuse.linear_quantized.default
_linear_plain_op = torch.ops.quantfuse.linear_plain.default
_rms_norm_op = torch.ops.quantfuse.rms_norm.default
_rms_norm_quantized_op = torch.ops.quantfuse.rms_norm_quantized.default


def is_plain(x: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether nobody but the kernel has a say in a call: no autograd, tracer, subclass or mode."""
    if (
        type(x) is not torch.Tensor
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
    ):
        return False
    if forward_ad._current_level >= 0:
        for tensor in (x, other):
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError("quantfuse: there are no gradients in forward mode")
    may_need = x.requires_grad or (other is not None and other.requires_grad)
    return not (may_need and torch.is_grad_enabled()) and _get_current_dispatch_mode() is None


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd records what is computed from ``tensors``."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def dtype_of_result(x: torch.Tensor) -> torch.dtype:
    """The type of ``x``, or of autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def linear(x: torch.Tensor, *args: Any) -> Any:
    """``torch.ops.quantfuse.linear``, less the dispatcher where it would change nothing but the time."""
    return _linear(x, *args) if is_plain(x, args[8]) else _linear_op(x, *args)


def linear_quantized(x: torch.Tensor, *args: Any) -> Any:
    """``torch.ops.quantfuse.linear_quantized``, likewise."""
    return _linear_quantized(x, *args) if is_plain(x, args[8]) else _linear_quantized_op(x, *args)


def linear_plain(x: torch.Tensor, weight: torch.Tensor, bias: Any, *args: Any) -> Any:
    """``torch.ops.quantfuse.linear_plain``, likewise."""
    is_direct = is_plain(x, bias) and not needs_gradient(weight)
    return (_linear_plain if is_direct else _linear_plain_op)(x, weight, bias, *args)


def rms_norm(x: torch.Tensor, gain: torch.Tensor | None, eps: float) -> Any:
    """``torch.ops.quantfuse.rms_norm``, likewise."""
    return (_rms_norm if is_plain(x, gain) else _rms_norm_op)(x, gain, eps)


def rms_norm_quantized(x: torch.Tensor, gain: torch.Tensor | None, eps: float, *args: Any) -> Any:
    """``torch.ops.quantfuse.rms_norm_quantized``, likewise."""
    return (_rms_norm_quantized if is_plain(x, gain) else _rms_norm_quantized_op)(x, gain, eps, *args)


def checked_activation(activation: str | None) -> str:
    """The name of an activation, or ``ValueError``."""
    choice(ACTIVATIONS, activation, "activation")
    return activation or "identity"
