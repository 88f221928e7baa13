"""No memory, and a newer format: whatever is met while reading, it is no damage.

Only `CheckpointCorrupt` makes `restore_latest` go back a step, after which the next save sets the newest one
aside. So each of these must arrive as what it is, from wherever it is raised, and nothing may move.
"""

import errno
import json
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._read import extents, wants
from ckpt_core._storage import arrays
from tests.contract.faults.crafted.signed import read_record, write_record
from tests.contract.run.test_not_seen_is_not_absent import raised

STATE = {
    "large": np.arange(300_000, dtype=np.float32),
    "small": np.arange(12, dtype=np.int32),
    "text": "words",
    "generator": np.random.default_rng(3),
    "key": (1, [2.5, None]),
}
CALLS: dict[str, Callable[[str], Any]] = {
    "load": ckpt.load,
    "as_numpy": lambda path: ckpt.load(path, as_numpy=True),
    "like": lambda path: ckpt.load(path, STATE),
    "inspect": ckpt.inspect,
    "verify": lambda path: ckpt.verify(path).ok or pytest.fail("verify says damaged"),
}
_MOST_CALLS = 400


@pytest.fixture(name="path", params=[None, "zstd"], ids=["plain", "zstd"])
def make_path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    path = str(tmp_path / "one")
    ckpt.save(path, STATE, options=ckpt.Options(compression=request.param))
    return path


def _failing_at(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException
) -> dict[str, Any]:
    """Makes the call number ``left`` of a function raise; ``came`` says whether it came."""
    state, real = {"left": 0, "came": False}, getattr(owner, name)

    def function(*arguments: Any, **named: Any) -> Any:
        if "ckpt_core" in sys._getframe(1).f_code.co_filename:
            state["left"] -= 1
            if state["left"] == 0:
                state["came"] = True
                raise error
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, function)
    return state


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (os, "read", MemoryError()),
        (os, "open", OSError(errno.EMFILE, "Too many open files")),
        (json, "loads", MemoryError()),
        (json, "loads", RecursionError("maximum recursion depth exceeded")),
        (np, "empty", MemoryError()),
        (np, "frombuffer", MemoryError()),
        (mmap, "mmap", MemoryError()),
        (mmap, "mmap", OSError(errno.ENOMEM, "Cannot allocate memory")),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value)[:20],
)
def test_what_each_call_meets_arrives_as_it_is(path, monkeypatch, call, owner, name, error):
    CALLS[call](path)  # what is loaded once and kept is loaded now
    state = _failing_at(monkeypatch, owner, name, error)
    for number in range(1, _MOST_CALLS):
        state.update(left=number, came=False)
        found = raised(lambda: CALLS[call](path))
        right = type(found) in (type(None), type(error))
        assert right, f"call {number} of {name}: {type(found).__name__}: {found}"
        if not state["came"]:
            return
    pytest.fail(f"more than {_MOST_CALLS} calls of {name}")


def _steps(directory: Path) -> None:
    with ckpt.Checkpointer(directory, asynchronous=False) as checkpointer:
        for step in range(2):
            checkpointer.save(step, {"w": np.full(100_000, step, np.float32)})


def _next_run_goes_on(directory: Path) -> None:
    """The newest step stands where it stood, and a run continues after it."""
    target = {"w": np.zeros(100_000, np.float32)}
    with ckpt.Checkpointer(directory, asynchronous=False) as checkpointer:
        restored = checkpointer.restore_latest(state=target)
        assert restored is not None and restored.step == 1
        assert restored["state"]["w"][0] == 1
        assert checkpointer.save(2, restored["state"])
        assert checkpointer.all_steps() == [0, 1, 2]
    assert not (directory / "damaged").exists()


@pytest.mark.parametrize("alignment", [2**46, 2**63], ids=["no-memory", "no-addresses"])
def test_restore_latest_goes_back_for_no_want_of_memory(tmp_path, monkeypatch, alignment):
    _steps(tmp_path)

    with (
        ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer,
        monkeypatch.context() as patched,
    ):
        patched.setattr(wants, "_ALIGNMENT", alignment)  # a buffer of any size is too large
        with pytest.raises(MemoryError):
            checkpointer.restore_latest(state={"w": np.zeros(100_000, np.float32)})
    _next_run_goes_on(tmp_path)


def test_a_compressed_chunk_beyond_memory_is_no_damage(tmp_path, monkeypatch):
    path = str(tmp_path / "one")
    ckpt.save(path, {"w": np.zeros(2**20, np.float32)}, options=ckpt.Options(compression="zstd"))
    monkeypatch.setattr("ckpt_core._storage.arrays.memory_bytes", lambda: 2**20)
    with pytest.raises(MemoryError, match="4194304 bytes must be decoded at once"):
        ckpt.load(path)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"v2": f"{2**30}\n"}, 2**30),
        ({"v2": "max\n", "v1": f"{2**31}\n"}, 2**31),
        ({"v2": "max\n", "v1": f"{2**63 - 4096}\n"}, None),
        ({}, None),
    ],
)
def test_the_memory_of_a_process_is_that_of_its_container(tmp_path, monkeypatch, limits, expected):
    monkeypatch.setattr(arrays, "_CONTAINER_LIMITS", ())
    whole = arrays.memory_bytes()
    assert whole > 2**31
    for name, text in limits.items():
        (tmp_path / name).write_text(text)
    files = (str(tmp_path / "v2"), str(tmp_path / "v1"))
    monkeypatch.setattr(arrays, "_CONTAINER_LIMITS", files)
    assert arrays.memory_bytes() == (expected or whole)


def test_a_newer_format_says_so_and_nothing_moves(tmp_path):
    _steps(tmp_path)
    record = read_record(tmp_path / "1")
    older = dict(record)
    record["format_version"] = 99
    record["leaves_of_a_later_version"] = []
    write_record(tmp_path / "1", record)
    target = {"w": np.zeros(100_000, np.float32)}
    for call in (
        lambda: ckpt.load(tmp_path / "1"),
        lambda: ckpt.inspect(tmp_path / "1"),
        lambda: ckpt.verify(tmp_path / "1"),
        lambda: _restore_latest(tmp_path, target),
        lambda: _restore_latest(tmp_path, target, strict_latest=True),
    ):
        with pytest.raises(ckpt.CheckpointError, match="upgrade ckpt to load it") as caught:
            call()
        assert not isinstance(caught.value, ckpt.CheckpointCorrupt)
    write_record(tmp_path / "1", older)
    _next_run_goes_on(tmp_path)


def _restore_latest(directory: Path, target: Any, **arguments: Any) -> Any:
    with ckpt.Checkpointer(directory, asynchronous=False) as checkpointer:
        return checkpointer.restore_latest(state=target, **arguments)


def test_a_file_that_is_shorter_than_recorded_takes_no_memory(tmp_path, monkeypatch):
    path = tmp_path / "one"
    ckpt.save(path, {"w": np.zeros(2**20, np.float32)})
    (data,) = [file for file in path.rglob("d/*") if file.stat().st_size > 2**21]
    os.truncate(data, 2**20)
    monkeypatch.setattr(
        extents, "aligned", lambda *_: pytest.fail("room before the file was looked at")
    )
    with pytest.raises(ckpt.CheckpointCorrupt, match="the file is truncated"):
        ckpt.load(path)
