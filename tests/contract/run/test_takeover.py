"""A newcomer and the run that it replaces: whatever moment the old one wakes up at, one history is left. Who claims a
directory, and what becomes of steps that are left or damaged.

The old run is stalled in the middle of a save: right before it asks whether it may still commit, or right after.
"""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import forked, seams
from tests.support.children import environment
from tests.support.refusals import refuse
from tests.support.takeovers import (
    LIMIT_SECS,
    NEW,
    OLD,
    make_directory,  # noqa: F401 (fixture)
    resume,
    retired,
    save,
    start,
    state,
    value_of,
    values,
    write,
)

FENCED = "another Checkpointer"


class Stalled:
    """An old run that is held back in the save of a step."""

    def __init__(self, patch: pytest.MonkeyPatch, directory: str, at: str, step: int, **more: Any):
        self._gate = seams.Gate()
        here = seams.below(directory)
        if at == "before":
            seams.at(patch, "record", after=self._gate, where=here, nth=1)
        else:
            seams.at(patch, "commit", before=self._gate, where=here, nth=1)
        # in the foreground of a thread, for what is in the background of this process the newcomer would wait
        self.run = start(directory, asynchronous=False, **more)
        resume(self.run)
        self._outcome = ""
        self._thread = threading.Thread(target=self._save, args=(step,))
        self._thread.start()
        assert self._gate.entered.wait(LIMIT_SECS)

    def _save(self, step: int) -> None:
        try:
            assert self.run.save(step, state(OLD + step))
        except ckpt.CheckpointError as error:
            self._outcome = f"{type(error).__name__}: {error}"

    def wake(self, *_: Any, **__: Any) -> str:
        """How its save ends: empty, or the error."""
        self._gate.go.set()
        self._thread.join()
        return self._outcome


ORDERS = ("before the first save", "after it", "after two")
ROWS = [  # who wakes before the claim is gone on from, whatever number the newcomer would have begun with
    *((at, "before the claim", 3, at == "before") for at in ("before", "after")),
    *(
        (at, order, first, (first + ORDERS.index(order) + (at == "after")) % 2 == 0)
        for at in ("before", "after")
        for order in ORDERS
        for first in (1, 2, 3)
    ),
]


@pytest.mark.parametrize(("stalled", "order", "first", "begun"), ROWS)
def test_one_history_is_left(tmp_path, monkeypatch, caplog, stalled, order, first, begun):
    """The old run saves step 2; the newcomer's first one has the same number, or one more or less."""
    directory = str(tmp_path / "run")
    if begun:
        write(directory, 0)
    with monkeypatch.context() as patch:
        old = Stalled(patch, directory, stalled, 2)
    new = start(directory, asynchronous=False)
    if order == "before the claim":
        assert old.wake() == "" and resume(new) == 2
        save(new, first, NEW)
        wanted = {2: OLD + 2, first: NEW + first}
    else:
        assert resume(new) == (0 if begun else None)
        outcome = ""
        for number, now in enumerate(ORDERS):
            if now == order:
                outcome = old.wake()
            save(new, first + number, NEW)
        wanted = {first + n: NEW + first + n for n in range(3)}
        assert FENCED in outcome or stalled == "after"
        assert retired(directory) == ({} if outcome else {"2": OLD + 2})
        if not outcome:
            assert f"step 2 is no continuation: moved to {directory}/retired" in caplog.text
    assert values(directory) == ({0: 0} if begun else {}) | wanted
    for call in (lambda: save(old.run, 9, OLD), lambda: old.run.rollback_to(0)):
        with pytest.raises(ckpt.CheckpointError, match=FENCED):
            call()
    old.run.close()
    new.close()
    with start(directory) as again:
        assert resume(again) == max(wanted)


@pytest.mark.parametrize("stalled", ["before", "after"])
def test_one_history_is_left_in_a_bucket(store, monkeypatch, stalled):
    write(store, 0)
    with monkeypatch.context() as patch:
        old = Stalled(patch, store, stalled, 2)
    with start(store, asynchronous=False) as new:
        assert resume(new) == 0
        assert bool(old.wake()) == (stalled == "before")
        save(new, 1, NEW)
    assert values(store) == {0: 0, 1: NEW + 1}
    old.run.close()


