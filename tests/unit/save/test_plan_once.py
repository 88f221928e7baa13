"""A tree is planned once; its values are those of the moment, wherever they are copied first."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt_core as ckpt
from ckpt_core._devices import transfer
from ckpt_core._save.plan import plan_tree, signature_of
from ckpt_core._tree import flatten
from tests.support import seams


def planned() -> int:
    """How many trees were planned so far."""
    return plan_tree.cache_info().misses


def tree(seed: int) -> dict[str, Any]:
    key = jax.random.key(seed)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    spread = NamedSharding(mesh, PartitionSpec("a", "b"))
    return {
        "w": jax.device_put(jax.random.normal(key, (8, 6)), spread),
        "steps": [jnp.int32(seed), seed, float(seed)],
        "host": np.full((3,), seed),
        "key": key,
        "name": f"run {seed}",
        "float8": jnp.full((4,), seed, jnp.float8_e4m3fn),
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    one, other = dict(one), dict(other)
    assert (jax.random.key_data(one.pop("key")) == jax.random.key_data(other.pop("key"))).all()
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), one, other)


def test_the_second_save_of_a_tree_plans_nothing(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "1", tree(1))
    before = planned()
    for seed in (2, 3):
        ckpt.save(tmp_path / str(seed), tree(seed))
        same(ckpt.load(tmp_path / str(seed)), tree(seed))
    assert planned() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state | {"w": state["w"].astype("bfloat16")},
        lambda state: state | {"w": state["w"][:4]},
        lambda state: state | {"w": jax.device_put(state["w"], jax.devices()[0])},
        lambda state: state | {"more": 1},
        lambda state: {"W" if key == "w" else key: value for key, value in state.items()},
        lambda state: state | {"steps": tuple(state["steps"])},
        lambda state: state | {"steps": [*state["steps"][:2], int(state["steps"][2])]},
        lambda state: state | {"name": 1},
    ],
)
def test_another_tree_is_planned_anew(tmp_path: Path, change: Any) -> None:
    ckpt.save(tmp_path / "1", tree(1))
    before = planned()
    other = change(tree(1))
    ckpt.save(tmp_path / "2", other)
    assert planned() == before + 1
    loaded = ckpt.load(tmp_path / "2")
    same(loaded, other)
    assert jax.tree.structure(loaded) == jax.tree.structure(other)
    shardings = [leaf.sharding for leaf in jax.tree.leaves(other) if isinstance(leaf, jax.Array)]
    assert shardings == [
        leaf.sharding for leaf in jax.tree.leaves(loaded) if isinstance(leaf, jax.Array)
    ]


def test_leaves_that_are_equal_are_described_by_the_same_objects() -> None:
    """Comparing the outlines of two steps is then a comparison of pointers."""
    one, other = ({f"w{n}": jnp.full((4, 4), n + add) for n in range(9)} for add in (0, 1))
    (first, _), (second, _) = signature_of(flatten(one)), signature_of(flatten(other))
    assert first == second and hash(first) == hash(second)
    for signature in (first, second):
        assert {*map(id, signature.specs)} == {id(first.specs[0])}
        assert {*map(id, signature.shardings), *map(id, signature.stored)} == {id(first.stored[0])}


def test_a_deleted_array_among_equal_ones_is_named(tmp_path: Path) -> None:
    state = {f"w{n}": jnp.full((4, 4), n) for n in range(3)}
    ckpt.save(tmp_path / "1", state)
    state["w1"].delete()
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"w1.*deleted"):
        ckpt.save(tmp_path / "2", state)
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


def test_a_weak_scalar_and_one_that_is_not_stay_what_they_are(tmp_path: Path) -> None:
    state = {"weak": jnp.asarray(1.0), "strong": jnp.float32(1.0), "also": jnp.asarray(2.0)}
    ckpt.save(tmp_path / "1", state)
    loaded: Any = ckpt.load(tmp_path / "1")
    assert {name: leaf.weak_type for name, leaf in loaded.items()} == {
        name: leaf.weak_type for name, leaf in state.items()
    }
    assert state["weak"].weak_type and not state["strong"].weak_type


def test_an_array_bound_to_its_device_and_one_that_is_not_are_two_things(tmp_path: Path) -> None:
    free = {"w": jnp.ones(4)}
    bound = {"w": jax.device_put(jnp.ones(4), jax.devices()[0])}
    for number, state in enumerate((free, bound, free, bound)):
        ckpt.save(tmp_path / str(number), state)
        loaded: Any = ckpt.load(tmp_path / str(number))
        assert loaded["w"].committed == state["w"].committed, number


@pytest.mark.parametrize("where", ["host", "device", "pinned_host"])
def test_a_snapshot_anywhere_is_of_the_moment(tmp_path: Path, where: Any) -> None:
    state = tree(7)
    expected = jax.tree.map(lambda leaf: leaf.copy() if hasattr(leaf, "copy") else leaf, state)
    step = jax.jit(lambda w: w * 0 - 1, donate_argnums=0)
    pending = ckpt.save_async(tmp_path / "one", state, options=ckpt.Options(snapshot=where))
    step(state["w"]).block_until_ready()
    state["host"][:] = -1
    pending.result()
    same(ckpt.load(tmp_path / "one"), expected)


def test_a_snapshot_keeps_arrays_that_lie_in_that_memory_already(tmp_path: Path) -> None:
    device = jax.devices()[0]
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    state = {"w": jax.device_put(jnp.arange(6.0), pinned)}
    pending = ckpt.save_async(tmp_path / "one", state, options=ckpt.Options(snapshot="pinned_host"))
    state["w"].delete()
    pending.result()
    np.testing.assert_array_equal(ckpt.load(tmp_path / "one", as_numpy=True)["w"], np.arange(6.0))


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_an_array_comes_back_to_the_kind_of_memory_it_was_in(tmp_path: Path, kind: str) -> None:
    device = jax.devices()[1]
    there = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    ckpt.save(tmp_path / "one", {"w": jax.device_put(jnp.arange(6.0), there)})
    loaded: Any = ckpt.load(tmp_path / "one")
    assert loaded["w"].sharding == there
    np.testing.assert_array_equal(loaded["w"], np.arange(6.0))


def test_a_kind_of_memory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="snapshot must be 'host', 'device' or 'pinned_host'"):
        ckpt.Options(snapshot="disk")  # pyright: ignore[reportArgumentType]


def test_a_snapshot_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(parts: Any, where: str) -> None:
        raise ckpt.CheckpointError(f"no {where}")

    monkeypatch.setattr(transfer, "stage", refuse)
    with pytest.raises(ckpt.CheckpointError, match="no device"):
        ckpt.save_async(tmp_path / "one", tree(1), options=ckpt.Options(snapshot="device"))
    assert not list(tmp_path.iterdir())


class Owner:
    """Holds its arrays, and takes part in saves by itself."""

    def __init__(self) -> None:
        self.w = jnp.ones(1000)

    def get_state(self) -> Any:
        return {"w": self.w}

    def set_state(self, state: Any) -> None:
        self.w = state["w"]


def test_a_plan_that_is_remembered_keeps_no_model_alive(tmp_path: Path) -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    ckpt.save(tmp_path / "one", model=owner)
    del owner
    gc.collect()
    assert alive() is None


def test_what_was_staged_is_let_go_when_it_has_landed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt_core._storage import ArrayWriter

    seen: list[bool] = []

    def look(*_: Any) -> None:
        gc.collect()
        seen.append(alive() is not None)

    seams.at(monkeypatch, (ArrayWriter, "finish"), before=look)
    state = {"w": jnp.ones(1000)}
    alive = weakref.ref(state["w"])
    pending = ckpt.save_async(tmp_path / "one", state, options=ckpt.Options(snapshot="device"))
    del state
    pending.result()
    assert seen == [False]
