"""Steps that training has left never come back out of a local directory, whoever left them, and on whatever host.

A job with local directories on host a; then another writer does something; then the job starts again, on either
host. What it restores is of the branch that was written last, and no older than what the persistent directory has.
At the end: who else is in a fast directory when ended runs are listed and removed there.
"""

import itertools
import json
import os
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import seams
from tests.support.command_line import Call, make_call  # noqa: F401 (fixture)
from tests.support.refusals import refuse

EVERY_THIRD = ckpt.Options(persist_policy=ckpt.when.every_steps(3), durable=False)
HOSTS = ("a", "b", None)
"""With a local directory of its own, or without one."""
AT_FIRST = {"a": 5, "b": 3, None: 3}
_values = itertools.count(1)


@dataclass
class Job:
    """One persistent directory, hosts, and the branch that training is on: step -> value."""

    root: Path
    branch: dict[int, int] = field(default_factory=dict[int, int])

    def start(self, host: str | None, **more: Any) -> ckpt.Checkpointer:
        local = None if host is None else self.root / host
        options = ckpt.Options(durable=False) if host is None else EVERY_THIRD
        return ckpt.Checkpointer(
            self.root / "steps", local_directory=local, options=options, asynchronous=False, **more
        )

    def leave(self, last: int) -> None:
        self.branch = {step: value for step, value in self.branch.items() if step <= last}

    def save(self, checkpointer: ckpt.Checkpointer, step: int) -> None:
        value = next(_values)
        assert checkpointer.save(step, {"n": value})
        self.leave(step - 1)
        self.branch[step] = value

    def resume(self, checkpointer: ckpt.Checkpointer) -> int:
        restored = checkpointer.restore_latest(state={"n": 0})
        if restored is None:
            return -1
        assert restored.step is not None
        assert self.branch.get(restored.step) == restored["state"]["n"], self.branch
        return restored.step

    def found(self) -> dict[str | None, int]:
        """What a start on each host restores; nothing is written."""
        with self.start(None, read_only=True) as persistent:
            steps = persistent.all_steps()
            for step in steps:
                assert self.branch.get(step) == persistent.load(step)["n"]
        found: dict[str | None, int] = {}
        for host in HOSTS:
            with self.start(host, read_only=True) as checkpointer:
                found[host] = self.resume(checkpointer)
            assert found[host] >= max(steps, default=-1)
        return found


def append(job: Job, host: str | None) -> None:
    with job.start(host) as checkpointer:
        step = job.resume(checkpointer)
        for later in (step + 1, step + 2):
            job.save(checkpointer, later)


def roll_back(job: Job, host: str | None) -> None:
    with job.start(host) as checkpointer:
        checkpointer.rollback_to(0)
    job.leave(0)


def roll_back_and_append(job: Job, host: str | None) -> None:
    roll_back(job, host)
    append(job, host)


def roll_back_while_it_runs(job: Job, host: str | None) -> None:
    """The first job had looked already, when somebody else rolled back."""
    with job.start("a") as waiting:
        roll_back(job, host)
        assert job.resume(waiting) == 0


def delete_the_newest(job: Job, host: str | None) -> None:
    with job.start(host) as checkpointer:
        newest = checkpointer.latest_step()
        assert newest is not None
        checkpointer.delete(newest)
    job.leave(newest - 1)


def restore_an_older_one(job: Job, host: str | None) -> None:
    with job.start(host) as checkpointer:
        assert checkpointer.restore(0, state={"n": 0})["state"]["n"] == job.branch[0]
        job.leave(0)
        job.save(checkpointer, 1)
        job.save(checkpointer, 2)


def only_restore(job: Job, host: str | None) -> None:
    with job.start(host) as checkpointer:
        job.resume(checkpointer)