def test_a_step_of_nobody_makes_way_in_a_bucket_while_a_run_saves():
    directory = f"memory://nobody-{os.getpid()}/run"
    with start(directory) as run:
        save(run, 0, NEW)
        ckpt.save(f"{directory}/1", state(OLD))
        save(run, 1, NEW)
        ckpt.save(f"{directory}/4", state(OLD))
        save(run, 5, NEW)
        with pytest.raises(ckpt.CheckpointExists, match="step 3 is older than 5"):
            run.save(3, state(NEW))
    assert values(directory) == {0: NEW, 1: NEW + 1, 5: NEW + 5}


def test_an_old_run_that_wakes_late_deletes_nothing(tmp_path, monkeypatch):
    """It has published one step too many; its retention would judge the newcomer's."""
    directory = str(tmp_path / "run")
    write(directory, 0)
    old = Stalled(monkeypatch, directory, "after", 9, max_to_keep=1)
    with start(directory, asynchronous=False) as new:
        assert resume(new) == 0
        save(new, 1, NEW)
        assert old.wake() == ""
        assert set(values(directory)) == {0, 1, 9}
        save(new, 2, NEW)
    assert values(directory) == {0: 0, 1: NEW + 1, 2: NEW + 2}
    old.run.close()


@pytest.mark.parametrize(("point", "late", "kept"), [("begin", 9, 1), ("record", 1, None)])
def test_a_late_step_appears_while_the_newcomer_saves(tmp_path, monkeypatch, point, late, kept):
    """As it begins: its retention keeps the newest one only. While it is written, with the same number."""
    directory = str(tmp_path / "run")
    write(directory, 0)
    with monkeypatch.context() as patch:
        old = Stalled(patch, directory, "after", late)
    woken: list[str] = []
    with start(directory, asynchronous=False, max_to_keep=kept) as new:
        assert resume(new) == 0
        seams.at(monkeypatch, point, before=lambda *_, **__: woken.append(old.wake()), nth=1)
        save(new, 1, NEW)
    assert woken == [""]
    assert values(directory) == ({} if kept else {0: 0}) | {1: NEW + 1}
    assert retired(directory) == {str(late): OLD + late}
    old.run.close()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_older_writer_is_fenced(directory, asynchronous):
    old = start(directory, asynchronous=asynchronous)
    save(old, 1, OLD)
    with start(directory, asynchronous=False) as new:
        save(new, 2, NEW)
        with pytest.raises(ckpt.CheckpointError, match=FENCED):
            save(old, 3, OLD)
        assert old.all_steps() == new.all_steps() == [1, 2]
        save(new, 3, NEW)
        closed = start(directory)
        closed.close()
        closed.restore(1, state=state(0))  # who is closed takes the directory from nobody
        save(new, 4, NEW)
    assert values(directory) == {1: OLD + 1, 2: NEW + 2, 3: NEW + 3, 4: NEW + 4}
    old.close()


def test_taking_over_from_a_living_writer_warns(tmp_path, caplog):
    old = start(tmp_path, asynchronous=False)
    save(old, 1, OLD)
    assert caplog.text == ""
    with start(tmp_path, asynchronous=False) as new:
        save(new, 2, NEW)
        assert f"taken over from process {os.getpid()} on" in caplog.text
        assert "an earlier Checkpointer of this process, not closed" in caplog.text
        with pytest.raises(ckpt.CheckpointError, match=rf"{FENCED} \(process {os.getpid()}"):
            save(old, 3, OLD)
    with pytest.raises(ckpt.CheckpointError, match="one that was closed since"):
        save(old, 3, OLD)
    old.close()
    caplog.clear()
    with start(tmp_path, asynchronous=False) as third:  # the last one was closed
        assert third.latest_step() == 2  # or it warns that it saves onto a run that it has not seen
        save(third, 3, NEW)
    assert caplog.text == ""


