"""Saves where something is already, of what cannot be saved, or without room: refused, nothing changed."""

import errno
import os

import pytest

import ckpt_core as ckpt
from tests.support.unchanged import (
    assert_tree,
    make_steps,  # noqa: F401 (fixtures)
    tree,
    unchanged,
)


@pytest.mark.parametrize("save", [ckpt.save, lambda *a, **kw: ckpt.save_async(*a, **kw).result()],
                         ids=["save", "save_async"])  # fmt: skip
def test_existing_checkpoint(tmp_path, save):
    save(tmp_path / "c", tree(1))
    with unchanged(tmp_path), pytest.raises(ckpt.CheckpointExists) as caught:
        save(tmp_path / "c", tree(2))
    assert isinstance(caught.value, FileExistsError)
    assert "overwrite" in str(caught.value)
    save(tmp_path / "c", tree(3), overwrite=True)
    assert_tree(ckpt.load(tmp_path / "c"), 3)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_of_something_else(tmp_path, overwrite):
    """Overwriting is for checkpoints: somebody's home directory is not deleted."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.tex").write_text("years of work")
    with unchanged(tmp_path), pytest.raises(ckpt.CheckpointExists):
        ckpt.save(tmp_path / "c", tree(), overwrite=overwrite)


@pytest.mark.parametrize("inside", ["other", "state/inner", "state"])
def test_saving_inside_a_checkpoint(tmp_path, inside):
    """It would not be the checkpoint any more that it was when it was sealed."""
    ckpt.save(tmp_path / "c", tree(1))
    for overwrite in (False, True):
        with unchanged(tmp_path), pytest.raises((ckpt.CheckpointError, ValueError)):
            ckpt.save(tmp_path / "c" / inside, tree(2), overwrite=overwrite)
    assert ckpt.verify(tmp_path / "c").ok


@pytest.mark.parametrize("inside", ["", "below"])
def test_a_file_in_the_way(tmp_path, inside):
    (tmp_path / "c").write_text("text")
    path, error = tmp_path / "c" / inside, (ckpt.CheckpointError, NotADirectoryError)
    for call, expected in (
        (lambda: ckpt.save(path, tree()), error if inside else ckpt.CheckpointExists),
        (lambda: ckpt.save(path, tree(), overwrite=True), error),
        (lambda: ckpt.Checkpointer(path).save(0, tree()), error),
        (lambda: ckpt.load(path), ckpt.CheckpointNotFound),
        (lambda: ckpt.inspect(path), ckpt.CheckpointNotFound),
        (lambda: ckpt.verify(path), ckpt.CheckpointNotFound),
    ):
        with unchanged(tmp_path), pytest.raises(expected) as caught:
            call()
        assert str(tmp_path / "c") in str(caught.value)


def test_a_file_among_the_steps(steps):
    (steps / "5").write_text("not a step")
    with ckpt.Checkpointer(steps, asynchronous=False) as checkpointer:
        assert list(checkpointer.all_steps()) == [3, 4]
        assert checkpointer.latest_step() == 4
        with unchanged(steps), pytest.raises(ckpt.CheckpointExists):
            checkpointer.save(5, tree(5))


def test_restore_latest_never_starts_afresh_over_damage(steps):
    """With every candidate damaged it raises; a None would train from scratch in silence."""
    for step in (3, 4):
        for path in (steps / str(step)).rglob("d/*"):
            path.write_bytes(bytes(path.stat().st_size))
    with (
        ckpt.Checkpointer(steps) as checkpointer,
        unchanged(steps),
        pytest.warns(RuntimeWarning, match="damaged"),
        pytest.raises(ckpt.CheckpointCorrupt),
    ):
        checkpointer.restore_latest(state=tree(0))


def test_a_mount_that_does_not_rename_asks_for_its_url(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError) as caught:
        ckpt.save(tmp_path / "a", {"w": 1})
    assert "s3://" in caught.value.__notes__[0]
