"""An object of the host that a program changes in place, at two places of a tree, stays one object."""

from __future__ import annotations

import functools
import random

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._format.record import load_record
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
def shared(request):
    return MAKE[request.param]()


def test_without_a_target_it_is_one_again(tmp_path, shared):
    ckpt.save(tmp_path / "a", {"data": [shared, 1], "model": {"rng": shared, "w": np.ones(2)}})
    for more in ({}, {"as_numpy": True}):
        loaded = ckpt.load(tmp_path / "a", **more)
        assert loaded["data"][0] is loaded["model"]["rng"] is not shared
        assert type(loaded["data"][0]) is type(shared)
    alone = ckpt.load(tmp_path / "a", only="model/**")
    assert type(alone["model"]["rng"]) is type(shared)


def test_equal_objects_stay_two(tmp_path):
    for make in MAKE.values():
        ckpt.save(tmp_path / "a", [make(), make()], overwrite=True)
        one, other = ckpt.load(tmp_path / "a")
        assert one is not other


def test_a_target_says_whether_it_is_one(tmp_path, shared):
    fresh = next(make for make in MAKE.values() if type(make()) is type(shared))
    if isinstance(shared, np.ndarray):
        fresh = functools.partial(np.empty_like, shared)
    ckpt.save(tmp_path / "one", {"a": shared, "b": shared})
    one = fresh()
    loaded = ckpt.load(tmp_path / "one", {"a": one, "b": one})
    assert loaded["a"] is loaded["b"] is not one
    loaded = ckpt.restore(tmp_path / "one", {"a": one, "b": one})["state"]
    assert loaded["a"] is loaded["b"]
    loaded = ckpt.load(tmp_path / "one", {"a": fresh(), "b": fresh()})
    assert loaded["a"] is not loaded["b"]
    ckpt.save(tmp_path / "two", {"a": shared, "b": fresh()})
    loaded = ckpt.load(tmp_path / "two", {"a": one, "b": one})
    assert loaded["a"] is not loaded["b"], "they were two when they were saved"


def test_kinds_that_nobody_can_change_are_left_alone(tmp_path):
    ones = jnp.ones(3)
    ckpt.save(tmp_path / "a", [ones, ones, "text", "text", 7, 7])
    ckpt.load(tmp_path / "a")
    record = load_record((tmp_path / "a" / "ckpt.json").read_bytes())
    assert record.items["state"].shared == ()
    # as jax arrays, what was one numpy array may be two: nobody can change them
    array = np.ones(3, np.float32)
    ckpt.save(tmp_path / "b", [array, array])
    assert ckpt.load(tmp_path / "b", [ones, ones])[1].tolist() == [1, 1, 1]


class Loader:
    """Two parts of a data source that draw from one generator."""

    def __init__(self, seed: int) -> None:
        self.shuffle = self.augment = np.random.default_rng(seed)

    def get_state(self):
        return {"shuffle": self.shuffle, "augment": {"rng": self.augment}}

    def set_state(self, state):
        self.shuffle, self.augment = state["shuffle"], state["augment"]["rng"]


def test_an_object_is_set_with_one(tmp_path):
    loader, other = Loader(1), Loader(2)
    ckpt.save(tmp_path / "a", loader=loader)
    ckpt.restore(tmp_path / "a", loader=other)
    assert other.shuffle is other.augment
    assert [other.shuffle.random(), other.augment.random()] == [
        loader.shuffle.random() for _ in "12"
    ]


def test_resume_with_a_checkpointer_after_the_sharing_changed(tmp_path):
    rng, like = np.random.default_rng(1), np.zeros(3)
    with ckpt.Checkpointer(tmp_path / "run") as run:
        run.save(0, {"a": rng, "b": rng, "x": like, "y": like})
        run.save(1, {"a": rng, "b": np.random.default_rng(1), "x": like, "y": np.zeros(3)})
        run.wait_until_finished()
        first, second = run.load(0), run.load(1)
    assert first["a"] is first["b"] and first["x"] is first["y"]
    assert second["a"] is not second["b"] and second["x"] is not second["y"]


def test_a_writer_and_a_copy_keep_it(tmp_path):
    rng = np.random.default_rng(1)
    with ckpt.writer(tmp_path / "w") as writer:
        writer.add("state", {"x": {"one": np.ones(2)}})
        writer.add("state", {"y": {"rng": rng}, "x": {"rng": rng}})
    loaded = ckpt.load(tmp_path / "w")["state"]
    assert loaded["x"]["rng"] is loaded["y"]["rng"]


@pytest.mark.parametrize(
    "entry", [[[0, 9]], [[0, 0]], [[0]], [[0, 1], [1, 0]], [[0, 2]], [["0", 1]], 3, [[2, 3]]]
)
def test_an_impossible_entry_is_damage(tmp_path, entry):
    rng = np.random.default_rng(1)
    ckpt.save(tmp_path / "a", [rng, rng, 1, 1])
    record = read_record(tmp_path / "a")
    assert record["items"]["state"]["shared"] == [[0, 1]]
    record["items"]["state"]["shared"] = entry
    write_record(tmp_path / "a", record)
    with pytest.raises(ckpt.CheckpointCorrupt, match="fields do not fit"):
        ckpt.load(tmp_path / "a")
