# SPDX-License-Identifier: Apache-2.0
import json
import os

import ml_dtypes
import numpy as np
import pytest

import quantfuse as qf

SCHEMES = ["int4", "int8", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "mxfp4", "mxfp8"]


def make(rng, scheme="int4", n=12, k=70, **options):
    return qf.QuantizedWeight.from_float(rng.standard_normal((n, k)).astype(np.float32), scheme, **options)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_from_float_and_back(scheme, rng):
    w = rng.standard_normal((16, 96)).astype(np.float32)
    weight = qf.QuantizedWeight.from_float(w, scheme)
    back = weight.dequantize()
    steps = {
        "int4": 14,
        "int8": 254,
        "fp8_e4m3": 2**4,
        "fp8_e5m2": 2**3,
        "fp4_e2m1": 6,
        "mxfp4": 3,
        "mxfp8": 2**3,
    }
    assert np.abs(back - w).max() <= np.abs(w).max() / steps[scheme] * 1.01
    assert weight.dequantize(ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16


def test_sizes(rng):
    weight = make(rng, "int4", n=64, k=256)
    assert weight.nbytes == 64 * 128 + 64 * 2 * 4
    assert weight.block == (1, 128)
    assert make(rng, "int8").block == (1, 0)
    assert make(rng, "mxfp4").scales.dtype == np.uint8
    assert make(rng, "fp8_e4m3", group=(4, 35)).scales.shape == (3, 2)
    assert make(rng, "int8", gated=True).out_features == 6


def test_asymmetric_keeps_zero_points(rng):
    w = (rng.standard_normal((8, 64)) + 3).astype(np.float32)
    symmetric = qf.QuantizedWeight.from_float(w, "int4", group=32)
    asymmetric = qf.QuantizedWeight.from_float(w, "int4", group=32, symmetric=False)
    assert symmetric.zeros is None
    assert asymmetric.zeros.dtype == np.int8
    assert np.abs(asymmetric.dequantize() - w).mean() < np.abs(symmetric.dequantize() - w).mean()


has_packed_form = pytest.mark.skipif(
    qf.info()["cpu"]["isa"] == "scalar", reason="the scalar kernels read the canonical weight"
)


def test_pack_changes_nothing_where_nothing_reads_it(rng, monkeypatch):
    def refuse(*_):
        raise NotImplementedError

    monkeypatch.setattr("quantfuse._weight.weight_packed_bytes", refuse)
    weight = make(rng)
    assert weight.pack(drop_canonical=True) is weight
    assert weight.packed is None
    assert weight.codes is not None


@has_packed_form
@pytest.mark.parametrize("scheme", SCHEMES)
def test_pack_is_idempotent_and_aligned(scheme, rng):
    weight = make(rng, scheme)
    assert weight.pack() is weight
    assert weight.packed is not None
    assert weight.packed.ctypes.data % 64 == 0
    packed, before = weight.packed, weight.packed.copy()
    assert weight.pack().packed is packed
    np.testing.assert_array_equal(packed, before)


@has_packed_form
def test_a_packed_weight_in_huge_pages_is_whole(rng):
    weight = make(rng, "int8", n=4096, k=1500)
    x = rng.standard_normal((3, 1500)).astype(np.float32)
    expected = x @ weight.dequantize().T
    np.testing.assert_allclose(qf.linear(x, weight.pack()), expected, rtol=1e-4, atol=1e-4)


@has_packed_form
def test_dropping_the_canonical_tensors(rng, tmp_path):
    weight = make(rng)
    x = rng.standard_normal((2, 70)).astype(np.float32)
    y = qf.linear(x, weight.pack())
    weight.pack(drop_canonical=True)
    assert weight.codes is None
    assert weight.nbytes == weight.packed.nbytes
    np.testing.assert_array_equal(qf.linear(x, weight), y)
    with pytest.raises(ValueError, match="dropped"):
        weight.dequantize()
    with pytest.raises(ValueError, match="dropped"):
        weight.save(tmp_path / "w")
    with pytest.raises((ValueError, NotImplementedError)):
        qf.linear_backward(np.ones((1, 12), np.float32), weight)


# ---- Files ----


@pytest.mark.parametrize("scheme", SCHEMES)
def test_save_and_load(scheme, rng, tmp_path):
    weight = make(rng, scheme, gated=True)
    weight.save(tmp_path / "w.safetensors")
    loaded = qf.QuantizedWeight.load(tmp_path / "w.safetensors")
    assert (loaded.format, loaded.shape, loaded.block) == (weight.format, weight.shape, weight.block)
    assert loaded.is_gated
    np.testing.assert_array_equal(loaded.codes, weight.codes)
    np.testing.assert_array_equal(loaded.scales, weight.scales)
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_save_and_load_zero_points_and_g_idx(rng, tmp_path):
    g_idx = rng.integers(0, 3, 6).astype(np.int32)
    scales, zeros = np.ones((4, 3), np.float32), rng.uniform(-1, 1, (4, 3)).astype(np.float32)
    codes = rng.integers(0, 256, (4, 3), dtype=np.uint8)
    weight = qf.QuantizedWeight("int4", (4, 6), (1, 2), codes, scales, zeros, g_idx)
    weight.save(tmp_path / "w")
    loaded = qf.QuantizedWeight.load(tmp_path / "w")
    np.testing.assert_array_equal(loaded.zeros, zeros)
    np.testing.assert_array_equal(loaded.g_idx, g_idx)
    np.testing.assert_array_equal(loaded.dequantize(), weight.dequantize())


def test_codes_of_ml_dtypes_are_saved_as_their_bytes(rng, tmp_path):
    codes = rng.standard_normal((4, 8)).astype(ml_dtypes.float8_e4m3fn)
    weight = qf.QuantizedWeight("fp8_e4m3", (4, 8), (0, 0), codes, np.ones(1, np.float32))
    weight.save(tmp_path / "w")
    np.testing.assert_array_equal(qf.QuantizedWeight.load(tmp_path / "w").codes, codes.view(np.uint8))


def test_the_file_is_safetensors(rng, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    weight = make(rng, "int8")
    weight.save(tmp_path / "w.safetensors")
    tensors = safetensors.load_file(tmp_path / "w.safetensors")
    np.testing.assert_array_equal(tensors["codes"], weight.codes)
    np.testing.assert_array_equal(tensors["scales"], weight.scales)


def test_every_truncation_is_refused(rng, tmp_path):
    path = tmp_path / "w"
    make(rng, "int8", n=2, k=3).save(path)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=str(path)):
            qf.QuantizedWeight.load(path)


def test_every_flipped_byte_is_refused_or_harmless(rng, tmp_path):
    path = tmp_path / "w"
    weight = make(rng, "int8", n=2, k=3)
    weight.save(path)
    content = bytearray(path.read_bytes())
    data_begin = 8 + int.from_bytes(content[:8], "little")
    for i in range(len(content)):
        broken = content.copy()
        broken[i] ^= 0x11
        path.write_bytes(broken)
        try:
            loaded = qf.QuantizedWeight.load(path)
        except ValueError:
            continue
        assert i < data_begin, f"byte {i} of the data was changed unnoticed"
        # The name of the header's checksum, of which the first files had none.
        assert (loaded.block, loaded.is_gated) == (weight.block, weight.is_gated)
        np.testing.assert_array_equal(loaded.dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    ("before", "after"),
    [(b'"1 128"', b'"1 129"'), (b'"is_gated":"0"', b'"is_gated":"1"'), (b'"nf4"', b'"fp4_bnb"')],
)
def test_changed_metadata_are_refused(before, after, rng, tmp_path):
    path = tmp_path / "w"
    make(rng, "nf4" if before == b'"nf4"' else "int4", n=4, k=200).save(path)
    content = path.read_bytes()
    assert before in content
    length = int.from_bytes(content[:8], "little") + len(after) - len(before)
    path.write_bytes(length.to_bytes(8, "little") + content[8:].replace(before, after))
    with pytest.raises(ValueError, match="header does not match its checksum"):
        qf.QuantizedWeight.load(path)


def rewrite(path, change):
    """Changes the header of a file and leaves the data as they are, as a program without checksum would."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    del header["__metadata__"]["header_crc32"]
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.pop("__metadata__"), "metadata"),
        (lambda h: h.pop("scales"), "tensors"),
        (lambda h: h["__metadata__"].update(format="other"), "format"),
        (lambda h: h["__metadata__"].update(quantization="int3"), "quantization"),
        (lambda h: h["__metadata__"].update(shape="2 -3"), "shape"),
        (lambda h: h["__metadata__"].update(shape="2 4"), "codes"),
        (lambda h: h["__metadata__"].update(shape="2"), "shape"),
        (lambda h: h["__metadata__"].update(block="1 1"), "scales"),
        (lambda h: h["__metadata__"].update(is_gated="yes"), "is_gated"),
        (lambda h: h["__metadata__"].update(quantization="fp8_e4m3"), "codes"),
        (lambda h: h["codes"].update(dtype="F64"), "type"),
        (lambda h: h["codes"].update(dtype=["I8"]), "type"),
        (lambda h: h["codes"].update(shape=[3, -2]), "shape"),
        (lambda h: h["codes"].update(shape=[2, 10**30]), "offsets"),
        (lambda h: h["codes"].update(data_offsets=[0, 10**9]), "offsets"),
        (lambda h: h["codes"].update(data_offsets=[1, 7]), "offsets"),
        (lambda h: h["codes"].update(shape="6"), "shape"),
        (lambda h: h.update(codes=[]), "malformed"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(change, message, rng, tmp_path):
    path = tmp_path / "w"
    make(rng, "int8", n=2, k=3).save(path)
    rewrite(path, change)
    with pytest.raises(ValueError, match=message):
        qf.QuantizedWeight.load(path)


@pytest.mark.parametrize("header", [b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 5000])
def test_a_file_that_is_something_else_is_refused(header, tmp_path):
    path = tmp_path / "w"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=str(path)):
        qf.QuantizedWeight.load(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0])
def test_impossible_scales_are_refused(value, rng, tmp_path):
    weight = make(rng, "int8", n=2, k=3)
    weight.scales[0, 0] = value
    weight.save(tmp_path / "w")
    with pytest.raises(ValueError, match="scales"):
        qf.QuantizedWeight.load(tmp_path / "w")


def test_a_failed_save_leaves_the_old_file(rng, tmp_path, monkeypatch):
    path = tmp_path / "w"
    make(rng, "int8").save(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        make(rng, "int4").save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["w"]


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        qf.QuantizedWeight.load(tmp_path / "none")


# ---- Bad tensors ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "int3"}, "format"),
        ({"shape": (4, 7)}, "codes has shape"),
        ({"shape": (-4, 8)}, "shape"),
        ({"block": (1, -4)}, "block"),
        ({"block": (1, 3)}, "scales has shape"),
        ({"codes": np.zeros((4, 8), np.uint8)}, "codes has type"),
        ({"scales": np.ones((4, 2), np.float64)}, "scales has type"),
        ({"zeros": np.ones((4, 2), np.int32)}, "zeros has type"),
        ({"zeros": np.ones((4, 3), np.int8)}, "zeros has shape"),
        ({"g_idx": np.zeros(7, np.int32)}, "g_idx has shape"),
        ({"g_idx": np.zeros(8, np.int64)}, "g_idx has type"),
    ],
)
def test_a_weight_that_does_not_fit_is_refused(changes, message):
    good = {
        "format": "int8",
        "shape": (4, 8),
        "block": (1, 4),
        "codes": np.zeros((4, 8), np.int8),
        "scales": np.ones((4, 2), np.float32),
    }
    qf.QuantizedWeight(**good)
    with pytest.raises(ValueError, match=message):
        qf.QuantizedWeight(**{**good, **changes})


def test_a_gated_weight_has_an_even_number_of_rows(rng):
    with pytest.raises(ValueError, match="is_gated"):
        make(rng, n=3, gated=True)


def test_microscaling_has_groups_of_32(rng):
    with pytest.raises(ValueError, match="group"):
        make(rng, "mxfp4", group=64)
