"""A newcomer and the run that it replaces: whatever moment the old one wakes up at, one history is left.

The old run is stalled in the middle of a save, right before it asks whether it may still commit, or right
after. It goes on before the newcomer claims the directory, between that and its first save, or later.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from ckpt_core._run.lease import Lease
from tests.support import forked, seams
from tests.support.children import environment
from tests.support.takeovers import (
    LIMIT_SECS,
    NEW,
    OLD,
    resume,
    retired,
    save,
    start,
    state,
    values,
    write,
)


class Stall:
    """Holds one run back in the background part of its save, at its question whether it may commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self._lease: Any = None
        self._questions_before = 0
        real = Lease.check

        def check(lease: Lease) -> None:
            background = threading.current_thread() is not threading.main_thread()
            held = lease is self._lease and background and not self._questions_before
            if lease is self._lease and background:
                self._questions_before = max(0, self._questions_before - 1)
            if held and when == "before":
                self._hold()
            real(lease)
            if held and when == "after":
                self._hold()

        monkeypatch.setattr(Lease, "check", check)

    def hold(self, checkpointer: ckpt.Checkpointer, questions_before: int = 0) -> None:
        self._questions_before = questions_before
        self._lease = checkpointer._run._disk.lease  # pyright: ignore[reportPrivateUsage]

    def _hold(self) -> None:
        self._lease = None  # once
        self.reached.set()
        assert self.go.wait(LIMIT_SECS)


def ended(old: ckpt.Checkpointer) -> str:
    """How the old run's save ended: empty, or its error."""
    try:
        old.wait_until_finished()
    except ckpt.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


ORDERS = ("before the first save", "after it", "after two")
# who wakes before the claim is gone on from, whatever number the newcomer would have begun with
WAKES = [("before the claim", 3), *((order, first) for order in ORDERS for first in (1, 2, 3))]


@pytest.mark.parametrize("stalled", ["before", "after"])
@pytest.mark.parametrize(("order", "first"), WAKES)
@pytest.mark.parametrize("begun", [True, False], ids=["with a step", "from nothing"])
def test_one_history_is_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stalled: str,
    order: str,
    first: int,
    begun: bool,
) -> None:
    """The old run saves step 2; the newcomer's first one has the same number, or one more or less."""
    directory = str(tmp_path / "run")
    if begun:
        write(directory, 0)
    stall = Stall(monkeypatch, stalled)
    old, new = start(directory), start(directory, asynchronous=False)
    resume(old)
    stall.hold(old)
    assert old.save(2, state(OLD + 2))
    assert stall.reached.wait(LIMIT_SECS)

    def wake(now: str) -> None:
        if now == order:
            stall.go.set()
            outcome.append(ended(old))

    outcome: list[str] = []
    wake("before the claim")
    resumed = resume(new)
    if order == "before the claim":
        assert outcome == [""]
        assert resumed == 2
        save(new, first, NEW)
        wanted = {2: OLD + 2, first: NEW + first}
    else:
        assert resumed == (0 if begun else None)
        wake("before the first save")
        save(new, first, NEW)
        wake("after it")
        save(new, first + 1, NEW)
        wake("after two")
        save(new, first + 2, NEW)
        wanted = {first + n: NEW + first + n for n in range(3)}
        assert len(outcome) == 1
        if stalled == "before":
            assert "another Checkpointer" in outcome[0]
        moved = stalled == "after" and outcome == [""]
        assert retired(directory) == ({"2": OLD + 2} if moved else {})
        if moved:
            assert f"step 2 is no continuation: moved to {directory}/retired" in caplog.text
    assert values(directory) == ({0: 0} if begun else {}) | wanted
    with pytest.raises(ckpt.CheckpointError, match="another Checkpointer"):
        save(old, 9, OLD)
    with pytest.raises(ckpt.CheckpointError, match="another Checkpointer"):
        old.rollback_to(0)
    old.close()
    new.close()
    with start(directory) as again:
        assert resume(again) == max(wanted)


