"""Who else is in a fast directory when ended runs are listed and removed there: users, readers, foreign files, dead removers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import hidden_names, lock_folder, posix
from ckpt_core._run.lease import Lease
from ckpt_core._run.tiers import ended
from ckpt_core._run.tiers.ended import make_room, remove_run, runs_in
from tests.support import seams
from tests.support.refusals import refuse as refuse_looks

MIB = 2**20
NEVER = ckpt.when.at_steps([0])


def open_run(tmp_path: Path, name: str, **more: Any) -> ckpt.Checkpointer:
    read_only = more.pop("read_only", False)
    options = ckpt.Options(persist_policy=NEVER, **more)
    return ckpt.Checkpointer(
        tmp_path / name,
        local_directory=tmp_path / "local",
        asynchronous=False,
        options=options,
        read_only=read_only,
    )


def train(tmp_path: Path, name: str, mib: int = 1, age_secs: float = 0.0) -> Path:
    """A run that has ended, so long ago; its folder."""
    before = set((tmp_path / "local").glob("run-*"))
    with open_run(tmp_path, name) as checkpointer:
        for step in (0, 1):
            assert checkpointer.save(step, {"w": np.full(mib * MIB // 4, step, np.float32)})
    (made,) = set((tmp_path / "local").glob("run-*")) - before
    then = time.time() - age_secs
    for path in (*made.rglob("*"), made):
        os.utime(path, (then, then))
    return made


def root_of(tmp_path: Path) -> str:
    return str(tmp_path / "local")


def test_a_folder_that_cannot_be_read_stays_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's folders have the mode 0700: the others are listed, and make room."""
    theirs, mine = train(tmp_path, "a", age_secs=1000), train(tmp_path, "b")
    listdir, scandir = os.listdir, os.scandir

    def refuse(path: Any = ".") -> None:
        if str(path).startswith(str(theirs)):
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", lambda path=".": refuse(path) or listdir(path))
    monkeypatch.setattr(os, "scandir", lambda path=".": refuse(path) or scandir(path))
    found = {run.path: run for run in runs_in(root_of(tmp_path))}
    assert found[str(theirs)].in_use and not found[str(mine)].in_use
    with pytest.raises(PermissionError):
        remove_run(found[str(theirs)])
    room = make_room(root_of(tmp_path), MIB, "", MIB)
    monkeypatch.undo()
    assert [run.path for run in room.removed] == [str(mine)] and theirs.is_dir()


def test_a_root_that_cannot_be_looked_at_has_no_known_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.makedirs(root_of(tmp_path))
    refuse_looks(monkeypatch, Path(root_of(tmp_path)), calls=("stat",), below=False)
    with pytest.raises(PermissionError):
        make_room(root_of(tmp_path), MIB, "", MIB)


def test_an_owner_file_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    made = train(tmp_path, "a")
    (owner,) = made.glob("process_*/.ckpt-owner")
    owner.unlink()
    owner.symlink_to("nowhere")
    (run,) = runs_in(root_of(tmp_path))
    assert run.in_use and not remove_run(run)
    with open_run(tmp_path, "b", local_max_bytes=MIB) as other:
        assert other.save(3, {"w": np.ones(4)})
    assert made.is_dir()


@pytest.mark.parametrize(
    "where", ["process_0-of-1/x", "process_0-of-1/partner-of_1-of-2", "process_1-of-2"]
)
def test_foreign_files_hide_no_run(tmp_path: Path, where: str) -> None:
    made = train(tmp_path, "a")
    (made / where).write_text("foreign")
    (made / "process_0-of-1" / "dangling").symlink_to("nowhere")
    (run,) = runs_in(root_of(tmp_path))
    assert run.steps == (1,) and not run.in_use and run.size_bytes > MIB


