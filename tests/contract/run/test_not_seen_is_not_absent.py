"""What the system cannot look at now is neither absent nor of another kind: the error says so, and no older step counts instead."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.refusals import refuse

ERRORS = (errno.EIO, errno.EMFILE, errno.EACCES, errno.ESTALE)
LOSS = (5.0, 1.0, 3.0)


def state(step: int) -> dict[str, Any]:
    return {"n": step, "w": np.full(300, step, np.float32)}


def raised(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def start(root: Path, **more: Any) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(root / "run", best_metric="loss", best_mode="min", **more)


@pytest.fixture(name="root")
def make_root(tmp_path: Path) -> Path:
    """Where a run has the steps 0 to 2, of which 1 is the best."""
    with start(tmp_path) as checkpointer:
        for step, loss in enumerate(LOSS):
            checkpointer.save(step, state(step), metrics={"loss": loss})
    return tmp_path


@pytest.mark.parametrize("number", ERRORS)
def test_the_best_step_may_be_one_that_cannot_be_read(root, monkeypatch, number):
    with start(root, read_only=True) as reader:
        with monkeypatch.context() as patch:
            refuse(patch, root / "run" / "1" / "ckpt.json", number, calls=("open",))
            with pytest.raises(OSError) as caught:
                reader.best_step()
        assert caught.value.errno == number and not isinstance(caught.value, ckpt.CheckpointError)
        assert reader.best_step() == 1


def test_a_damaged_step_is_not_the_best(root):
    (root / "run" / "1" / "ckpt.json").write_bytes(b"{")
    assert start(root, read_only=True).best_step() == 2


def test_retention_keeps_what_it_cannot_read(root, monkeypatch):
    with start(root, max_to_keep=1) as checkpointer, monkeypatch.context() as patch:
        assert checkpointer.restore_latest(state(9)).state["n"] == 2
        refuse(patch, root / "run" / "0" / "ckpt.json", errno.EIO, calls=("open",))
        checkpointer.save(3, state(3), metrics={"loss": 9.0})
        checkpointer.wait_until_finished()
        patch.undo()
        assert checkpointer.all_steps() == [0, 1, 3]


def test_the_best_step_is_local(tmp_path):
    never = ckpt.Options(persist_policy=ckpt.when.at_steps([0]), local_max_to_keep=3)
    with start(tmp_path, local_directory=tmp_path / "local", options=never) as checkpointer:
        for step, loss in enumerate(LOSS):
            checkpointer.save(step, state(step), metrics={"loss": loss})
        checkpointer.wait_until_finished()
        assert (checkpointer.all_steps(), checkpointer.best_step()) == ([0, 1, 2], 1)
    assert start(tmp_path).best_step() == 0


@pytest.fixture(name="replaced")
def make_replaced(root: Path) -> Path:
    """The same, killed between the two renames of a replacement, where a file system cannot exchange directories."""
    path = root / "run" / "2"
    path.rename(path.with_name(".ckpt-old.2.00000000-1-1.d4735e3a265e16ee00112233"))
    return root


CALLS: dict[str, Callable[[ckpt.Checkpointer], Any]] = {
    "all": lambda run: run.all_steps(),
    "latest": lambda run: run.latest_step(),
    "restore": lambda run: run.restore_latest(state(9)),
    "load": lambda run: run.load(2),
}


@pytest.mark.parametrize(
    ("call", "number"), [*zip(CALLS, (*ERRORS[:3], errno.ENOMEM), strict=True)]
)
def test_a_step_under_its_hidden_name_is_not_passed_over(replaced, monkeypatch, call, number):
    (replaced / "run" / "2").mkdir()  # what the kill left of the new one
    reader = start(replaced, read_only=True)
    assert reader.all_steps() == [0, 1, 2]
    with monkeypatch.context() as patch:
        met = refuse(patch, replaced / "run" / "2", number, calls=("scandir",))
        with pytest.raises(OSError) as caught:
            CALLS[call](reader)
    assert met and caught.value.errno == number, caught.value
    assert not isinstance(caught.value, ckpt.CheckpointError)
    assert reader.restore_latest(state(9)).step == 2


@pytest.mark.parametrize("nth", range(4))
def test_a_directory_is_not_taken_for_a_file(root, monkeypatch, nth):
    """A stat that fails between two that do not: ``os.path`` says that there is no directory."""
    for path, call in (
        (root / "run", lambda: start(root)),
        (root / "run" / "2", lambda: ckpt.save(root / "run" / "2", state(9), overwrite=True)),
    ):
        with monkeypatch.context() as patch:
            refuse(patch, path, errno.EIO, calls=("stat",), first=nth, times=1, below=False)
            error = raised(call)
            assert error is None or type(error) is OSError, error
    assert start(root, read_only=True).all_steps() == [0, 1, 2]


def test_a_directory_that_is_not_written_to_is_named(tmp_path, monkeypatch):
    """The path that was asked for, not the hidden name under which it would have been written."""
    refuse(monkeypatch, tmp_path, errno.EROFS, calls=("mkdir",))
    with pytest.raises(OSError) as caught:
        ckpt.save(tmp_path / "x", state(1))
    assert (caught.value.errno, caught.value.filename) == (errno.EROFS, str(tmp_path / "x"))
