"""Rules between the leaves of a checkpoint, ours or Orbax', and those of a target: what they make is what numpy makes."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_core as ckpt
from ckpt_core import Options, Rule
from tests.contract.load.test_rules import shardings
from tests.support.orbax import make_quiet_orbax  # noqa: F401 (fixture)
from tests.support.orbax_layouts import save_standard
from tests.support.same_bits import bits

LAYERS, HEADS, SIZE, WIDTH = 4, 8, 4, 64
# from one layout to the other, and back
RULES = [
    Rule("scan/w", "layers_{n}/w", stack="n", transpose=(1, 0)),
    Rule("scan/k", "layers_{n}/k", stack="n", stack_axis=1),
    Rule("scan/q", "layers_{n}/q", stack="n", stack_axis=1, reshape=(0, (1, 2))),
    Rule("scan/e", "experts/{m}/{n}", stack=("n", "m"), stack_axis=1),
    Rule("qkv/{n}", ("q/{n}", "k/{n}", "v/{n}"), axis=1),
    Rule(("mlp/{n}/gate", "mlp/{n}/up"), "gate_up/{n}", axis=1, transpose=(1, 0)),
    Rule("heads", "by_head", reshape=((0, 1), 2), transpose=(1, 0, 2)),
]
BACK = [
    Rule("layers_{n}/w", "scan/w", stack="n", transpose=(1, 0)),
    Rule("layers_{n}/k", "scan/k", stack="n", stack_axis=1),
    Rule("experts/{m}/{n}", "scan/e", stack=("n", "m"), stack_axis=1),
    Rule(("q/{n}", "k/{n}", "v/{n}"), "qkv/{n}", axis=1),
    Rule("gate_up/{n}", ("mlp/{n}/gate", "mlp/{n}/up"), axis=0, transpose=(1, 0)),
]


def saved() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def made(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "scan": {
            "w": made(LAYERS, WIDTH, 8),
            "k": made(WIDTH, LAYERS, 8),
            "q": made(WIDTH, LAYERS, HEADS * SIZE),
            "e": made(WIDTH, LAYERS, 2, 8),
        },
        "qkv": [made(WIDTH, 24) for _ in range(2)],
        "mlp": [{"gate": made(WIDTH, 8), "up": made(WIDTH, 16)} for _ in range(2)],
        "heads": made(HEADS * SIZE, WIDTH),
        "kept": made(3),
    }


def by_hand(t: dict[str, Any]) -> dict[str, Any]:
    scan = t["scan"]
    layers = {
        f"layers_{n}": {
            "w": scan["w"][n].T,
            "k": scan["k"][:, n],
            "q": scan["q"][:, n].reshape(WIDTH, HEADS, SIZE),
        }
        for n in range(LAYERS)
    }
    parts = [np.split(one, [8, 12], axis=1) for one in t["qkv"]]
    return layers | {
        "experts": [[scan["e"][:, n, m] for n in range(LAYERS)] for m in range(2)],
        **{name: [part[number] for part in parts] for number, name in enumerate("qkv")},
        "gate_up": [np.concatenate([one["gate"], one["up"]], 1).T for one in t["mlp"]],
        "by_head": t["heads"].reshape(HEADS, SIZE, WIDTH).transpose(1, 0, 2),
        "kept": t["kept"],
    }


def on(mesh: Any, tree: Any, kind: str) -> Any:
    return jax.tree.map(lambda one: jax.device_put(one, shardings(mesh, one.shape, kind)), tree)


WRITERS = {
    "whole": lambda path, tree, mesh: ckpt.save(path, tree),
    "chunks": lambda path, tree, mesh: ckpt.save(path, tree, options=Options(chunk_bytes=1024)),
    "zstd": lambda path, tree, mesh: ckpt.save(path, tree, options=Options(compression="zstd")),
    "sharded": lambda path, tree, mesh: ckpt.save(path, on(mesh, tree, "middle")),
    "orbax": lambda path, tree, mesh: save_standard(Path(path), on(mesh, tree, "middle")),
}


def same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape and bits(one) == bits(np.ascontiguousarray(other))


@pytest.mark.parametrize("kind", [None, "first", "last", "middle"])
@pytest.mark.parametrize("writer", WRITERS)
def test_as_by_hand_and_back(tmp_path, mesh, writer, kind):
    expected = by_hand(saved())
    WRITERS[writer](tmp_path / "a", saved(), mesh)
    like = jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(
            one.shape, one.dtype, sharding=kind and shardings(mesh, one.shape, kind)
        ),
        expected,
    )
    loaded = ckpt.load(tmp_path / "a", like, rules=RULES)
    same(loaded, expected)
    for one, asked in zip(jax.tree.leaves(loaded), jax.tree.leaves(like), strict=True):
        assert asked.sharding is None or one.sharding == asked.sharding
    WRITERS[writer](tmp_path / "b", loaded, mesh)
    before = saved() | {"by_head": loaded["by_head"]}
    del before["heads"], before["scan"]["q"]
    restored = ckpt.restore(tmp_path / "b", before, rules=BACK, unexpected="ignore")
    same(restored["state"], before)


def test_a_bucket_a_background_load_and_other_leaves(mesh):
    """What no rule names comes back as it was, of any kind; also where it is one object at two places."""
    twice = np.arange(3)
    other = {
        "step": 3,
        "name": "x",
        "key": jax.random.key(1),
        "rng": np.random.default_rng(2),
        "twice": [twice, {"again": twice}],
        "none": None,
    }
    path = "memory://rules-of-checkpoints/a"
    ckpt.save(path, {**saved(), **other})
    like = jax.tree.map(np.zeros_like, by_hand(saved())) | {
        **other,
        "step": 0,
        "name": "",
        "key": jax.random.key(0),
        "rng": np.random.default_rng(0),
    }
    found = ckpt.load_async(path, like, rules=RULES).result()
    same({name: found[name] for name in by_hand(saved())}, by_hand(saved()))
    assert (found["step"], found["name"]) == (3, "x")
    assert bits(found["key"]) == bits(other["key"])
    assert found["rng"].random() == np.random.default_rng(2).random()
    assert found["twice"][0] is found["twice"][1]["again"]
    assert found["twice"][0].tolist() == [0, 1, 2]


class Scanned(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.zeros((3, 8, 4)))
        self.rngs = nnx.Rngs(0)


class Listed(nnx.Module):
    def __init__(self):
        self.layers = nnx.List(
            [nnx.Linear(4, 8, use_bias=False, rngs=nnx.Rngs(n)) for n in range(3)]
        )
        self.rngs = nnx.Rngs(5)


@pytest.mark.parametrize("atomic", [False, True])
def test_a_live_model_from_a_run_and_back(tmp_path, atomic):
    listed, options = Listed(), Options(atomic_restore=atomic)
    unstacked = [Rule("kernel", "layers/{n}/kernel", stack="n", transpose=(1, 0))]
    stacked = [Rule("layers/{n}/kernel", "kernel", stack="n", transpose=(1, 0))]
    first = Scanned()
    first.kernel[...] = jnp.arange(96.0).reshape(3, 8, 4)
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(0, model=first)
        with pytest.raises(TypeError, match="rules= is an argument of load and restore"):
            checkpointer.restore_latest(model=listed, rules=unstacked)
        assert checkpointer.restore(0, model=listed, rules=unstacked, options=options)
        assert (listed.layers[2].kernel[...] == first.kernel[2].T).all()
        checkpointer.save(1, model=listed)
        second = Scanned()
        checkpointer.restore(1, model=second, rules=stacked, options=options)
        assert (second.kernel[...] == first.kernel[...]).all()
        like = {"model": {"kernel": jnp.zeros((3, 8, 4)), "rngs": ...}}
        loaded = checkpointer.load(1, like, rules=stacked)
        assert (loaded["model"]["kernel"] == first.kernel[...]).all()


def test_all_that_does_not_fit_is_in_one_error(tmp_path):
    tree = {**saved(), "step": 3, "key": jax.random.key(1), "name": "x"}
    ckpt.save(tmp_path / "a", model=tree, other={"gone": np.zeros(2)})
    rules = [
        Rule("scan/w", "layers_{n}/w", stack="n"),  # forgets the transpose
        Rule("scan/k", "k/{n}", stack="n", stack_axis=4),
        *(Rule(name, f"{name}s/{{n}}", stack="n") for name in ("step", "key", "name")),
        Rule("skan/q", "layers_{n}/q", stack="n"),
        Rule("gone", "found"),  # is in another item
        Rule("before", "kept"),  # has its new name already
    ]
    like = {"layers_0": {"w": np.zeros((8, WIDTH), np.float32)}, "kept": np.zeros(3, np.float32)}
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.load(tmp_path / "a", {"model": like}, rules=rules, unexpected="ignore")
    told = {(one.path, one.kind): str(one) for one in caught.value.mismatches}
    assert set(told) == {
        ("layers_0/w", "shape"),
        ("scan/k", "shape"),
        *((name, "kind") for name in ("step", "key", "name")),
        ("skan/q", "rule"),
    }
    assert "5 dimensions, by its rule" in told["scan/k", "shape"]
    assert "wanted an array, by its rule" in told["key", "kind"]
    assert told["skan/q", "rule"].endswith("for layers_{n}/q (nearest name: scan/q)")


def test_a_forged_number_of_layers_is_told(tmp_path):
    ckpt.save(tmp_path / "a", {"w": np.zeros((10**9, 0), np.float32)})
    rules = [Rule("w", "layers/{n}/w", stack="n")]
    with pytest.raises(ckpt.StructureMismatch, match="at most 100,000 leaves of its rule"):
        ckpt.load(tmp_path / "a", {"layers": []}, rules=rules)


def test_an_export_takes_no_such_rule_backwards(tmp_path):
    ckpt.save(tmp_path / "a", {"w": np.zeros((2, 3), np.float32)})
    for rule in (Rule("w", "l/{n}", stack="n"), Rule("l.{n}", "w", stack="n", stack_axis=1)):
        with pytest.raises(ckpt.CheckpointError, match="takes no rule backwards"):
            ckpt.convert.export_safetensors(tmp_path / "a", tmp_path / "b", rules=[rule])


def test_the_saved_sharding_without_one_in_the_target(tmp_path, mesh):
    spread = NamedSharding(mesh, PartitionSpec("data", None, "model"))
    ckpt.save(tmp_path / "a", {"k": jax.device_put(np.zeros((8, 3, 4), np.float32), spread)})
    like = {"k": [jax.ShapeDtypeStruct((4, 8), np.float32)] * 3}
    rules = [Rule("k", "k/{n}", stack="n", stack_axis=1, transpose=(1, 0))]
    loaded = ckpt.load(tmp_path / "a", like, rules=rules)
    assert loaded["k"][2].sharding.spec == PartitionSpec("model", "data")
