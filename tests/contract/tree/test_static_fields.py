"""Static fields of registered classes: what is plain comes back, the rest is told or refused."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.faults.crafted.signed import read_record, write_record

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
    jnp.int4,
    float,
    (Color.RED, jnp.float32),
]


@pytest.mark.parametrize("cls", CLASSES)
def test_plain_static_fields_come_back_with_their_class(cls: Any, tmp_path: Path):
    saved = [cls(jnp.ones(2), value) for value in PLAIN]
    ckpt.save(tmp_path / "one", {"deep": saved})
    for found, value in zip(ckpt.load(tmp_path / "one")["deep"], PLAIN, strict=True):
        assert type(found) is cls
        assert type(found.meta) is type(value) and repr(found.meta) == repr(value)
    assert ckpt.verify(tmp_path / "one").ok
    # the target decides where it is a text, as ever
    ckpt.save(tmp_path / "two", cls(1.5, "y"))
    assert ckpt.load(tmp_path / "two", cls(0.0, "x")).meta == "x"


NOT_PLAIN = [[1], {"a": 1}, jnp.sin, object(), np.float32(1), (object(),), np.dtype(">f4"), {1}]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_of_what_is_not_plain_the_arrays_come_back(cls: Any, tmp_path: Path):
    ckpt.save(tmp_path / "one", [cls(1.5, value) for value in NOT_PLAIN])
    assert ckpt.load(tmp_path / "one") == [{"w": 1.5}] * len(NOT_PLAIN)
    found = ckpt.load(tmp_path / "one", [cls(0.0, value) for value in NOT_PLAIN])
    assert all(one.meta is value for one, value in zip(found, NOT_PLAIN, strict=True))


def test_what_is_not_at_hand_comes_back_as_a_dict(tmp_path: Path, monkeypatch):
    ckpt.save(tmp_path / "enum", Registered(1.5, Color.BLUE))
    ckpt.save(tmp_path / "class", Struct(1.5, 2))
    monkeypatch.delattr(f"{__name__}.Color")
    monkeypatch.delattr(f"{__name__}.Struct")
    assert ckpt.load(tmp_path / "enum") == ckpt.load(tmp_path / "class") == {"w": 1.5}


def test_a_record_without_static_fields_is_what_it_was(tmp_path: Path):
    """And loads as one of before, where classes are named whose fields are not."""
    ckpt.save(tmp_path / "one", {"a": [1, (2,)], "b": jnp.ones(2)})
    assert b'"statics"' not in (tmp_path / "one/ckpt.json").read_bytes()
    ckpt.save(tmp_path / "two", Registered(1.5, 3))
    record = read_record(tmp_path / "two")
    del record["items"]["state"]["statics"]
    write_record(tmp_path / "two", record)
    assert ckpt.load(tmp_path / "two") == {"w": 1.5}
    assert ckpt.load(tmp_path / "two", Registered(0.0, 4)) == Registered(1.5, 4)


def crafted(path: Path, statics: Any) -> Path:
    """A checkpoint whose record says this of its static fields."""
    ckpt.save(path, {"a": [1, None], "r": Registered(1.5, 3)})
    record = read_record(path)
    ((at, _),) = record["items"]["state"]["statics"]
    assert record["items"]["state"]["nodes"][at][1].endswith(":Registered")
    entries = [[at if place is None else place, told] for place, told in statics]
    record["items"]["state"]["statics"] = entries
    write_record(path, record)
    return path


IMPOSSIBLE = [
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
]


@pytest.mark.parametrize(
    ("at", "static"),
    [(None, one) for one in IMPOSSIBLE]
    + [(at, {"fields": {}}) for at in (0, 1, -1, 10**6, "1", 1.0, True)],
)
def test_impossible_static_fields_are_damage(at: Any, static: Any, tmp_path: Path):
    path = crafted(tmp_path / "one", [(at, static)])
    with pytest.raises(ckpt.CheckpointCorrupt):
        ckpt.load(path)


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
def test_values_that_nobody_saves_make_no_object(field: Any, tmp_path: Path):
    path = crafted(tmp_path / "one", [(None, {"fields": {"meta": field}})])
    assert ckpt.load(path) == {"a": [1, None], "r": {"w": 1.5}}


class Net(nnx.Module):
    def __init__(self) -> None:
        self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("make", [lambda: nnx.split(Net()), lambda: {"a": Handmade(), "b": 1}])
def test_static_objects_that_would_be_dropped_are_refused(make: Any, tmp_path: Path):
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"static to jax.*save the state") as refused:
        ckpt.save(tmp_path / "one", make())
    assert refused.value.leaf in ("0", "a") and not (tmp_path / "one").exists()


def test_static_objects_of_plain_fields_come_back(tmp_path: Path):
    ckpt.save(tmp_path / "one", {"c": Config(7), "n": Nothing(), "w": 1})
    assert ckpt.load(tmp_path / "one")["c"] == Config(7)
    target = {"c": Config(8), "n": Nothing(), "w": 0}
    assert ckpt.load(tmp_path / "one", target) == {**target, "w": 1}


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["width", "kind"]
)
@dataclasses.dataclass
class Wide:
    w: Any
    width: int
    kind: Any


def test_static_fields_come_back(tmp_path):
    ckpt.save(tmp_path / "c", {"layer": Wide(jnp.ones(2), 8, np.dtype("int8"))})
    got = ckpt.load(tmp_path / "c")["layer"]
    assert type(got) is Wide
    assert (got.width, got.kind) == (8, np.dtype("int8"))
