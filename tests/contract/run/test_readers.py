"""Readers beside a run that goes on: what they read stays, or they get what counts now."""

import contextlib
import errno
import fcntl
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.children import environment
from tests.support.takeovers import save, start, state, value_of, values, write

Starts = Callable[..., ckpt.Checkpointer]


def starts(root: Path, *, persists_every: int, local_max_to_keep: int) -> Starts:
    """Starts a blocking Checkpointer on ``root/steps`` and ``root/local``; takes further arguments of it."""
    options = ckpt.Options(
        persist_policy=ckpt.when.every_steps(persists_every),
        local_max_to_keep=local_max_to_keep,
        durable=False,
    )

    def start(**more: Any) -> ckpt.Checkpointer:
        local = root / "local"
        return ckpt.Checkpointer(
            root / "steps", local_directory=local, options=options, asynchronous=False, **more
        )

    return start


def trains(directory: Path, **more: Any) -> ckpt.Checkpointer:
    return start(directory, asynchronous=False, **more)


def during(work: Callable[[], Any]) -> Callable[..., bool]:
    """An ``only=`` that takes everything and does the work once, in the middle of a load."""
    done: list[int] = []

    def choose(path: Any, leaf: Any) -> bool:
        if not done:
            done.append(1)
            work()
        return True

    return choose


@pytest.mark.parametrize("locks", ["as Linux has them", "as NFS has them"])
def test_retention_leaves_a_step_that_is_being_read(tmp_path, monkeypatch, locks):
    flock = fcntl.flock

    def nfs(descriptor: int, kind: int) -> None:
        """A shared lock takes a file open for reading, an exclusive one a file open for writing."""
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if mode == (os.O_RDONLY if kind & fcntl.LOCK_EX else os.O_WRONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, kind)

    if locks == "as NFS has them":
        monkeypatch.setattr(fcntl, "flock", nfs)
    with trains(tmp_path, max_to_keep=1) as checkpointer:
        save(checkpointer, 1, 0)
        tree = ckpt.load(tmp_path / "1", only=during(lambda: save(checkpointer, 2, 0)))
        assert value_of(tree) == 1
        assert checkpointer.all_steps() == [1, 2]
        save(checkpointer, 3, 0)
        assert checkpointer.all_steps() == [3]


def test_a_step_that_is_being_verified_stays(tmp_path, monkeypatch):
    with trains(tmp_path, max_to_keep=1) as checkpointer:
        save(checkpointer, 1, 0)
        pread, met = os.pread, list[int]()

        def reads(*of: Any) -> bytes:
            if not met:
                met.append(1)
                save(checkpointer, 2, 0)
            return pread(*of)

        monkeypatch.setattr(os, "pread", reads)
        report = ckpt.verify(tmp_path / "1")
        assert met and report.ok, report.problems
        assert checkpointer.all_steps() == [1, 2]


@pytest.mark.parametrize("call", ["delete", "rollback"])
def test_what_is_refused_while_it_is_read_changes_nothing(tmp_path, call):
    """A save of it does nothing, as before; it is not taken for a foreign step that must make way."""
    write(tmp_path, 0)
    with trains(tmp_path, max_to_keep=2) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step, 0)

        def refused() -> None:
            with pytest.raises(ckpt.CheckpointError, match="being read"):
                checkpointer.delete(3) if call == "delete" else checkpointer.rollback_to(1)
            assert not checkpointer.save(3, state(9))
            save(checkpointer, 4, 0)

        assert value_of(ckpt.load(tmp_path / "3", only=during(refused))) == 3
        assert checkpointer.all_steps() == [3, 4]
        checkpointer.delete(3)
        assert checkpointer.all_steps() == [4]
    assert not (tmp_path / "retired").exists()


READER = """
import sys
import ckpt_core as ckpt

waited = []

def choose(path, leaf):
    if not waited:
        waited.append(1)
        print("reading", flush=True)
        sys.stdin.readline()
    return True

print(int(ckpt.load(sys.argv[1], only=choose)["value"][0]), flush=True)
"""


