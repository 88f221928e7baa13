"""Listings and looks that fail once in a save: it fails, with what the system said, and nothing is lost.

A directory that cannot be listed was taken for empty: a checkpoint without half of its files was
acknowledged, and retention then removed the good one before it.
"""

import contextlib
import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.refusals import refuse

STATE = {"a": np.arange(5000.0), "b": {"c": np.arange(3)}}
MOST = 200


def check(path: Path, n: int) -> None:
    loaded = ckpt.load(path)
    np.testing.assert_array_equal(loaded["a"], STATE["a"] + n)
    assert ckpt.verify(path).ok


def state(n: int) -> dict[str, Any]:
    return {"a": STATE["a"] + n, "b": STATE["b"]}


@pytest.mark.parametrize("name", ["scandir", "listdir", "lstat", "stat"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_a_listing_that_fails_loses_nothing(tmp_path, monkeypatch, name, number):
    """At every call of a save that replaces a checkpoint: one of the two is there, whole."""
    path = tmp_path / "run"
    ckpt.save(path, state(0))
    told = 0
    for at in range(1, MOST):
        new = at
        with monkeypatch.context() as patch:
            looks = refuse(patch, tmp_path, number, (name,), times=1, first=at - 1)
            try:
                ckpt.save(path, state(new), overwrite=True)
            except (OSError, ckpt.CheckpointError):
                told += 1
                new = -1
        if len(looks) < at:
            break
        assert ckpt.verify(path).ok, (name, at)
        kept = int(ckpt.load(path)["a"][0])
        assert kept in ({at} if new == at else {at, at - 1}), (name, at)
        ckpt.save(path, state(at), overwrite=True)
    else:
        raise AssertionError("there is no end to the calls")
    if name == "scandir":
        assert told > 0


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_the_step_before_stays(tmp_path, monkeypatch, number):
    for at in range(1, MOST):
        run = tmp_path / str(at)
        with ckpt.Checkpointer(run, max_to_keep=1, asynchronous=False) as checkpointer:
            checkpointer.save(0, state(0))
            with monkeypatch.context() as patch, contextlib.suppress(OSError):
                looks = refuse(patch, tmp_path, number, ("scandir",), times=1, first=at - 1)
                checkpointer.save(1, state(1))
            newest = checkpointer.all_steps()[-1]
        check(run / str(newest), newest)
        if len(looks) < at:
            return
    raise AssertionError("there is no end to the calls")
