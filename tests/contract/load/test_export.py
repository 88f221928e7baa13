"""Exports to safetensors: leaf by leaf what was saved, and through rules what was loaded."""

import ast
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_core as ckpt
from ckpt_core import Rule
from ckpt_core.convert import export_safetensors
from tests.contract.load.test_rules import RULES, by_hand, saved
from tests.support.damage import turn_a_bit
from tests.support.same_bits import bits


def same(one: Any, other: Any) -> bool:
    return jax.tree.map(bits, one) == jax.tree.map(bits, other)


def test_every_leaf_as_it_was_saved(tmp_path, mesh):
    sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
    state: Any = {
        "params": {
            "w": jax.device_put(jnp.arange(512.0).reshape(64, 8), sharding),
            "b": jnp.ones(3, jnp.bfloat16),
            "empty": jnp.zeros((0, 2), jnp.int8),
        },
        "flags": [np.array([True, False]), jnp.arange(3, dtype=jnp.float16)],
        "step": np.int32(7),
    }
    ckpt.save(tmp_path / "one", state)
    (path,) = export_safetensors(tmp_path / "one", tmp_path / "a.safetensors", metadata={"a": "b"})
    expected = {
        "params.w": state["params"]["w"],
        "params.b": state["params"]["b"],
        "params.empty": state["params"]["empty"],
        "flags.0": state["flags"][0],
        "flags.1": state["flags"][1],
        "step": state["step"],
    }
    assert same(safetensors.flax.load_file(path), expected)
    assert ckpt.inspect(path).metadata == {"a": "b"}
    again = ckpt.load(path, state)
    assert again["params"]["w"].sharding == sharding
    assert jax.tree.all(jax.tree.map(lambda a, b: bits(a) == bits(b), again, state))


def test_through_rules_and_back(tmp_path):
    """What rules made of a file is saved, and exported through the same rules: the file again."""
    tensors = saved()
    safetensors.numpy.save_file(tensors, tmp_path / "a.safetensors")
    like = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), by_hand(tensors))
    ckpt.save(tmp_path / "one", ckpt.load(tmp_path / "a.safetensors", like, rules=RULES))
    told = [
        {name: value for name, value in vars(rule).items() if value is not None} for rule in RULES
    ]
    back = json.loads(json.dumps(told))
    next(rule for rule in back if "l.{n}.gate" in rule["saved"])["sizes"] = [24, 8]
    written = export_safetensors(
        tmp_path / "one", tmp_path / "out", rules=back, max_shard_bytes=20_000
    )
    assert len(written) == 3
    assert written[-1].endswith("model.safetensors.index.json")
    assert same(ckpt.load(tmp_path / "out"), tensors)
    found: dict[str, Any] = {}
    for path in written[:-1]:
        inside = safetensors.numpy.load_file(path)
        assert sum(array.nbytes for array in inside.values()) <= 20_000
        assert not found.keys() & inside.keys()
        found |= inside
    assert same(found, tensors)


def test_only_an_item_of_several(tmp_path):
    ckpt.save(
        tmp_path / "one", model={"w": np.ones(3), "key": jax.random.key(0)}, other={"w": np.ones(2)}
    )
    with pytest.raises(ckpt.CheckpointNotFound, match="say which with item=, of model, other"):
        export_safetensors(tmp_path / "one", tmp_path / "out")
    with pytest.raises(ckpt.CheckpointError, match=r"no place for key .*exclude=\['key'\]"):
        export_safetensors(tmp_path / "one", tmp_path / "out", item="model")
    with pytest.raises(ckpt.CheckpointNotFound, match="matches no leaf"):
        export_safetensors(tmp_path / "one", tmp_path / "out", item="model", only="x")
    assert not (tmp_path / "out").exists()
    (path,) = export_safetensors(tmp_path / "one", tmp_path / "out", item="model", only="w")
    assert path == str(tmp_path / "out" / "model.safetensors")
    with pytest.raises(ckpt.CheckpointExists, match="exists already"):
        export_safetensors(tmp_path / "one", tmp_path / "out", item="other")
    with pytest.raises(ckpt.CheckpointError, match="written to a disk"):
        export_safetensors(tmp_path / "one", "memory://x/y")


