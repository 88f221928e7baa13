"""A commit is two acts: everything durable, then the question who may, then one rename.

From the rename on nothing is deleted, and the error says that the checkpoint can be seen.
"""

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import ObjectStoreBackend, PosixBackend, files, hidden_names
from ckpt_core._errors import VISIBLE, is_visible
from ckpt_core._format.packed import pack
from ckpt_core._run.lease import Lease
from ckpt_core._save.agree import join_parts, size_and_crc
from ckpt_core._storage import KeyValues, Location


def state(value: float) -> dict[str, Any]:
    return {"w": np.full(3, value)}


def saved_value(path: str | Path) -> float | None:
    try:
        return float(ckpt.load(path)["w"][0])
    except ckpt.CheckpointNotFound:
        return None


def hidden_values(folder: Path) -> list[float | None]:
    """What loads under hidden names."""
    found: list[float | None] = []
    for hidden in hidden_names.find(str(folder)):
        with contextlib.suppress(ckpt.CheckpointError, OSError):
            found.append(saved_value(folder / hidden.entry))
    return found


class Operations:
    """Counts what changes a file system, and lets one operation go wrong."""

    def __init__(self, patch: pytest.MonkeyPatch, exchange: bool = True) -> None:
        self.done: list[str] = []
        self.act: Callable[[int], None] | None = None  # gets the number of the operation, before it
        self._counting = False

        def synced(descriptor: int) -> str:
            return f"fsync {os.readlink(f'/proc/self/fd/{descriptor}')}"

        patch.setattr(os, "fsync", self._watched(os.fsync, synced))
        patch.setattr(os, "rename", self._watched(os.rename, lambda old, new: f"rename {new}"))
        swap = self._watched(files.exchange, lambda one, other: f"exchange {other}")
        patch.setattr(
            "ckpt_core._directory.files.exchange", swap if exchange else lambda one, other: False
        )

    def _watched(self, call: Any, describe: Callable[..., str]) -> Any:
        def watched(*args: Any, **more: Any) -> Any:
            if not self._counting:
                return call(*args, **more)
            number = len(self.done) + 1
            self.done.append(describe(*args) + " (failed)")
            self._meanwhile(number)
            result = call(*args, **more)
            self.done[number - 1] = self.done[number - 1].removesuffix(" (failed)")
            return result

        return watched

    def _meanwhile(self, number: int) -> None:
        if self.act is not None:
            self._counting = False
            try:
                self.act(number)
            finally:
                self._counting = True

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        self._counting = True
        try:
            yield
        finally:
            self._counting = False


EXCHANGE = pytest.mark.linux("renameat2")


def unsynced(patch: pytest.MonkeyPatch, folder: Path, exchange: bool = True) -> Operations:
    """While it counts, this folder cannot be synced."""
    operations = Operations(patch, exchange)

    def fail(number: int) -> None:
        if operations.done[number - 1].startswith(f"fsync {folder} "):
            raise OSError(errno.EIO, "no sync")

    operations.act = fail
    return operations


