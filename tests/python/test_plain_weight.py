# SPDX-License-Identifier: Apache-2.0
"""Layers over weights that are not quantized: PlainWeight, FusedLinear, LinearGELU, LinearSiLU."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest

import quantfuse as qf

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import quantfuse._operators as operators  # noqa: E402

DEVICES = ["cpu"] + ["cuda"] * (torch.cuda.is_available() and bool(qf.info()["cuda"]["architectures"]))
device = pytest.mark.parametrize("device", DEVICES)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS = operators._ACTIVATIONS


def tolerance(dtype):
    return {"rtol": {torch.float32: 1e-5}.get(dtype, 1e-2), "atol": {torch.float32: 1e-5}.get(dtype, 1e-2)}


@device
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_a_layer_is_the_formula(activation, dtype, rows, device):
    torch.manual_seed(1)
    linear = nn.Linear(72, 24, device=device, dtype=dtype)
    layer = qf.nn.FusedLinear.from_linear(linear, activation=activation)
    x = torch.randn(2, rows, 72, device=device, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    z = functional.linear(x.float(), linear.weight.float(), linear.bias.float())
    expected = ACTIVATIONS[activation](z)
    torch.testing.assert_close(y.float(), expected, **tolerance(dtype))


@device
@pytest.mark.parametrize("rows", [1, 20, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_may_begin_anywhere(dtype, rows, device):
    torch.manual_seed(6)
    w = torch.randn(24, 72, device=device, dtype=dtype) / 8
    x = torch.randn(rows, 72, device=device, dtype=dtype)
    biases = torch.randn(25, device=device, dtype=dtype)
    expected = functional.linear(x.float(), w.float(), biases[1:].float()).relu()
    y = qf.linear(x, w, bias=biases[1:], activation="relu")
    torch.testing.assert_close(y.float(), expected, **tolerance(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_numpy_gated_with_residual(dtype):
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((20, 33)).astype(dtype), rng.standard_normal((5, 33)).astype(np.float32)
    residual = rng.standard_normal((5, 10)).astype(np.float32)
    gate, up = np.split(x @ w.astype(np.float32).T, 2, axis=1)
    expected = gate / (1 + np.exp(-gate)) * up + residual
    for weight in (qf.PlainWeight(w, is_gated=True), qf.PlainWeight(w, is_gated=True).pack()):
        y = qf.linear(x, weight, activation="silu", residual=residual)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_a_tensor_is_a_weight():
    w, x = np.eye(3, 4, dtype=np.float32), np.arange(8, dtype=np.float32).reshape(2, 4)
    assert (qf.linear(x, w) == x @ w.T).all()
    assert (qf.linear(torch.from_numpy(x), torch.from_numpy(w)).numpy() == x @ w.T).all()
    assert repr(qf.PlainWeight(w)) == "PlainWeight(float32, 3 x 4)"


def test_what_is_no_weight_is_refused():
    x = np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match="w has type int8"):
        qf.linear(x, np.zeros((3, 4), np.int8))
    with pytest.raises(ValueError, match="expected a matrix"):
        qf.PlainWeight(np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="even number"):
        qf.PlainWeight(np.zeros((3, 4), np.float32), is_gated=True)
    with pytest.raises(ValueError, match="the weight is not quantized"):
        qf.linear(x, np.zeros((3, 4), np.float32), act_quant="int8")
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        qf.nn.FusedLinear(4, 4, activation="tanh")
    with pytest.raises(ValueError, match="approximate is 'erf'"):
        qf.nn.LinearGELU(4, 4, approximate="erf")


@pytest.mark.parametrize(
    ("make", "function"),
    [
        (qf.nn.LinearGELU, functional.gelu),
        (
            lambda *a: qf.nn.LinearGELU(*a, approximate="tanh"),
            lambda z: functional.gelu(z, approximate="tanh"),
        ),
        (qf.nn.LinearSiLU, functional.silu),
    ],
)
def test_layers_with_an_activation_take_the_state_of_linear(make, function):
    linear, layer = nn.Linear(16, 8), make(16, 8)
    layer.load_state_dict(linear.state_dict())
    x = torch.randn(3, 16)
    torch.testing.assert_close(layer(x), function(linear(x)))
    assert isinstance(layer, nn.Linear)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer)
        assert torch.equal(other(x), layer(x))


def test_a_scheme_quantizes():
    linear = nn.Linear(64, 8)
    for make, activation in ((qf.nn.LinearGELU, "gelu"), (qf.nn.LinearSiLU, "silu")):
        assert type(make(64, 8, bits=4)) is qf.nn.QuantizedLinear
        layer = make.from_linear(linear, "int8")
        assert type(layer) is qf.nn.QuantizedLinear
        assert layer.activation == activation
        plain = make.from_linear(linear)
        assert plain.weight is linear.weight
        assert plain.activation == activation


@device
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_gradients_are_those_of_torch(activation, device):
    torch.manual_seed(2)
    linear = nn.Linear(40, 24, device=device)
    layer = qf.nn.FusedLinear.from_linear(linear, activation=activation)
    x = torch.randn(2, 3, 40, device=device, requires_grad=True)
    dy = torch.randn(2, 3, 24, device=device)
    inputs = (x, linear.weight, linear.bias)
    given = torch.autograd.grad(layer(x), inputs, dy)
    right = torch.autograd.grad(ACTIVATIONS[activation](linear(x)), inputs, dy)
    for got, expected in zip(given, right, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def test_a_step_of_training_is_seen():
    torch.manual_seed(3)
    layer = qf.nn.LinearSiLU(16, 8)
    x = torch.randn(4, 16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    for _ in range(3):
        expected = functional.silu(functional.linear(x, layer.weight, layer.bias))
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()


def test_copies_are_let_go_with_their_weights():
    before = len(operators._plain_weights)
    layer = qf.nn.LinearGELU(16, 8)
    with torch.no_grad():
        layer(torch.zeros(1, 16))
    assert len(operators._plain_weights) == before + 1
    del layer
    assert len(operators._plain_weights) == before


@device
def test_compiled_and_exported(device):
    torch.manual_seed(4)
    model = nn.Sequential(qf.nn.LinearGELU(32, 64), qf.nn.LinearSiLU(64, 32)).to(device)
    x = torch.randn(5, 32, device=device, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    given = torch.autograd.grad(compiled(x).sum(), x)[0]
    torch.testing.assert_close(given, torch.autograd.grad(model(x).sum(), x)[0])
    program = torch.export.export(model, (x.detach(),))
    torch.testing.assert_close(program.module()(x.detach()), model(x.detach()))


@device
def test_opcheck(device):
    x = torch.randn(3, 40, device=device, requires_grad=True)
    weight = torch.randn(24, 40, device=device, requires_grad=True)
    arguments = (x, weight, torch.randn(24, device=device), "silu", False)
    torch.library.opcheck(torch.ops.quantfuse.linear_plain.default, arguments)


@device
def test_autocast(device):
    layer = qf.nn.LinearGELU(16, 8, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert layer(torch.randn(2, 16, device=device)).dtype == torch.bfloat16


def test_explain_names_the_kernel():
    x, w = np.zeros((2, 16), np.float32), np.zeros((4, 16), np.float32)
    answer = qf.explain(qf.linear, x, w)
    reasons = {c["kernel"]: c["reason"] for c in answer["candidates"]}
    assert answer["chosen"].startswith("linear_")
    assert "integers" in reasons["linear_int_avx2"] or "not" in reasons["linear_int_avx2"]


@device
def test_batch_invariance(device):
    torch.manual_seed(5)
    linear = nn.Linear(128, 32, device=device, dtype=torch.bfloat16)
    x = torch.randn(70, 128, device=device, dtype=torch.bfloat16)
    layers = [
        qf.nn.FusedLinear.from_linear(linear, activation="gelu"),
        qf.nn.QuantizedLinear.from_linear(linear, "int4"),
        qf.nn.QuantizedLinear.from_linear(linear, "w8a8-int8"),
    ]
    with torch.inference_mode():
        for layer in layers:
            layer.batch_invariant = True
            all_rows = layer(x)
            for rows in (1, 2, 3, 17, 64):
                assert torch.equal(layer(x[:rows].contiguous()), all_rows[:rows])