ZOMBIE = """
import os, signal, sys, threading
import numpy as np
import ckpt_core as ckpt
from tests.support import seams

directory, when, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
state = lambda value: {"value": np.full(2000, value)}
stop = lambda *_: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this very thread, now
if when == "before":
    seams.at(None, "record", after=stop)
else:
    seams.at(None, "commit", before=stop)
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
WOKEN = [
    pytest.param("before", 1, "before the first save", 1, marks=pytest.mark.always),
    ("before", 1, "after it", 1),
    ("after", 1, "before the first save", 1),
    *(
        pytest.param(when, step, wakes, first, marks=pytest.mark.faults)
        for when, step, wakes, first in (
            ("after", 1, "after it", 1),
            ("before", 2, "before the first save", 1),
            ("before", 5, "after it", 2),
            ("after", 2, "after it", 2),
            ("after", 5, "before the first save", 1),
            ("after", 1, "before the first save", 2),
        )
    ),
]


@pytest.mark.parametrize(("when", "step", "wakes", "first"), WOKEN)
def test_a_stopped_process_wakes_up(tmp_path, when, step, wakes, first):
    """A process that SIGSTOP has stopped in the middle of a save."""
    directory, said, errors = tmp_path / "run", tmp_path / "said", tmp_path / "errors"
    write(directory, 0)
    files = {"output": said, "errors": errors, "environment": environment()}
    zombie = forked.start(ZOMBIE, str(directory), when, str(step), **files)

    def wake() -> None:
        zombie.send_signal(signal.SIGCONT)
        assert zombie.wait(LIMIT_SECS) == 0, errors.read_text()

    try:
        zombie.wait_until_stopped(LIMIT_SECS)
        with start(directory, asynchronous=False) as new:
            assert resume(new) == 0
            if wakes == "before the first save":
                wake()
            save(new, first, NEW)
            if wakes == "after it":
                wake()
            save(new, first + 1, NEW)
    finally:
        zombie.end()
    assert values(directory) == {0: 0, first: NEW + first, first + 1: NEW + first + 1}
    if when == "before":
        assert said.read_text().startswith("CheckpointError") and FENCED in said.read_text()
        assert f"process {os.getpid()}" in said.read_text()  # by whom
    elif wakes == "after it":  # the number is taken
        assert said.read_text().startswith("CheckpointExists")
    else:
        assert said.read_text() == "saved\n"
        assert retired(str(directory)) == {str(step): OLD + step}
    assert not list(directory.glob(".ckpt-tmp.*"))


def test_a_killed_writer_is_taken_over_without_a_warning(tmp_path, caplog):
    code = """
import os, signal, sys
import numpy as np
import ckpt_core as ckpt
ckpt.Checkpointer(sys.argv[1], asynchronous=False).save(1, {"value": np.full(2000, 1)})
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = forked.run(code, str(tmp_path), environment=environment(), timeout_secs=LIMIT_SECS)
    assert done.returncode == -signal.SIGKILL
    with start(tmp_path, asynchronous=False) as checkpointer:
        assert checkpointer.all_steps() == [1]
        save(checkpointer, 2, 0)
    assert values(tmp_path) == {1: 1, 2: 2}
    assert caplog.text == ""


OWNER = ".ckpt-owner"


def owner(directory: Path) -> bytes | None:
    return (directory / OWNER).read_bytes() if (directory / OWNER).exists() else None


def test_who_claims_a_directory(tmp_path):
    """Who restores to train, and nobody who looks; who leaves takes the claim away, and nothing else is left."""
    run = tmp_path / "run"
    with start(run) as checkpointer:
        assert checkpointer.latest_step() is None
        assert owner(run) is None
        assert resume(checkpointer) is None  # also where there is nothing
        assert owner(run) is not None
        save(checkpointer, 0, 0)
    assert os.listdir(run) == ["0"]
    with start(run) as looking:
        for look in (looking.load, looking.metadata, looking.inspect, looking.should_save):
            look(0)
        assert owner(run) is None
        looking.restore(0, state=state(1))
        claimed = owner(run)
        assert claimed is not None
        with start(run, read_only=True) as evaluator:
            assert resume(evaluator) == 0
            evaluator.restore(0, state=state(1))
        assert owner(run) == claimed
        with start(run) as checkpointer:
            save(checkpointer, 1, 0)
            assert owner(run) not in (None, claimed)
            looking.close()
            assert owner(run) is not None  # that of the other stays
    assert sorted(os.listdir(run)) == ["0", "1"]