def test_links_and_files_that_are_named_as_runs_are_none(tmp_path: Path) -> None:
    made = train(tmp_path, "a")
    other = tmp_path / "elsewhere"
    other.mkdir()
    moved = other / made.name
    made.rename(moved)
    made.symlink_to(moved)
    (made.parent / f"run-{'0' * 16}-{'1' * 8}").write_text("a file")
    assert runs_in(root_of(tmp_path)) == []
    assert make_room(root_of(tmp_path), 1, "", 1).removed == ()
    assert (moved / "process_0-of-1" / "1").is_dir()


def test_what_a_killed_removal_left_goes(tmp_path: Path) -> None:
    """It was killed after the rename: what it hid is nobody's."""
    made = train(tmp_path, "a")
    code = f"from ckpt_core._directory import hidden_names as h; print(h.make(h.TEMPORARY, {str(made)!r}, 'process_0-of-1'))"
    hidden = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    os.rename(made / "process_0-of-1", hidden.stdout.strip())
    (run,) = runs_in(root_of(tmp_path))
    assert run.size_bytes > MIB and not run.in_use
    assert remove_run(run) and not made.exists()


def test_a_removal_that_is_going_on_is_left_alone(tmp_path: Path) -> None:
    made = train(tmp_path, "a")
    os.rename(made / "process_0-of-1", hidden_names.make(hidden_names.TEMPORARY, str(made), "p"))
    assert made.is_dir()
    for run in runs_in(root_of(tmp_path)):
        assert not remove_run(run)
    assert list(made.iterdir())


