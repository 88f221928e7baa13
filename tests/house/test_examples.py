"""The examples run as a user starts them: in processes of their own, from the command line."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.support.children import compiling_once
from tests.support.paths import EXAMPLES, ROOT


@pytest.fixture(name="run_example", scope="module")
def make_run_example(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs an example; what it prints. It must succeed. What one compiles, the next one finds."""
    return partial(_run_example, compiling_once(tmp_path_factory.mktemp("jax-cache")))


def _run_example(compiled: dict[str, str], name: str, *arguments: str) -> str:
    environment = {**os.environ, **compiled, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_train_nnx_goes_on_where_it_stopped(run_example, tmp_path):
    pytest.importorskip("flax")
    pytest.importorskip("grain")
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run_example("train_nnx.py", "--directory", str(straight), "--steps", "17")
    assert "starting at step 0" in run_example(
        "train_nnx.py", "--directory", str(stopped), "--steps", "17"
    )
    # the run is over and its last save, of step 16, is there: starting again trains nothing more
    again = run_example("train_nnx.py", "--directory", str(stopped), "--steps", "17")
    assert "starting at step 17" in again
    prints = [json.loads((run / "fingerprint.json").read_text()) for run in (straight, stopped)]
    assert prints[0] == prints[1]


def test_train_nnx_resumes_exactly(run_example):
    pytest.importorskip("flax")
    pytest.importorskip("grain")
    printed = run_example("train_nnx.py", "--check", "--steps", "12")
    assert "interrupted_at=(9,), resumed_from=(" in printed


def test_a_sampler_follows_a_trainer(run_example, tmp_path):
    pytest.importorskip("optax")
    pytest.importorskip("flax")
    given = ("--directory", str(tmp_path), "--steps", "61")
    with ThreadPoolExecutor(1) as pool:
        sampler = pool.submit(run_example, "publish_and_follow.py", "sample", *given)
        assert "published 60" in run_example(
            "publish_and_follow.py", "train", *given, "--secs", "0.1"
        )
        printed = sampler.result()
    assert "version 60: " in printed


def test_multihost_goes_on_with_fewer_processes(run_example, tmp_path):
    pytest.importorskip("optax")
    printed = run_example("multihost.py", "--demo", "--directory", str(tmp_path), "--steps", "20")
    assert "four processes, one killed after step 12: [" in printed
    rows = [line.split() for line in printed.splitlines() if line.strip()[:1].isdigit()]
    assert {row[3] for row in rows} == {"4", "2"}
    assert float(printed.rpartition(":")[2]) < 1e-3


def test_keras_fit_resumes_exactly(run_example):
    for needed in ("keras", "sklearn"):
        pytest.importorskip(needed)
    printed = run_example("keras_fit.py")
    assert "restored step 30" in printed and "bit for bit" in printed


def test_torchax_train_is_killed_and_goes_on(run_example, tmp_path):
    for needed in ("torch", "optax", "sklearn", "safetensors"):
        pytest.importorskip(needed)
    printed = run_example("torchax_train.py", "--demo", "--directory", str(tmp_path))
    assert "50 of the next 50 losses are equal" in printed


def test_llama_weights_go_in_and_out(run_example, tmp_path):
    for needed in ("flax", "safetensors", "torch"):
        pytest.importorskip(needed)
    printed = run_example("llama_weights.py", "--gib", "0.0625", "--directory", str(tmp_path))
    assert "a Llama of 62 MiB in 6 files" in printed
    assert "bit for bit as in the file: True" in printed
    peak = float(printed.partition("peak memory is ")[2].split()[0])
    assert peak < 1.5  # of a model this small, what a load needs besides is a larger part
    assert float(printed.partition("PyTorch differ by ")[2].split()[0]) < 1e-4
    assert list(tmp_path.iterdir()) == []
