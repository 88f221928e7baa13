"""Steps that training has left never come back out of a local directory, whoever left them, and how.

A table: a job with local directories on host a; then another writer does something; then the job starts
again, on either host. What it restores must be of the branch that was written last, and be no older than
what the persistent directory has of it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from tests.support import seams
from tests.support.two_tiers import starts

EVERY_THIRD = ckpt.Options(persist_policy=ckpt.when.every_steps(3), durable=False)
EVERY = ckpt.Options(durable=False)
WRITERS = ("a", "b", None)
"""On a host with a local directory of its own, or without one."""
_values = itertools.count(1)


def state(value: int) -> dict[str, Any]:
    return {"value": np.full(3, value)}


@dataclass
class Job:
    """One persistent directory, hosts, and the branch that training is on: step -> value."""

    root: Path
    branch: dict[int, int] = field(default_factory=dict[int, int])

    def start(self, host: str | None, **more: Any) -> ckpt.Checkpointer:
        local = None if host is None else self.root / host
        options = EVERY if host is None else EVERY_THIRD
        return ckpt.Checkpointer(
            self.root / "steps", local_directory=local, options=options, asynchronous=False, **more
        )

    def save(self, checkpointer: ckpt.Checkpointer, step: int) -> None:
        value = next(_values)
        assert checkpointer.save(step, state(value))
        self.branch = {old: was for old, was in self.branch.items() if old < step}
        self.branch[step] = value

    def restore(self, checkpointer: ckpt.Checkpointer) -> int:
        """The newest step there is, which must be one of the branch."""
        restored = checkpointer.restore_latest(state=state(0))
        if restored is None:
            return -1
        assert restored.step is not None
        self.check(restored.step, int(restored["state"]["value"][0]))
        return restored.step

    def check(self, step: int, value: int) -> None:
        assert self.branch.get(step) == value, (step, value, self.branch)

    def check_start(self, host: str | None) -> int:
        """What a start on this host restores; nothing is written."""
        with self.start(host, read_only=True) as checkpointer:
            step = self.restore(checkpointer)
        with self.start(None, read_only=True) as persistent:
            assert step >= max(persistent.all_steps(), default=-1)
            for other in persistent.all_steps():
                self.check(other, int(persistent.load(other)["value"][0]))
        return step


def append(job: Job, host: str | None) -> None:
    with job.start(host) as checkpointer:
        step = job.restore(checkpointer)
        for later in (step + 1, step + 2):
            job.save(checkpointer, later)


def roll_back(job: Job, host: str | None) -> None:
    with job.start(host) as checkpointer:
        checkpointer.rollback_to(0)
    job.branch = {0: job.branch[0]}


def roll_back_and_append(job: Job, host: str | None) -> None:
    roll_back(job, host)
    append(job, host)


def delete_newest(job: Job, host: str | None) -> None:
    with job.start(host) as checkpointer:
        newest = checkpointer.latest_step()
        assert newest is not None
        checkpointer.delete(newest)
    job.branch = {step: value for step, value in job.branch.items() if step < newest}


def restore_an_older_one(job: Job, host: str | None) -> None:
    with job.start(host) as checkpointer:
        restored = checkpointer.restore(0, state=state(0))
        job.check(0, int(restored["state"]["value"][0]))
        job.branch = {0: job.branch[0]}
        job.save(checkpointer, 1)
        job.save(checkpointer, 2)


def roll_back_while_it_runs(job: Job, host: str | None) -> None:
    """The first job had looked already, when somebody else rolled back."""
    with job.start("a") as waiting:
        roll_back(job, host)
        assert job.restore(waiting) == 0


def do_nothing(job: Job, host: str | None) -> None:
    with job.start(host) as checkpointer:
        job.restore(checkpointer)


ACTIONS = {
    "append": append,
    "roll back": roll_back,
    "roll back and append": roll_back_and_append,
    "roll back while it runs": roll_back_while_it_runs,
    "delete the newest": delete_newest,
    "restore an older one": restore_an_older_one,
    "only restore": do_nothing,
}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Steps 0 to 5 of host a: 0 and 3 are persistent, 5 is in its local directory."""
    job = Job(tmp_path)
    with job.start("a") as checkpointer:
        assert job.restore(checkpointer) == -1
        for step in range(6):
            job.save(checkpointer, step)
    assert job.check_start("a") == 5
    assert job.check_start("b") == job.check_start(None) == 3
    return job


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("writer", WRITERS)
def test_only_the_branch_that_was_written_last_comes_back(
    job: Job, action: str, writer: str | None
) -> None:
    ACTIONS[action](job, writer)
    found = {host: job.check_start(host) for host in WRITERS}
    if action in ("append", "roll back and append", "restore an older one"):
        assert found[writer] == max(job.branch)  # and nothing is lost where it was written
    elif action == "only restore":
        assert found == {"a": 5, "b": 3, None: 3}  # looking changes nothing
    # whoever goes on, from whatever host, goes on with the branch; and the others then with theirs
    for host in ("a", None, "b", "a"):
        append(job, host)
        assert job.check_start(host) == max(job.branch)
        for other in WRITERS:
            job.check_start(other)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_any_order_of_what_writers_do(job: Job, seed: int) -> None:
    chance = np.random.default_rng(seed)
    for _ in range(6):
        action = ACTIONS[str(chance.choice(sorted(ACTIONS)))]
        writer = WRITERS[int(chance.integers(3))]
        if 0 not in job.branch or job.check_start(writer) < 0:
            action = append
        action(job, writer)
        for host in WRITERS:
            job.check_start(host)


