# SPDX-License-Identifier: Apache-2.0
"""torch.ops.quantfuse.*: what autograd, torch.compile and torch.export make of it."""

import pytest

import quantfuse as qf

torch = pytest.importorskip("torch")
import quantfuse._operators as operators  # noqa: E402

DEVICES = ["cpu"] + ["cuda"] * (torch.cuda.is_available() and bool(qf.info()["cuda"]["architectures"]))
ACTIVATIONS = ["identity", "relu", "gelu", "gelu_tanh", "silu"]


def operands(n, k, scheme="int8", *, gated=False, device="cpu", **options):
    torch.manual_seed(3)
    weight = qf.QuantizedWeight.from_float(torch.randn(n, k) / k**0.5, scheme, gated=gated, **options)
    tensors = [
        None if tensor is None else tensor.to(device)
        for tensor in (weight.codes, weight.scales, weight.zeros, weight.offsets, weight.g_idx)
    ]
    return (None, *tensors, scheme, operators.geometry_of(weight)), weight.dequantize().to(device)


def call(x, weight, bias=None, activation="identity", residual=None, act_quant=None, act_group=0):
    return torch.ops.quantfuse.linear(
        x, *weight, bias, activation, residual, act_quant, act_group, None, None
    )


def formula(x, w, bias, activation, gated):
    z = x @ w.T + (0 if bias is None else bias)
    act = operators._ACTIVATIONS[activation]
    if not gated:
        return act(z)
    gate, up = z.chunk(2, dim=-1)
    return act(gate) * up


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_the_formula(activation, gated, device):
    weight, w = operands(24, 40, gated=gated, device=device)
    x = torch.randn(2, 3, 40, device=device, requires_grad=True)
    bias = torch.randn(24, device=device, requires_grad=True)
    residual = torch.randn(2, 3, 12 if gated else 24, device=device, requires_grad=True)
    y = call(x, weight, bias, activation, residual)
    expected = formula(x, w, bias, activation, gated) + residual
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    dy = torch.randn_like(y)
    given = torch.autograd.grad(y, (x, bias, residual), dy)
    for got, right in zip(given, torch.autograd.grad(expected, (x, bias, residual), dy), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-4)


def test_the_gradient_goes_straight_through_the_quantization_of_x():
    weight, w = operands(16, 64)
    x = torch.randn(3, 64, requires_grad=True)
    call(x, weight, act_quant="int8").sum().backward()
    torch.testing.assert_close(x.grad, w.sum(0).expand(3, 64), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 5])
def test_x_normalized_on_the_way_in(rows, device):
    weight, w = operands(24, 64, "int4", group=32, device=device)
    x, gain = torch.randn(rows, 64, device=device), torch.randn(64, device=device)
    args = (x, *weight, None, "identity", None, None, 0, None, None, False, gain, 1e-5)
    expected = torch.nn.functional.rms_norm(x, (64,), gain, 1e-5) @ w.T
    torch.testing.assert_close(torch.ops.quantfuse.linear(*args), expected, rtol=1e-4, atol=1e-4)
    torch.library.opcheck(torch.ops.quantfuse.linear.default, args)
    with pytest.raises(NotImplementedError, match="x_gain has no gradient"):
        torch.ops.quantfuse.linear(x.requires_grad_(), *args[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_rms_norm(dtype):
    x = torch.randn(4, 5, 32, dtype=dtype, requires_grad=True)
    gain = torch.randn(32, dtype=dtype, requires_grad=True)
    y = torch.ops.quantfuse.rms_norm(x, gain, 1e-5)
    expected = torch.nn.functional.rms_norm(x.float(), (32,), gain.float(), 1e-5)
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)
    dy = torch.randn(4, 5, 32)
    got = torch.autograd.grad(y, (x, gain), dy.to(dtype))
    right = torch.autograd.grad(expected, (x, gain), dy)
    for g, r in zip(got, right, strict=True):
        torch.testing.assert_close(g.float(), r.float(), rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options", [{}, {"gated": True}, {"scheme": "int4", "group": 32, "symmetric": False}]
)
def test_opcheck_linear(options, device):
    weight, _ = operands(16, 64, device=device, **options)
    x = torch.randn(3, 64, device=device, requires_grad=True)
    arguments = (x, *weight, torch.randn(16, device=device), "silu", None, None, 0, None, None)
    torch.library.opcheck(torch.ops.quantfuse.linear.default, arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_the_others(device):
    weight, _ = operands(16, 64, device=device)
    x, gain = torch.randn(3, 64, device=device), torch.ones(64, device=device)
    ops = torch.ops.quantfuse
    torch.library.opcheck(ops.linear_backward.default, (torch.randn(3, 16, device=device), *weight))
    torch.library.opcheck(ops.rms_norm.default, (x.clone().requires_grad_(), gain, 1e-5))
    torch.library.opcheck(ops.rms_norm_quantized.default, (x, gain, 1e-5, "int8", 0))
    arguments = (x, *weight, None, "silu", "int8", 0, None, "int8", 8)
    torch.library.opcheck(ops.linear_quantized.default, arguments)


def test_a_fake_call_checks_the_width_of_x():
    weight, _ = operands(16, 64)
    with pytest.raises(RuntimeError, match="expected k=64"):
        call(torch.empty(3, 32, device="meta"), [None if t is None else t for t in weight])


def test_weights_are_let_go_with_their_tensors():
    weight, _ = operands(16, 64)
    before = len(operators._weights)
    call(torch.randn(1, 64), weight)
    assert len(operators._weights) == before + 1
    del weight
    assert len(operators._weights) == before


def test_memory_at_the_same_address_is_another_weight():
    x = torch.randn(2, 64)
    for seed in range(20):
        torch.manual_seed(seed)
        weight = qf.QuantizedWeight.from_float(torch.randn(16, 64), "int8")
        tensors = (None, weight.codes, weight.scales, None, None, None, "int8", operators.geometry_of(weight))
        torch.testing.assert_close(call(x, tensors), x @ weight.dequantize().T, rtol=1e-4, atol=1e-4)
        del weight, tensors


def test_neither_packed_nor_canonical_is_refused():
    with pytest.raises(ValueError, match="packed and codes"):
        call(torch.randn(2, 64), (None, None, None, None, None, None, "int8", [16, 64, 1, 0, 0]))
