"""A newcomer and the run that it replaces: whatever moment the old one wakes up at, one history is left.

The old run is stalled in the middle of a save, right before it asks whether it may still commit, or right
after. It goes on before the newcomer claims the directory, between that and its first save, or later.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from ckpt_core._run.fence import OWNER_FILE, Fence

QUICK = ckpt.Options(durable=False)
LIMIT_SECS = 240
OLD, NEW = 100, 200


def state(value: int) -> dict[str, Any]:
    return {"value": np.full(2000, value)}


def value_of(tree: Any) -> int:
    assert (tree["value"] == tree["value"][0]).all()
    return int(tree["value"][0])


def start(directory: Any, **more: Any) -> ckpt.Checkpointer:
    more.setdefault("options", QUICK)
    return ckpt.Checkpointer(directory, **more)


def values(directory: Any) -> dict[int, int]:
    with start(directory, read_only=True) as reader:
        return {step: value_of(reader.load(step)) for step in reader.all_steps()}


def write(directory: Any, *steps: int) -> None:
    with start(directory) as checkpointer:
        for step in steps:
            assert checkpointer.save(step, state(step), force=True)


def resume(checkpointer: ckpt.Checkpointer) -> int | None:
    restored = checkpointer.restore_latest(state=state(-1))
    if restored is None:
        return None
    value_of(restored["state"])
    return restored.step


def save(checkpointer: ckpt.Checkpointer, step: int, base: int) -> None:
    assert checkpointer.save(step, state(base + step))
    checkpointer.wait_until_finished()


class Stall:
    """Holds one run back in the background part of its save, at its question whether it may commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self._fence: Any = None
        real = Fence.check

        def check(fence: Fence) -> None:
            held = (
                fence is self._fence and threading.current_thread() is not threading.main_thread()
            )
            if held and when == "before":
                self._hold()
            real(fence)
            if held and when == "after":
                self._hold()

        monkeypatch.setattr(Fence, "check", check)

    def hold(self, checkpointer: ckpt.Checkpointer) -> None:
        self._fence = checkpointer._fence  # pyright: ignore[reportPrivateUsage]

    def _hold(self) -> None:
        self._fence = None  # once
        self.reached.set()
        assert self.go.wait(LIMIT_SECS)


