# SPDX-License-Identifier: Apache-2.0
"""Linear layers over quantized weights, as modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import _operators
from .._scheme import Scheme
from .._tensors import CODE_DTYPES, FORMATS, FOUR_BIT, MICROSCALED, blocks_of, ceil_div
from .._weight import QuantizedWeight, check_values
from ._frozen import FrozenWeight

_CANONICAL = ("codes", "scales", "zeros", "offsets", "g_idx")
_FORMAT_NUMBERS = {
    **FORMATS,
    "mxfp8": 16,
    "mxfp4": 17,
}  # in the state; microscaled formats have one of their own


class QuantizedLinear(nn.Linear):
    """``activation(x @ w.T + bias)`` with a quantized, frozen weight.

    Its state is the canonical form of the weight (``codes``, ``scales``, perhaps ``zeros`` and ``g_idx``),
    the same on every device; what the kernels of a device read is made there, once. On a CUDA device the
    packed form serves 16-bit inputs alone, so the canonical one moves to host memory, from where
    ``state_dict`` takes it; a call that needs it (float32 inputs, a gradient) brings it back.

    Args:
        scheme: a :class:`quantfuse.Scheme` or its name; ``bits=8`` and ``bits=4`` are short for ``int8`` and
            ``int4``.
        activation: None, ``relu``, ``gelu``, ``gelu_tanh`` or ``silu``.
        gated: the layer is ``activation(gate) * up`` of a weight ``[gate; up]`` of ``2 * out_features``
            rows.

    >>> import torch, quantfuse as qf
    >>> layer = qf.nn.QuantizedLinear.from_linear(torch.nn.Linear(256, 64), "int4")
    >>> layer
    QuantizedLinear(in_features=256, out_features=64, bias=True, scheme=int4, group=128)
    >>> layer(torch.zeros(2, 3, 256)).shape
    torch.Size([2, 3, 64])
    """

    #: Whether the bits of a row must not depend on how many rows there are.
    batch_invariant = False
    #: Whether FP8 sums may stay in the tensor cores (:func:`quantfuse.scaled_mm`).
    fast_accumulation = False
    #: The type of :attr:`weight`: that of the numbers it was quantized from.
    weight_dtype: torch.dtype = torch.float32
    #: Whether a loader is about to fill the layer, whose tensors are anything until then.
    is_loading = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        scheme: str | Scheme | None = None,
        bits: int | None = None,
        activation: str | None = None,
        gated: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        nn.Module.__init__(self)
        self.scheme = _scheme_of(scheme, bits)
        self._act_quant, self._act_group = self.scheme.act_quant, self.scheme.act_group
        self.in_features, self.out_features = in_features, out_features
        self.weight_dtype = dtype or torch.float32
        self.activation = _operators.checked_activation(activation)
        self._set_format(self.scheme.format, self.scheme.block, gated)
        for name in (*_CANONICAL, "layout"):
            self.register_buffer(name, None)
        self.register_buffer("packed", None, persistent=False)
        self._host: dict[str, torch.Tensor] | None = None
        self._keeps_canonical = self.scheme.act_quant is not None
        n = self.weight_shape[0]
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros(n, device=device, dtype=dtype)) if bias else None
        )
        for name, tensor in _empty_canonical(self, device).items():
            self._buffers[name] = tensor
        self.layout = self._layout_tensor(device)

    # ---- From other weights ----

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, scheme: str | Scheme = "int8", *, activation: str | None = None
    ) -> QuantizedLinear:
        """The quantized form of ``linear``, with its bias, on its device."""
        layer = cls.from_float(linear.weight, scheme, linear.bias, activation=activation)
        layer.train(linear.training)
        return layer

    @classmethod
    def from_float(
        cls,
        weight: torch.Tensor,
        scheme: str | Scheme = "int8",
        bias: torch.Tensor | None = None,
        *,
        activation: str | None = None,
    ) -> QuantizedLinear:
        """A layer of ``weight`` ``[out, in]``, on its device; on the meta device its state comes later."""
        layer = cls(
            weight.shape[1], weight.shape[0], bias=False, scheme=scheme, activation=activation, device="meta"
        )
        layer.bias = _parameter(bias)
        layer.weight_dtype = weight.dtype
        return layer if weight.is_meta else layer.quantize_from_float(weight)

    @classmethod
    def from_weight(
        cls,
        weight: QuantizedWeight,
        bias: torch.Tensor | None = None,
        *,
        scheme: Scheme | None = None,
        activation: str | None = None,
    ) -> QuantizedLinear:
        """A layer around the torch tensors of ``weight``, whichever its format and block are; ``scheme`` says
        what is done to activations, by default nothing."""
        scheme = scheme or _weight_only_scheme(weight.format)
        layer = cls(
            weight.shape[1],
            weight.out_features,
            bias=False,
            scheme=scheme,
            activation=activation,
            gated=weight.is_gated,
            device="meta",
        )
        layer.bias = _parameter(bias)
        layer._adopt(weight)
        layer.settle()
        return layer

    @classmethod
    def merged(
        cls, layers: list[QuantizedLinear], *, gated: bool = False, activation: str | None = None
    ) -> QuantizedLinear:
        """One layer whose rows are those of ``layers``, in order, exactly; their formats are the same. It is
        left to the caller to :meth:`settle` it."""
        first = layers[0]
        device = first._device()
        parts = [layer._held() for layer in layers]
        held = {
            name: None if parts[0][name] is None else torch.cat([part[name] for part in parts]).to(device)
            for name in ("codes", "scales", "zeros", "offsets")
        }
        rows = sum(layer.weight_shape[0] for layer in layers)
        g_idx = None if parts[0]["g_idx"] is None else parts[0]["g_idx"].to(device)
        weight = QuantizedWeight(
            first.weight_format,
            (rows, first.in_features),
            first.block,
            held["codes"],
            held["scales"],
            held["zeros"],
            g_idx,
            gated,
            held["offsets"],
        )
        layer = cls(
            first.in_features,
            weight.out_features,
            bias=False,
            scheme=first.scheme,
            activation=activation,
            gated=gated,
            device="meta",
        )
        layer._keeps_canonical, layer.weight_dtype = first._keeps_canonical, first.weight_dtype
        biases = [layer.bias for layer in layers]
        present = next((bias for bias in biases if bias is not None), None)
        if present is not None:
            filled = [
                present.new_zeros(layer.weight_shape[0]) if layer.bias is None else layer.bias.detach()
                for layer in layers
            ]
            layer.bias = nn.Parameter(torch.cat(filled), requires_grad=present.requires_grad)
        layer._adopt(weight)
        layer.train(first.training)
        return layer

    @torch.no_grad()
    def quantize_from_float(self, weight: torch.Tensor) -> QuantizedLinear:
        """Quantizes ``weight`` ``[n, in_features]`` by the layer's scheme; returns the layer."""
        if tuple(weight.shape) != self.weight_shape:
            raise ValueError(f"weight has shape {tuple(weight.shape)}, expected {self.weight_shape}")
        if not bool(torch.isfinite(weight).all()):
            raise ValueError("weight has values that are not finite")
        self._adopt(self.quantize(weight))
        self.settle()
        return self

    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        """``weight`` by the layer's scheme, on its device."""
        scheme, device = self.scheme, weight.device

        def quantized(weight: torch.Tensor) -> QuantizedWeight:
            return QuantizedWeight.from_float(
                weight.detach().contiguous(),
                scheme.format,
                group=scheme.group,
                symmetric=scheme.symmetric,
                mse=scheme.mse,
                gated=self.is_gated,
            )

        try:
            return quantized(weight)
        except NotImplementedError:  # a GPU does not make every format; a weight is quantized but once
            if device.type == "cpu":
                raise
        made = quantized(weight.cpu())
        codes, scales, zeros, _ = (
            None if tensor is None else tensor.to(device)
            for tensor in (made.codes, made.scales, made.zeros, made.g_idx)
        )
        return QuantizedWeight(made.format, made.shape, made.block, codes, scales, zeros, None, made.is_gated)

    def _adopt(self, weight: QuantizedWeight) -> None:
        self._set_format(weight.format, weight.block, weight.is_gated)
        for name in _CANONICAL:
            self._buffers[name] = getattr(weight, name)
        self._buffers["layout"] = self._layout_tensor(getattr(weight.codes, "device", None))
        self._buffers["packed"], self._host = None, None

    def _set_format(self, format: str, block: tuple[int, int], is_gated: bool) -> None:
        self.weight_format, self.block, self.is_gated = format, block, is_gated
        self.weight_shape = ((1 + is_gated) * self.out_features, self.in_features)
        self._geometry = [*self.weight_shape, *block, int(is_gated)]

    # ---- Use ----

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, of the type of ``x`` or of autocast."""
        result: torch.Tensor = self._call(x)
        return result

    def _call(self, x: torch.Tensor, x_scale: torch.Tensor | None = None, out_dtype: Any = None) -> Any:
        """``x`` is numbers, or codes of the scheme's ``act_quant`` with their ``x_scale``."""
        device_type = "cuda" if x.is_cuda else "cpu"
        if torch.is_autocast_enabled(device_type) and x_scale is None:
            x = x.to(torch.get_autocast_dtype(device_type))
        if self._host is not None and (
            x.requires_grad
            or (x.is_cuda and x.dtype is torch.float32)
            or (self.is_gated and _operators.needs_gradient(self.bias))
        ):
            self.keep_canonical()
        # Not by name: to find a tensor of a module takes longer than to find its dictionary.
        held = self._buffers
        return _operators.linear(
            x,
            held["packed"],
            held["codes"],
            held["scales"],
            held["zeros"],
            held["offsets"],
            held["g_idx"],
            self.weight_format,
            self._geometry,
            self._parameters["bias"],
            self.activation,
            None,
            self._act_quant,
            self._act_group,
            x_scale,
            out_dtype,
            self.batch_invariant,
            *((None, 1e-6, True) if self.fast_accumulation else ()),
        )

    def call_quantized(self, codes: torch.Tensor, scale: torch.Tensor, out_dtype: Any) -> torch.Tensor:
        """The layer over an input that its producer has quantized by the scheme's ``act_quant``."""
        result: torch.Tensor = self._call(codes, scale, out_dtype)
        return result

    def _operands(self) -> tuple[Any, ...]:
        """What stands for the weight in a call of an operator."""
        held = self._buffers
        return (
            held["packed"],
            held["codes"],
            held["scales"],
            held["zeros"],
            held["offsets"],
            held["g_idx"],
            self.weight_format,
            self._geometry,
        )

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was rounded, ``[n, in_features]`` of :attr:`weight_dtype`, made anew by every
        access and not to be written to; ``quantized_weight().dequantize()`` has it in float32."""
        if self.is_loading:
            numbers = torch.empty(self.weight_shape, dtype=self.weight_dtype, device="meta")
        else:
            numbers = self.quantized_weight().dequantize().to(self._device(), self.weight_dtype)
        frozen: torch.Tensor = numbers.as_subclass(FrozenWeight)
        return frozen

    def quantized_weight(self) -> QuantizedWeight:
        """The canonical weight; its tensors are the layer's own."""
        self._need_canonical("be dequantized")
        return self._weight_of(self._held())

    def _weight_of(self, held: dict[str, Any]) -> QuantizedWeight:
        return QuantizedWeight(
            self.weight_format,
            self.weight_shape,
            self.block,
            held["codes"],
            held["scales"],
            held["zeros"],
            held["g_idx"],
            self.is_gated,
            held["offsets"],
        )

    @property
    def canonical_bytes(self) -> int:
        """Bytes of the weight's canonical tensors: of its part of a state."""
        held = [tensor for tensor in self._held().values() if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def extra_repr(self) -> str:
        words = [
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}",
            f"scheme={self.scheme.name}"
            if self.weight_format == self.scheme.format
            else f"format={self.weight_format}",
        ]
        if self.block != (1, 0):
            words.append(f"group={self.block[1] if self.block[0] == 1 else self.block}")
        words += ["gated"] * self.is_gated
        if self.activation != "identity":
            words.append(f"activation={self.activation}")
        return ", ".join(words)

    # ---- Where the tensors are ----

    def keep_canonical(self) -> QuantizedLinear:
        """Keeps the canonical tensors on the layer's device from now on, beside the packed ones."""
        self._keeps_canonical = True
        if self._host is not None:
            self._need_canonical("compute a gradient, nor with float32 inputs on a GPU")
            device = self._device()
            for name, tensor in self._host.items():
                self._buffers[name] = tensor.to(device)
            self._host = None
        return self

    def drop_canonical(self) -> QuantizedLinear:
        """Keeps what the kernels read and nothing else: half the memory on a CPU, and none of the host's for
        a layer on a GPU. The layer has no state and no gradient from then on. Nothing changes where the
        kernels read the canonical form."""
        if self._buffers["packed"] is None and not self._must_keep_canonical():
            self._buffers["packed"] = self.quantized_weight().pack().packed
        if self._buffers["packed"] is not None:
            self._host = {}
            for name in _CANONICAL:
                self._buffers[name] = None
        return self

    def _must_keep_canonical(self) -> bool:
        """Packed kernels of GPUs compute with 16-bit inputs, and read their rows at multiples of 16 bytes."""
        return self._device().type == "cuda" and (self._keeps_canonical or self.in_features % 8 != 0)

    def _need_canonical(self, what: str) -> None:
        if self._held()["codes"] is None:
            raise RuntimeError(f"the layer's canonical tensors were dropped: it cannot {what}")

    def _device(self) -> torch.device:
        held = self._buffers["codes"] if self._buffers["packed"] is None else self._buffers["packed"]
        assert held is not None
        return held.device

    def _held(self) -> dict[str, Any]:
        """The canonical tensors, wherever they are."""
        return {
            name: self._buffers[name] if self._host is None else self._host.get(name) for name in _CANONICAL
        }

    def settle(self) -> None:
        """Called where the weight has come to a device: decides what is kept there."""
        self._host = None
        self._buffers["packed"] = None
        codes = self._buffers["codes"]
        if codes is None or not codes.is_cuda or self._must_keep_canonical():
            return
        weight = self.quantized_weight().pack()
        if weight.packed is not None:
            self._buffers["packed"] = weight.packed
            self._host = {name: tensor.cpu() for name, tensor in self._held().items() if tensor is not None}
            for name in _CANONICAL:
                self._buffers[name] = None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedLinear:
        """Moves the quantized tensors, and changes the type of the bias alone."""
        before = self._device()
        hidden = {name: self._buffers[name] for name in (*_CANONICAL, "layout", "packed")}
        self._buffers.update(dict.fromkeys(hidden))
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers.update(hidden)
        probe = fn(torch.empty(0, device=before, dtype=self.weight_dtype))
        self.weight_dtype, device = probe.dtype, probe.device
        if device != before:
            self._need_canonical(f"be moved to {device}")
            for name, tensor in (*self._held().items(), ("layout", self._buffers["layout"])):
                self._buffers[name] = None if tensor is None else _moved(tensor, device)
            self.settle()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """The canonical form: what is packed belongs to this process and its device. Codes go as bytes,
        because ``pickle`` loses the type of FP8 tensors."""
        self._need_canonical("be copied or pickled")
        held = self._held()
        buffers = {**self._buffers, **held, "codes": held["codes"].view(torch.uint8), "packed": None}
        return {**self.__dict__, "_buffers": buffers, "_host": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        codes, layout = self._buffers["codes"], self._buffers["layout"]
        assert codes is not None
        assert layout is not None
        self._buffers["codes"] = codes.view(_code_dtype(self.weight_format))
        for name in _CANONICAL:  # from host memory to where the layer was, or where it is mapped to
            tensor = self._buffers[name]
            self._buffers[name] = None if tensor is None else tensor.to(layout.device)
        self.settle()

    # ---- State ----

    def check_state(self) -> None:
        """Refuses tensors that are not those of a layer like this one."""
        layout = self._buffers["layout"]
        expected = [_FORMAT_NUMBERS[self.weight_format], *self._geometry]
        if layout is None or layout.flatten().tolist() != expected:
            text = "nothing" if layout is None else _layout_text(layout)
            raise ValueError(f"the state is of another layout, {text}, expected {self}")
        check_values(self.quantized_weight())

    def _layout_tensor(self, device: Any) -> torch.Tensor:
        return torch.tensor([_FORMAT_NUMBERS[self.weight_format], *self._geometry], device=device)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self._need_canonical("be saved")
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._host is not None:
            for name, tensor in self._host.items():
                destination[prefix + name] = tensor

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Takes the canonical tensors whole or not at all; never writes into those at hand, which may be
        shared."""
        given = {name: state_dict.get(prefix + name) for name in (*_CANONICAL, "layout")}
        if prefix + "weight" in state_dict and given["codes"] is None:
            error_msgs.append(
                f"{prefix}weight is there, {prefix}codes is not: the state of a layer that is not quantized"
            )
            return
        present = {name for name, tensor in given.items() if tensor is not None}
        wanted = {name for name, tensor in self._held().items() if tensor is not None} | {"layout"}
        if present:
            try:
                self._take_state(given, present, wanted)
            except ValueError as error:
                error_msgs.append(f"{prefix.rstrip('.') or 'the layer'}: {error}")
        elif strict:
            missing_keys.extend(prefix + name for name in sorted(wanted))
        held = {name: self._buffers[name] for name in (*_CANONICAL, "layout")}
        others = {key: value for key, value in state_dict.items() if key[len(prefix) :] not in held}
        for name in held:
            self._buffers[name] = None
        try:
            super()._load_from_state_dict(
                others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        finally:
            self._buffers.update(held)

    def _take_state(self, given: dict[str, Any], present: set[str], wanted: set[str]) -> None:
        if present != wanted:
            raise ValueError(f"the state has {sorted(present)}, expected {sorted(wanted)}")
        expected = [_FORMAT_NUMBERS[self.weight_format], *self._geometry]
        if given["layout"].shape != (len(expected),) or given["layout"].tolist() != expected:
            raise ValueError(
                f"the state is of another layout, {_layout_text(given['layout'])}, expected {self}"
            )
        own = self._device()
        # Copies: a state's tensors are the caller's, and may be mapped from a file that goes away.
        taken: dict[str, Any] = {
            name: tensor.to(tensor.device if own.type == "meta" else own, copy=True)
            for name, tensor in given.items()
            if tensor is not None
        }
        taken = {name: taken.get(name) for name in given}
        if not taken["codes"].is_meta:
            check_values(self._weight_of(taken))
        self._buffers.update(taken)
        self.settle()


def expect_quantized(*layers: nn.Module) -> None:
    """Refuses what somebody has put in the place of layers that work together."""
    for layer in layers:
        if not isinstance(layer, QuantizedLinear):
            raise TypeError(
                f"a layer is a {type(layer).__name__}, expected a QuantizedLinear: adapters go onto a model "
                "that was quantized with fuse=False"
            )


def _parameter(bias: torch.Tensor | None) -> nn.Parameter | None:
    return bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias, requires_grad=False)


def _scheme_of(scheme: str | Scheme | None, bits: int | None) -> Scheme:
    if scheme is not None:
        if bits is not None:
            raise ValueError("scheme and bits are both given, expected one of them")
        return Scheme.of(scheme)
    names = {None: "int8", 8: "int8", 4: "int4"}
    if bits not in names:
        raise ValueError(f"bits is {bits}, expected 8 or 4")
    return Scheme(names[bits])


def _weight_only_scheme(format: str) -> Scheme:
    """The one whose weights are most like this format."""
    if format == "mxfp4" or "fp8" in format:
        return Scheme("mxfp4" if format == "mxfp4" else "fp8")
    return Scheme("int4" if format in FOUR_BIT else "int8")


def _empty_canonical(layer: QuantizedLinear, device: Any) -> dict[str, torch.Tensor]:
    n, k = layer.weight_shape
    cols = ceil_div(k, 2) if layer.weight_format in FOUR_BIT else k
    blocks = blocks_of(n, k, layer.block)
    scale_dtype = torch.uint8 if layer.weight_format in MICROSCALED else torch.float32
    tensors = {
        "codes": torch.zeros((n, cols), dtype=torch.uint8, device=device).view(
            _code_dtype(layer.weight_format)
        ),
        "scales": torch.ones(blocks, dtype=scale_dtype, device=device),
    }
    if not layer.scheme.symmetric:
        tensors["zeros"] = torch.zeros(blocks, dtype=torch.int8, device=device)
    return tensors


def _code_dtype(format: str) -> Any:
    return getattr(torch, CODE_DTYPES[MICROSCALED.get(format, format)])


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


def _layout_text(layout: torch.Tensor) -> str:
    names = {number: name for name, number in _FORMAT_NUMBERS.items()}
    values = layout.flatten().tolist()
    if len(values) != 6:
        return str(values)
    number, n, k, block_rows, block_cols, is_gated = values
    gated = ", gated" if is_gated else ""
    return f"{names.get(number, number)} {n} x {k}, block ({block_rows}, {block_cols}){gated}"