def test_the_advice_about_leaves_that_have_no_place(tmp_path):
    """What the message says to leave out is just that, for one leaf, a branch, and a name in many branches."""
    key = jax.random.key(0)
    layers = [
        {"w": np.ones(2, np.float32), "rngs": {"key": key, "count": np.uint32(1)}} for _ in range(9)
    ]
    ckpt.save(tmp_path / "one", {"layers": layers, "more": {"a": key, "b": key}, "last": key})
    with pytest.raises(ckpt.CheckpointError, match="no place for") as caught:
        export_safetensors(tmp_path / "one", tmp_path / "out")
    exclude = ast.literal_eval(str(caught.value).partition("exclude=")[2])
    assert exclude == ["**/key", "**/a", "**/b", "**/last"]
    export_safetensors(tmp_path / "one", tmp_path / "out", exclude=exclude)
    left = {f"layers.{n}.{name}" for n in range(9) for name in ("w", "rngs.count")}
    assert ckpt.load(tmp_path / "out").keys() == left
    for wrong in (["last", "lost"], "lost"):
        with pytest.raises(ckpt.CheckpointNotFound, match=r"exclude=\['lost'\] matches no leaf"):
            export_safetensors(tmp_path / "one", tmp_path / "x", exclude=wrong)
    with pytest.raises(ckpt.CheckpointNotFound, match=r"exclude='\*\*' leave no leaf"):
        export_safetensors(tmp_path / "one", tmp_path / "x", exclude="**")


def test_a_damaged_checkpoint_leaves_no_file(tmp_path):
    ckpt.save(tmp_path / "one", {"w": np.arange(100_000.0)})
    turn_a_bit(tmp_path / "one")
    with pytest.raises(ckpt.CheckpointCorrupt):
        export_safetensors(tmp_path / "one", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (Rule("s", ("a", "gone")), "gone: wanted a leaf beside a"),
        (Rule("s.{n}", "a", stack=("n",), transpose=(1, 0)), "3 dimensions, by its rule"),
        (Rule(("s", "t", "u"), "a"), "3 parts of sizes="),
        (Rule(("s", "t"), "a", sizes=(1, 1)), "2 parts of sizes="),
        (Rule("s", ("a", "b")), "b: shape differs"),
        (Rule("b", "a"), "two leaves"),
    ],
)
def test_rules_that_cannot_be_taken_back(tmp_path, rule, told):
    ckpt.save(tmp_path / "one", {"a": np.ones((4, 2)), "b": np.ones((4, 3))})
    with pytest.raises(ckpt.StructureMismatch, match=told):
        export_safetensors(tmp_path / "one", tmp_path / "out", rules=[rule])


def test_an_orbax_checkpoint(tmp_path):
    ocp: Any = pytest.importorskip("orbax.checkpoint")
    state = {"a": {"w": jnp.arange(6.0).reshape(2, 3)}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", state)
    (path,) = export_safetensors(tmp_path / "orbax", tmp_path / "out")
    assert same(ckpt.load(path), {"a.w": state["a"]["w"]})


def test_an_axis_counts_only_where_tensors_are_joined_or_split(tmp_path):
    ckpt.save(tmp_path / "one", {"z": jnp.ones(4), "y": jnp.ones(4)})
    alone = [Rule("a", "z", axis=1), Rule("b", "y")]
    (path,) = export_safetensors(tmp_path / "one", tmp_path / "alone", rules=alone)
    assert {name: one.shape for name, one in ckpt.load(path).items()} == {"a": (4,), "b": (4,)}
    split = [Rule("a", ("z", "y"), axis=1)]
    with pytest.raises(ckpt.StructureMismatch, match="a dimension 1"):
        export_safetensors(tmp_path / "one", tmp_path / "split", rules=split)
