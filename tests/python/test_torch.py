# SPDX-License-Identifier: Apache-2.0
"""torch tensors on the CPU."""

import numpy as np
import pytest

import quantfuse as qf

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_in_torch_out(dtype):
    x = torch.randn(3, 5, 64, dtype=dtype)
    q, scale = qf.per_token_quant_int8(x)
    assert type(q) is torch.Tensor
    assert (q.dtype, scale.dtype) == (torch.int8, torch.float32)
    expected_q, expected_scale = qf.per_token_quant_int8(x.float().numpy())
    np.testing.assert_array_equal(q.numpy(), expected_q)
    np.testing.assert_array_equal(scale.numpy(), expected_scale)


@pytest.mark.parametrize(("format", "dtype"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_fp8_has_its_own_type(format, dtype):
    x = torch.randn(4, 64)
    q, scale = qf.per_token_group_quant_fp8(x, 32, format=format)
    assert q.dtype == getattr(torch, dtype)
    expected = (x.view(4, 2, 32) * (1 / scale)[..., None]).view(4, 64).to(q.dtype)
    assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8))
    back = qf.dequantize_tensor(q, scale, block=(1, 32))
    assert torch.equal(back, (q.float().view(4, 2, 32) * scale[..., None]).view(4, 64))


def test_linear_and_its_gradient():
    w = torch.randn(48, 128)
    weight = qf.QuantizedWeight.from_float(w, "int8").pack()
    x, bias = torch.randn(2, 3, 128), torch.randn(48)
    y = qf.linear(x, weight, bias, activation="silu")
    exact = torch.nn.functional.silu(x.double() @ weight.dequantize().double().T + bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-3)
    dy = torch.randn(2, 3, 48)
    torch.testing.assert_close(qf.linear_backward(dy, weight), dy @ weight.dequantize(), rtol=1e-4, atol=1e-3)


def test_parameters_and_tensors_that_require_gradients():
    x = torch.nn.Parameter(torch.randn(4, 8))
    q, _ = qf.per_token_quant_int8(x)
    assert not q.requires_grad
    assert torch.equal(q, qf.per_token_quant_int8(x.detach())[0])


def test_out_is_written():
    x = torch.randn(4, 8)
    q, scale = torch.empty(4, 8, dtype=torch.int8), torch.empty(4, 1)
    assert qf.per_token_quant_int8(x, out=(q, scale))[0] is q
    assert torch.equal(q, qf.per_token_quant_int8(x)[0])


def test_strided_rows_are_taken_and_others_refused():
    x = torch.randn(4, 16)
    assert torch.equal(
        qf.per_token_quant_int8(x[:, :8])[0], qf.per_token_quant_int8(x[:, :8].contiguous())[0]
    )
    with pytest.raises(ValueError, match="x has stride"):
        qf.per_token_quant_int8(x.t())
    with pytest.raises(ValueError, match=r"x has shape .* strides"):
        qf.per_token_quant_int8(torch.randn(4, 6, 8)[:, :4])


def test_negative_conjugate_and_sparse_views_are_refused():
    z = torch.randn(4, 8, dtype=torch.complex64)
    with pytest.raises(ValueError, match="negative view"):
        qf.per_token_quant_int8(z.conj().imag)
    with pytest.raises(ValueError, match="x has type"):
        qf.per_token_quant_int8(z.conj())
    with pytest.raises(ValueError, match="not strided"):
        qf.per_token_quant_int8(torch.eye(4).to_sparse())


def test_meta_tensors_are_refused():
    with pytest.raises(ValueError, match="meta"):
        qf.per_token_quant_int8(torch.empty(4, 8, device="meta"))


def test_fake_tensors_are_refused():
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake.FakeTensorMode() as mode:
        x = mode.from_tensor(torch.randn(4, 8))
    with pytest.raises(TypeError, match="FakeTensor"):
        qf.per_token_quant_int8(x)
    with pytest.raises(TypeError, match="FakeTensor"):
        qf.quantize_tensor(torch.randn(4, 8), out=x)


def test_a_subclass_with_memory_of_its_own_is_taken_as_the_tensor_it_is():
    class Tagged(torch.Tensor):
        pass

    x = torch.randn(4, 8)
    for got, right in zip(
        qf.per_token_quant_int8(x.as_subclass(Tagged)), qf.per_token_quant_int8(x), strict=True
    ):
        assert type(got) is torch.Tensor
        assert torch.equal(got, right)


def test_families_do_not_mix():
    with pytest.raises(TypeError, match="families"):
        qf.static_quant_fp8(torch.randn(4, 8), np.ones(1, np.float32))
    weight = qf.QuantizedWeight.from_float(np.ones((4, 8), np.float32), "int8")
    with pytest.raises(TypeError, match="families"):
        qf.linear(torch.randn(2, 8), weight)


def test_weights_travel_through_files(tmp_path):
    for scheme in ("int4", "fp8_e4m3", "mxfp4"):
        weight = qf.QuantizedWeight.from_float(torch.randn(8, 64), scheme)
        weight.save(tmp_path / "w")
        loaded = qf.QuantizedWeight.load(tmp_path / "w", device="cpu")
        assert loaded.codes.dtype == weight.codes.dtype
        assert torch.equal(loaded.codes.view(torch.uint8), weight.codes.view(torch.uint8))
        as_numpy = qf.QuantizedWeight.load(tmp_path / "w")
        np.testing.assert_array_equal(as_numpy.codes, weight.codes.view(torch.uint8).numpy())


def test_the_number_of_threads_is_torchs():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert qf.get_num_threads() == 3
        qf.set_num_threads(2)  # said so: torch leads no more
        torch.set_num_threads(1)
        assert qf.get_num_threads() == 2
        qf.set_num_threads(0)
        assert qf.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
        qf.set_num_threads(0)
