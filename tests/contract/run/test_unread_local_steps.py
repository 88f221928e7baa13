"""A local step that cannot be read, though nothing says that it is damaged, is neither passed over nor deleted.

It may be the newest: training went back to an older step, and the next save deleted it.
"""

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.faults.crafted.signed import read_record, write_record
from tests.support.damage import failing_reads, turn_a_bit
from tests.support.refusals import refuse


def state(step: int) -> dict[str, Any]:
    return {"n": step, "w": np.full(300, step, np.float32)}


def start(root: Path, **options: Any) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(root / "run", local_directory=root / "local", **options)


@pytest.fixture(name="newest")
def make_newest(tmp_path: Path) -> Path:
    """Steps 0 to 3, of which the last is in the local directory alone; where that is."""
    with start(tmp_path, options=ckpt.Options(local_max_to_keep=5)) as checkpointer:
        for step in range(4):
            checkpointer.save(step, state(step))
    shutil.rmtree(tmp_path / "run" / "3")
    (record,) = (tmp_path / "local").rglob("3/ckpt.json")
    return record.parent


def test_a_newer_format_is_told_and_stays(newest, tmp_path):
    record = read_record(newest)
    record["format_version"] = 99
    write_record(newest, record)
    before = (newest / "ckpt.json").read_bytes()
    for read_only in (False, True):
        reader = start(tmp_path, read_only=read_only)
        with pytest.raises(ckpt.CheckpointError, match=r"local step 3 .*upgrade ckpt") as told:
            reader.restore_latest(state(9))
        assert not isinstance(told.value, ckpt.CheckpointCorrupt)
        reader.close()
    with start(tmp_path) as checkpointer:
        checkpointer.restore(1, state=state(9)).state  # noqa: B018
    with start(tmp_path) as checkpointer:
        checkpointer.save(7, state(7), force=True)
    assert (newest / "ckpt.json").read_bytes() == before
    with start(tmp_path) as checkpointer:
        restored = checkpointer.restore_latest(state(9))
        assert restored is not None and restored.step == 7


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(("open", number) for number in (errno.EIO, errno.ESTALE, errno.EACCES)),
        *(("scandir", number) for number in (errno.ENODEV, errno.ETIMEDOUT, errno.EMFILE)),
    ],
)
def test_what_the_system_refuses_is_told(newest, tmp_path, monkeypatch, name, number):
    with monkeypatch.context() as patch:
        refuse(patch, newest if name == "open" else newest.parent, number, calls=(name,))
        reader = start(tmp_path, read_only=True)
        with pytest.raises(OSError, match="cannot be read, and training does not go back") as told:
            reader.restore_latest(state(9))
        reader.close()
    assert told.value.errno == number and str(newest.parent) in str(told.value)
    with start(tmp_path) as checkpointer:
        restored = checkpointer.restore_latest(state(9))
        assert restored is not None and restored.step == 3


@pytest.mark.linux("/proc/self/fd")
@pytest.mark.parametrize("of", ["preadv", "pread"])
def test_a_disk_that_does_not_give_the_data_of_the_newest_step_is_no_damage(
    newest, tmp_path, monkeypatch, of
):
    """Nothing is read from an older step instead, nothing moved to ``damaged/``; the older one by its number."""
    with monkeypatch.context() as patch:
        met = failing_reads(patch, newest, of)
        with start(tmp_path) as checkpointer:
            with pytest.raises(OSError, match=r"step 3 cannot be read .*restore\(step") as caught:
                checkpointer.restore_latest(state(9))
            assert (
                met
                and caught.value.errno == errno.EIO
                and not isinstance(caught.value, ckpt.CheckpointError)
            )
            with pytest.raises(OSError, match="Input/output error"):
                checkpointer.load(3)
        with start(tmp_path) as checkpointer:
            assert checkpointer.restore(2, state(9)).step == 2
    assert newest.is_dir() and not (tmp_path / "run" / "damaged").exists()
    with start(tmp_path, read_only=True) as reader:
        restored = reader.restore_latest(state(9))
        assert restored is not None and restored.step == 3


@pytest.mark.linux("/proc/self/fd")
def test_the_persistent_copy_is_read_if_the_local_disk_does_not_give_its_own(
    newest, tmp_path, monkeypatch
):
    met = failing_reads(monkeypatch, newest.parent / "2")
    with start(tmp_path) as checkpointer:
        restored = checkpointer.restore(2, state(9))
        assert met and restored.state["n"] == 2 and restored.path == str(tmp_path / "run" / "2")


@pytest.mark.linux("/proc/self/fd")
def test_a_load_reads_the_local_copy_if_the_persistent_one_cannot_be_read(
    newest, tmp_path, monkeypatch
):
    with start(tmp_path, read_only=True) as reader:
        with monkeypatch.context() as patch:
            met = failing_reads(patch, tmp_path / "run" / "2")
            assert reader.load(2)["n"] == 2 and met
        turn_a_bit(tmp_path / "run" / "1")
        assert reader.load(1)["n"] == 1
        assert reader.load(3)["n"] == 3
        turn_a_bit(newest)
        with pytest.raises(ckpt.CheckpointCorrupt, match="step 3"):
            reader.load(3)


