# SPDX-License-Identifier: Apache-2.0
"""Bad input raises an error that names the argument, and nothing is written."""

import ml_dtypes
import numpy as np
import pytest

import quantfuse as qf

X = np.ones((4, 8), np.float32)
ONE = np.ones(1, np.float32)


def weight(scheme="int8"):
    return qf.QuantizedWeight.from_float(np.ones((6, 8), np.float32), scheme)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: qf.per_token_quant_int8(X.astype(np.float64)), "x has type float64"),
        (lambda: qf.per_token_quant_int8(X.astype(">f4")), "x has type >f4"),
        (lambda: qf.per_token_quant_int8(X.astype(np.int8)), "x has type"),
        (lambda: qf.per_token_quant_int8(np.array(1, np.float32)), "x has shape"),
        (lambda: qf.per_token_quant_int8(X.T[::2]), "x has stride"),
        (lambda: qf.per_token_quant_int8(np.ones((4, 8, 6), np.float32)[:, :3]), r"x has shape .* strides"),
        (lambda: qf.per_token_quant_int8(X, out=np.empty((4, 8), np.int8)), "out"),
        (lambda: qf.per_token_quant_int8(X, out=(np.empty((4, 7), np.int8), None)), "q has shape"),
        (lambda: qf.per_token_quant_int8(X, out=(np.empty((4, 8), np.uint8), None)), "q has type"),
        (lambda: qf.per_token_quant_int8(X, out=(None, np.empty((4, 2), np.float32))), "scale has shape"),
        (lambda: qf.per_token_group_quant_int8(X, 0), "group_size"),
        (lambda: qf.per_token_group_quant_int8(X, -4), "group_size"),
        (lambda: qf.per_token_group_quant_fp8(X, 4, format="fp8"), "format"),
        (lambda: qf.static_quant_fp8(X, np.ones(2, np.float32)), "scale has shape"),
        (lambda: qf.static_quant_fp8(X, np.zeros(1, np.float32)), "scale has the value"),
        (lambda: qf.static_quant_fp8(X, np.full(1, np.nan, np.float32)), "scale has the value"),
        (lambda: qf.static_quant_fp8(X, np.full(1, np.inf, np.float32)), "scale has the value"),
        (lambda: qf.quantize_tensor(X, "int5"), "format is 'int5'"),
        (lambda: qf.quantize_tensor(X, None), "format is None"),
        (lambda: qf.quantize_tensor(X, block=(-1, 0)), "block"),
        (lambda: qf.quantize_tensor(X, "fp8_e4m3", symmetric=False), "zero"),
        (lambda: qf.quantize_tensor(X, "fp8_e4m3", row_sums=True), "row_sums"),
        (lambda: qf.quantize_tensor(X, scale_format="f64"), "scale_format"),
        (lambda: qf.quantize_tensor(X, scale=ONE, mse=True), "mse"),
        (lambda: qf.quantize_tensor(X, zero=np.zeros(1, np.int8)), "zero"),
        (lambda: qf.dequantize_tensor(np.ones((2, 2), np.uint8), ONE), "codes has type uint8"),
        (lambda: qf.dequantize_tensor(np.ones((2, 2), np.int8), ONE, out_dtype="int8"), "out_dtype"),
        (
            lambda: qf.dequantize_tensor(np.ones((2, 2), np.uint8), ONE, "int4", cols=9),
            "x has shape|q has shape",
        ),
        (lambda: qf.int8_matmul(np.ones((2, 3), np.int8), np.ones((2, 4), np.int8)), "has shape"),
        (lambda: qf.int8_matmul(np.ones((2, 3), np.int8), np.ones(3, np.int8)), "b has shape"),
        (lambda: qf.int8_matmul(np.ones((2, 3), np.int8), np.ones((2, 3), np.int8), b_order="mn"), "b_order"),
        (lambda: qf.int4_matmul(np.ones((2, 3), np.uint8), np.ones((2, 3), np.uint8), k=9), "has shape|k"),
        (lambda: qf.linear(np.ones((2, 7), np.float32), weight()), "x has shape"),
        (lambda: qf.linear(X, weight(), np.ones(5, np.float32)), "bias has shape"),
        (lambda: qf.linear(X, weight(), activation="swish"), "activation is 'swish'"),
        (lambda: qf.linear(X, weight(), act_quant="int3"), "act_quant is 'int3'"),
        (lambda: qf.linear(X, weight(), act_quant="int8", act_group=2.5), "act_group is 2.5"),
        (lambda: qf.linear(X.astype(np.float64), weight()), "x has type float64"),
        (lambda: qf.rms_norm(X.astype(">f4")), "x has type >f4"),
        (lambda: qf.linear(X, weight(), out_quant="int8", out_group="8"), "out_group is '8'"),
        (lambda: qf.linear(X, weight(), out_group=2), "out_group is 2, and out_quant is not given"),
        (lambda: qf.linear(X, weight(), out_quant="int8", out=(X, X, X)), "out has 3 parts"),
        (lambda: qf.quantize_tensor(X, block=32), "block is 32, expected two sizes"),
        (lambda: qf.quantize_tensor(X, block=(1, 2, 3)), "block is"),
        (lambda: qf.quantize_tensor(X, hadamard=2.9), "hadamard is 2.9"),
        (lambda: qf.per_token_group_quant_int8(X, "8"), "group_size is '8'"),
        (lambda: qf.set_num_threads(2**32 + 5), "num_threads is 4294967301"),
        (lambda: qf.set_num_threads("a"), "num_threads is 'a'"),
        (lambda: qf.QuantizedWeight("int8", (4.0, 8.0), (1, 0), X, ONE), "shape is"),
        (
            lambda: qf.QuantizedWeight(
                "int8", (4, 8), (1, 0), X.astype(np.int8), np.ones((1, 4), np.float32)
            ),
            "scales has shape",
        ),
        (lambda: qf.QuantizedWeight.from_float(X, "int8", group="128"), "group is '128'"),
        (lambda: qf.linear(X, weight(), out_quant="int3"), "out_quant is 'int3'"),
        (lambda: qf.linear(X, weight(), out_scale=ONE), "out_scale"),
        (lambda: qf.linear(X, weight(), out_quant="int8", out_group=-1), "out_group"),
        (lambda: qf.linear(X, weight(), out_quant="int8", out_dtype="float32"), "out_dtype"),
        (lambda: qf.linear(X, weight(), residual=np.ones((4, 5), np.float32)), "residual has shape"),
        (lambda: qf.linear(X, weight(), act_group=-1, act_quant="int8"), "act_group"),
        (lambda: qf.linear_backward(np.ones((2, 7), np.float32), weight()), "dy has shape"),
        (lambda: qf.rms_norm(X, np.ones(7, np.float32)), "gain has shape"),
        (lambda: qf.rms_norm(X, residual=X.astype(np.float16)), "residual has type"),
        (lambda: qf.gated_act(X, "tanh"), "activation is 'tanh'"),
        (lambda: qf.set_num_threads(-1), "num_threads is -1"),
        (lambda: qf.explain("no_such_call"), "operation is 'no_such_call'"),
        (lambda: qf.explain("info"), "runs no kernel"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "x",
    [[1.0, 2.0], 3.0, None, "text", np.ma.masked_array(X, X > 2)],
    ids=lambda x: type(x).__name__,
)
def test_what_is_no_tensor(x):
    with pytest.raises(TypeError, match="x is a"):
        qf.per_token_quant_int8(x)


