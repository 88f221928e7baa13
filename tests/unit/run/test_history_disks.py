"""A disk that fails in one tier, then the same Checkpointer goes on: what was acknowledged stays, and all see the same."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from tests.support import seams
from tests.support.two_tiers import Starts, starts


def state(value: int) -> dict[str, Any]:
    return {"value": np.full(3, value)}


@pytest.fixture(name="start")
def make_start(tmp_path: Path) -> Starts:
    """Checkpointers of one run, which writes every hundredth step to the persistent directory."""
    return starts(tmp_path, persists_every=100, local_max_to_keep=10)


def seen(checkpointer: ckpt.Checkpointer) -> dict[int, int]:
    return {step: int(checkpointer.load(step)["value"][0]) for step in checkpointer.all_steps()}


@pytest.mark.parametrize("step", [101, 102])
def test_an_overwrite_that_fails_in_the_local_tier_leaves_the_step_as_it_was(
    start: Starts, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """It was forgotten: the next save deleted the only copy, and the same overwrite was refused as of an older step."""
    before = {100: 100, 101: 101, 102: 102}
    with start() as checkpointer:
        for number in before:
            checkpointer.save(number, state(number))
    with start() as checkpointer:
        restored = checkpointer.restore_latest(state=state(0))
        assert restored is not None
        assert restored["state"]["value"][0] == 102

        def is_local(_: PosixBackend, target: str, **__: Any) -> bool:
            return "local" in target

        with monkeypatch.context() as patch:
            seams.at(patch, (PosixBackend, "begin"), before=seams.fail(), where=is_local)
            with pytest.raises(OSError, match="No space"):
                checkpointer.save(step, state(-step), overwrite=True)
        assert seen(checkpointer) == before
        assert checkpointer.save(103, state(103))
        assert seen(checkpointer) == before | {103: 103}
        assert checkpointer.save(step, state(-step), overwrite=True)
    with start(read_only=True) as reader:
        assert seen(reader) == before | {103: 103, step: -step}


def test_a_save_that_leaves_steps_and_fails_halfway_leaves_them_for_its_own_program_too(
    start: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second file could not be written: all others no longer saw the steps that it leaves, and it did."""
    with start() as checkpointer:
        for number in (100, 101, 200, 202):
            checkpointer.save(number, state(number))
        restored = checkpointer.restore(101, state=state(0))
        assert restored["state"]["value"][0] == 101
        fails = seams.fail(OSError, errno.EIO, "Input/output error")
        with monkeypatch.context() as patch:
            seams.at(patch, (PosixBackend, "put"), before=fails, where=seams.names(".ckpt-run"))
            with pytest.raises(OSError, match="Input/output"):
                checkpointer.save(102, state(-102))
        with start(read_only=True) as reader:
            assert seen(reader) == seen(checkpointer) == {100: 100, 101: 101}
        assert checkpointer.save(102, state(-102))
    with start(read_only=True) as reader:
        assert seen(reader) == {100: 100, 101: 101, 102: -102}


@pytest.mark.parametrize("number", [np.array, np.int64])
def test_queries_of_a_step_in_both_tiers_take_any_integer(start: Starts, number: Any) -> None:
    with start() as checkpointer:
        checkpointer.save(100, state(1), metadata="hundred", metrics={"loss": 2.0})
        step = number(100)
        assert checkpointer.load(step)["value"][0] == 1
        assert checkpointer.metadata(step) == "hundred"
        assert checkpointer.metrics(step) == {"loss": 2.0}
        assert checkpointer.inspect(step).metadata == "hundred"
        with pytest.raises(TypeError, match="step must be an integer"):
            checkpointer.load(np.array([100]))  # pyright: ignore[reportArgumentType]