def test_a_run_without_local_directories_writes_no_note_of_them(tmp_path: Path) -> None:
    job = Job(tmp_path)
    append(job, None)
    assert not (tmp_path / "steps" / ".ckpt-run").exists()


def test_local_steps_count_at_every_moment_of_the_next_writers_first_save(job: Job) -> None:
    """It begins a lineage of its own; what it continues from counts before, meanwhile and afterwards."""
    counted: list[int] = []

    def is_note(_: Any, path: str, name: str, data: bytes) -> bool:
        return name.startswith(".ckpt-")

    def count(*_: Any) -> None:
        counted.append(job.check_start("a"))

    with pytest.MonkeyPatch.context() as patch, job.start("a") as checkpointer:
        assert job.restore(checkpointer) == 5
        seams.at(patch, (PosixBackend, "put"), before=count, after=count, where=is_note)
        job.save(checkpointer, 6)
        patch.undo()
        assert counted and set(counted) == {5}
    assert job.check_start("a") == 6
    append(job, "b")  # which knows of 6 only
    assert job.check_start("a") == job.check_start(None)


def test_older_local_steps_stay_with_a_branch_that_begins_after_them(tmp_path: Path) -> None:
    options = ckpt.Options(
        persist_policy=ckpt.when.at_steps([0]), local_max_to_keep=4, durable=False
    )

    def start() -> ckpt.Checkpointer:
        return ckpt.Checkpointer(
            tmp_path / "steps",
            local_directory=tmp_path / "local",
            options=options,
            asynchronous=False,
        )

    with start() as checkpointer:
        for step in range(6):
            checkpointer.save(step, state(step))
    with start() as checkpointer:
        assert checkpointer.all_steps() == [0, 2, 3, 4, 5]
        assert checkpointer.restore(3, state=state(9))["state"]["value"][0] == 3
        checkpointer.save(4, state(40))
        assert checkpointer.all_steps() == [0, 2, 3, 4]
    with start() as checkpointer:
        assert checkpointer.all_steps() == [0, 2, 3, 4]
        assert checkpointer.load(4)["value"][0] == 40


@pytest.mark.parametrize("name", [".ckpt-leaving", ".ckpt-run"])
def test_a_rollback_that_cannot_be_written_down_changes_nothing_or_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The disk is full at its first file: before. At its second: the next writer does the rest."""
    start = starts(tmp_path, persists_every=2, local_max_to_keep=3)

    def newest() -> int | None:
        with start(read_only=True) as reader:
            restored = reader.restore_latest(state=state(9))
            return None if restored is None else restored.step

    with start() as checkpointer:
        for step in range(5):
            checkpointer.save(step, state(step))
        with monkeypatch.context() as patch:
            seams.at(patch, (PosixBackend, "put"), before=seams.fail(), where=seams.names(name))
            with pytest.raises(OSError, match="No space"):
                checkpointer.rollback_to(3)
        assert newest() == (4 if name == ".ckpt-leaving" else 3)
        checkpointer.rollback_to(3)
        assert checkpointer.save(4, state(40))
    assert newest() == 4
    with start(read_only=True) as again:
        assert again.load(4)["value"][0] == 40
