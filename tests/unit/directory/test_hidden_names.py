"""Hidden names beside checkpoints: whatever a checkpoint is called, nobody takes another one's for its own."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from ckpt_core.testing import assert_same

DEAD = "00000000-1-1"
QUICK = ckpt.Options(durable=False)


def state(value: float) -> dict[str, Any]:
    return {"w": np.full(3, value)}


def saved_value(path: str | Path) -> float:
    return float(ckpt.load(path)["w"][0])


CHARACTERS = {"one byte": "n", "two bytes": "é", "three bytes": "あ", "four bytes": "😀"}


@pytest.mark.parametrize("swap", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("length_bytes", [100, 143, 241, 243, 255])
@pytest.mark.parametrize("character", CHARACTERS.values(), ids=CHARACTERS)
def test_whatever_name_the_file_system_takes(tmp_path, monkeypatch, character, length_bytes, swap):
    if not swap:
        no_exchange(monkeypatch)
    size = len(os.fsencode(character))
    name = character * (length_bytes // size) + "n" * (length_bytes % size)
    path = tmp_path / name
    path.mkdir()  # the file system takes it
    path.rmdir()
    for value in (1, 2, 3):
        ckpt.save(path, state(value), overwrite=True, options=QUICK)
        assert saved_value(path) == value
        assert os.listdir(tmp_path) == [name]
    form = PosixBackend()
    for _ in range(2):  # the second one finds the name taken there
        form.delete(str(path), "trash")
        ckpt.save(path, state(4), options=QUICK)
    form.delete(str(path))
    assert len(os.listdir(tmp_path / "trash")) == 2
    assert os.listdir(tmp_path) == ["trash"]


def test_a_name_that_is_no_utf_8_is_refused(tmp_path):
    """TensorStore takes none; so says the error, and nothing is left. What was given such a name later is read without it."""
    with pytest.raises(ckpt.CheckpointError, match="no UTF-8"):
        ckpt.save(tmp_path / os.fsdecode(b"model\xff"), state(1))
    assert os.listdir(tmp_path) == []
    ckpt.save(tmp_path / "model", state(1))
    moved = tmp_path / os.fsdecode(b"model\xff")
    (tmp_path / "model").rename(moved)
    assert ckpt.inspect(moved).items
    assert_same(ckpt.load(moved), state(1))
    ckpt.save(tmp_path / "compressed", state(1), options=ckpt.Options(compression="zstd"))
    (tmp_path / "compressed").rename(moved / "compressed")
    assert_same(ckpt.load(moved / "compressed"), state(1))


NEIGHBOURS = ("model", "model.v2", "model.v2.deadbeef", "model.deadbeef", "mod")


class Killed(BaseException):
    """The process ends here: nobody tidies up."""


def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_core._directory.files.exchange", lambda one, other: False)


def die_between_the_renames(path: Path, value: float, patch: pytest.MonkeyPatch) -> None:
    """An overwriting save of another process that is killed when the old one has no name any more."""
    rename = os.rename

    def killed(source: Any, target: Any) -> None:
        if str(target) == str(path):
            raise Killed
        rename(source, target)

    with patch.context() as during:
        no_exchange(during)
        during.setattr("ckpt_core._directory.hidden_names.this_owner", lambda: DEAD)
        during.setattr(os, "rename", killed)
        during.setattr("ckpt_core._directory.posix.LocalAttempt.abort", lambda attempt: None)
        with pytest.raises(Killed):
            ckpt.save(path, state(value), overwrite=True)
    assert not path.exists()


@pytest.fixture
def dead_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners of this test's killed processes are known to have ended."""
    for module in ("owner", "hidden_names"):
        monkeypatch.setattr(f"ckpt_core._directory.{module}.lives", lambda owner: owner != DEAD)


def _load(folder: Path, name: str) -> None:
    """Only looked at, below."""


def _save(folder: Path, name: str) -> None:
    ckpt.save(folder / name, state(-1), overwrite=True)


def _save_without_leave(folder: Path, name: str) -> None:
    with pytest.raises(ckpt.CheckpointExists):
        ckpt.save(folder / name, state(-1))


def _clean(folder: Path, name: str) -> None:
    PosixBackend().clean(str(folder))


def _delete(folder: Path, name: str) -> None:
    PosixBackend().delete(str(folder / name))


@pytest.mark.usefixtures("dead_is_dead")
@pytest.mark.parametrize("act", [_load, _save, _save_without_leave, _clean, _delete])
@pytest.mark.parametrize(
    ("victim", "present"),
    [("model", True), ("model.v2", True), ("model.v2.deadbeef", False), ("mod", False)],
)
def test_a_replacement_that_was_cut_short_concerns_one_name(
    tmp_path, monkeypatch, victim, act, present
):
    values = {name: float(i) for i, name in enumerate(NEIGHBOURS) if present or name == victim}
    for name, value in values.items():
        ckpt.save(tmp_path / name, state(value))
    die_between_the_renames(tmp_path / victim, 99.0, monkeypatch)
    for neighbour in NEIGHBOURS:
        if neighbour == victim:
            act(tmp_path, victim)
            continue
        if neighbour not in values:
            with pytest.raises(ckpt.CheckpointNotFound):
                ckpt.load(tmp_path / neighbour)
        elif act is not _save_without_leave or neighbour in values:
            act(tmp_path, neighbour)
            values[neighbour] = -1.0 if act is _save else values[neighbour]
            if act is _delete:
                del values[neighbour]
    if act is _save:
        values[victim] = -1.0
    if act is _delete:
        values.pop(victim, None)
    for name in NEIGHBOURS:
        if name in values:
            assert saved_value(tmp_path / name) == values[name], name
        else:
            with pytest.raises(ckpt.CheckpointNotFound):
                ckpt.load(tmp_path / name)
    if act is _save:
        assert sorted(os.listdir(tmp_path)) == sorted(values)


@pytest.mark.usefixtures("dead_is_dead")
def test_a_step_that_was_being_replaced_is_still_a_step(tmp_path, monkeypatch):
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.save(2, state(2))
    die_between_the_renames(tmp_path / "2", 99.0, monkeypatch)
    with ckpt.Checkpointer(tmp_path, read_only=True) as reader:
        assert reader.all_steps() == [1, 2]
        restored = reader.restore_latest(state=state(0))
        assert restored is not None and restored.step == 2
        assert restored["state"]["w"][0] == 2
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step() == 2
        checkpointer.delete(2)
        assert checkpointer.all_steps() == [1]
    assert ckpt.Checkpointer(tmp_path).all_steps() == [1]


def test_an_empty_directory_does_not_hide_the_only_copy(tmp_path, monkeypatch):
    """Launch scripts make directories."""
    path = tmp_path / "model"
    ckpt.save(path, state(1))
    die_between_the_renames(path, 99.0, monkeypatch)
    path.mkdir()
    assert saved_value(path) == 1
    with pytest.raises(ckpt.CheckpointExists):
        ckpt.save(path, state(2))
    assert saved_value(path) == 1
