"""An object of the host that a program changes in place stays one: at two places of a tree, in two items of a save."""

import random
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.faults.crafted.signed import read_record, write_record

MAKE = {
    "generator": lambda: np.random.default_rng(3),
    "random_state": lambda: np.random.RandomState(3),
    "python": lambda: random.Random(3),
    "array": lambda: np.arange(6.0),
    "big array": lambda: np.arange(200_000.0),
    "big-endian": lambda: np.arange(6, dtype=">f4"),
}


@pytest.fixture(params=MAKE)
def make(request):
    return MAKE[request.param]


def in_a_tree(one: Any, other: Any) -> dict[str, Any]:
    return {"state": {"a": [one, 1], "b": {"rng": other, "w": np.ones(2)}}}


def in_two_items(one: Any, other: Any) -> dict[str, Any]:
    return {"a": [one, 1], "b": {"rng": other, "w": np.ones(2)}}


PLACES = [in_a_tree, in_two_items]


def pair(items: Any) -> tuple[Any, Any]:
    tree = items.get("state", items)
    return tree["a"][0], tree["b"]["rng"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_without_a_target_it_is_one_again(tmp_path, make, where, place):
    shared = make()
    path = str(tmp_path / "a") if where == "disk" else f"memory://{tmp_path.name}/a"
    ckpt.save(path, items=place(shared, shared))
    for as_numpy in (False, True):
        one, other = pair(ckpt.load(path, as_numpy=as_numpy))
        assert one is other is not shared and type(one) is type(shared)
    one, other = pair(ckpt.load_async(path).result())
    assert one is other
    assert ckpt.verify(path).ok


@pytest.mark.parametrize("place", PLACES)
def test_a_target_says_whether_it_is_one(tmp_path, make, place):
    ckpt.save(tmp_path / "one", items=place(*[make()] * 2))
    ckpt.save(tmp_path / "two", items=place(make(), make()))
    fresh = make()

    def restored(name: str, one: Any, other: Any) -> bool:
        got = pair(dict(ckpt.restore(tmp_path / name, items=place(one, other))))
        return got[0] is got[1]

    assert restored("one", fresh, fresh)
    assert not restored("one", fresh, make())
    assert not restored("two", fresh, fresh), "they were two when they were saved"
    one, other = pair(ckpt.load(tmp_path / "two"))
    assert one is not other


def test_kinds_that_nobody_can_change_are_left_alone(tmp_path):
    ones = jnp.ones(3)
    ckpt.save(tmp_path / "a", [ones, ones, "text", "text", 7, 7])
    assert not read_record(tmp_path / "a")["items"]["state"].get("shared")
    # as jax arrays, what was one numpy array may be two: nobody can change them
    array = np.ones(3, np.float32)
    ckpt.save(tmp_path / "b", [array, array])
    assert ckpt.load(tmp_path / "b", [ones, ones])[1].tolist() == [1, 1, 1]


class Maker:
    """Makes arrays for each save, which may lie where those of another object have lain."""

    def __init__(self, value: float) -> None:
        self.value = value

    def get_state(self) -> dict[str, Any]:
        return {"x": np.full(1000, self.value)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.value = float(state["x"][0])


def test_arrays_that_are_made_for_the_save_are_not_taken_for_one(tmp_path):
    makers = {f"m{n}": Maker(n) for n in range(20)}
    ckpt.save(tmp_path / "a", items=makers)
    assert not read_record(tmp_path / "a").get("shared")
    fresh = {name: Maker(-1) for name in makers}
    ckpt.restore(tmp_path / "a", items=fresh)
    assert [one.value for one in fresh.values()] == list(range(20))


@pytest.mark.parametrize("tier", [False, True])
def test_steps_of_a_run(tmp_path, tier):
    """Each as it was when it was saved, in local parts too."""
    rng, array = np.random.default_rng(1), np.zeros(3)
    local = tmp_path / "local" if tier else None
    options = ckpt.Options(local_max_to_keep=2) if tier else None
    with ckpt.Checkpointer(tmp_path / "run", local_directory=local, options=options) as run:
        run.save(0, a={"rng": rng, "x": array}, b={"rng": rng, "x": array})
        run.save(1, a={"rng": rng, "x": array}, b={"rng": np.random.default_rng(1), "x": array})
    for directory in (tmp_path / "run", *(local or tmp_path).glob("*/process_*")):
        with ckpt.Checkpointer(directory, read_only=True) as reading:
            first, second = reading.load(0), reading.load(1)
        assert first["a"]["rng"] is first["b"]["rng"] and first["a"]["x"] is first["b"]["x"]
        assert second["a"]["rng"] is not second["b"]["rng"]
        assert second["a"]["x"] is second["b"]["x"]


OF_A_TREE = [[[0, 9]], [[0, 0]], [[0]], [[0, 1], [1, 0]], [[0, 2]], [["0", 1]], 3, [[2, 3]]]
OF_ITEMS = [
    [[["a", 0]]],
    [[["a", 0], ["c", 0]]],
    [[["a", 0], ["b", 9]]],
    [[["a", 0], ["b", -1]]],
    [[["a", 0], ["b", 0]], [["a", 0], ["b", 1]]],
    [[["a", 0], ["b", 1]]],
    [[[["a"], 0], ["b", 0]]],
    7,
    {"a": 1},
]


@pytest.mark.parametrize("entry", OF_A_TREE)
def test_an_impossible_entry_of_a_tree_is_damage(tmp_path, entry):
    rng = np.random.default_rng(1)
    ckpt.save(tmp_path / "a", [rng, rng, 1, 1])
    record = read_record(tmp_path / "a")
    assert record["items"]["state"]["shared"] == [[0, 1]]
    record["items"]["state"]["shared"] = entry
    write_record(tmp_path / "a", record)
    with pytest.raises(ckpt.CheckpointCorrupt, match="fields do not fit"):
        ckpt.load(tmp_path / "a")


@pytest.mark.parametrize("entry", OF_ITEMS)
def test_an_impossible_entry_of_items_is_damage(tmp_path, entry):
    ckpt.save(tmp_path / "a", a=[np.ones(2)], b=[np.ones(2), np.ones(3)])
    write_record(tmp_path / "a", read_record(tmp_path / "a") | {"shared": entry})
    with pytest.raises(ckpt.CheckpointCorrupt):
        ckpt.load(tmp_path / "a")
