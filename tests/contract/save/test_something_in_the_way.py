"""Saves where something is already, or of what cannot be saved: refused, nothing changed."""

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.unchanged import (
    assert_tree,
    assert_usable,
    make_steps,  # noqa: F401 (fixtures)
    tree,
    unchanged,
)


def save_and_wait(checkpointer, step, state=None):
    """The error of a save may come at the call or in the background."""
    checkpointer.save(step, tree(step) if state is None else state)
    checkpointer.wait_until_finished()


# ----------------------------------------------------------------------------------------- existing


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


def test_existing_step(steps):
    with (
        ckpt.Checkpointer(steps) as checkpointer,
        unchanged(steps),
        pytest.raises(ckpt.CheckpointExists, match="4"),
    ):
        save_and_wait(checkpointer, 4)
    assert_usable(steps)


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


def test_overwriting_with_what_cannot_be_saved(tmp_path):
    ckpt.save(tmp_path / "c", tree(1))
    with unchanged(tmp_path), pytest.raises(ckpt.UnsupportedLeaf):
        ckpt.save(tmp_path / "c", {"x": {1, 2}}, overwrite=True)
    assert_tree(ckpt.load(tmp_path / "c"), 1)


# --------------------------------------------------------------- a file where a directory should be


def test_saving_onto_a_file(tmp_path):
    (tmp_path / "c").write_text("text")
    for overwrite in (False, True):
        with unchanged(tmp_path), pytest.raises(ckpt.CheckpointExists) as caught:
            ckpt.save(tmp_path / "c", tree(), overwrite=overwrite)
        assert str(tmp_path / "c") in str(caught.value)


def test_saving_below_a_file(tmp_path):
    (tmp_path / "file").write_text("text")
    with unchanged(tmp_path), pytest.raises((ckpt.CheckpointError, NotADirectoryError)) as caught:
        ckpt.save(tmp_path / "file" / "c", tree())
    assert str(tmp_path / "file") in str(caught.value)


def test_loading_a_file(tmp_path):
    (tmp_path / "c").write_text("text")
    for path in (tmp_path / "c", tmp_path / "c" / "below"):
        for call in (ckpt.load, ckpt.inspect, ckpt.verify):
            with unchanged(tmp_path), pytest.raises(ckpt.CheckpointNotFound) as caught:
                call(path)
            assert str(tmp_path / "c") in str(caught.value)


def test_a_checkpointer_on_a_file(tmp_path):
    (tmp_path / "c").write_text("text")
    with unchanged(tmp_path), pytest.raises((ckpt.CheckpointError, NotADirectoryError)) as caught:
        ckpt.Checkpointer(tmp_path / "c").save(0, tree())
    assert str(tmp_path / "c") in str(caught.value)


def test_a_file_among_the_steps(steps):
    (steps / "5").write_text("not a step")
    with ckpt.Checkpointer(steps) as checkpointer:
        assert list(checkpointer.all_steps()) == [3, 4]
        assert checkpointer.latest_step() == 4
        with unchanged(steps), pytest.raises(ckpt.CheckpointExists):
            save_and_wait(checkpointer, 5)


# ------------------------------------------------------------------- what cannot be saved or loaded


@pytest.mark.parametrize("asynchronous", [True, False])
def test_unsaveable_leaf(steps, asynchronous):
    with ckpt.Checkpointer(steps, asynchronous=asynchronous) as checkpointer, unchanged(steps):
        with pytest.raises(ckpt.UnsupportedLeaf) as caught:
            checkpointer.save(5, {"good": jnp.ones(2), "bad": {"f": len}})
        assert isinstance(caught.value, TypeError)
        assert "bad/f" in str(caught.value)
        assert "builtin_function_or_method" in str(caught.value)
    assert_usable(steps)


def test_mismatched_tree(steps):
    target = tree(0)
    target["params"]["weight"] = target["params"].pop("w")
    for call in (
        lambda: ckpt.load(steps / "4", target),
        lambda: ckpt.restore(steps / "4", state=target),
    ):
        with unchanged(steps), pytest.raises(ckpt.StructureMismatch) as caught:
            call()
        assert {(one.path, one.kind) for one in caught.value.mismatches} == {
            ("params/weight", "missing"),
            ("params/w", "unexpected"),
        }
    np.testing.assert_array_equal(target["params"]["b"], np.zeros(3))


def test_restore_latest_raises_on_a_mismatch(steps):
    """The code is wrong, not the disk: no older step is tried."""
    with (
        ckpt.Checkpointer(steps) as checkpointer,
        unchanged(steps),
        pytest.raises(ckpt.StructureMismatch),
    ):
        checkpointer.restore_latest(state={"params": {"w": jnp.ones((40, 40))}})


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