@pytest.mark.parametrize("stalled", ["before", "after"])
@pytest.mark.parametrize("order", ["before the claim", "before the first save"])
def test_one_history_is_left_in_a_store(
    store: str, monkeypatch: pytest.MonkeyPatch, stalled: str, order: str
) -> None:
    directory = store
    write(directory, 0)
    stall = Stall(monkeypatch, stalled)
    old, new = start(directory), start(directory, asynchronous=False)
    resume(old)
    stall.hold(old, questions_before=1)  # the attempt begins in the background too
    assert old.save(2, state(OLD + 2))
    assert stall.reached.wait(LIMIT_SECS)
    if order == "before the claim":
        stall.go.set()
        assert ended(old) == ""
    resumed = resume(new)
    stall.go.set()
    outcome = ended(old)
    assert bool(outcome) == (order != "before the claim" and stalled == "before")
    save(new, (resumed or 0) + 1, NEW)
    wanted = {2: OLD + 2, 3: NEW + 3} if order == "before the claim" else {1: NEW + 1}
    assert values(directory) == {0: 0} | wanted
    old.close()
    new.close()


def test_a_step_of_nobody_makes_way_in_a_store_while_a_run_saves(tmp_path: Path) -> None:
    directory = f"memory://nobody-{os.getpid()}-{tmp_path.name}/run"
    with start(directory) as run:
        save(run, 0, NEW)
        ckpt.save(f"{directory}/1", state(OLD))
        save(run, 1, NEW)
        ckpt.save(f"{directory}/4", state(OLD))
        save(run, 5, NEW)
        run.wait_until_finished()
        with pytest.raises(ckpt.CheckpointExists, match="step 3 is older than 5"):
            run.save(3, state(NEW))
    assert values(directory) == {0: NEW, 1: NEW + 1, 5: NEW + 5}


def test_an_old_run_that_wakes_late_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has published one step too many; its retention would judge the newcomer's."""
    write(tmp_path / "run", 0)
    stall = Stall(monkeypatch, "after")
    old = start(tmp_path / "run", max_to_keep=1)
    new = start(tmp_path / "run", asynchronous=False)
    resume(old)
    stall.hold(old)
    assert old.save(9, state(OLD + 9))
    assert stall.reached.wait(LIMIT_SECS)
    assert resume(new) == 0
    save(new, 1, NEW)
    stall.go.set()
    assert ended(old) == ""
    assert set(values(tmp_path / "run")) == {0, 1, 9}
    save(new, 2, NEW)
    assert values(tmp_path / "run") == {0: 0, 1: NEW + 1, 2: NEW + 2}
    old.close()
    new.close()


def test_what_a_late_step_would_have_pushed_out_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It appears while the newcomer saves, whose retention then keeps the newest one only."""
    write(tmp_path / "run", 0)
    stall = Stall(monkeypatch, "after")
    old = start(tmp_path / "run")
    new = start(tmp_path / "run", max_to_keep=1, asynchronous=False)
    resume(old)
    stall.hold(old)
    assert old.save(9, state(OLD + 9))
    assert stall.reached.wait(LIMIT_SECS)
    assert resume(new) == 0

    def wake(*_: Any, **__: Any) -> None:
        stall.go.set()
        assert ended(old) == ""

    seams.at(monkeypatch, (PosixBackend, "begin"), before=wake)
    save(new, 1, NEW)
    assert values(tmp_path / "run") == {1: NEW + 1}
    assert retired(str(tmp_path / "run")) == {"9": OLD + 9}
    old.close()
    new.close()


def test_equal_numbers_while_both_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one's step appears when the newcomer's is being written: the newcomer's wins."""
    for attempt in range(6):
        directory = str(tmp_path / str(attempt))
        write(directory, 5)
        stall = Stall(monkeypatch, "after")
        old, new = start(directory), start(directory, asynchronous=False)
        assert resume(old) == 5
        stall.hold(old)
        assert old.save(6, state(OLD + 6))
        assert stall.reached.wait(LIMIT_SECS)
        assert resume(new) == 5

        def wake(
            lease: Lease,
            mine: Lease = new._run._disk.lease,  # pyright: ignore[reportPrivateUsage]
            stall: Stall = stall,
            old: ckpt.Checkpointer = old,
        ) -> None:
            if lease is mine and not stall.go.is_set():
                stall.go.set()
                assert ended(old) == ""

        def wake_later(*_: Any, wake: Any = wake, **__: Any) -> None:
            seams.at(monkeypatch, (Lease, "check"), after=wake)

        # not at the first question, which is asked before anything is written
        seams.at(monkeypatch, (PosixBackend, "begin"), after=wake_later)
        save(new, 6, NEW)
        monkeypatch.undo()
        assert stall.go.is_set()
        assert values(directory) == {5: 5, 6: NEW + 6}
        assert retired(directory) == {"6": OLD + 6}
        old.close()
        new.close()


