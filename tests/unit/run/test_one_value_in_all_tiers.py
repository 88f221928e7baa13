"""An overwrite with a fast directory: before it is acknowledged every tier has the old value, and then each has the new one."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import ckpt_core as ckpt
from ckpt_core._format.record import load_record
from ckpt_core._run.disk import Disk
from tests.support import seams

HOURLY = ckpt.Options(persist_policy=ckpt.when.every_secs(3600), durable=False, local_max_to_keep=3)


class Run:
    def __init__(self, root: Path) -> None:
        self.persistent, self.local = root / "run", root / "local"

    def start(self, **more: Any) -> ckpt.Checkpointer:
        more = {"options": HOURLY} | more
        return ckpt.Checkpointer(self.persistent, local_directory=self.local, **more)

    def values(self) -> list[dict[int, int]]:
        """What a restart finds, and what whoever knows of no local directory does."""
        with self.start(read_only=True) as both, self.start(read_only=True) as other:
            shown = {step: both.load(step)["n"] for step in both.all_steps()}
            latest = other.restore_latest(state={"n": 0})
            assert latest is not None
            assert (latest.step, latest["state"]["n"]) == max(shown.items())
        with ckpt.Checkpointer(self.persistent, read_only=True) as tool:
            return [shown, {step: tool.load(step)["n"] for step in tool.all_steps()}]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def save(checkpointer: ckpt.Checkpointer, step: int, value: int, **more: Any) -> None:
    assert checkpointer.save(step, {"n": value}, **more)
    checkpointer.wait_until_finished()


def fails_to_overwrite(
    checkpointer: ckpt.Checkpointer,
    step: int,
    value: int,
    place: Path,
    point: seams.Point = "commit",
    **more: Any,
) -> OSError:
    """The error of an overwrite while the disk below ``place`` fails at this moment."""
    fails = seams.fail(OSError, "the disk is gone")
    with pytest.MonkeyPatch.context() as patch:
        seams.at(patch, point, before=fails, where=seams.below(place))
        with pytest.raises(OSError, match="the disk is gone") as failure:
            save(checkpointer, step, value, overwrite=True, **more)
    return failure.value


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_failure_in_the_persistent_directory_replaces_nothing(
    run: Run, asynchronous: bool, goes_on: bool
) -> None:
    """The fast directory had the new value then, until the local copy was gone."""
    checkpointer = run.start(asynchronous=asynchronous)
    save(checkpointer, 10, 10)
    error = fails_to_overwrite(checkpointer, 10, 11, run.persistent)
    assert "replaced" not in str(getattr(error, "__notes__", ""))  # the one reason
    assert run.values() == [{10: 10}, {10: 10}]
    if goes_on:
        assert checkpointer.load(10)["n"] == 10
        assert not checkpointer.save(10, {"n": 12})  # it is saved already
        save(checkpointer, 10, 13, overwrite=True)
        assert run.values() == [{10: 13}, {10: 13}]
    checkpointer.close()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_after_a_failure_in_the_fast_directory_the_new_value_counts(
    run: Run, asynchronous: bool
) -> None:
    checkpointer = run.start(asynchronous=asynchronous)
    save(checkpointer, 10, 10)
    fails_to_overwrite(checkpointer, 10, 11, run.local)
    assert run.values() == [{10: 11}, {10: 11}]
    assert checkpointer.load(10)["n"] == 11
    checkpointer.close()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_fast_disk_at_an_overwrite(run: Run, asynchronous: bool) -> None:
    """The old local copy is intact, and was the only one of its number once retention had taken the new one."""
    checkpointer = run.start(asynchronous=asynchronous, max_to_keep=1)
    save(checkpointer, 10, 10)
    fails_to_overwrite(checkpointer, 10, 11, run.local, "record")
    assert run.values() == [{10: 11}, {10: 11}] and checkpointer.load(10)["n"] == 11
    save(checkpointer, 11, 12, force=True)
    assert run.values() == [{11: 12}, {11: 12}] and checkpointer.all_steps() == [11]
    checkpointer.close()
    with run.start() as again:
        assert again.all_steps() == [11]


def test_a_failed_overwrite_of_a_local_step_leaves_it(run: Run) -> None:
    """It was forgotten, so that retention deleted the only copy, though the next save of it said that it is there."""
    with run.start() as checkpointer:
        save(checkpointer, 10, 10)
        save(checkpointer, 11, 11)  # in the fast directory alone
        fails_to_overwrite(checkpointer, 11, 12, run.local)
        assert checkpointer.all_steps() == [10, 11] and checkpointer.load(11)["n"] == 11
        assert not checkpointer.save(11, {"n": 13})
        save(checkpointer, 12, 14)
        assert run.values() == [{10: 10, 11: 11, 12: 14}, {10: 10}]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_overwrite_of_a_local_step_that_fails_everywhere_leaves_it(
    run: Run, asynchronous: bool
) -> None:
    """The persistent directory has no copy of it: until it has the new one, the old local one counts."""
    with run.start(asynchronous=asynchronous) as checkpointer:
        save(checkpointer, 10, 10)
        save(checkpointer, 11, 11)  # in the fast directory alone
        fails_to_overwrite(checkpointer, 11, 12, run.local.parent, force=True)
        assert checkpointer.load(11)["n"] == 11
    assert run.values() == [{10: 10, 11: 11}, {10: 10}]
    with run.start() as again:
        restored = again.restore_latest(state={"n": 0})
        assert restored is not None and restored["state"]["n"] == 11


@pytest.mark.parametrize("overwrites", ["another host", "a tool"])
def test_an_older_copy_on_another_host_does_not_come_back(run: Run, overwrites: str) -> None:
    """The newer save of its number is gone, in all tiers of the host that made it."""
    with run.start() as checkpointer:
        save(checkpointer, 10, 10)
    here, run.local = run.local, run.local.with_name("elsewhere")
    local = run.local if overwrites == "another host" else None
    with ckpt.Checkpointer(
        run.persistent, local_directory=local, max_to_keep=1, options=HOURLY if local else None
    ) as other:
        restored = other.restore_latest(state={"n": 0})
        assert restored is not None and restored["state"]["n"] == 10
        save(other, 10, 11, overwrite=True)
        for step in (12, 13, 14, 15):
            save(other, step, step, force=True)
    run.local = here
    assert run.values() == [{15: 15}, {15: 15}]
    with run.start() as back:
        assert back.all_steps() == [15]


def test_a_rollback_to_an_overwritten_step_stands_on_the_newer_save(run: Run) -> None:
    with run.start() as checkpointer:
        save(checkpointer, 10, 10)
        fails_to_overwrite(checkpointer, 10, 11, run.local)
        checkpointer.rollback_to(10)
        save(checkpointer, 11, 12, force=True)
    ten, eleven = (
        load_record((run.persistent / name / "ckpt.json").read_bytes()) for name in ("10", "11")
    )
    assert eleven.parent == (10, ten.token)


def test_an_older_local_copy_does_not_come_back(run: Run) -> None:
    """A tool replaced the step; retention then took the newer one, and the local copy was the only one of its number."""
    with run.start() as checkpointer:
        save(checkpointer, 10, 10)
    away = shutil.copytree(run.local, run.local.with_name("away"))
    with ckpt.Checkpointer(run.persistent) as tool:
        restored = tool.restore_latest(state={"n": 0})
        assert restored is not None and restored["state"]["n"] == 10
        save(tool, 10, 11, overwrite=True)
    assert run.values() == [{10: 11}, {10: 11}]
    with run.start(max_to_keep=1) as checkpointer:
        restored = checkpointer.restore_latest(state={"n": 0})
        assert restored is not None and restored["state"]["n"] == 11
        save(checkpointer, 12, 12, force=True)
        assert checkpointer.all_steps() == [12]  # it has local_max_to_keep=3
    assert run.values() == [{12: 12}, {12: 12}]
    shutil.rmtree(run.local)
    away.rename(run.local)  # that of a host that was away meanwhile
    assert run.values() == [{12: 12}, {12: 12}]


@pytest.mark.parametrize("step", [1, 2])
def test_an_overwrite_of_a_step_that_is_being_saved(
    run: Run, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """It looked before the first save had reached the persistent directory, which kept its value."""
    asked, looked = threading.Event(), threading.Event()
    make_way, persistent = Disk.make_way, seams.below(run.persistent)

    def waits(attempt: Any) -> None:
        # the fast one until the overwrite is asked for, the persistent one until it has looked, if it does so meanwhile
        (looked if persistent(attempt) else asked).wait(1)

    def looks(self: Any, *rest: Any, **more: Any) -> Any:
        found = make_way(self, *rest, **more)
        looked.set()
        return found

    with run.start() as checkpointer:
        save(checkpointer, 2, 2)
        with monkeypatch.context() as patch:
            seams.at(patch, "commit", before=waits)
            # beneath a newer one, so that the next save looks, too; or once more
            assert checkpointer.save(step, {"n": 3}, force=step == 1, overwrite=step == 2)
            looked.clear()
            patch.setattr(Disk, "make_way", looks)
            threading.Timer(0.2, asked.set).start()
            assert checkpointer.save(step, {"n": 4}, overwrite=True)
            checkpointer.wait_until_finished()
        assert checkpointer.load(step)["n"] == 4
    both, alone = run.values()
    assert both[step] == alone[step] == 4
