"""Reader threads: begun only where several reads can run beside each other, and ended whatever ends a load."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._background import threads
from ckpt_core._load import loading
from ckpt_core._options import MIB
from ckpt_core._read import pipeline


@pytest.fixture(name="started")
def count_pools(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads of each pool whose threads begin."""
    found = list[int]()
    launch = threads._launch

    def counted(owner: Any, jobs: Any, ends: list[Any], *more: Any) -> None:
        found.append(len(ends))
        launch(owner, jobs, ends, *more)

    monkeypatch.setattr(threads, "_launch", counted)
    return found


def _descriptors() -> set[str]:
    at = "/proc/self/fd"
    links = [f"{at}/{one}" for one in os.listdir(at)]
    return {os.readlink(link) for link in links if os.path.lexists(link)}


@pytest.mark.parametrize("count", [1, 3, 200])
def test_a_small_load_starts_no_thread(tmp_path: Path, started: list[int], count: int) -> None:
    state = {f"leaf{n}": np.full(900, n, np.float32) for n in range(count)}
    ckpt.save(tmp_path / "one", state)
    started.clear()
    found = ckpt.load(tmp_path / "one")
    assert started == []
    assert all(np.array_equal(found[name], value) for name, value in state.items())


def test_reads_of_one_batch_run_beside_each_other(
    tmp_path: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"leaf{n}": np.full(MIB // 4, n, np.float32) for n in range(3)}
    ckpt.save(tmp_path / "one", state)
    started.clear()
    at_once = threading.Barrier(2, timeout=20)  # two reads begin before either of them ends
    read, number = pipeline.ExtentReader._read, itertools.count()

    def waiting(*given: Any) -> None:
        if next(number) < 2:
            at_once.wait()
        read(*given)

    monkeypatch.setattr(pipeline.ExtentReader, "_read", waiting)
    found = ckpt.load(tmp_path / "one")
    assert len(started) == 1 and next(number) >= 2
    assert all(np.array_equal(found[name], value) for name, value in state.items())


def test_a_last_batch_of_one_job_does_not_wait_for_the_caller(
    tmp_path: Path, started: list[int]
) -> None:
    """It is read while the caller works on the one before."""
    state = {f"leaf{n}": np.full(MIB // 4, n, np.float32) for n in range(3)}
    ckpt.save(tmp_path / "one", state)
    started.clear()
    ckpt.load(tmp_path / "one", options=ckpt.Options(max_host_bytes=MIB))
    assert len(started) == 1


@pytest.mark.linux("/proc/self/fd")
def test_an_error_that_is_kept_keeps_no_thread_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a notebook keeps the last one: a device without memory, or a signal handler that raises."""
    state = {f"leaf{n}": np.full(MIB // 4, n, np.float32) for n in range(9)}
    ckpt.save(tmp_path / "one", state)
    before = _descriptors()

    def refuses(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "value_of", refuses)
    with pytest.raises(KeyboardInterrupt) as caught:
        ckpt.load(tmp_path / "one", options=ckpt.Options(max_host_bytes=MIB))
    left = [one.name for one in threading.enumerate() if one.name.startswith("ckpt-read")]
    kept = {one for one in _descriptors() - before if str(tmp_path) in one}
    assert caught.value is not None and left == [] and kept == set()


@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_no_more_threads_than_there_are_things(started: list[int], count: int) -> None:
    mine = threading.get_ident()
    found = threads.run_each(lambda n: (n + 1, threading.get_ident()), range(count), 4, "ckpt-x")
    assert [one for one, _ in found] == [*range(1, count + 1)]
    assert started == ([] if count < 2 else [min(count, 4)])
    assert count != 1 or found[0][1] == mine