def test_a_run_that_was_opened_and_has_not_claimed_its_folder_lives(tmp_path: Path) -> None:
    """Between the opening and the restore may lie minutes in which it compiles."""
    made = train(tmp_path, "a", age_secs=1000)
    with open_run(tmp_path, "a") as live:
        (run,) = runs_in(root_of(tmp_path))
        assert run.in_use and not remove_run(run)
        with open_run(tmp_path, "b", local_max_bytes=MIB) as other:
            assert other.save(3, {"w": np.ones(4)})
        found = live.restore_latest({"w": np.zeros(MIB // 4, np.float32)})
        assert found is not None and found.step == 1
    assert made.is_dir()
    (run,) = [run for run in runs_in(root_of(tmp_path)) if run.path == str(made)]
    assert not run.in_use and remove_run(run)


def test_what_a_reader_reads_stays(tmp_path: Path) -> None:
    train(tmp_path, "a")
    with open_run(tmp_path, "a", read_only=True) as reader:
        (run,) = runs_in(root_of(tmp_path))
        assert run.in_use and not remove_run(run)
        assert reader.latest_step() == 1 and reader.load(1)["w"][0] == 1


def test_of_a_run_that_lives_again_nothing_goes(tmp_path: Path) -> None:
    """Of a run of which one process is there again, the folders of the others are what it restores from."""
    made = train(tmp_path, "a")
    (run,) = runs_in(root_of(tmp_path))
    other = made / "process_1-of-2"
    (other / "7").mkdir(parents=True)
    with open_run(tmp_path, "a") as live:
        assert live.restore_latest({"w": np.zeros(MIB // 4, np.float32)}) is not None
        assert not remove_run(run)
        assert (other / "7").is_dir()


def test_several_at_once_remove_no_more_than_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes of a host save at the same moment."""
    runs = [train(tmp_path, name, 2, age) for name, age in (("a", 3000), ("b", 2000), ("c", 1000))]
    both = threading.Barrier(4)
    seams.at(monkeypatch, (posix, "remove_tree"), before=lambda _: time.sleep(0.3))
    rooms: list[ended.Room] = []

    def room() -> None:
        both.wait(20)
        rooms.append(make_room(root_of(tmp_path), 7 * MIB, "", 2 * MIB))

    threads = [threading.Thread(target=room, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(rooms) == 4 and all(room.over_bytes <= 0 for room in rooms)
    assert [run.is_dir() for run in runs] == [False, True, True]
    assert sum(len(room.removed) for room in rooms) == 1


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run of another process that saves all the time."""
    code = (
        "import itertools, numpy as np, ckpt_core as ckpt\n"
        "options = ckpt.Options(persist_policy=ckpt.when.at_steps([0]), durable=False)\n"
        f"c = ckpt.Checkpointer({str(tmp_path / 'a')!r}, local_directory={root_of(tmp_path)!r}, options=options, asynchronous=False)\n"
        "for step in itertools.count():\n"
        "    c.save(step, {'w': np.ones(4)})\n"
        "    if step == 3: print('saves', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"saves\n"
    yield child
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)


def test_a_run_that_saves_meanwhile_is_listed(
    tmp_path: Path, busy: subprocess.Popen[bytes]
) -> None:
    """Steps come and go while they are looked at."""
    for _ in range(200):
        (run,) = runs_in(root_of(tmp_path))
        assert run.in_use and not remove_run(run)
    assert busy.poll() is None


def test_files_count(tmp_path: Path) -> None:
    """What a save needs is not in its arrays alone."""
    old = train(tmp_path, "a", 2)
    big = tmp_path / "big"
    big.write_bytes(bytes(4 * MIB))
    with open_run(tmp_path, "b", local_max_bytes=5 * MIB) as other:
        assert other.save(3, model={"w": np.ones(4)}, files=ckpt.Files(big))
    assert not old.exists()


def test_one_run_that_cannot_be_removed_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = [train(tmp_path, "a", age_secs=1000), train(tmp_path, "b")]
    monkeypatch.setattr(posix, "remove_tree", os.rmdir)  # an error of the system: not empty
    assert make_room(root_of(tmp_path), MIB, "", MIB).removed == ()
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == 2
    assert all(str(run) in text for run, text in zip(made, told, strict=True))


def test_all_processes_of_a_host_need_room(tmp_path: Path) -> None:
    """Each reports what it writes itself; those that have claimed their folders write as much."""
    old = train(tmp_path, "a", 2, age_secs=1000)
    own = train(tmp_path, "b", 1)
    leases = [Lease(str(own / f"process_{n}-of-4"), posix.PosixBackend()) for n in range(4)]
    room = make_room(root_of(tmp_path), 6 * MIB, str(own), 2 * MIB)
    assert room.removed == () and old.is_dir()
    for lease in leases:
        lease.take()
    room = make_room(root_of(tmp_path), 12 * MIB, str(own), 2 * MIB)
    assert room.removed == () and old.is_dir()  # 3 are there, and 8 come
    hidden = own / "process_2-of-4" / ".ckpt-tmp.1.x"
    hidden.mkdir()
    (hidden / "d").write_bytes(bytes(2 * MIB))  # one of them has written its own
    room = make_room(root_of(tmp_path), 12 * MIB, str(own), 2 * MIB)
    assert room.removed == () and old.is_dir()
    room = make_room(root_of(tmp_path), 10 * MIB, str(own), 2 * MIB)
    assert [run.path for run in room.removed] == [str(old)] and room.over_bytes <= 0
    for lease in leases:
        lease.close()


def test_who_opens_a_run_while_it_is_listed_is_seen_afterwards(tmp_path: Path) -> None:
    made = train(tmp_path, "a")
    listing = lock_folder(str(made), exclusive=True)
    assert listing is not None
    threading.Timer(0.2, listing.close).start()
    with open_run(tmp_path, "a"):
        assert runs_in(root_of(tmp_path))[0].in_use


def test_who_holds_the_directory_stops_nobody_for_long(tmp_path: Path) -> None:
    old = train(tmp_path, "a")
    with lock_folder(root_of(tmp_path), exclusive=True) or pytest.fail("held by nobody"):
        began = time.monotonic()
        assert len(make_room(root_of(tmp_path), MIB, "", MIB, 0.2).removed) == 1
        assert time.monotonic() - began < 20
    assert not old.exists()
