"""A job that is asked to stop, killed, and left without room, in turn: no acknowledged step is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.faults.test_disk import _mounted
from tests.support.children import environment

pytestmark = pytest.mark.faults

STEPS = 802  # the last one is a multiple of the interval
LIMIT_SECS = 120

JOB = """
import sys, time
import numpy as np
import ckpt_core as ckpt

directory, steps = sys.argv[1], int(sys.argv[2])
state = {"w": np.zeros(64 * 1024), "n": -1}
policy = ckpt.when.every_steps(3) | ckpt.when.preempted()
with ckpt.Checkpointer(directory, save_policy=policy, keep_policy=ckpt.keep.latest(2)) as checkpointer:
    restored = checkpointer.restore_latest(state=state)
    if restored:
        state = restored["state"]
        assert state["n"] == restored.step and (state["w"] == restored.step + 1).all()
    print("start", restored.step if restored else -1, flush=True)
    for step in range(restored.step + 1 if restored else 0, steps):
        state["w"] += 1
        state["n"] = step
        if checkpointer.save(step, state) and step % 2:
            checkpointer.wait_until_finished()
            print("acknowledged", step, flush=True)
        time.sleep(0.002)
        if checkpointer.should_stop:
            break
print("acknowledged", step, flush=True)
print("end", step, flush=True)
"""


class Job:
    """One start of the job, and what it has said."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOB, str(directory), str(STEPS)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started_at = -2
        self.acknowledged = -1
        self.ended: int | None = None
        self.error = ""
        self._filler: threading.Thread | None = None
        self._timer = threading.Timer(LIMIT_SECS, self.process.kill)
        self._timer.start()

    def lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            what, _, number = line.partition(" ")
            if what == "start":
                self.started_at = int(number)
            elif what == "acknowledged":
                self.acknowledged = int(number)
            elif what == "end":
                self.ended = int(number)
            yield what

    def run_until(self, acknowledgements: int) -> None:
        """Reads until so many saves are acknowledged."""
        for what in self.lines():
            acknowledgements -= what == "acknowledged"
            if not acknowledgements:
                return

    def finish(self) -> int:
        """Reads the rest, and gives the exit code."""
        for _ in self.lines():
            pass
        assert self.process.stderr is not None
        self.error = self.process.stderr.read()
        return self.process.wait()

    def fill(self, path: Path) -> None:
        """Leaves no room while the job lives: what its own retention frees is taken, too."""

        def take() -> None:
            with path.open("wb", buffering=0) as file:
                while self.process.poll() is None:
                    try:
                        file.write(bytes(2**14))
                    except OSError:
                        time.sleep(0.0005)

        self._filler = threading.Thread(target=take)
        self._filler.start()

    def close(self) -> None:
        self._timer.cancel()
        self.process.kill()
        self.process.communicate()
        if self._filler is not None:
            self._filler.join()


def test_no_acknowledged_step_is_lost(tmp_path: Path) -> None:
    chance = random.Random(0)
    acknowledged = -1
    with _mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=24m", "tmpfs") as disk:
        run, ballast = disk / "run", disk / "ballast"
        for trouble in ("term", "kill", "full", "kill", "full", "term", "none"):
            job = Job(run)
            try:
                job.run_until(chance.randint(2, 8))
                if trouble == "term":
                    job.process.send_signal(signal.SIGTERM)
                elif trouble == "kill":
                    job.process.send_signal(signal.SIGKILL)
                elif trouble == "full":
                    job.fill(ballast)
                code = job.finish()
            finally:
                job.close()
            print(trouble, job.started_at, job.acknowledged, code, job.error[-300:])
            assert job.started_at >= acknowledged, "an acknowledged step was lost"
            acknowledged = max(acknowledged, job.acknowledged)
            if trouble == "term":
                assert code == 0, job.error
                assert job.ended == job.acknowledged < STEPS - 1
            elif trouble == "kill":
                assert code == -signal.SIGKILL
            elif trouble == "full":
                assert code == 1
                assert "No space left on device" in job.error
                ballast.unlink()
            else:
                assert code == 0, job.error
                assert job.ended == STEPS - 1
        tree = ckpt.load(run / str(STEPS - 1))
        assert np.array_equal(tree["w"], np.full(64 * 1024, float(STEPS)))
        assert len([name for name in os.listdir(run) if name.isdigit()]) == 2
        assert not [name for name in os.listdir(run) if name.startswith(".ckpt-tmp")]
