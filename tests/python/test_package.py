# SPDX-License-Identifier: Apache-2.0
"""The package as a user meets it: import, documentation, the machine."""

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import quantfuse as qf

NEED_TORCH = ("quantfuse._operators", "quantfuse.nn", "quantfuse._model", "quantfuse.integrations")
MODULES = ["quantfuse"] + [
    module.name for module in pkgutil.walk_packages(qf.__path__, "quantfuse.", onerror=lambda _: None)
]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    if name.startswith(NEED_TORCH):
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    outcome = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert outcome.failed == 0


def test_every_function_has_an_example():
    for name in qf.__all__:
        thing = getattr(qf, name)
        if inspect.isfunction(thing) and name not in ("version", "get_num_threads"):
            assert ">>>" in (thing.__doc__ or ""), f"{name} has no example"


def test_what_needs_torch_is_found_when_asked_for():
    pytest.importorskip("transformers")
    assert {"nn", "quantize_model", "load_quantized", "QuantFuseConfig"} <= set(dir(qf))
    for name in qf._LAZY.keys() - {"nn"}:
        assert ">>>" in getattr(qf, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'quantise_model'"):
        _ = qf.quantise_model
    code = [
        "import sys; sys.modules['torch'] = None",
        "import quantfuse as qf",
        "try: qf.quantize_model",
        "except ImportError as error: print(error.name)",
    ]
    assert python(*code) == "torch"


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_documentation_runs(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    programs = [block for block in blocks if "import quantfuse" in block]
    assert programs
    for program in programs:
        if "torch" not in program or importlib.util.find_spec("torch"):
            exec(compile(program, page, "exec"), {})


def test_version_and_machine():
    assert qf.__version__ == qf.version() == qf.info()["version"]
    assert qf.info()["cpu"]["cpus"] >= 1
    for kernel in qf.kernels():
        assert set(kernel) == {"op", "kernel", "target", "available", "reason"}
        assert kernel["available"] or kernel["reason"]


def test_explain_says_why_not():
    answer = qf.explain(qf.per_token_quant_int8, np.zeros((4, 256), np.float32))
    assert answer["chosen"]
    for candidate in answer["candidates"]:
        assert candidate["reason"]
    assert qf.explain("per_token_quant_int8", np.zeros((4, 256), np.float32)) == answer


def test_explain_computes_nothing():
    q = np.full((2, 4), 55, np.int8)
    qf.explain(qf.quantize_tensor, np.ones((2, 4), np.float32), out=q)
    assert (q == 55).all()


def test_explain_refuses_what_the_call_refuses():
    with pytest.raises(ValueError, match="q has shape"):
        qf.explain(qf.quantize_tensor, np.ones((2, 4), np.float32), out=np.empty((2, 3), np.int8))


def test_a_named_kernel_runs():
    x = np.ones((4, 64), np.float32)
    with qf.options(kernel="quantize_ref"):
        assert qf.explain(qf.per_token_quant_int8, x)["chosen"] == "quantize_ref"


def python(*code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_works_where_torch_and_ml_dtypes_cannot_be_imported():
    assert (
        python(
            "import sys; sys.modules['torch'] = sys.modules['ml_dtypes'] = None",
            "import numpy as np, quantfuse as qf",
            "print(qf.per_token_quant_int8(np.eye(2, dtype=np.float32))[0].tolist())",
        )
        == "[[127, 0], [0, 127]]"
    )


def test_bfloat16_by_name_needs_ml_dtypes_and_says_so():
    code = [
        "import sys; sys.modules['ml_dtypes'] = None",
        "import numpy as np, quantfuse as qf",
        "try: qf.dequantize_tensor(np.ones((1, 2), np.int8), np.ones(1, np.float32), out_dtype='bfloat16')",
        "except ImportError as error: print(error)",
    ]
    assert "ml_dtypes" in python(*code)


def test_a_missing_library_is_an_import_error(tmp_path):
    code = [
        f"import os; os.environ['QUANTFUSE_LIBRARY_DIR'] = {str(tmp_path)!r}",
        "try: import quantfuse",
        "except ImportError as error: print(error)",
    ]
    assert str(tmp_path) in python(*code)
