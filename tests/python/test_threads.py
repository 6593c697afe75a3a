# SPDX-License-Identifier: Apache-2.0
"""Threads of Python around us, and threads of ours."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import quantfuse as qf


def test_the_gil_is_released_while_working(rng):
    """Another thread ticks in the middle of one long call; with the GIL held it could not."""
    x = rng.standard_normal((64, 4096)).astype(np.float32)
    ticks: list[float] = []
    stop = threading.Event()

    def tick():
        while not stop.wait(0.001):
            ticks.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    ticker.start()
    inside = 0
    try:
        for _ in range(10):  # a busy machine may keep the ticker from running at all
            ticks.clear()
            begin = time.perf_counter()
            with qf.options(kernel="quantize_ref"):
                qf.quantize_tensor(x, "int4", block=(1, 32), mse=True)
            duration = time.perf_counter() - begin
            # Not near the ends, where Python's own switching of threads would let it tick too.
            inside = sum(begin + 0.2 * duration < t < begin + 0.8 * duration for t in list(ticks))
            if inside >= 5:
                break
    finally:
        stop.set()
        ticker.join()
    assert duration > 0.02, "the call is too short to tell"
    assert inside >= 5


def test_many_threads_get_their_own_answers(rng):
    inputs = [rng.standard_normal((17, 300 + i)).astype(np.float32) for i in range(16)]
    expected = [qf.quantize_tensor(x, "int4", block=(1, 32)) for x in inputs]

    def work(i):
        for _ in range(20):
            got = qf.quantize_tensor(inputs[i], "int4", block=(1, 32))
            np.testing.assert_array_equal(got.codes, expected[i].codes)
            np.testing.assert_array_equal(got.scale, expected[i].scale)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))


def test_workspaces_of_many_threads_do_not_mix(rng):
    weight = qf.QuantizedWeight.from_float(rng.standard_normal((64, 256)).astype(np.float32), "int4").pack()
    inputs = [rng.standard_normal((1 + i, 256)).astype(np.float32) for i in range(12)]
    expected = [qf.linear(x, weight, act_quant="int8") for x in inputs]

    def work(i):
        for _ in range(20):
            np.testing.assert_array_equal(qf.linear(inputs[i], weight, act_quant="int8"), expected[i])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(12)))


def test_errors_belong_to_their_thread(rng):
    x = rng.standard_normal((4, 8)).astype(np.float32)

    def work(i):
        for _ in range(50):
            with pytest.raises(ValueError, match=rf"\(4, {i}\)"):
                qf.per_token_quant_int8(x, out=(np.empty((4, i), np.int8), None))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(9, 13)))


def test_options_belong_to_their_thread():
    x = np.ones((2, 4), np.float32)
    with qf.options(kernel="no_such_kernel"), ThreadPoolExecutor(1) as pool:
        pool.submit(qf.per_token_quant_int8, x).result()


def test_results_do_not_depend_on_the_number_of_threads(rng):
    x = rng.standard_normal((64, 1000)).astype(np.float32)
    try:
        qf.set_num_threads(1)
        one = qf.quantize_tensor(x, "fp8_e4m3", block=(1, 128))
        qf.set_num_threads(3)
        assert qf.get_num_threads() == 3
        three = qf.quantize_tensor(x, "fp8_e4m3", block=(1, 128))
    finally:
        qf.set_num_threads(0)
    np.testing.assert_array_equal(one.codes, three.codes)
    np.testing.assert_array_equal(one.scale, three.scale)


def run(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_environment_sets_the_number_of_threads():
    code = "import quantfuse as qf; print(qf.get_num_threads())"
    assert run(code, QUANTFUSE_NUM_THREADS="5") == "5"


def test_a_forked_child_can_call():
    code = """
import os, numpy as np, quantfuse as qf
x = np.ones((256, 1024), np.float32)
qf.per_token_quant_int8(x)
child = os.fork()
if child == 0:
    os._exit(0 if (qf.per_token_quant_int8(x)[0] == 127).all() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(code) == "0"


# ---- Beside torch's threads ----

TORCH = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # so that the pool is as small everywhere
import numpy as np, quantfuse as qf
x = np.random.default_rng(0).standard_normal((4, 1024)).astype(np.float32)
weight = qf.QuantizedWeight.from_float(np.resize(x, (1024, 1024)), "int4").pack()
alone = qf.linear(x, weight)  # before there is a runtime
import torch
torch.set_num_threads(2)
tx, tweight = torch.from_numpy(x), qf.QuantizedWeight.from_float(torch.ones(1024, 1024), "int8").pack()
torch.ones(1 << 20).exp_()
"""


def run_beside_torch(code: str) -> str:
    if not pytest.importorskip("torch").backends.openmp.is_available():
        pytest.skip("torch is built without OpenMP")
    return run(TORCH + code)


def test_torch_threads_are_used_and_none_added():
    code = """
qf.linear(tx, tweight)
before = len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
torch.ones(1 << 20).exp_()
qf.linear(tx, tweight)
print(len(os.listdir("/proc/self/task")) - before)
"""
    assert run_beside_torch(code) == "1"


def test_a_number_of_threads_of_our_own_is_kept_beside_torch():
    """Teams of another size than torch's would end its threads: these are ours, and one more."""
    code = """
qf.linear(tx, tweight)
before = len(os.listdir("/proc/self/task"))
qf.set_num_threads(4)
qf.linear(tx, tweight)
print(qf.get_num_threads(), torch.get_num_threads(), len(os.listdir("/proc/self/task")) - before)
"""
    own, of_torch, added = run_beside_torch(code).split()
    assert (own, of_torch) == ("4", "2")
    assert 2 <= int(added) <= 3  # the pool has one already where this machine has two CPUs


def test_results_are_the_same_on_torch_threads():
    code = """
for threads in (1, 2, 3):
    torch.set_num_threads(threads)
    assert (qf.linear(x, weight) == alone).all(), threads
print("same")
"""
    assert run_beside_torch(code) == "same"


def test_a_forked_child_can_call_after_torch():
    code = """
expected = qf.linear(tx, tweight)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(qf.linear(tx, tweight), expected) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_beside_torch(code) == "0"