def test_local_directories_are_claimed_too(tmp_path):
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
    old.close()
    with run() as again:
        assert resume(again) == 2
        assert value_of(again.load(2)) == NEW + 2


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_a_directory_that_cannot_be_written_is_restored(tmp_path, monkeypatch, caplog, error):
    run = tmp_path / "run"
    write(run, 0)
    with start(run, asynchronous=False) as new:
        with monkeypatch.context() as patch:
            refuse(patch, run, error, calls=("mkdir", "link", "rename", "open"), below=False)
            refuse(patch, run / OWNER, error, calls=("open", "link", "rename"))
            assert resume(new) == 0
            assert "could not be claimed" in caplog.text
            with pytest.raises(OSError, match=os.strerror(error)):
                save(new, 1, NEW)
        save(new, 1, NEW)  # it can be by now
    assert set(values(run)) == {0, 1}


def test_steps_that_are_left_are_moved_and_named(tmp_path, caplog):
    directory = str(tmp_path / "run")
    write(directory, *range(6))
    with start(directory, asynchronous=False) as checkpointer:
        value_of(checkpointer.restore(2, state=state(-1))["state"])
        caplog.clear()
        save(checkpointer, 3, NEW)
        save(checkpointer, 4, NEW)
        (warning,) = [one for one in caplog.records if one.levelname == "WARNING"]
        told = warning.getMessage()
        assert "goes on from step 2, of which steps 3, 4, 5 are no continuation" in told
        assert f"moved to {directory}/retired" in told
    assert retired(directory) == {"3": 3, "4": 4, "5": 5}
    with start(directory, asynchronous=False) as checkpointer:  # and once more
        value_of(checkpointer.restore(3, state=state(-1))["state"])
        save(checkpointer, 9, NEW)
    assert len(retired(directory)) == 4  # a second step 4 has its place beside the first
    assert value_of(ckpt.load(f"{directory}/retired/4")) == 4


def test_what_is_refused_says_the_way_out(directory, caplog):
    write(directory, 0, 2, 4)
    with start(directory, asynchronous=False) as checkpointer:
        with pytest.raises(ckpt.CheckpointExists, match=r"call restore_latest\(\)"):
            checkpointer.save(0, state(NEW))
        with pytest.raises(ckpt.CheckpointExists, match=r"older than 4.*rollback_to\(2\)") as told:
            checkpointer.save(3, state(NEW))
        assert "force=True" in str(told.value)
        assert checkpointer.save(3, state(NEW), force=True)
        assert "step 3 is saved with force=True, and is older than 4" in caplog.text
        assert checkpointer.rollback_to(2) == [3, 4]
        assert "has deleted every step" not in caplog.text
        assert checkpointer.rollback_to(0) == [2]
    assert values(directory) == {0: 0}


def test_a_step_that_is_being_read_is_waited_for(tmp_path):
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
    assert value_of(found[0]) == 1
    assert values(tmp_path / "run") == {0: 0, 1: NEW + 1}


