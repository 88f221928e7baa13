"""Who else is in a fast directory when ended runs are listed and removed there: users, readers, foreign files, dead removers."""

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.command_line import Call, make_call  # noqa: F401 (fixture)
from tests.support.refusals import refuse

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
