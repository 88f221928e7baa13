"""Copies of host arrays: of the moment, in memory that the next save uses again."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._devices.staging import Staging
from tests.support import seams


def test_the_next_save_gets_the_same_memory() -> None:
    staging = Staging(2**20)
    first = [staging.copy(np.full((4, 8), n, np.float32)) for n in range(3)]
    assert [copy[0, 0] for copy in first] == [0, 1, 2]
    staging.release()
    second = [staging.copy(np.full((4, 8), 9, np.float32)) for _ in range(3)]
    assert {copy.ctypes.data for copy in first} == {copy.ctypes.data for copy in second}


def test_what_is_lent_is_lent_once() -> None:
    staging = Staging(2**20)
    copies = [staging.copy(np.zeros(100)) for _ in range(4)]
    assert len({copy.ctypes.data for copy in copies}) == 4


def test_other_shapes_dtypes_and_orders_get_other_memory() -> None:
    staging = Staging(2**20)
    kept = staging.copy(np.zeros(8, ml_dtypes.bfloat16))
    staging.release()
    others: list[np.ndarray[Any, Any]] = [
        np.zeros(8, np.float16),
        np.zeros(8, ">i2"),
        np.zeros((2, 4), ml_dtypes.bfloat16),
        np.arange(8.0).reshape(2, 4).T,
    ]
    for other in others:
        copy = staging.copy(other)
        assert copy.ctypes.data != kept.ctypes.data
        assert (copy.dtype, copy.flags.c_contiguous) == (other.dtype, True)
        np.testing.assert_array_equal(copy, other)


def test_no_more_is_kept_than_allowed_and_only_what_the_last_save_used() -> None:
    staging = Staging(1000)
    large = [staging.copy(np.zeros(100, np.float64)) for _ in range(3)]
    staging.release()
    again = [staging.copy(np.zeros(100, np.float64)) for _ in range(3)]
    same = {copy.ctypes.data for copy in large} & {copy.ctypes.data for copy in again[:1]}
    assert len(same) == 1
    staging.release()
    staging.copy(np.zeros(3))
    staging.release()
    assert list(staging._free) == [(np.dtype(np.float64), (3,))]  # pyright: ignore


@pytest.mark.parametrize("tier", [False, True])
def test_saves_in_a_row_are_each_of_their_moment(tmp_path: Path, tier: bool) -> None:
    state = {"a": np.zeros((64, 1024)), "b": np.zeros(7, np.int8)}
    local = tmp_path / "local" if tier else None
    with ckpt.Checkpointer(tmp_path / "run", local_directory=local) as checkpointer:
        for step in range(6):
            state["a"][:], state["b"][:] = step, step
            checkpointer.save(step, state)
            state["a"][:], state["b"][:] = -1, -1
        checkpointer.wait_until_finished()
    for step in range(6):
        loaded: Any = ckpt.load(tmp_path / "run" / str(step))
        assert (loaded["a"] == step).all(), step
        assert (loaded["b"] == step).all(), step


def test_memory_is_not_used_again_while_a_save_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = seams.Gate()
    seams.at(monkeypatch, "write", before=gate)
    state = np.zeros(1000)
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state)
        assert gate.entered.wait(30)
        state[:] = 1
        second = threading.Thread(target=checkpointer.save, args=(1, state))
        second.start()
        gate.go.set()
        second.join(30)
        checkpointer.wait_until_finished()
    assert [float(np.sum(ckpt.load(tmp_path / str(step)))) for step in (0, 1)] == [0.0, 1000.0]


def test_a_failed_save_takes_no_memory_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.at(monkeypatch, "write", after=seams.fail(), nth=1)
    state = np.zeros(1000)
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state)
        with pytest.raises(OSError, match="No space"):
            checkpointer.wait_until_finished()
        for step in (1, 2):
            state[:] = step
            checkpointer.save(step, state)
            state[:] = -1
        checkpointer.wait_until_finished()
    assert [float(np.sum(ckpt.load(tmp_path / str(step)))) for step in (1, 2)] == [1000.0, 2000.0]


def test_between_saves_no_more_is_kept_than_the_limit(tmp_path: Path):
    options = ckpt.Options(max_host_bytes=10_000)
    tree = {f"leaf{n}": np.full(1000, n, np.float64) for n in range(4)}
    with ckpt.Checkpointer(tmp_path, options=options) as checkpointer:
        checkpointer.save(0, tree)
        checkpointer.wait_until_finished()
        staging = checkpointer._run._stagings[-1]  # pyright: ignore
        kept = [buffer for free in staging._free.values() for buffer in free]  # pyright: ignore
        assert not staging.lent
        assert sum(buffer.nbytes for buffer in kept) == 8000