APPENDING = (append, roll_back_and_append, restore_an_older_one)
ACTIONS = (*APPENDING, roll_back, roll_back_while_it_runs, delete_the_newest, only_restore)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Steps 0 to 5 of host a: 0 and 3 are persistent, 5 is in its local directory."""
    job = Job(tmp_path)
    with job.start("a") as checkpointer:
        assert job.resume(checkpointer) == -1
        for step in range(6):
            job.save(checkpointer, step)
    assert job.found() == AT_FIRST
    return job


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("writer", HOSTS)
def test_only_the_branch_that_was_written_last_comes_back(job, action, writer):
    action(job, writer)
    found = job.found()
    if action in APPENDING:
        assert found[writer] == max(job.branch)  # and nothing is lost where it was written
    elif action is only_restore:
        assert found == AT_FIRST  # looking changes nothing
    for host in ("a", None, "b", "a"):  # whoever goes on, goes on with the branch
        append(job, host)
        assert job.found()[host] == max(job.branch)


@pytest.mark.parametrize("seed", range(100))
def test_any_order_of_what_writers_do(job, seed):
    chance, found = np.random.default_rng(seed), AT_FIRST
    for _ in range(6):
        action = ACTIONS[int(chance.integers(len(ACTIONS)))]
        writer = HOSTS[int(chance.integers(3))]
        if 0 not in job.branch or found[writer] < 0:
            action = append
        action(job, writer)
        found = job.found()


def test_a_run_without_local_directories_writes_no_note_of_them(tmp_path):
    append(Job(tmp_path), None)
    assert not (tmp_path / "steps" / ".ckpt-run").exists()


def test_local_steps_count_at_every_moment_of_the_next_writers_first_save(job, monkeypatch):
    """It begins a lineage of its own; what it continues from counts before, meanwhile and afterwards."""
    counted: list[int] = []

    def count(*_: Any) -> None:
        counted.append(job.found()["a"])

    with job.start("a") as checkpointer:
        assert job.resume(checkpointer) == 5
        with monkeypatch.context() as patch:
            seams.at(patch, "note", before=count, after=count, where=_is_of_the_run)
            job.save(checkpointer, 6)
        assert counted and {*counted} == {5}
    assert job.found()["a"] == 6
    append(job, "b")  # which knows of 6 only
    found = job.found()
    assert found["a"] == found[None]


def _is_of_the_run(_: Any, path: str, name: str, data: bytes) -> bool:
    return name.startswith(".ckpt-")


MIB = 2**20
OPTIONS = ckpt.Options(persist_policy=ckpt.when.at_steps([0]), durable=False)


class Fast:
    """A fast directory; runs in it are listed and removed by the command."""

    def __init__(self, root: Path, call: Call) -> None:
        self.root, self.local, self._call = root, root / "local", call

    def start(self, name: str, **more: Any) -> ckpt.Checkpointer:
        return ckpt.Checkpointer(
            self.root / name,
            local_directory=self.local,
            asynchronous=False,
            options=OPTIONS,
            **more,
        )

    def ended(self, name: str) -> Path:
        """The folder of a run that has ended."""
        before = {*self.local.glob("run-*")}
        with self.start(name) as checkpointer:
            for step in (0, 1):
                assert checkpointer.save(step, {"w": np.full(MIB // 4, step, np.float32)})
        (made,) = {*self.local.glob("run-*")} - before
        return made

    def runs(self) -> dict[str, dict[str, Any]]:
        code, out, err = self._call("ls", "--local", self.local, "--json")
        assert code == 0, err
        return {run["path"]: run for run in json.loads(out)["runs"]}

    def remove_all(self) -> None:
        self._call("rm", "--local", self.local, "--yes")


@pytest.fixture
def fast(tmp_path: Path, call: Call) -> Fast:
    return Fast(tmp_path, call)


def test_a_folder_that_cannot_be_read_stays_and_hides_no_other(fast, monkeypatch):
    """Another user's folders have the mode 0700: the others are listed, and removed."""
    theirs, mine = fast.ended("a"), fast.ended("b")
    with monkeypatch.context() as patch:
        refuse(patch, theirs, calls=("listdir", "scandir"))
        found = fast.runs()
        assert found[str(theirs)]["in_use"] and not found[str(mine)]["in_use"]
        fast.remove_all()
    assert theirs.is_dir() and not mine.exists()


@pytest.mark.parametrize(
    "where", ["process_0-of-1/x", "process_0-of-1/partner-of_1-of-2", "process_1-of-2"]
)
def test_foreign_files_hide_no_run(fast, where):
    made = fast.ended("a")
    (made / where).write_text("foreign")
    (made / "process_0-of-1" / "dangling").symlink_to("nowhere")
    run = fast.runs()[str(made)]
    assert run["steps"] == [1] and not run["in_use"] and run["size_bytes"] > MIB


def test_what_a_killed_removal_left_goes(fast):
    """It was killed after the rename: what it hid is nobody's."""
    made = fast.ended("a")
    hidden = made / ".ckpt-tmp.process_0-of-1.00000000-1-1.0123abcd0123abcd0123abcd"
    (made / "process_0-of-1").rename(hidden)
    for path in (*made.rglob("*"), made):
        os.utime(path, (time.time() - 10**6,) * 2)
    run = fast.runs()[str(made)]
    assert run["size_bytes"] > MIB and not run["in_use"]
    fast.remove_all()
    assert not made.exists()


@pytest.mark.parametrize("read_only", [False, True])
def test_a_run_that_was_opened_and_has_not_claimed_its_folder_lives(fast, read_only):
    """Between the opening and the restore may lie minutes in which it compiles; what a reader reads stays."""
    made = fast.ended("a")
    with fast.start("a", read_only=read_only) as live:
        assert fast.runs()[str(made)]["in_use"]
        fast.remove_all()
        found = live.restore_latest({"w": np.zeros(MIB // 4, np.float32)})
        assert found is not None and found.step == 1
        (made / "process_1-of-2" / "7").mkdir(parents=True)
        fast.remove_all()  # of a run of which one process is there, the others restore from the rest
        assert (made / "process_1-of-2" / "7").is_dir()
        shutil.rmtree(made / "process_1-of-2")
    assert not fast.runs()[str(made)]["in_use"]
    fast.remove_all()
    assert not made.exists()


def test_links_and_files_that_are_named_as_runs_are_none(fast, tmp_path):
    made = fast.ended("a")
    moved = made.rename(tmp_path / made.name)
    made.symlink_to(moved)
    (fast.local / f"run-{'0' * 16}-{'1' * 8}").write_text("a file")
    assert fast.runs() == {}
    fast.remove_all()
    assert (moved / "process_0-of-1" / "1").is_dir()


def test_an_owner_file_that_cannot_be_read_says_nothing(fast):
    made = fast.ended("a")
    (owner,) = made.glob("process_*/.ckpt-owner")
    owner.unlink()
    owner.symlink_to("nowhere")
    assert fast.runs()[str(made)]["in_use"]
    fast.remove_all()
    assert made.is_dir()


def test_a_run_that_saves_meanwhile_is_listed(fast):
    """Steps come and go while they are looked at."""
    with fast.start("a") as live:
        done = threading.Event()

        def train() -> None:
            for step in range(60):
                live.save(step, {"w": np.ones(4)})
            done.set()

        thread = threading.Thread(target=train)
        live.save(0, {"w": np.ones(4)})
        thread.start()
        while not done.is_set():
            (run,) = fast.runs().values()
            assert run["in_use"]
            fast.remove_all()
        thread.join()
        assert live.all_steps() == [0, 59]