@pytest.fixture(params=["local", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "run")
    return f"memory://takeover-{os.getpid()}-{tmp_path.name}/run"


def retired(directory: str) -> dict[str, int]:
    place = Path(directory) / "retired"
    return {path.name: value_of(ckpt.load(path)) for path in sorted(place.glob("*"))}


def ended(old: ckpt.Checkpointer) -> str:
    """How the old run's save ended: empty, or its error."""
    try:
        old.wait_until_finished()
    except ckpt.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


ORDERS = ("before the claim", "before the first save", "after it", "after two")


@pytest.mark.parametrize("stalled", ["before", "after"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("first", [1, 2, 3])
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
        save(new, 3, NEW)
        wanted = {2: OLD + 2, 3: NEW + 3}
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stalled: str, order: str
) -> None:
    directory = f"memory://takeover-{os.getpid()}-{tmp_path.name}/run"
    write(directory, 0)
    stall = Stall(monkeypatch, stalled)
    old, new = start(directory), start(directory, asynchronous=False)
    resume(old)
    stall.hold(old)
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
    real = PosixBackend.begin

    def begin(*arguments: Any, **more: Any) -> Any:
        stall.go.set()
        assert ended(old) == ""
        return real(*arguments, **more)

    monkeypatch.setattr(PosixBackend, "begin", begin)
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
        real = Fence.check

        def check(
            fence: Fence,
            mine: Fence = new._fence,  # pyright: ignore[reportPrivateUsage]
            stall: Stall = stall,
            old: ckpt.Checkpointer = old,
            real: Any = real,
        ) -> None:
            real(fence)
            if fence is mine and not stall.go.is_set():
                stall.go.set()
                assert ended(old) == ""

        # not at the first question, which is asked before anything is written
        begin = PosixBackend.begin

        def begin_then_wake(*arguments: Any, begin: Any = begin, **more: Any) -> Any:
            attempt = begin(*arguments, **more)
            monkeypatch.setattr(Fence, "check", check)
            return attempt

        monkeypatch.setattr(PosixBackend, "begin", begin_then_wake)
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
from ckpt_core._run.fence import Fence

directory, when, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
state = lambda value: {"value": np.full(2000, value)}
real, stopped = Fence.check, []

def check(fence):
    asked = not stopped and threading.current_thread() is not threading.main_thread()
    if asked:
        stopped.append(1)
    if asked and when == "before":
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this very thread, now
    real(fence)
    if asked and when == "after":
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this very thread, now

Fence.check = check
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
        self._process = subprocess.Popen(
            [sys.executable, "-c", ZOMBIE, str(directory), when, str(step)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._timer = threading.Timer(LIMIT_SECS, self._process.kill)
        self._timer.start()
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "it ended before it came to its commit"

    def wake(self) -> str:
        """Lets it go on to its end; gives what it said."""
        self._process.send_signal(signal.SIGCONT)
        out, error = self._process.communicate(timeout=LIMIT_SECS)
        assert out, error
        return out

    def close(self) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.communicate()


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


@pytest.mark.parametrize(
    ("zombie", "wakes"),
    [
        (("before", 1), "before the first save"),
        (("before", 1), "after it"),
        (("after", 1), "before the first save"),
    ],
    indirect=["zombie"],
)
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
    "zombie", [(when, step) for when in ("before", "after") for step in (1, 2, 5)], indirect=True
)
@pytest.mark.parametrize("wakes", ["before the first save", "after it"])
@pytest.mark.parametrize("first", [1, 2])
def test_a_stopped_process_wakes_up(zombie: Zombie, tmp_path: Path, wakes: str, first: int) -> None:
    _takes_over(zombie, tmp_path / "run", first, wakes)


# ---- the claim ---------------------------------------------------------------------------------


def owner(directory: Any) -> bytes | None:
    try:
        return Path(directory, OWNER_FILE).read_bytes()
    except FileNotFoundError:
        return None


def test_who_claims_a_directory(tmp_path: Path) -> None:
    """Who restores to train, and nobody who looks."""
    run = tmp_path / "run"
    with start(run) as checkpointer:
        assert checkpointer.latest_step() is None
        assert owner(run) is None
        assert resume(checkpointer) is None  # also where there is nothing
        assert owner(run) is not None
        save(checkpointer, 0, 0)
    claimed = owner(run)
    with start(run) as looking:
        looking.load(0)
        looking.metadata(0)
        looking.inspect(0)
        looking.all_steps()
        looking.should_save(1)
        assert owner(run) == claimed
        looking.restore(0, state=state(1))
        assert owner(run) != claimed
    claimed = owner(run)
    with start(run, read_only=True) as evaluator:
        assert resume(evaluator) == 0
        evaluator.restore(0, state=state(1))
    assert owner(run) == claimed
    with start(run) as checkpointer:
        save(checkpointer, 1, 0)
    assert owner(run) != claimed


def test_local_directories_are_claimed_too(tmp_path: Path) -> None:
    def run() -> ckpt.Checkpointer:
        options = ckpt.Options(durable=False, persist_policy=ckpt.when.at_steps([0]))
        return start(tmp_path / "run", local_directory=tmp_path / "local", options=options)

    old = run()
    save(old, 0, OLD)
    save(old, 1, OLD)
    with run() as new:
        assert resume(new) == 1
        with pytest.raises(ckpt.CheckpointError, match="another Checkpointer"):
            save(old, 2, OLD)  # which goes into the local directory only
        save(new, 2, NEW)
    with pytest.raises(ckpt.CheckpointError, match="another Checkpointer"):
        save(old, 3, OLD)
    old.close()
    with run() as again:
        assert resume(again) == 2
        assert value_of(again.load(2)) == NEW + 2


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_a_directory_that_cannot_be_written_is_restored(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: int,
) -> None:
    write(tmp_path / "run", 0)

    def claim(*_: Any) -> Any:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch, start(tmp_path / "run", asynchronous=False) as new:
        patch.setattr(PosixBackend, "claim", claim)
        # raised in this file, the error would be taken for that of a signal handler
        patch.setattr("ckpt_core._run.branch.raised_by_a_handler", lambda _: None)
        assert resume(new) == 0
        assert "could not be claimed" in caplog.text
        with pytest.raises(OSError, match=os.strerror(error)):
            save(new, 1, NEW)
        patch.undo()
        save(new, 1, NEW)  # it can be by now
    assert set(values(tmp_path / "run")) == {0, 1}


# ---- steps that are newer than the restored one ------------------------------------------------


def test_restoring_an_older_step_and_saving_retires_the_newer_ones(
    directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(directory, *range(6))
    with start(directory, asynchronous=False) as checkpointer:
        value_of(checkpointer.restore(2, state=state(-1))["state"])
        assert checkpointer.all_steps() == list(range(6))  # who only looks moves nothing
        caplog.clear()
        save(checkpointer, 3, NEW)
        assert checkpointer.all_steps() == [0, 1, 2, 3]
        save(checkpointer, 4, NEW)
        (warning,) = [one for one in caplog.records if one.levelname == "WARNING"]
        told = warning.getMessage()
        assert "goes on from step 2, of which steps 3, 4, 5 are no continuation" in told
    assert values(directory) == {0: 0, 1: 1, 2: 2, 3: NEW + 3, 4: NEW + 4}
    if "://" not in directory:
        assert retired(directory) == {"3": 3, "4": 4, "5": 5}
        assert f"moved to {directory}/retired" in told
    with start(directory, asynchronous=False) as checkpointer:  # and once more
        value_of(checkpointer.restore(3, state=state(-1))["state"])
        save(checkpointer, 9, NEW)
    assert set(values(directory)) == {0, 1, 2, 3, 9}
    if "://" not in directory:
        assert len(retired(directory)) == 4  # a second step 4 has its place beside the first
        assert value_of(ckpt.load(f"{directory}/retired/4")) == 4


def test_looking_at_an_older_step_in_between_is_no_branch(directory: str) -> None:
    write(directory, *range(6))
    with start(directory, asynchronous=False) as checkpointer:
        assert resume(checkpointer) == 5
        value_of(checkpointer.restore(2, state=state(-1))["state"])  # the best one, to compare
        save(checkpointer, 6, NEW)
        value_of(checkpointer.restore(1, state=state(-1))["state"])
        save(checkpointer, 7, NEW)
    assert list(values(directory)) == list(range(8))


def test_going_back_in_one_run_is_one(directory: str) -> None:
    write(directory, *range(6))
    with start(directory, asynchronous=False) as checkpointer:
        assert resume(checkpointer) == 5
        value_of(checkpointer.restore(2, state=state(-1))["state"])
        save(checkpointer, 3, NEW)
        save(checkpointer, 4, NEW)
    assert values(directory) == {0: 0, 1: 1, 2: 2, 3: NEW + 3, 4: NEW + 4}


def test_own_steps_do_not_make_way(directory: str) -> None:
    """Of which the newer ones would hide what is saved now: that is refused as ever."""
    with start(directory, asynchronous=False) as checkpointer:
        for step in (0, 2, 4):
            save(checkpointer, step, 0)
        value_of(checkpointer.restore(0, state=state(-1))["state"])
        assert not checkpointer.save(2, state(NEW))
        with pytest.raises(ckpt.CheckpointExists, match=r"older than 4.*rollback_to\(2\)"):
            checkpointer.save(3, state(NEW))
        save(checkpointer, 5, 0)
    assert values(directory) == {0: 0, 2: 2, 4: 4, 5: 5}


def test_a_refused_save_moves_nothing(directory: str) -> None:
    write(directory, *range(6))
    with start(directory, asynchronous=False) as checkpointer:
        assert resume(checkpointer) == 5
        save(checkpointer, 6, NEW)
        value_of(checkpointer.restore(2, state=state(-1))["state"])
        with pytest.raises(ckpt.CheckpointExists, match="older than 6"):
            checkpointer.save(3, state(NEW))
        assert checkpointer.all_steps() == list(range(7))


def test_who_never_restored_is_refused_as_ever(directory: str) -> None:
    write(directory, 0, 1, 2)
    with start(directory, asynchronous=False) as checkpointer:
        with pytest.raises(ckpt.CheckpointExists, match="step 2 is there already"):
            checkpointer.save(2, state(NEW))
        with pytest.raises(ckpt.CheckpointExists, match="step 0 is there already"):
            checkpointer.save(0, state(NEW))
        save(checkpointer, 3, NEW)
        with pytest.raises(ckpt.CheckpointExists):
            checkpointer.save(1, state(NEW))
    assert values(directory) == {0: 0, 1: 1, 2: 2, 3: NEW + 3}


def test_overwriting_a_step_leaves_the_others(tmp_path: Path) -> None:
    write(tmp_path / "run", 0, 1, 2)
    with start(tmp_path / "run", asynchronous=False) as checkpointer:
        value_of(checkpointer.restore(0, state=state(-1))["state"])
        assert checkpointer.save(1, state(NEW), overwrite=True)
    assert values(tmp_path / "run") == {0: 0, 1: NEW, 2: 2}


def test_a_step_that_is_being_read_is_waited_for(tmp_path: Path) -> None:
    write(tmp_path / "run", 0, 1)
    reading, read = threading.Event(), threading.Event()

    def choose(path: Any, leaf: Any) -> bool:
        reading.set()
        assert read.wait(LIMIT_SECS)
        return True

    with start(tmp_path / "run", asynchronous=False) as checkpointer:
        value_of(checkpointer.restore(0, state=state(-1))["state"])
        found: list[Any] = []
        reader = threading.Thread(
            target=lambda: found.append(ckpt.load(tmp_path / "run" / "1", only=choose))
        )
        reader.start()
        assert reading.wait(LIMIT_SECS)
        soon = threading.Timer(0.2, read.set)
        soon.start()
        save(checkpointer, 1, NEW)
        reader.join(LIMIT_SECS)
        soon.join(LIMIT_SECS)
    assert value_of(found[0]) == 1
    assert values(tmp_path / "run") == {0: 0, 1: NEW + 1}


@pytest.mark.filterwarnings("ignore:.*damaged and skipped:RuntimeWarning")
def test_past_damage_and_beyond_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was damaged may be whole again some day (a storage that stuttered): it is set aside."""
    run = tmp_path / "run"
    write(run, 10, 20, 30)
    for step in (20, 30):
        manifest = run / str(step) / "state" / "manifest.ocdbt"
        manifest.rename(run / f"manifest-{step}")
    with start(run, asynchronous=False) as checkpointer:
        assert resume(checkpointer) == 10
        assert checkpointer.all_steps() == [10, 20, 30]
        save(checkpointer, 15, NEW)
        assert checkpointer.all_steps() == [10, 15]
    assert sorted(os.listdir(run / "damaged")) == ["20", "30"]
    for step in (20, 30):
        (run / f"manifest-{step}").rename(run / "damaged" / str(step) / "state/manifest.ocdbt")
        assert value_of(ckpt.load(run / "damaged" / str(step))) == step
    with start(run) as checkpointer:
        assert resume(checkpointer) == 15


# ---- what a directory is -----------------------------------------------------------------------


def test_a_directory_that_is_one_checkpoint(directory: str) -> None:
    ckpt.save(f"{directory}/5", state(1))
    for read_only in (True, False):
        with pytest.raises(ckpt.CheckpointExists, match="is one checkpoint") as caught:
            start(f"{directory}/5", read_only=read_only)
        assert f"make the Checkpointer on {directory}" in str(caught.value)
    with start(directory) as checkpointer:
        assert checkpointer.all_steps() == [5]


def test_a_step_of_orbax_is_one_checkpoint(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": np.ones(3)}))
        manager.wait_until_finished()
    for name in ("3", "3/default"):
        with pytest.raises(ckpt.CheckpointExists, match="is one checkpoint"):
            start(tmp_path / "run" / name)
    with start(tmp_path / "run") as checkpointer:
        assert checkpointer.all_steps() == [3]


def test_a_step_that_is_saved_twice_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ckpt_core")
    with start(tmp_path / "run", asynchronous=False) as checkpointer:
        for _ in range(3):
            checkpointer.save(0, state(0))
        assert not checkpointer.save(0, state(1))
    told = [one.getMessage() for one in caplog.records if "already" in one.getMessage()]
    assert len(told) == 1
    assert "step 0" in told[0]