def test_an_unpacked_fp4_array_is_refused():
    codes = np.ones((2, 4), ml_dtypes.float4_e2m1fn)
    with pytest.raises(ValueError, match="codes has type float4_e2m1fn"):
        qf.dequantize_tensor(codes, ONE, "fp4_e2m1")


def test_outputs_stay_untouched_on_an_error():
    q, scale = np.full((4, 8), 55, np.int8), np.full((4, 2), 55, np.float32)
    with pytest.raises(ValueError, match="scale has shape"):
        qf.per_token_quant_int8(X, out=(q, scale))
    assert (q == 55).all()
    assert (scale == 55).all()


def test_a_read_only_output_is_refused():
    q = np.zeros((4, 8), np.int8)
    q.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        qf.quantize_tensor(X, out=q)


def test_overlapping_outputs_are_refused():
    memory = np.ones(256, np.uint8)
    x = memory[:128].view(np.float32).reshape(4, 8)
    with pytest.raises(ValueError, match="overlaps"):
        qf.quantize_tensor(x, out=memory[64:96].view(np.int8).reshape(4, 8))


def test_an_unaligned_view_is_refused():
    x = np.ones(129, np.uint8)[1:].view(np.float32).reshape(4, 8)
    with pytest.raises(ValueError, match="aligned"):
        qf.per_token_quant_int8(x)


def test_strides_of_broken_elements_are_refused():
    x = np.zeros((2, 4), dtype=[("a", np.int8), ("b", np.float32)])["b"]
    with pytest.raises(ValueError, match="DLPack"):
        qf.per_token_quant_int8(x)


def test_no_kernel_accepts():
    with (
        pytest.raises((NotImplementedError, ValueError), match="no_such_kernel"),
        qf.options(kernel="no_such_kernel"),
    ):
        qf.per_token_quant_int8(X)


def test_options_end_with_their_block():
    with pytest.raises(ZeroDivisionError), qf.options(kernel="no_such_kernel"):
        raise ZeroDivisionError
    qf.per_token_quant_int8(X)


def test_empty_inputs_are_no_ops():
    q, scale = qf.per_token_quant_int8(np.empty((0, 8), np.float32))
    assert (q.shape, scale.shape) == ((0, 8), (0, 1))
    q, scale = qf.per_token_quant_int8(np.empty((3, 0), np.float32))
    assert (q.shape, scale.shape) == ((3, 0), (3, 0))
    assert qf.linear(np.empty((0, 8), np.float32), weight()).shape == (0, 6)


def test_huge_integers_are_refused():
    with pytest.raises((ValueError, TypeError, OverflowError)):
        qf.quantize_tensor(X, block=(1, 2**70))


def test_a_message_has_no_path_in_it():
    with pytest.raises(ValueError) as caught:
        qf.per_token_quant_int8(X, out=(np.empty((4, 7), np.int8), None))
    assert str(caught.value) == "quantize: q has shape (4, 7), expected (rows=4, code bytes=8)"
