"""An import that ends half way leaves nothing at its target; its memory does not grow with the file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.convert import import_weights

MIB = 2**20
# All is written by then, and nothing of it is at the target yet.
KILLED = """
import os, signal, sys
import ckpt_core as ckpt
def kill(event, arguments):
    if event == "os.rename":
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
ckpt.convert.import_weights(sys.argv[1], sys.argv[2])
"""


@pytest.fixture(name="source", scope="module")
def make_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six arrays of 40 MiB."""
    path = tmp_path_factory.mktemp("source") / "a.npz"
    np.savez(path, **{f"w{n}": np.full(10 * MIB, n, np.float32) for n in range(6)})  # type: ignore[arg-type]
    return path


def test_killed_before_it_is_renamed(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "run" / "a"
    call = [sys.executable, "-c", KILLED, str(source), str(target)]
    assert subprocess.run(call, timeout=120, check=False).returncode == -signal.SIGKILL
    assert not target.exists()
    import_weights(source, target)
    assert ckpt.verify(target).ok
    assert ckpt.load(target, only="w5")["w5"][0] == 5
    assert [name for name in os.listdir(target.parent) if not name.startswith(".")] == ["a"]


def test_memory_is_that_of_a_batch(source: Path, tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        import_weights(source, tmp_path / "a")
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most_bytes < 200 * MIB  # of 240; two arrays at once, and what the database holds