@pytest.mark.parametrize("file", ["ckpt.json", "state/manifest.ocdbt"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_past_damage_and_beyond_it(tmp_path, file, asynchronous):
    """What was damaged may be whole again some day (a storage that stuttered): it is set aside."""
    run = tmp_path / "run"
    write(run, 10, 20, 30)
    for step in (20, 30):
        (run / str(step) / file).rename(run / f"kept-{step}")
        (run / str(step) / file).write_bytes(b"damaged")
    with start(run, max_to_keep=2, asynchronous=asynchronous) as checkpointer:
        with pytest.warns(RuntimeWarning, match="damaged and skipped"):
            assert resume(checkpointer) == 10
        assert checkpointer.all_steps() == [10, 20, 30]
        assert "damaged" in checkpointer.explain()[30]
        for step in (15, 20, 25, 30):
            save(checkpointer, step, NEW)
        assert checkpointer.all_steps() == [25, 30]
    assert values(run) == {25: NEW + 25, 30: NEW + 30}
    assert sorted(os.listdir(run / "damaged")) == ["20", "30"]
    for step in (20, 30):
        (run / f"kept-{step}").rename(run / "damaged" / str(step) / file)
        assert value_of(ckpt.load(run / "damaged" / str(step))) == step


def test_damaged_steps_hide_until_they_are_found_deleted_or_rolled_back(tmp_path):
    write(tmp_path, 0, 2, 3, 4)
    for step in (2, 3, 4):
        (tmp_path / str(step) / "ckpt.json").write_text("{}")
    with start(tmp_path, asynchronous=False) as checkpointer:
        with pytest.raises(ckpt.CheckpointExists, match="rollback_to"):
            checkpointer.save(1, state(NEW))
        checkpointer.delete(4)
        with pytest.raises(ckpt.CheckpointNotFound, match="has no step 4; it has: 0, 2, 3"):
            checkpointer.delete(4)
        assert checkpointer.rollback_to(0) == [2, 3]
    assert values(tmp_path) == {0: 0}


def test_a_directory_that_is_one_checkpoint(directory):
    ckpt.save(f"{directory}/5", state(1))
    for read_only in (True, False):
        with pytest.raises(ckpt.CheckpointExists, match="is one checkpoint") as caught:
            start(f"{directory}/5", read_only=read_only)
        assert f"make the Checkpointer on {directory}" in str(caught.value)
    with start(directory) as checkpointer:
        assert checkpointer.all_steps() == [5]


def test_a_claim_that_comes_while_another_writer_leaves(tmp_path, monkeypatch):
    """It is put back, and the new writer goes on."""
    older, newer = start(tmp_path), start(tmp_path)
    save(older, 0, OLD)
    rename, claimed = os.rename, list[str]()

    def claimed_first(source: str, target: str) -> None:
        if os.path.basename(source) == OWNER and not claimed:
            claimed.append(source)
            assert resume(newer) == 0
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", claimed_first)
        older.close()
    assert claimed and sorted(os.listdir(tmp_path)) == [OWNER, "0"]
    save(newer, 1, NEW)
    newer.close()
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_a_step_of_orbax_is_one_checkpoint(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": np.ones(3)}))
        manager.wait_until_finished()
    for name in ("3", "3/default"):
        with pytest.raises(ckpt.CheckpointExists, match="is one checkpoint"):
            start(tmp_path / "run" / name)
    with start(tmp_path / "run") as checkpointer:
        assert checkpointer.all_steps() == [3]


TWO_USERS = """
import os, sys
import ckpt_core as ckpt
with ckpt.Checkpointer(sys.argv[1], asynchronous=False) as first:
    first.save(0, {"n": 0}), first.save(1, {"n": 1})
os.chmod(sys.argv[1], 0o777)
os.setgroups([]), os.setgid(12345), os.setuid(12345)
with ckpt.Checkpointer(sys.argv[1], asynchronous=False) as second:
    print(second.restore(0, {"n": 0}).state, flush=True)
    for call in (second.delete, second.rollback_to, lambda step: second.save(1, {"n": 2})):
        try:
            call(0)
        except PermissionError as error:
            print("refused:", error, file=sys.stderr)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two other users")
def test_a_second_user_hears_at_the_restore_whose_steps_it_cannot_move() -> None:
    """It may write beside them; a training of hours would end at the first save that has to retire one."""
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)  # the directories of pytest are for their owner alone
        command = [sys.executable, "-c", TWO_USERS, f"{root}/run"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110)
        said, *refused = done.stderr.split("refused:")
        assert done.stdout == "{'n': 0}\n", done.stderr
        assert len(refused) == 3, done.stderr
        for text in (said, *refused):
            assert "belongs to user 0" in text and f"chmod -R g+w {root}/run" in text, done.stderr
        assert ckpt.Checkpointer(f"{root}/run", read_only=True).all_steps() == [0, 1]