# ---- with real processes -----------------------------------------------------------------------


ZOMBIE = """
import os, signal, sys, threading
import numpy as np
import ckpt_core as ckpt
from ckpt_core._run.lease import Lease

directory, when, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
state = lambda value: {"value": np.full(2000, value)}
real, stopped = Lease.check, []

def check(lease):
    asked = not stopped and threading.current_thread() is not threading.main_thread()
    if asked:
        stopped.append(1)
    if asked and when == "before":
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this very thread, now
    real(lease)
    if asked and when == "after":
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this very thread, now

Lease.check = check
checkpointer = ckpt.Checkpointer(directory)
restored = checkpointer.restore_latest(state=state(-1))
restored and restored["state"]
checkpointer.save(step, state(100 + step))
try:
    checkpointer.wait_until_finished()
    print("saved")
except ckpt.CheckpointError as error:
    print(type(error).__name__, error)
"""


class Zombie:
    """A run in a process of its own, stopped by SIGSTOP in the middle of a save."""

    def __init__(self, directory: Path, when: str, step: int) -> None:
        self._output = directory.parent / "zombie.out"
        self._errors = directory.parent / "zombie.err"
        self._process = forked.start(
            ZOMBIE,
            *(str(directory), when, str(step)),
            output=self._output,
            errors=self._errors,
            environment=environment(),
        )
        try:
            self._process.wait_until_stopped(LIMIT_SECS)
        except TimeoutError as error:
            self.close()
            raise AssertionError(self._errors.read_text()) from error

    def wake(self) -> str:
        """Lets it go on to its end; gives what it said."""
        self._process.send_signal(signal.SIGCONT)
        code = self._process.wait(LIMIT_SECS)
        said = self._output.read_text()
        assert code == 0 and said, self._errors.read_text()
        return said

    def close(self) -> None:
        self._process.end()


@pytest.fixture
def zombie(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Zombie]:
    write(tmp_path / "run", 0)
    zombie = Zombie(tmp_path / "run", *request.param)
    yield zombie
    zombie.close()


def _takes_over(zombie: Zombie, directory: Path, first: int, wakes: str) -> str:
    said = ""
    with start(directory, asynchronous=False) as new:
        assert resume(new) == 0
        if wakes == "before the first save":
            said = zombie.wake()
        save(new, first, NEW)
        if wakes == "after it":
            said = zombie.wake()
        save(new, first + 1, NEW)
    assert values(directory) == {0: 0, first: NEW + first, first + 1: NEW + first + 1}
    return said


SAME_NUMBER = [
    (("before", 1), "before the first save"),
    (("before", 1), "after it"),
    (("after", 1), "before the first save"),
]


@pytest.mark.parametrize(("zombie", "wakes"), SAME_NUMBER, indirect=["zombie"])
def test_a_stopped_process_wakes_up_with_the_same_number(
    zombie: Zombie, tmp_path: Path, wakes: str
) -> None:
    said = _takes_over(zombie, tmp_path / "run", 1, wakes)
    if said == "saved\n":
        assert retired(str(tmp_path / "run")) == {"1": OLD + 1}
    else:
        assert said.startswith("CheckpointError")
        assert "another Checkpointer" in said
        assert f"process {os.getpid()}" in said  # by whom
    assert not list((tmp_path / "run").glob(".ckpt-tmp.*"))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("zombie", "wakes", "first"),
    [
        ((when, step), wakes, first)
        for when in ("before", "after")
        for step in (1, 2, 5)
        for wakes in ("before the first save", "after it")
        for first in (1, 2)
        if first != 1 or ((when, step), wakes) not in SAME_NUMBER
    ],
    indirect=["zombie"],
)
def test_a_stopped_process_wakes_up(zombie: Zombie, tmp_path: Path, wakes: str, first: int) -> None:
    _takes_over(zombie, tmp_path / "run", first, wakes)
