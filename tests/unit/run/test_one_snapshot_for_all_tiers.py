"""A step that goes to the fast and to the persistent directory is asked for, flattened and copied once."""

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._devices import transfer
from ckpt_core._devices.transfer import Staging
from tests.support import seams


class Counter:
    """A data pipeline, each of whose states is another."""

    per_process = True

    def __init__(self) -> None:
        self.asked = 0

    def get_state(self) -> dict[str, int]:
        self.asked += 1
        return {"asked": self.asked}

    def set_state(self, state: Any) -> None:
        self.asked = state["asked"]


def both(tmp_path: Path, **options: Any) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(
        tmp_path / "run",
        local_directory=tmp_path / "fast",
        options=ckpt.Options(
            persist_policy=ckpt.when.every_steps(2), local_max_to_keep=9, **options
        ),
    )


def of_each_tier(tmp_path: Path, step: int) -> list[Path]:
    """The checkpoints of a step, in the persistent and in the fast directory."""
    found = [file.parent for file in tmp_path.glob(f"**/{step}/ckpt.json")]
    assert len(found) == 2, found
    return found


def test_a_pipeline_is_asked_once(tmp_path):
    pipeline = Counter()
    with both(tmp_path) as checkpointer:
        for step in range(4):
            checkpointer.save(step, data=pipeline)
    found: list[int] = []
    for path in of_each_tier(tmp_path, 2):
        ckpt.restore(path, data=(seen := Counter()))
        found.append(seen.asked)
    assert found[0] == found[1], "each tier has a state of another moment"


@pytest.mark.parametrize("size_bytes", [10, 3 * 2**20])
def test_a_function_writes_its_files_once(tmp_path, size_bytes, monkeypatch):
    """And both tiers have copied them before its directory is deleted."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    calls: list[int] = []

    def write(folder: Path) -> None:
        calls.append(len(calls))
        (folder / "content").write_bytes(os.urandom(size_bytes))

    with both(tmp_path) as checkpointer:
        for step in (0, 1, 2):
            checkpointer.save(step, tokenizer=ckpt.Files(write), model={"w": np.zeros(3)})
    assert calls == [0, 1, 2]
    first, second = (path / "tokenizer" / "content" for path in of_each_tier(tmp_path, 2))
    assert first.stat().st_size == size_bytes
    assert first.read_bytes() == second.read_bytes()
    assert not list((tmp_path / "scratch").iterdir())


def test_host_memory_is_copied_once(tmp_path, monkeypatch):
    copied: list[int] = []
    copy = (Staging, "copy")
    seams.at(monkeypatch, copy, before=lambda _, array: copied.append(array.nbytes))
    state = {"a": np.zeros(1000), "b": np.zeros(10, np.int8)}
    with both(tmp_path) as checkpointer:
        for step in range(5):
            state["a"][:] = state["b"][:] = step
            checkpointer.save(step, state)
            state["a"][:] = state["b"][:] = -1
    assert copied == [8000, 10] * 5
    for step in (2, 4):
        for path in of_each_tier(tmp_path, step):
            loaded: Any = ckpt.load(path)
            assert (loaded["a"] == step).all(), path
            assert (loaded["b"] == step).all(), path


def test_device_memory_is_copied_once_and_brought_to_the_host_once(tmp_path, monkeypatch):
    staged: list[Any] = []
    landed: list[Any] = []

    def land(value: Any, *_: Any, **__: Any) -> None:
        if isinstance(value, jax.Array) and threading.current_thread().name.startswith("ckpt-"):
            landed.append(value.shape)

    copies = (transfer, "copies")
    seams.at(monkeypatch, copies, before=lambda values: staged.append(len(values)))
    seams.at(monkeypatch, (np, "asarray"), before=land)
    with both(tmp_path, snapshot="device") as checkpointer:
        for step in range(3):
            state = {"w": jnp.full(100, float(step)), "v": jnp.full(7, step)}
            checkpointer.save(step, state)
            jax.tree.map(lambda leaf: leaf.delete(), state)
    assert staged == [1] * 6
    assert sorted(landed) == [(7,)] * 3 + [(100,)] * 3
    for path in of_each_tier(tmp_path, 2):
        loaded: Any = ckpt.load(path)
        assert (np.asarray(loaded["w"]) == 2).all()
        assert (np.asarray(loaded["v"]) == 2).all()


def test_a_save_that_must_persist_does_not_reuse_the_memory_of_one_on_its_way(
    tmp_path, monkeypatch
):
    """An overwrite goes to the persistent directory whatever the policy wants, while an earlier step may be on its way."""
    with ckpt.Checkpointer(tmp_path / "run") as earlier:
        for step in range(4):
            earlier.save(step, np.full(1000, 100.0 + step))
    gate = seams.Gate()
    seams.at(monkeypatch, "write", before=gate, where=seams.below(tmp_path / "run"), nth=1)
    state = np.full(1000, 2.0)
    with both(tmp_path) as checkpointer:
        checkpointer.save(2, state, overwrite=True)
        assert gate.entered.wait(30)
        state[:] = 1.0
        second = threading.Thread(
            target=checkpointer.save, args=(1, state), kwargs={"overwrite": True}
        )
        second.start()
        second.join(1)  # without the wait for the first save it returns
        gate.go.set()
        second.join(30)
        checkpointer.wait_until_finished()
    values = [float(np.mean(np.asarray(ckpt.load(tmp_path / "run" / str(n))))) for n in (1, 2)]
    assert values == [1.0, 2.0]
