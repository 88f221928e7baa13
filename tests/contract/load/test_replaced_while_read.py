"""Who reads a path while `overwrite=True` replaces the checkpoint there gets the old one or the new one, always.

CheckpointNotFound is a FileNotFoundError, after which programs begin afresh; and nothing was damaged.
"""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.replacing import KINDS, replacing

_CALLS, _REPLACED = 20, 20
"""At least so many calls of each kind, and as many more as it takes for the path to be replaced so often."""
_LIMIT_SECS = 120.0


def _whole(state: dict[str, Any]) -> None:
    numbers = {*np.unique(state["a"]), *np.unique(state["b"][0]), *np.unique(state["c"])}
    assert len(numbers) == 1, f"parts of several checkpoints: {numbers}"


def _restore(path: str) -> None:
    target = {
        "a": np.zeros(5000, np.int64),
        "b": [np.zeros(7, np.int64), ""],
        "c": np.zeros(300_000, np.int64),
    }
    _whole(ckpt.restore(path, state=target)["state"])


def _as_step(path: str) -> None:
    directory, name = os.path.split(path)
    with ckpt.Checkpointer(directory, read_only=True) as checkpointer:
        assert checkpointer.all_steps() == [int(name)]
        _whole(checkpointer.load(int(name)))


def _verify(path: str) -> None:
    report = ckpt.verify(path)
    assert report.ok, report.problems


CALLS: dict[str, Callable[[str], None]] = {
    "load": lambda path: _whole(ckpt.load(path)),
    "as_numpy": lambda path: _whole(ckpt.load(path, as_numpy=True)),
    "load_async": lambda path: _whole(ckpt.load_async(path).result()),
    "restore": _restore,
    "inspect": lambda path: _number_is_there(ckpt.inspect(path)),
    "verify": _verify,
    "checkpointer": _as_step,
}


def _number_is_there(info: ckpt.CheckpointInfo) -> None:
    assert info.metadata["number"] > 0 and len(info.items["state"].leaves) == 4


@pytest.fixture(name="replaced", params=KINDS, scope="module")
def make_replaced(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Callable[[], int]]]:
    """A path that another process replaces all the time, and how often it has."""
    directory = tmp_path_factory.mktemp("replaced")
    path = directory / "run" / "3"
    with replacing(path, directory / "told", request.param) as count:
        yield str(path), count


@pytest.mark.parametrize("call", CALLS)
def test_readers_see_the_old_or_the_new(replaced, call):
    path, count = replaced
    CALLS[call](path)
    before, calls, failed = count(), 0, list[str]()
    until = time.monotonic() + _LIMIT_SECS
    while calls < _CALLS or count() - before < _REPLACED:
        assert time.monotonic() < until, f"{calls} calls, replaced {count() - before} times"
        calls += 1
        try:
            CALLS[call](path)
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}"[:300])
    assert not failed, f"{len(failed)} of {calls} calls: {failed[:3]}"
