"""Who claims a directory, and what happens to steps newer than the restored one."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from tests.support import seams
from tests.support.takeovers import (
    LIMIT_SECS,
    NEW,
    OLD,
    make_directory,  # noqa: F401 (fixtures)
    resume,
    retired,
    save,
    start,
    state,
    value_of,
    values,
    write,
)

# ---- the claim ---------------------------------------------------------------------------------


def owner(directory: Any) -> bytes | None:
    try:
        return Path(directory, ".ckpt-owner").read_bytes()
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
    assert owner(run) is None  # who leaves takes it away
    with start(run) as looking:
        looking.load(0)
        looking.metadata(0)
        looking.inspect(0)
        looking.all_steps()
        looking.should_save(1)
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

    with monkeypatch.context() as patch, start(tmp_path / "run", asynchronous=False) as new:
        fails = seams.fail(OSError, error, os.strerror(error))
        patch.setattr(PosixBackend, "claim", fails)
        # raised in a file of tests, the error would be taken for that of a signal handler
        patch.setattr("ckpt_core._run.lease.raised_by_a_handler", lambda _: None)
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


def test_between_own_steps_is_refused_and_beyond_them_goes_on(directory: str) -> None:
    """The newer ones would hide what is saved now."""
    with start(directory, asynchronous=False) as checkpointer:
        for step in (0, 2, 4):
            save(checkpointer, step, 0)
        assert not checkpointer.save(2, state(NEW))
        with pytest.raises(ckpt.CheckpointExists, match=r"older than 4.*rollback_to\(2\)"):
            checkpointer.save(3, state(NEW))
        assert checkpointer.all_steps() == [0, 2, 4]
        value_of(checkpointer.restore(0, state=state(-1))["state"])  # to compare: numbers decide
        save(checkpointer, 5, 0)
    assert values(directory) == {0: 0, 2: 2, 4: 4, 5: 5}


def test_going_back_on_its_own_steps_leaves_them(directory: str) -> None:
    write(directory, *range(6))
    with start(directory, asynchronous=False) as checkpointer:
        assert resume(checkpointer) == 5
        save(checkpointer, 6, NEW)
        value_of(checkpointer.restore(2, state=state(-1))["state"])
        assert not checkpointer.save(2, state(0))  # it stands there
        with pytest.raises(ckpt.CheckpointExists, match="step 1 is there already"):
            checkpointer.save(1, state(0))
        assert checkpointer.all_steps() == list(range(7))
        save(checkpointer, 4, NEW)
        assert checkpointer.all_steps() == [0, 1, 2, 4]
        assert not checkpointer.save(4, state(0))
        save(checkpointer, 5, NEW)
    assert values(directory) == {0: 0, 1: 1, 2: 2, 4: NEW + 4, 5: NEW + 5}


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


def test_overwriting_a_step_of_its_own_leaves_the_others(directory: str) -> None:
    with start(directory, asynchronous=False) as checkpointer:
        for step in range(3):
            save(checkpointer, step, 0)
        assert checkpointer.save(1, state(NEW), overwrite=True)
        assert not checkpointer.save(1, state(0))
        save(checkpointer, 3, 0)
    assert values(directory) == {0: 0, 1: NEW, 2: 2, 3: 3}


def test_overwriting_what_was_left_leaves_the_rest_of_it_too(directory: str) -> None:
    """Or the next start goes on with step 2 of the other history."""
    write(directory, 0, 1, 2)
    with start(directory, asynchronous=False) as checkpointer:
        value_of(checkpointer.restore(0, state=state(-1))["state"])
        assert checkpointer.save(1, state(NEW), overwrite=True)
    assert values(directory) == {0: 0, 1: NEW}


@pytest.mark.parametrize("steps", [range(21), range(0, 21, 5)])
def test_a_second_start_with_overwrite_ends_in_one_run(directory: str, steps: range) -> None:
    """A message said that step 0 is there, and passed overwrite=True from then on."""
    write(directory, *range(41))
    with start(directory, asynchronous=False) as checkpointer:
        with pytest.raises(ckpt.CheckpointExists, match=r"call restore_latest\(\)"):
            checkpointer.save(0, state(NEW))
        for step in steps:
            assert checkpointer.save(step, state(NEW + step), overwrite=True)
    assert values(directory) == {step: NEW + step for step in steps}


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


def test_a_step_that_is_saved_twice_is_reported_once(
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
