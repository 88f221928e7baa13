"""The tree of a checkpoint without its arrays; targets that describe, or leave places out by `...`."""

import collections
import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt
from tests.support.orbax import make_quiet_orbax  # noqa: F401 (fixture)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


def tree() -> dict[str, Any]:
    return {
        "list": [jnp.ones((2, 3)), None, (), [], {}],
        "tuple": (np.int32(3), 4, "text"),
        "point": Point(jnp.zeros(4, jnp.bfloat16), Pair(1.5, jax.random.key(0))),
        3: np.arange(5),
        "ordered": collections.OrderedDict(b=True, a=2**70),
    }


def forms(value: Any) -> Any:
    """The containers of a tree, with the shape of each leaf."""
    if isinstance(value, dict):
        return type(value), {key: forms(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [forms(part) for part in value]
    if isinstance(value, Pair):
        return Pair, forms(value.left), forms(value.right)
    return None if value is None else tuple(getattr(value, "shape", np.shape(value)))


def test_containers_none_and_empty_ones_are_as_saved(tmp_path):
    ckpt.save(tmp_path / "step", tree())
    item = ckpt.inspect(tmp_path / "step").items["state"]
    assert forms(item.tree) == forms(tree())
    leaf = item.tree["point"].x
    assert isinstance(leaf, ckpt.LeafInfo)
    assert (leaf.path, leaf.shape, leaf.dtype, leaf.bytes) == ("point/x", (4,), "bfloat16", 8)
    item.tree["list"].clear()
    assert len(item.tree["list"]) == 5
    assert jax.tree.leaves(item.tree["list"], is_leaf=lambda x: x is None)[0] == item.leaves[0]


def test_a_bare_leaf_and_other_forms(tmp_path):
    (tmp_path / "file").touch()
    ckpt.save(tmp_path / "step", one=np.ones(2), j=ckpt.Json(1), f=ckpt.Files(tmp_path / "file"))
    items = ckpt.inspect(tmp_path / "step").items
    assert items["one"].tree.shape == (2,)
    assert (items["j"].tree, items["f"].tree) == (None, None)


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_of_orbax_as_far_as_it_tells(tmp_path, version):
    saved = {"a": [jnp.ones(2), {"b": None}], "c": {}, "d": (jnp.zeros(3),)}
    if version == "v0":
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "step", saved)
    else:
        ocp_v1.save(tmp_path / "step", saved)
    (item,) = ckpt.inspect(tmp_path / "step").items.values()
    lengths = jax.tree.map(lambda leaf: leaf.shape[0], item.tree)
    assert lengths == {"a": [2, {"b": None}], "c": {}, "d": [3]}


def test_it_is_a_target(tmp_path):
    ckpt.save(tmp_path / "step", tree())
    info = ckpt.inspect(tmp_path / "step")
    found = ckpt.load(tmp_path / "step", info.items["state"].tree)
    assert forms(found) == forms(tree())
    assert isinstance(found["list"][0], jax.Array)
    assert isinstance(found[3], np.ndarray)
    assert found["ordered"]["a"] == 2**70
    ckpt.save(tmp_path / "other", tree() | {"list": [jnp.ones((2, 2)), None, (), [], {}]})
    with pytest.raises(ckpt.StructureMismatch, match="list/0"):
        ckpt.load(tmp_path / "other", info.items["state"].tree)


@dataclasses.dataclass
class Described:
    """As in Orbax's own metadata: a dataclass that is no pytree."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any = None


@pytest.mark.parametrize("kind", [Described, lambda *a: SimpleNamespace(shape=a[0], dtype=a[1])])
def test_any_object_with_shape_and_dtype(tmp_path, kind):
    ckpt.save(tmp_path / "step", {"w": jnp.arange(6.0).reshape(2, 3), "n": np.ones(2, np.int32)})
    found = ckpt.load(tmp_path / "step", {"w": kind((2, 3), "float32"), "n": kind((2,), np.int32)})
    assert isinstance(found["w"], jax.Array)
    assert np.array_equal(found["w"], np.arange(6.0).reshape(2, 3))
    restored = ckpt.restore(
        tmp_path / "step", {"w": kind([2, 3], "float32"), "n": np.zeros(2, np.int32)}
    )
    assert np.array_equal(restored["state"]["w"], found["w"])
    with pytest.raises(ckpt.StructureMismatch, match="shape"):
        ckpt.load(tmp_path / "step", {"w": kind((3, 2), "float32"), "n": kind((2,), "int32")})
    with pytest.raises(ckpt.StructureMismatch, match="dtype"):
        ckpt.load(tmp_path / "step", {"w": kind((2, 3), "bfloat16"), "n": kind((2,), "int32")})
    like = {"w": kind((2, 3), "float32"), "n": kind((2,), "int32"), "new": kind((), "int32")}
    with pytest.raises(ckpt.StructureMismatch, match="abstract"):
        ckpt.load(tmp_path / "step", like, missing="keep")
    with pytest.raises(ckpt.UnsupportedLeaf, match="cannot be a target"):
        ckpt.load(tmp_path / "step", {"w": kind((2, 3), "no dtype"), "n": kind((2,), "int32")})


def test_their_sharding_is_taken(tmp_path, mesh):
    sharding = NamedSharding(mesh, P("data"))
    ckpt.save(tmp_path / "step", {"w": jnp.arange(8.0)})
    found = ckpt.load(tmp_path / "step", {"w": Described((8,), np.float32, sharding)})
    assert found["w"].sharding == sharding
    found = ckpt.load(tmp_path / "step", {"w": Described((8,), np.float32, "some text")})
    assert np.array_equal(found["w"], np.arange(8.0))


def test_what_only_leaves_out_stays_what_it_is(tmp_path):
    ckpt.save(tmp_path / "step", {"w": jnp.ones(2), "v": jnp.ones(2)})
    like = {"w": Described((2,), "float32"), "v": Described((2,), "float32")}
    found = ckpt.load(tmp_path / "step", like, only="w")
    assert found["v"] is like["v"]


def test_a_dataclass_is_saved_as_before(tmp_path):
    ckpt.save(tmp_path / "step", {"a": Described((2,), "float32")})
    found = ckpt.load(tmp_path / "step")
    assert (found["a"].shape, found["a"].dtype) == ((2,), "float32")


def test_a_place_is_left_out(tmp_path):
    saved = {"w": jnp.ones(2), "opt": {"mu": [jnp.ones(3), jnp.ones(4)]}, "n": 1}
    ckpt.save(tmp_path / "step", saved)
    abstract = jax.ShapeDtypeStruct((2,), jnp.float32)
    found = ckpt.load(tmp_path / "step", {"w": abstract, "opt": ..., "n": ...})
    assert (found["opt"], found["n"]) == (..., ...)
    assert np.array_equal(found["w"], np.ones(2))
    found = ckpt.load(
        tmp_path / "step", {"w": ..., "opt": {"mu": [..., np.zeros(4, np.float32)]}, "n": 0}
    )
    assert found["w"] is found["opt"]["mu"][0] is ...
    assert np.array_equal(found["opt"]["mu"][1], np.ones(4))
    restored = ckpt.restore(tmp_path / "step", {"w": abstract, "opt": {"mu": ...}, "n": 0})
    assert restored["state"]["opt"] == {"mu": ...}
    assert restored.report.loaded == ("state/w", "state/n")
    renamed = ckpt.load(
        tmp_path / "step", {"x": ..., "o": ..., "n": 0}, rename={"w": "x", "opt": "o"}
    )
    assert renamed == {"x": ..., "o": ..., "n": 1}


def test_what_is_left_out_is_not_read(tmp_path):
    ckpt.save(tmp_path / "step", {"w": np.ones(2), "big": np.ones(2**20)})
    for file in (tmp_path / "step").rglob("d/*"):
        if file.stat().st_size > 2**20:
            file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(ckpt.CheckpointCorrupt):
        ckpt.load(tmp_path / "step")
    found = ckpt.load(tmp_path / "step", {"w": np.zeros(2), "big": ...})
    assert found["big"] is ...


def test_a_place_where_nothing_was_saved_is_a_mismatch(tmp_path):
    ckpt.save(tmp_path / "step", {"w": np.ones(2)})
    with pytest.raises(ckpt.StructureMismatch, match="to be left out"):
        ckpt.load(tmp_path / "step", {"w": np.ones(2), "v": ...})
    found = ckpt.load(tmp_path / "step", {"w": np.ones(2), "v": ...}, missing="keep")
    assert found["v"] is ...
    with pytest.raises(ckpt.StructureMismatch, match="missing"):
        ckpt.load(tmp_path / "step", {"w": ..., "v": np.ones(2)})
    with pytest.raises(ckpt.UnsupportedLeaf):
        ckpt.save(tmp_path / "other", {"w": ...})


def test_a_whole_item_is_left_out(tmp_path):
    ckpt.save(tmp_path / "step", model={"w": np.ones(2)}, opt={"m": np.ones(2)}, j=ckpt.Json(1))
    found = ckpt.load(tmp_path / "step", {"model": {"w": np.zeros(2)}, "opt": ..., "j": ...})
    assert (found["opt"], found["j"]) == (..., ...)
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(0, model={"w": np.ones(2)}, opt={"m": np.ones(2)})
        checkpointer.wait_until_finished()
        restored = checkpointer.restore_latest(model={"w": np.zeros(2)}, opt=...)
        model = restored["model"]
        assert checkpointer.save(1, model=model, opt={"m": np.zeros(2)})  # meant to begin anew
