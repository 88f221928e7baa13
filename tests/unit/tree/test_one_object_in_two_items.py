"""An object of the host that a program changes in place, in two items of one save, stays one object."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._format.record import load_record
from tests.contract.faults.crafted.signed import read_record, write_record

MAKE: dict[str, Callable[[], Any]] = {
    "generator": lambda: np.random.default_rng(3),
    "random_state": lambda: np.random.RandomState(3),
    "python": lambda: random.Random(3),
    "array": lambda: np.arange(6.0),
    "big array": lambda: np.arange(200_000.0),
}


@pytest.fixture(name="make", params=MAKE)
def make_make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return MAKE[request.param]


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_without_a_target_it_is_one_again(
    tmp_path: Path, make: Callable[[], Any], where: str
) -> None:
    shared = make()
    path = str(tmp_path / "a") if where == "disk" else f"memory://{tmp_path.name}-{id(make)}/a"
    ckpt.save(path, data=[shared, 1], model={"rng": shared, "again": shared, "w": np.ones(2)})
    for as_numpy in (False, True):
        loaded = ckpt.load(path, as_numpy=as_numpy)
        model = loaded["model"]
        assert loaded["data"][0] is model["rng"] is model["again"] is not shared
    assert type(ckpt.load(path, item="data")[0]) is type(shared)
    assert type(ckpt.load_async(path, only="**/again").result()["model"]["again"]) is type(shared)
    assert ckpt.verify(path).ok


def test_a_target_says_whether_it_is_one(tmp_path: Path, make: Callable[[], Any]) -> None:
    shared, one = make(), make()
    ckpt.save(tmp_path / "one", data=[shared], model={"rng": shared, "again": shared})
    restored = ckpt.restore(tmp_path / "one", data=[one], model={"rng": one, "again": make()})
    assert restored["data"][0] is restored["model"]["rng"] is not restored["model"]["again"]
    ckpt.save(tmp_path / "two", data=[shared], model={"rng": make(), "again": 1})
    restored = ckpt.restore(tmp_path / "two", data=[one], model={"rng": one, "again": 1})
    assert restored["data"][0] is not restored["model"]["rng"], "they were two when saved"


def test_steps_of_a_run(tmp_path: Path) -> None:
    rng, array = np.random.default_rng(1), np.zeros(3)
    with ckpt.Checkpointer(tmp_path / "run") as run:
        run.save(0, a={"rng": rng, "x": array}, b={"rng": rng, "x": array})
        run.save(1, a={"rng": rng, "x": array}, b={"rng": np.random.default_rng(1), "x": array})
    with ckpt.Checkpointer(tmp_path / "run") as run:
        first, second = run.load(0), run.load(1)
        targets: dict[str, Any] = {"a": {"rng": rng, "x": array}, "b": {"rng": rng, "x": array}}
        again = run.restore(0, items=targets)
    assert first["a"]["rng"] is first["b"]["rng"] and first["a"]["x"] is first["b"]["x"]
    assert second["a"]["rng"] is not second["b"]["rng"] and second["a"]["x"] is second["b"]["x"]
    assert again["a"]["rng"] is again["b"]["rng"]


class Maker:
    """Makes arrays for each save, which may lie where those of another object have lain."""

    def __init__(self, value: float) -> None:
        self.value = value

    def get_state(self) -> dict[str, Any]:
        return {"x": np.full(1000, self.value)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.value = float(state["x"][0])


def test_arrays_that_are_made_for_the_save_are_not_taken_for_one(tmp_path: Path) -> None:
    makers = {f"m{n}": Maker(n) for n in range(20)}
    ckpt.save(tmp_path / "a", items=makers)
    assert load_record((tmp_path / "a" / "ckpt.json").read_bytes()).shared == ()
    fresh = {name: Maker(-1) for name in makers}
    ckpt.restore(tmp_path / "a", items=fresh)
    assert [one.value for one in fresh.values()] == list(range(20))


@pytest.mark.parametrize(
    "entry",
    [
        [[["a", 0]]],
        [[["a", 0], ["c", 0]]],
        [[["a", 0], ["b", 9]]],
        [[["a", 0], ["b", -1]]],
        [[["a", 0], ["b", True]]],
        [[["a", 0], ["b", 0]], [["a", 0], ["b", 1]]],
        [[["a", 0], ["b", 1]]],
        [[["a", []], ["b", 0]]],
        [[[["a"], 0], ["b", 0]]],
        7,
        {"a": 1},
    ],
)
def test_a_crafted_entry_is_refused(tmp_path: Path, entry: Any) -> None:
    ckpt.save(tmp_path / "a", a=[np.ones(2)], b=[np.ones(2), np.ones(3)])
    record = read_record(tmp_path / "a")
    write_record(tmp_path / "a", record | {"shared": entry})
    with pytest.raises(ckpt.CheckpointCorrupt):
        ckpt.load(tmp_path / "a")


def test_a_local_step_keeps_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    run, local = tmp_path / "run", tmp_path / "local"
    with ckpt.Checkpointer(run, local_directory=local) as saving:
        saving.save(0, a={"rng": rng}, b={"rng": rng})
    parts = list(local.glob("*/process_*"))
    assert parts
    for directory in (run, *parts):
        with ckpt.Checkpointer(directory, read_only=True) as reading:
            loaded = reading.load(0)
        assert loaded["a"]["rng"] is loaded["b"]["rng"]
