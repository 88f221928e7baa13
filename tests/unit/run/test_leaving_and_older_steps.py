"""What a Checkpointer leaves behind when it is closed; steps that are older than the newest one."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from ckpt_core._run.lease import Lease
from tests.support.places import Place, make_place, open_at, same, state, write  # noqa: F401

OWNER = ".ckpt-owner"


def test_nothing_but_steps_is_left(tmp_path: Path):
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state(0))
        checkpointer.wait_until_finished()
        assert OWNER in os.listdir(tmp_path)
    assert os.listdir(tmp_path) == ["0"]
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore_latest(state(9)) is not None
        assert sorted(os.listdir(tmp_path)) == [OWNER, "0"]
    assert os.listdir(tmp_path) == ["0"]


def test_an_older_writer_is_refused_all_the_same(tmp_path: Path):
    older = ckpt.Checkpointer(tmp_path, asynchronous=False)
    older.save(0, state(0))
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as newer:
        assert newer.restore_latest(state(9))["state"]  # pyright: ignore[reportOptionalSubscript]
        newer.save(1, state(1))
    assert os.listdir(tmp_path).count(OWNER) == 0
    with pytest.raises(ckpt.CheckpointError, match="took this directory over"):
        older.save(2, state(2))
    older.close()
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_the_claim_of_another_writer_stays(tmp_path: Path):
    older = ckpt.Checkpointer(tmp_path, asynchronous=False)
    older.save(0, state(0))
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as newer:
        assert newer.restore_latest(state(9))["state"]  # pyright: ignore[reportOptionalSubscript]
        older.close()
        assert OWNER in os.listdir(tmp_path)
        newer.save(1, state(1))


def test_a_claim_that_comes_while_another_writer_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is put back, and the new writer goes on."""
    backend = PosixBackend()
    older, newer = Lease(str(tmp_path), backend), Lease(str(tmp_path), backend)
    older.take()
    rename = os.rename

    def claimed_first(source: str, target: str) -> None:
        if os.path.basename(source) == OWNER:
            newer.take()
        rename(source, target)

    monkeypatch.setattr(os, "rename", claimed_first)
    older.release()
    assert os.listdir(tmp_path) == [OWNER]
    newer.check()
    newer.release()
    assert os.listdir(tmp_path) == []


def test_a_step_older_than_the_newest_one(place: Place, caplog: pytest.LogCaptureFixture):
    write(place, 10)
    with open_at(place) as checkpointer:
        with pytest.raises(ckpt.CheckpointExists, match="force=True"):
            checkpointer.save(5, state(5))
        with caplog.at_level(logging.WARNING, "ckpt_core"):
            assert checkpointer.save(5, state(5), force=True)
            checkpointer.wait_until_finished()
        assert "step 5 is saved with force=True, and is older than 10" in caplog.text
        assert checkpointer.all_steps() == [5, 10]
        with pytest.raises(ckpt.CheckpointExists, match="step 10 is there already"):
            checkpointer.save(10, state(10), force=True)
        checkpointer.save(7, state(7), force=True)
        checkpointer.save(11, state(11))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore_latest(state(0))
        assert restored is not None
        assert restored.step == 11
        assert same(checkpointer.load(5, state(0)), 5)
        assert np.array_equal(checkpointer.all_steps(), [5, 7, 10, 11])


def test_retention_takes_it_as_any_other(place: Place):
    with open_at(place, max_to_keep=2) as checkpointer:
        for step in (10, 11, 5):
            checkpointer.save(step, state(step), force=True)
            checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [10, 11]