@contextlib.contextmanager
def reader_of(step: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is in the middle of reading the step; killed at the end."""
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(step)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        yield reader
    finally:
        reader.kill()
        reader.communicate(timeout=60)


@pytest.mark.always
def test_a_step_that_another_process_reads_stays(tmp_path):
    """While it reads; one that was killed holds nothing."""
    with trains(tmp_path, max_to_keep=1) as checkpointer:
        save(checkpointer, 1, 0)
        with reader_of(tmp_path / "1") as reader, reader_of(tmp_path / "1"):
            save(checkpointer, 2, 0)
            assert checkpointer.all_steps() == [1, 2]
            out, _ = reader.communicate("go on\n", timeout=60)
            assert out == "1\n"
            with pytest.raises(ckpt.CheckpointError, match="being read"):
                checkpointer.delete(1)
        checkpointer.delete(1)
        assert os.listdir(tmp_path / "2") and not (tmp_path / "1").exists()


def test_a_step_deleted_between_the_look_and_the_read(tmp_path, monkeypatch):
    write(tmp_path, 1, 2, 3)
    with start(tmp_path, read_only=True) as follower:
        opening(monkeypatch, "3/ckpt.json", lambda: shutil.rmtree(tmp_path / "3"))
        restored = follower.restore_latest(state=state(0))
    assert restored is not None and restored.step == 2


def opening(patch: pytest.MonkeyPatch, file: str, work: Callable[[], Any]) -> None:
    """Works once, right before a file is opened."""
    real, met = os.open, list[str]()

    def opens(path: Any, *flags: Any, **more: Any) -> int:
        if str(path).endswith(file) and not met:
            met.append(path)
            work()
        return real(path, *flags, **more)

    patch.setattr(os, "open", opens)


@pytest.mark.parametrize("goes_back", [False, True])
def test_local_steps_that_go_while_they_are_read_are_no_damage(tmp_path, monkeypatch, goes_back):
    """Three retired local steps, and an evaluator ended with CheckpointCorrupt: none of the steps can be loaded."""
    run = starts(tmp_path, persists_every=4, local_max_to_keep=3)
    with run() as writer, run(read_only=True) as reader:
        for step in range(8):
            save(writer, step, 0)

        def goes_on() -> None:
            if goes_back:
                writer.rollback_to(5)
            else:
                for step in (9, 10, 11):
                    save(writer, step, 0)
                writer.delete(4)

        opening(monkeypatch, "/7/ckpt.json", goes_on)
        restored = reader.restore_latest(state=state(0))
        assert restored is not None
        newest = 5 if goes_back else 11
        assert (restored.step, value_of(restored["state"])) == (newest, newest)


def test_an_evaluator_that_follows(tmp_path):
    """A reader and a writer with the tightest retention, in turn: what was waited for stays until the next is asked for."""
    with trains(tmp_path, max_to_keep=1) as trainer:
        save(trainer, 1, 0)
        evaluator = start(tmp_path, read_only=True)
        assert evaluator.wait_for_new_step(timeout_secs=0) == 1
        for step in (2, 3, 4):
            save(trainer, step, 0)
        assert trainer.all_steps() == [1, 4]
        assert value_of(evaluator.restore(1, state=state(0))["state"]) == 1
        assert evaluator.wait_for_new_step(1, timeout_secs=0) == 4
        save(trainer, 5, 0)
        assert trainer.all_steps() == [4, 5]
        evaluator.close()
        save(trainer, 6, 0)
        assert trainer.all_steps() == [6]


@pytest.mark.parametrize("how", ["asks in vain", "is forgotten"])
def test_a_step_is_kept_no_longer_than_it_is_wanted(tmp_path, how):
    with trains(tmp_path, max_to_keep=1) as trainer:
        save(trainer, 1, 0)
        evaluator = start(tmp_path, read_only=True)
        assert evaluator.wait_for_new_step(timeout_secs=0) == 1
        if how == "asks in vain":
            assert evaluator.wait_for_new_step(1, timeout_secs=0) is None
        else:
            del evaluator
            gc.collect()
        save(trainer, 2, 0)
        assert trainer.all_steps() == [2]


def test_training_goes_back_behind_a_step_that_is_evaluated(tmp_path):
    """An evaluation may take an hour: training must not wait for it, nor fail."""
    with trains(tmp_path) as trainer, start(tmp_path, read_only=True) as evaluator:
        for step in (1, 2, 3):
            save(trainer, step, 0)
        assert evaluator.wait_for_new_step(timeout_secs=0) == 3
        assert value_of(trainer.restore(1, state=state(0))["state"]) == 1
        save(trainer, 2, 100)
        assert trainer.all_steps() == [1, 2]
        with pytest.raises(ckpt.CheckpointNotFound):
            evaluator.restore(3, state=state(0))
        assert evaluator.wait_for_new_step(timeout_secs=0) == 2
        assert trainer.rollback_to(1) == [2]


@pytest.mark.parametrize("after", ["3", 3.0])
def test_waiting_for_a_step_after_what_is_no_number(tmp_path, after):
    write(tmp_path, 4)
    with start(tmp_path, read_only=True) as reader:
        with pytest.raises(TypeError, match="after must be the number of a step"):
            reader.wait_for_new_step(after, 0)
        assert reader.wait_for_new_step(-1, 0) == reader.wait_for_new_step(np.int32(3), 0) == 4


def test_a_tool_that_deletes_the_newest_persistent_step_takes_none_that_the_run_saves_on(tmp_path):
    """Local steps that the run had saved after it, and all that it saved from then on, did not count any more."""
    run = starts(tmp_path, persists_every=4, local_max_to_keep=3)
    with run() as writer:
        for step in (4, 6, 7, 8, 9):
            save(writer, step, 0)
        with start(tmp_path / "steps") as tool:
            tool.delete(8)
        for step in (10, 11):
            save(writer, step, 0)
        assert writer.all_steps() == [4, 9, 10, 11]
    with run() as again:
        restored = again.restore_latest(state=state(0))
        assert restored is not None and restored.step == 11
        assert again.all_steps() == [4, 9, 10, 11]
    assert values(tmp_path / "steps") == {4: 4}