@pytest.mark.parametrize("exchange", [pytest.param(True, marks=EXCHANGE), False])
def test_nothing_is_deleted_until_the_new_one_is_durable(tmp_path, monkeypatch, exchange):
    """The directory cannot be synced, save after save: every old one stays until one save succeeds."""
    path = tmp_path / "model"
    ckpt.save(path, state(1))
    operations = unsynced(monkeypatch, tmp_path, exchange)
    with operations.counted():
        with pytest.raises(OSError, match=VISIBLE) as caught:
            ckpt.save(path, state(2), overwrite=True)
        assert caught.value.errno == errno.EIO
        assert str(path) in str(caught.value)
        assert saved_value(path) == 2
        assert hidden_values(tmp_path) == [1]
        with contextlib.suppress(OSError):
            ckpt.save(path, state(3), overwrite=True)
        assert saved_value(path) in (2, 3)
        assert 1 in hidden_values(tmp_path)
        assert PosixBackend().clean(str(tmp_path)) == []
        with contextlib.suppress(OSError):
            PosixBackend().delete(str(path))
        assert 1 in hidden_values(tmp_path)
    ckpt.save(path, state(4), overwrite=True)
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("clean", [False, True])
def test_what_was_kept_does_not_come_back(tmp_path, monkeypatch, clean):
    """Who removes the new one does not find the old one in its place."""
    form, path = PosixBackend(), tmp_path / "model"
    ckpt.save(path, state(1))
    with unsynced(monkeypatch, tmp_path).counted(), pytest.raises(OSError, match=VISIBLE):
        ckpt.save(path, state(2), overwrite=True)
    assert hidden_values(tmp_path) == [1]
    if clean:
        assert len(form.clean(str(tmp_path))) == 1
        assert os.listdir(tmp_path) == ["model"]
    form.delete(str(path))
    assert os.listdir(tmp_path) == []
    assert saved_value(path) is None


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
def test_a_step_of_which_it_is_not_known_can_be_saved_again(tmp_path, monkeypatch, asynchronous):
    events: list[ckpt.events.Event] = []
    options = ckpt.Options(on_event=events.append)
    with ckpt.Checkpointer(
        tmp_path, asynchronous=asynchronous, max_to_keep=2, options=options
    ) as c:
        c.save(0, state(0))
        c.wait_until_finished()

        def save() -> None:
            c.save(1, state(1))
            c.wait_until_finished()

        operations = unsynced(monkeypatch, tmp_path)
        with operations.counted(), pytest.raises(OSError, match=VISIBLE):
            save()
        assert c.all_steps() == [0, 1]
        failed = [event for event in events if event.kind == "save_failed"]
        assert len(failed) == 1 and failed[0].error is not None and is_visible(failed[0].error)
        assert c.save(1, state(1.5))  # the same step once more: it is written again, not believed
        c.wait_until_finished()
        assert not c.save(1, state(1.7))  # now it is known
        assert c.load(1)["w"][0] == 1.5
        c.save(2, state(2))
        c.wait_until_finished()
        assert c.all_steps() == [1, 2]
    assert not [name for name in os.listdir(tmp_path) if hidden_names.parse(name)]


def test_on_a_store_a_fenced_run_removes_nothing(tmp_path):
    """Its save would begin by removing what the newcomer is writing at the same path."""
    store = f"memory://{tmp_path.name}-{os.getpid()}"
    form = ObjectStoreBackend(lambda url: KeyValues(Location(url, False)))
    old = ckpt.Checkpointer(store, asynchronous=False)
    old.save(0, state(0))
    Lease(store, form).claim()
    written = form.begin(f"{store}/1", overwrite=False, durable=True, token="new")
    written.write("data", b"of the newcomer")
    with pytest.raises(ckpt.CheckpointError, match="another Checkpointer"):
        old.save(1, state(1))
    assert written.read("data") == b"of the newcomer"


@pytest.mark.parametrize("wrong", ["", "passed", "size", "file"])
def test_what_process_0_does_not_see_is_no_checkpoint(tmp_path, wrong):
    attempt = PosixBackend().begin(str(tmp_path / "one"), overwrite=False, durable=False, token="t")
    attempt.write("state/a", b"1234")
    name, size = "state/c" if wrong == "file" else "state/a", 5 if wrong == "size" else 4
    passed = pack({"": json.dumps([[name, size, 7, 0]]).encode()})
    attempt.write("ckpt.passed_1", passed)
    said = ["", size_and_crc(passed) + "1" * (wrong == "passed")]
    files: dict[str, Any] = {}
    if wrong:
        with pytest.raises(ckpt.CheckpointError, match="do all processes see the same files"):
            join_parts(attempt, said, files, {})
    else:
        join_parts(attempt, said, files, {})
        assert files["state/a"].crc32 == 7
    attempt.abort()


@EXCHANGE
def test_a_disk_that_fails_for_good_after_the_rename_takes_no_old_one(tmp_path, monkeypatch):
    path = tmp_path / "model"
    ckpt.save(path, state(1))
    operations, struck = unsynced(monkeypatch, tmp_path), list[int]()
    fails_once = operations.act

    def fail(number: int) -> None:
        if struck:
            raise OSError(errno.EIO, "no disk")
        try:
            fails_once(number)
        except OSError:
            struck.append(number)
            raise

    operations.act = fail
    with operations.counted(), pytest.raises(OSError, match=VISIBLE):
        ckpt.save(path, state(2), overwrite=True)
    assert saved_value(path) == 2 and hidden_values(tmp_path) == [1]
