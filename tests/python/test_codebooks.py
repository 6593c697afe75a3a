# SPDX-License-Identifier: Apache-2.0
"""Weights whose codes are looked up (NF4, bitsandbytes' FP4, IQ4_NL), and integer ones with offsets."""

from __future__ import annotations

import numpy as np
import pytest

import quantfuse as qf
from reference import pack_nibbles

# QLoRA's appendix E; ggml's kvalues_iq4nl; bitsandbytes' table of FP4.
TABLES = {
    "nf4": [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ],
    "fp4_bnb": [
        *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204),
        *(0.25, 0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5),
        *(-0.1666666716337204, -0.25),
    ],
    "iq4_nl": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
}


def make(format: str, n: int, k: int, group: int, rng) -> tuple[qf.QuantizedWeight, np.ndarray]:
    """A weight, and its numbers by NumPy, to the bit."""
    groups = -(-k // group)
    scales = rng.uniform(0.1, 2, (n, groups)).astype(np.float32)
    each = np.arange(k) // group
    if format in TABLES:
        scales *= rng.choice(np.float32([-1, 1, 1]), scales.shape)
        codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
        weight = qf.QuantizedWeight(format, (n, k), (1, group), pack_nibbles(codes), scales)
        return weight, np.float32(TABLES[format])[codes] * scales[:, each]
    offsets = rng.uniform(-20, 20, scales.shape).astype(np.float32)
    if format == "int8":  # as Q5_K
        codes = rng.integers(0, 32, (n, k)).astype(np.int8)
        weight = qf.QuantizedWeight(format, (n, k), (1, group), codes, scales, offsets=offsets)
        return weight, codes.astype(np.float32) * scales[:, each] + offsets[:, each]
    codes, zeros = rng.integers(0, 16, (n, k)).astype(np.uint8), np.full(scales.shape, -8, np.int8)  # Q4_K
    weight = qf.QuantizedWeight(
        format, (n, k), (1, group), pack_nibbles((codes - 8) & 15), scales, zeros, offsets=offsets
    )
    return weight, codes.astype(np.float32) * scales[:, each] + offsets[:, each]


FORMATS = [*TABLES, "int4", "int8"]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("k", "group"), [(256, 64), (96, 32), (33, 5)])
def test_dequantize_is_exact(format, k, group, rng):
    weight, numbers = make(format, 12, k, group, rng)
    np.testing.assert_array_equal(weight.dequantize(), numbers)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("m", [1, 3, 20])
@pytest.mark.parametrize("is_packed", [False, True])
def test_linear_and_its_gradient(format, m, is_packed, rng):
    weight, numbers = make(format, 40, 192, 32, rng)
    if is_packed:
        weight.pack()
    x = rng.standard_normal((m, 192)).astype(np.float32)
    bound = 1e-5 * (np.abs(x) @ np.abs(numbers).T + np.abs(x).sum(1, keepdims=True) * 20)
    assert (np.abs(qf.linear(x, weight) - x @ numbers.T.astype(np.float64)) <= bound).all()
    dy = rng.standard_normal((m, 40)).astype(np.float32)
    np.testing.assert_allclose(qf.linear_backward(dy, weight), dy @ numbers.astype(np.float64), atol=2e-2)


@pytest.mark.parametrize("format", FORMATS)
def test_save_and_load(format, rng, tmp_path):
    weight, numbers = make(format, 6, 64, 32, rng)
    weight.save(tmp_path / "w.safetensors")
    loaded = qf.QuantizedWeight.load(tmp_path / "w.safetensors")
    np.testing.assert_array_equal(loaded.dequantize(), numbers)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_quantizing_to_nf4_takes_the_nearest_number(dtype, rng):
    w = rng.standard_normal((9, 200)).astype(dtype)
    w[3, 64:128] = 0
    weight = qf.QuantizedWeight.from_float(w, "nf4")
    assert weight.block == (1, 64)
    groups = np.arange(200) // 64
    largest = np.stack([np.abs(w[:, groups == g]).max(1) for g in range(4)], 1).astype(np.float32)
    np.testing.assert_array_equal(weight.scales[largest > 0], largest[largest > 0])
    table, got = np.float32(TABLES["nf4"]), weight.dequantize()
    nearest = np.abs(w[..., None] / weight.scales[:, groups, None] - table).min(-1)
    np.testing.assert_allclose(np.abs(got - w) / weight.scales[:, groups], nearest, atol=1e-6)
    assert (got[3, 64:128] == 0).all()
    nan = np.float32([[np.nan, np.inf, -np.inf, 1.0]])
    assert qf.quantize_tensor(nan, "nf4", scale=np.ones(1, np.float32)).codes.tolist() == [[0xF7, 0xF0]]
    with pytest.raises(ValueError, match="format is iq4_nl"):
        qf.QuantizedWeight.from_float(w, "iq4_nl", group=32)


def test_what_does_not_fit_is_refused(rng):
    codes, scales = np.zeros((4, 8), np.uint8), np.ones((4, 1), np.float32)
    with pytest.raises(ValueError, match="offsets has type"):
        qf.QuantizedWeight("int4", (4, 16), (1, 16), codes, scales, offsets=np.ones((4, 1)))
    with pytest.raises(ValueError, match="offsets has shape"):
        qf.QuantizedWeight("int4", (4, 16), (1, 16), codes, scales, offsets=np.ones((4, 2), np.float32))
    with pytest.raises(ValueError, match="floating formats have no offsets"):
        qf.QuantizedWeight("nf4", (4, 16), (1, 16), codes, scales, offsets=scales).dequantize()
    bad = qf.QuantizedWeight("nf4", (4, 16), (1, 16), codes, scales * np.float32(np.inf))
    with pytest.raises(ValueError, match="scale is not finite"):
        bad.dequantize()
