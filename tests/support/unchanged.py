"""Directories that a refused call must leave as they were."""

import contextlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt


def tree(value=1.0):
    return {"params": {"w": jnp.full((40, 30), value), "b": np.full(3, value)}, "step": int(value)}


def assert_tree(got, value=1.0):
    np.testing.assert_array_equal(got["params"]["w"], np.full((40, 30), value, np.float32))
    np.testing.assert_array_equal(got["params"]["b"], np.full(3, value))
    assert got["step"] == int(value)


def snapshot(directory: Path):
    """Every path below a directory with its bytes; None for directories.

    The note of who saves into a directory of steps is the one file that is no part of a checkpoint.
    """
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
        if path.name != ".ckpt-owner"
    }


@contextlib.contextmanager
def unchanged(directory: Path):
    """Fails if a file appears, disappears or changes meanwhile."""
    before = snapshot(directory)
    yield
    after = snapshot(directory)
    assert set(after) - set(before) == set(), "left behind"
    assert set(before) - set(after) == set(), "lost"
    assert [name for name in before if before[name] != after[name]] == []


@pytest.fixture(name="steps")
def make_steps(tmp_path):
    """A directory with the steps 3 and 4."""
    root = tmp_path / "run"
    with ckpt.Checkpointer(root) as checkpointer:
        for step in (3, 4):
            checkpointer.save(step, tree(step))
    return root