def test_a_folder_of_runs_that_cannot_be_listed(newest, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        met = refuse(patch, newest.parents[1], errno.EIO, calls=("scandir",))
        with start(tmp_path) as checkpointer:
            with pytest.raises(OSError, match="local steps cannot be read"):
                checkpointer.restore_latest(state(9))
            assert met and checkpointer.restore(2, state(9)).step == 2
    with start(tmp_path) as checkpointer:
        restored = checkpointer.restore_latest(state(9))
        assert restored is not None and restored.step == 3


def test_what_goes_on_from_the_newest_step_is_refused_while_one_cannot_be_read(
    newest, tmp_path, monkeypatch
):
    """Who asked for ``latest_step()``, and restored that, or began anew, lost the newest one at the next save."""
    unread = r"local step 3 cannot be read"
    for others in (True, False):
        if not others:
            for step in range(3):
                shutil.rmtree(tmp_path / "run" / str(step))
                shutil.rmtree(newest.parent / str(step), ignore_errors=True)
        with monkeypatch.context() as patch:
            refuse(patch, newest / "ckpt.json", errno.EIO, calls=("open",))
            refuse(patch, tmp_path / "run" / "3" / "ckpt.json", errno.EIO, calls=("open",))
            checkpointer = start(tmp_path)
        with checkpointer:
            for call in (checkpointer.load, checkpointer.inspect):
                with pytest.raises(OSError, match=unread):
                    call(3)
            with pytest.raises(OSError, match=unread):
                checkpointer.latest_step()
            if not others:
                with pytest.raises(OSError, match=unread):
                    checkpointer.save(0, state(0))
            assert newest.exists()
            restored = checkpointer.restore_latest(state(9))  # it looks anew
            assert restored is not None and restored.step == 3 == checkpointer.latest_step()


@pytest.fixture(name="unread")
def make_unread(
    newest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ckpt.Checkpointer]:
    """A writer that could not read the newest step, 3, for the moment in which it began."""
    with begun_without([newest], tmp_path, monkeypatch) as checkpointer:
        yield checkpointer


def begun_without(
    where: list[Path], root: Path, monkeypatch: pytest.MonkeyPatch, call: str = "open"
) -> ckpt.Checkpointer:
    """A writer that could open, or list, nothing in some directories for the moment in which it began."""
    with monkeypatch.context() as patch:
        for path in where:
            refuse(patch, path, errno.EIO, calls=(call,))
        return start(root)


@pytest.mark.parametrize("force", [False, True])
def test_nor_that_of_an_older_one(newest, tmp_path, monkeypatch, force):
    """Several cannot be read: which is told of is the newest, and what counts is each."""
    shutil.rmtree(tmp_path / "run" / "2")
    with begun_without([newest, newest.parent / "2"], tmp_path, monkeypatch) as checkpointer:
        for call in (checkpointer.delete, checkpointer.inspect, checkpointer.load):
            with pytest.raises(OSError, match="the local step 2 cannot be read"):
                call(2)
        with pytest.raises(ckpt.CheckpointExists, match="step 2 is there already"):
            checkpointer.save(2, state(9), force=force)
    with start(tmp_path) as checkpointer:
        assert checkpointer.all_steps() == [0, 1, 2, 3]
        assert checkpointer.restore(2, state(9)).state["n"] == 2


@pytest.mark.parametrize("step", [3, 4])
def test_nor_does_one_begin_while_none_can_be_listed(newest, tmp_path, monkeypatch, step):
    """What it would replace, and what its retention would delete, is not known."""
    with begun_without([newest.parents[1]], tmp_path, monkeypatch, "scandir") as checkpointer:
        with pytest.raises(OSError, match=r"local steps cannot be read.*restore_latest\(\) looks"):
            checkpointer.save(step, state(9))
        restored = checkpointer.restore_latest(state(9))
        assert restored is not None and (restored.step, restored.state["n"]) == (3, 3)
        assert checkpointer.save(4, state(4))


@pytest.mark.parametrize("to", [1, 0])
def test_who_has_left_it_hears_no_more_of_it(unread, to):
    with pytest.raises(OSError, match="the local step 3 cannot be read"):
        unread.latest_step()
    gone = unread.rollback_to(to)
    assert (gone, unread.latest_step()) == ([*range(to + 1, 4)], to)
    unread.save(to + 1, state(to + 1))
    unread.wait_until_finished()
    assert unread.latest_step() == to + 1


def test_who_restores_an_older_one_and_saves_hears_no_more_of_it(unread):
    assert unread.restore(1, state(9)).state["n"] == 1
    unread.save(2, state(2))
    unread.wait_until_finished()
    assert unread.latest_step() == 2


def test_it_is_not_deleted_as_if_it_were_not_there(unread):
    for call in (unread.delete, unread.inspect, unread.load):
        with pytest.raises(OSError, match="the local step 3 cannot be read, which says nothing"):
            call(3)
    assert unread.restore_latest(state(9)).step == 3  # pyright: ignore[reportOptionalMemberAccess]
    unread.delete(3)
    assert unread.latest_step() == 2
