"""Static fields of registered classes: what is plain comes back, the rest is told or refused."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._format import record
from ckpt_core._format.treedef import dump_nodes, dump_statics, load_nodes
from ckpt_core._tree import flatten

eqx = pytest.importorskip("equinox")
struct = pytest.importorskip("flax.struct")
nnx = pytest.importorskip("flax.nnx")


class Color(enum.Enum):
    RED = 1
    CRIMSON = 1  # another name of it
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


@jax.tree_util.register_dataclass
@dataclass
class Registered:
    w: Any
    meta: Any = dataclasses.field(metadata={"static": True}, default=None)


@struct.dataclass
class Struct:
    w: Any
    meta: Any = struct.field(pytree_node=False, default=None)


class Module(eqx.Module):
    w: Any
    meta: Any = eqx.field(static=True, default=None)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Config:
    size: int = 1


@jax.tree_util.register_static
class Handmade:
    """Static, and jax knows no fields of it."""

    def __init__(self) -> None:
        self.size = 1


@jax.tree_util.register_static
class Nothing:
    """A mark."""


CLASSES = [Registered, Struct, Module]
PLAIN = [
    None,
    True,
    -3,
    2**70,
    1.5,
    -0.0,
    math.inf,
    1 - 2j,
    "text ü\ud800",
    b"\x00\xff",
    (),
    (1, ("a", (None, 2.5))),
    Color.BLUE,
    Level.LOW,
    jax.lax.Precision.HIGHEST,
    np.dtype("float32"),
    np.dtype(jnp.bfloat16),
    np.int8,
    jnp.bfloat16,
    jnp.float32,
    jnp.int4,
    float,
    (Color.RED, jnp.float32),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
@pytest.mark.parametrize("cls", CLASSES)
def test_plain_static_fields_come_back_with_their_class(cls: Any, value: Any, tmp_path: Path):
    saved = cls(jnp.ones(2), value)
    ckpt.save(tmp_path / "one", {"deep": [saved, 1]})
    found = ckpt.load(tmp_path / "one")["deep"][0]
    assert type(found) is cls and jax.tree.structure(found) == jax.tree.structure(saved)
    assert type(found.meta) is type(value) and repr(found.meta) == repr(value)
    assert ckpt.verify(tmp_path / "one").ok
    # the target decides, as ever
    assert ckpt.load(tmp_path / "one", {"deep": [cls(jnp.zeros(2), "x"), 0]})["deep"][0].meta == "x"


@pytest.mark.parametrize(
    "value", [[1], {"a": 1}, jnp.sin, object(), np.float32(1), (object(),), np.dtype(">f4"), {1}]
)
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_of_what_is_not_plain_the_arrays_come_back(cls: Any, value: Any, tmp_path: Path):
    ckpt.save(tmp_path / "one", cls(1.5, value))
    assert ckpt.load(tmp_path / "one") == {"w": 1.5}
    assert ckpt.load(tmp_path / "one", cls(0.0, value)).meta is value


def test_layers_come_back_without_a_target(tmp_path: Path):
    layer = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    ckpt.save(tmp_path / "one", layer)
    assert bool(eqx.tree_equal(ckpt.load(tmp_path / "one"), layer))


def test_what_is_not_at_hand_comes_back_as_a_dict(tmp_path: Path, monkeypatch):
    ckpt.save(tmp_path / "enum", Registered(1.5, Color.BLUE))
    ckpt.save(tmp_path / "class", Struct(1.5, 2))
    monkeypatch.delattr(f"{__name__}.Color")
    monkeypatch.delattr(f"{__name__}.Struct")
    assert ckpt.load(tmp_path / "enum") == ckpt.load(tmp_path / "class") == {"w": 1.5}


def test_records_of_before_load_as_before(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(record, "dump_statics", lambda root: [])
    ckpt.save(tmp_path / "one", Registered(1.5, 3))
    assert b'"statics"' not in (tmp_path / "one/ckpt.json").read_bytes()
    assert ckpt.load(tmp_path / "one") == {"w": 1.5}
    assert ckpt.load(tmp_path / "one", Registered(0.0, 4)) == Registered(1.5, 4)


def test_a_record_without_static_fields_is_what_it_was(tmp_path: Path):
    ckpt.save(tmp_path / "one", {"a": [1, (2,)], "b": jnp.ones(2)})
    assert b'"statics"' not in (tmp_path / "one/ckpt.json").read_bytes()


def test_a_static_field_that_changes_is_recorded_anew(tmp_path: Path):
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        for step in range(3):
            checkpointer.save(step, Registered(jnp.ones(2), step))
    assert [ckpt.load(tmp_path / str(step)).meta for step in range(3)] == [0, 1, 2]


class Keeper:
    """Takes part by itself, and its state is of a registered class."""

    def __init__(self, meta: Any) -> None:
        self.state = Registered(jnp.full(2, meta), meta)

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def test_own_objects_get_their_class_back(tmp_path: Path, monkeypatch):
    ckpt.save(tmp_path / "new", keeper=Keeper(1))
    monkeypatch.setattr(record, "dump_statics", lambda root: [])
    ckpt.save(tmp_path / "old", keeper=Keeper(1))
    for name in ("new", "old"):
        keeper = Keeper(2)
        ckpt.restore(tmp_path / name, keeper=keeper)
        assert type(keeper.state) is Registered and keeper.state.w[0] == 1


def tokens_and_statics() -> tuple[list[Any], list[Any]]:
    tree = [{"a": 1, "b": None}, Registered([1, Registered(2, "x")], 3), (Module(1, Color.RED), 4)]
    root = flatten(tree).root
    return json.loads(json.dumps([dump_nodes(root), dump_statics(root)]))


def test_positions_lead_to_their_nodes():
    tokens, statics = tokens_and_statics()
    assert load_nodes(tokens, [], statics) == load_nodes(tokens, [], statics)
    assert dump_statics(load_nodes(tokens, [], statics)) == statics
    assert {tokens[at][1].rpartition(":")[2] for at, _ in statics} == {"Registered", "Module"}
    assert load_nodes(tokens, []) != load_nodes(tokens, [], statics)


@pytest.mark.parametrize(
    "static",
    [
        None,
        [],
        {"other": 1},
        {"fields": [1]},
        {"fields": {"a": {}}},
        {"fields": {"a": 1.5}},
        {"fields": {"a": []}},
        {"fields": {"a": ["eval", "1"]}},
        {"fields": {"a": ["tuple", ["float", 1]]}},
        {"fields": {"a": [["tuple"], "x"]}},
        {"function": 1},
    ],
)
def test_impossible_static_fields_are_refused(static: Any):
    tokens, statics = tokens_and_statics()
    with pytest.raises((ValueError, TypeError)):
        load_nodes(tokens, [], [[statics[0][0], static]])


@pytest.mark.parametrize("at", [0, 1, -1, 10**6, "1", 1.0, True])
def test_static_fields_of_what_is_no_registered_class_are_refused(at: Any):
    tokens, _ = tokens_and_statics()
    with pytest.raises((ValueError, TypeError)):
        load_nodes(tokens, [], [[at, {"fields": {}}]])


@pytest.mark.parametrize(
    "field",
    [
        ["float", "x"],
        ["int", "z"],
        ["bytes", "0"],
        ["float", "0x1p99999"],
        ["complex", "1"],
        ["dtype", "datetime64"],
        ["dtype", "ndarray"],
        ["type", "object"],
        ["enum", "os:environ", "x"],
        ["enum", f"{__name__}:Color", "GREEN"],
        ["enum", "subprocess:Popen", "x"],
        ["jax", "sin"],
        ["numpy", "str_"],
    ],
)
def test_values_that_nobody_saves_make_no_object(field: Any, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(record, "dump_statics", lambda root: [[0, {"fields": {"meta": field}}]])
    ckpt.save(tmp_path / "one", Registered(1.5, 3))
    assert ckpt.load(tmp_path / "one") == {"w": 1.5}


class Net(nnx.Module):
    def __init__(self) -> None:
        self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("make", [lambda: nnx.split(Net()), lambda: {"a": Handmade(), "b": 1}])
def test_static_objects_that_would_be_dropped_are_refused(make: Any, tmp_path: Path):
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"static to jax.*save the state") as refused:
        ckpt.save(tmp_path / "one", make())
    assert refused.value.leaf in ("0", "a") and not (tmp_path / "one").exists()
    graph, state = nnx.split(Net())
    ckpt.save(tmp_path / "state", state)
    assert nnx.merge(graph, ckpt.load(tmp_path / "state", nnx.state(Net()))) is not None


def test_static_objects_of_plain_fields_come_back(tmp_path: Path):
    ckpt.save(tmp_path / "one", {"c": Config(7), "n": Nothing(), "w": 1})
    assert ckpt.load(tmp_path / "one")["c"] == Config(7)
    target = {"c": Config(8), "n": Nothing(), "w": 0}
    assert ckpt.load(tmp_path / "one", target) == {**target, "w": 1}


def test_a_checkpoint_with_a_dropped_one_still_loads(tmp_path: Path):
    """As versions of before wrote it: the target has what is static."""
    ckpt.save(tmp_path / "one", ({}, {"w": 1}))
    own = Handmade()
    assert ckpt.load(tmp_path / "one", (own, {"w": 0})) == (own, {"w": 1})
