"""Being told to stop, and being replaced: SIGTERM, and the fence against an older writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckpt_core as ckpt

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(params=["local", "memory"])
def directory(request, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else f"memory://{tmp_path.name}/fence"


def test_the_older_writer_is_fenced(directory: str) -> None:
    old = ckpt.Checkpointer(directory, asynchronous=False)
    old.save(1, {"w": np.ones(2)})
    new = ckpt.Checkpointer(directory, asynchronous=False)
    new.save(2, {"w": np.full(2, 2.0)})
    with pytest.raises(ckpt.CheckpointError, match="another Checkpointer"):
        old.save(3, {"w": np.full(2, 3.0)})
    assert new.all_steps() == [1, 2]
    assert new.save(3, {"w": np.full(2, 4.0)})
    assert new.load(3)["w"][0] == 4.0


def test_the_fence_reaches_a_save_that_is_under_way(directory: str) -> None:
    old = ckpt.Checkpointer(directory)
    old.save(1, {"w": np.ones(2)})
    old.wait_until_finished()
    ckpt.Checkpointer(directory, asynchronous=False).save(2, {"w": np.ones(2)})
    old.save(3, {"w": np.ones(2)})
    with pytest.raises(ckpt.CheckpointError, match="another Checkpointer"):
        old.wait_until_finished()
    assert old.all_steps() == [1, 2]


def test_sigterm_is_noticed_and_passed_on(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with ckpt.Checkpointer(tmp_path) as checkpointer:
            assert not checkpointer.should_stop
            signal.raise_signal(signal.SIGTERM)
            assert checkpointer.should_stop
            assert checkpointer.reached_preemption(3)
        assert heard == [signal.SIGTERM]
        signal.raise_signal(signal.SIGTERM)  # closed: the earlier handler is back
        assert heard == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_nothing_listens_before_it_is_asked(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ckpt.Checkpointer(tmp_path):
        assert signal.getsignal(signal.SIGTERM) == before


def test_the_policy_saves_the_last_step(tmp_path: Path) -> None:
    policy = ckpt.when.every_steps(100) | ckpt.when.preempted()
    before = signal.getsignal(signal.SIGTERM)
    with ckpt.Checkpointer(tmp_path, save_policy=policy, asynchronous=False) as checkpointer:
        assert not checkpointer.save(1, {"w": np.ones(2)})
        signal.raise_signal(signal.SIGTERM)
        assert checkpointer.save(2, {"w": np.ones(2)})
    assert signal.getsignal(signal.SIGTERM) == before
    assert ckpt.Checkpointer(tmp_path).all_steps() == [2]


LOOP = """
import sys, time
import numpy as np
import ckpt_core as ckpt
with ckpt.Checkpointer(sys.argv[1], save_policy=ckpt.when.preempted()) as checkpointer:
    print("ready", flush=True)
    for step in range(10_000):
        time.sleep(0.01)
        checkpointer.save(step, {"step": step})
        if checkpointer.should_stop:
            break
sys.exit(3)
"""


def test_a_run_that_is_told_to_stop_saves_and_ends(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 3
    finally:
        process.kill()
        process.communicate()
    (step,) = ckpt.Checkpointer(tmp_path / "run").all_steps()
    assert ckpt.load(tmp_path / "run" / str(step)) == {"step": step}
