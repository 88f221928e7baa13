"""Fields of registered classes: static ones that are plain come back and are compared, functions are told apart by name,
the rest is told or refused.
"""

import dataclasses
import enum
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
    None, True, -3, 2**70, 1.5, -0.0, math.inf, 1 - 2j, "text ü\ud800", b"\x00\xff", (),
    (1, ("a", (None, 2.5))), Color.BLUE, Level.LOW, jax.lax.Precision.HIGHEST, np.dtype("float32"),
    np.dtype(jnp.bfloat16), np.int8, jnp.bfloat16, jnp.int4, float, (Color.RED, jnp.float32),
]  # fmt: skip


@pytest.mark.parametrize("cls", CLASSES)
def test_plain_static_fields_come_back_with_their_class(cls, tmp_path):
    saved = [cls(jnp.ones(2), value) for value in PLAIN]
    ckpt.save(tmp_path / "one", {"deep": saved})
    for found, value in zip(ckpt.load(tmp_path / "one")["deep"], PLAIN, strict=True):
        assert type(found) is cls
        assert type(found.meta) is type(value) and repr(found.meta) == repr(value)
    assert ckpt.verify(tmp_path / "one").ok
    ckpt.load(tmp_path / "one", {"deep": saved})


NOT_PLAIN = [[1], {"a": 1}, jnp.sin, object(), np.float32(1), (object(),), np.dtype(">f4"), {1}]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_of_what_is_not_plain_the_arrays_come_back(cls, tmp_path):
    ckpt.save(tmp_path / "one", [cls(1.5, value) for value in NOT_PLAIN])
    assert ckpt.load(tmp_path / "one") == [{"w": 1.5}] * len(NOT_PLAIN)
    found = ckpt.load(tmp_path / "one", [cls(0.0, value) for value in NOT_PLAIN])
    assert all(one.meta is value for one, value in zip(found, NOT_PLAIN, strict=True))


def test_what_is_not_at_hand_comes_back_as_a_dict(tmp_path, monkeypatch):
    ckpt.save(tmp_path / "enum", Registered(1.5, Color.BLUE))
    ckpt.save(tmp_path / "class", Struct(1.5, 2))
    monkeypatch.delattr(f"{__name__}.Color")
    monkeypatch.delattr(f"{__name__}.Struct")
    assert ckpt.load(tmp_path / "enum") == ckpt.load(tmp_path / "class") == {"w": 1.5}


def test_a_record_without_static_fields_is_what_it_was(tmp_path):
    """And loads as one of before, where classes are named whose fields are not."""
    ckpt.save(tmp_path / "one", {"a": [1, (2,)], "b": jnp.ones(2)})
    assert b'"statics"' not in (tmp_path / "one/ckpt.json").read_bytes()
    ckpt.save(tmp_path / "two", Registered(1.5, 3))
    record = read_record(tmp_path / "two")
    del record["items"]["state"]["statics"]
    write_record(tmp_path / "two", record)
    assert ckpt.load(tmp_path / "two") == {"w": 1.5}
    assert ckpt.load(tmp_path / "two", Registered(0.0, 4)) == Registered(
        1.5, 4
    )  # nothing to compare


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
    None, [], {"other": 1}, {"fields": [1]}, {"fields": {"a": {}}}, {"fields": {"a": 1.5}},
    {"fields": {"a": []}}, {"fields": {"a": ["eval", "1"]}},
    {"fields": {"a": ["tuple", ["float", 1]]}}, {"fields": {"a": [["tuple"], "x"]}},
    {"function": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    ("at", "static"),
    [(None, one) for one in IMPOSSIBLE]
    + [(at, {"fields": {}}) for at in (0, 1, -1, 10**6, "1", 1.0, True)],
)
def test_impossible_static_fields_are_damage(at, static, tmp_path):
    path = crafted(tmp_path / "one", [(at, static)])
    with pytest.raises(ckpt.CheckpointCorrupt):
        ckpt.load(path)


OF_NO_OBJECT = [
    ["float", "x"], ["int", "z"], ["bytes", "0"], ["float", "0x1p99999"], ["complex", "1"],
    ["dtype", "datetime64"], ["dtype", "ndarray"], ["type", "object"], ["enum", "os:environ", "x"],
    ["enum", f"{__name__}:Color", "GREEN"], ["enum", "subprocess:Popen", "x"], ["jax", "sin"],
    ["numpy", "str_"],
]  # fmt: skip


@pytest.mark.parametrize("field", OF_NO_OBJECT)
def test_values_that_nobody_saves_make_no_object(field, tmp_path):
    path = crafted(tmp_path / "one", [(None, {"fields": {"meta": field}})])
    assert ckpt.load(path) == {"a": [1, None], "r": {"w": 1.5}}


class Net(nnx.Module):
    def __init__(self) -> None:
        self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("make", [lambda: nnx.split(Net()), lambda: {"a": Handmade(), "b": 1}])
def test_static_objects_that_would_be_dropped_are_refused(make, tmp_path):
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"static to jax.*save the state") as refused:
        ckpt.save(tmp_path / "one", make())
    assert refused.value.leaf in ("0", "a") and not (tmp_path / "one").exists()


def test_static_objects_of_plain_fields_come_back(tmp_path):
    ckpt.save(tmp_path / "one", {"c": Config(7), "n": Nothing(), "w": 1})
    assert ckpt.load(tmp_path / "one")["c"] == Config(7)
    target = {"c": Config(7), "n": Nothing(), "w": 0}
    assert ckpt.load(tmp_path / "one", target) == {**target, "w": 1}


@jax.tree_util.register_pytree_node_class
class Handwritten:
    """As the pages of jax write one: a dict, tuple or bare value of auxiliary data."""

    def __init__(self, w: Any, aux: Any) -> None:
        self.w, self.aux = w, aux

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.w,), self.aux

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Handwritten":
        return cls(*children, aux)


@dataclass(frozen=True)
class Sizes:
    heads: int
    activation: Any = jnp.sin


MAKERS: list[Any] = [
    *CLASSES,
    Handwritten,
    lambda w, meta: Struct(w, (jnp.sin, meta)),  # beside a function, which is no value
    lambda w, meta: Handwritten(w, {"f": jnp.sin, "meta": [meta]}),
    lambda w, meta: Module(w, Sizes(meta)),
    lambda w, meta: Registered(w, {"inner": Sizes(meta)}),
    lambda w, meta: Plain(Module(w, meta)),
]


class Plain(NamedTuple):
    """Compared is what stands in other containers, too."""

    x: Any


NUMBERS = [(2, 4), (True, False), (0.1, 0.2), (Color.RED, Color.BLUE), (jnp.float32, jnp.bfloat16)]
NUMBERS += [((2, "a"), (4, "a")), (np.dtype("int8"), np.dtype("int4")), (2**70, 2**71)]
NUMBERS += [((None, 1), (3, 1))]


@pytest.mark.parametrize("make", MAKERS)
def test_another_static_value_is_a_mismatch(make, tmp_path):
    def state(w: float, side: int) -> Any:
        return {f"{n}": make(w, pair[side]) for n, pair in enumerate(NUMBERS)}

    ckpt.save(tmp_path / "one", a=state(1.5, 0), step=1)
    ckpt.restore(tmp_path / "one", a=state(0.0, 0))
    target = state(0.0, 1)
    for call in (
        lambda **more: ckpt.load(tmp_path / "one", {"a": target}, **more),
        lambda **more: ckpt.load(tmp_path / "one", target, item="a", **more),
        lambda **more: ckpt.restore(tmp_path / "one", a=target, only="**", **more),
        lambda **more: ckpt.load_async(tmp_path / "one", {"a": target}, **more).result(),
    ):
        with pytest.raises(ckpt.StructureMismatch, match='static="target"') as refused:
            call()
        found = {entry.path.partition("/")[0]: entry for entry in refused.value.mismatches}
        assert {entry.kind for entry in found.values()} == {"static"}
        assert list(found) == [str(n) for n in range(len(NUMBERS))]
        assert (found["0"].item, found["0"].saved, found["0"].wanted) == ("a", "2", "4")
        assert (found["3"].saved, found["4"].wanted) == ("Color.RED", "bfloat16")
        call(static="target")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (True, 1),
        (jnp.float32, np.dtype("float32")),
        (math.nan, float("nan")),
        (Color.RED, Color.CRIMSON),
        ((1, 2), [1, 2]),
        (np.int64(3), 3),
        (jnp.sin, jnp.cos),
        (object(), object()),
    ],
)
def test_what_means_the_same_or_is_no_value_is_none(one, other, tmp_path):
    for make in (Registered, Handwritten):
        ckpt.save(tmp_path / "one", make(1.5, one), overwrite=True)
        assert ckpt.load(tmp_path / "one", make(0.0, other)).w == 1.5


def test_another_text_is_a_warning_with_both(tmp_path):
    ckpt.save(tmp_path / "one", {"run": Struct(1.5, "a"), "at": Handwritten(1.5, ("x", None))})
    target = {"run": Struct(0.0, "b"), "at": Handwritten(0.0, (None, "y"))}
    with pytest.warns(UserWarning, match=r"run/meta: .*saved 'a', wanted 'b'.*at/aux_data: .*'y'"):
        found = ckpt.load(tmp_path / "one", target)
    assert found["run"] == Struct(1.5, "b")
    ckpt.load(tmp_path / "one", target, static="target")


def test_the_argument_is_checked(tmp_path):
    ckpt.save(tmp_path / "one", Registered(1.5, 3))
    with pytest.raises(ValueError, match=r"static must be 'error' or 'target'"):
        ckpt.load(tmp_path / "one", Registered(0.0, 3), static="ignore")
    with pytest.raises(TypeError, match="pass like"):
        ckpt.load(tmp_path / "one", static="target")


def test_only_what_is_restored_whole_is_compared(tmp_path):
    saved = Module({"in": Module(1.5, 2), "out": 2.5}, 3)
    ckpt.save(tmp_path / "one", saved)
    target = Module({"in": Module(0.0, 2), "out": 0.0}, 4)
    assert ckpt.load(tmp_path / "one", target, only="w/in/**").w["out"] == 0.0
    other = Module({"in": Module(0.0, 5), "out": 0.0}, 4)
    with pytest.raises(ckpt.StructureMismatch, match="w/in/meta"):
        ckpt.load(tmp_path / "one", other, only="w/in/**")
    renamed = Module({"inner": Module(0.0, 5), "out": 0.0}, 3)
    with pytest.raises(ckpt.StructureMismatch, match="w/inner/meta: static differs: saved 2"):
        ckpt.load(tmp_path / "one", renamed, rename={"w/in": "w/inner"})


class Loop:
    """Has a state with a static value in it."""

    def __init__(self, bits: int) -> None:
        self.module = Module(1.5, bits)

    def get_state(self) -> Any:
        return {"module": self.module}

    def set_state(self, state: Any) -> None:
        self.module = state["module"]


def test_in_the_state_of_a_users_object_and_in_a_run(tmp_path):
    with ckpt.Checkpointer(tmp_path / "run") as run:
        run.save(0, loop=Loop(4), step=0)
    with ckpt.Checkpointer(tmp_path / "run") as run:
        for call in (
            lambda **more: run.restore_latest(loop=Loop(8), step=0, **more),
            lambda **more: run.restore(0, loop=Loop(8), step=0, **more),
            lambda **more: run.load(0, {"loop": {"module": Module(0.0, 8)}}, **more),
        ):
            with pytest.raises(
                ckpt.StructureMismatch, match="module/meta: static differs: saved 4"
            ):
                call()
            assert call(static="target") is not None


@pytest.mark.parametrize(
    "constants",
    [[[0, 1]], [["x", {}]], [[99, {}]], [[1, {}]], [[0, {"a": {}}]], [[0, {"a": ["f"]}]]],
)
def test_impossible_constants_are_damage(constants, tmp_path):
    ckpt.save(tmp_path / "one", [1, Handwritten(1.5, 4)])
    record = read_record(tmp_path / "one")
    assert record["items"]["state"]["statics"] == [[2, {"constants": {"aux_data": 4}}]]
    record["items"]["state"]["statics"] = [[at, {"constants": told}] for at, told in constants]
    write_record(tmp_path / "one", record)
    with pytest.raises(ckpt.CheckpointCorrupt):
        ckpt.load(tmp_path / "one")


def test_numbers_that_no_float_can_be_are_refused(tmp_path):
    path = crafted(tmp_path / "one", [(None, {"fields": {"meta": ["float", "x"]}})])
    with pytest.raises(ckpt.StructureMismatch, match="r/meta"):
        ckpt.load(path, {"a": [1, None], "r": Registered(0.0, 3)})


@pytest.mark.parametrize(
    ("one", "other"), [(None, {"factor": 4.0}), ([1, 2], [1, 2, 4]), ([1, 2], (1, 3))]
)
def test_static_values_of_other_lengths_differ(tmp_path, one, other):
    for before, now in ((one, other), (other, one)):
        ckpt.save(tmp_path / "a", Struct(jnp.ones(2), before), overwrite=True)
        with pytest.raises(ckpt.StructureMismatch, match="meta"):
            ckpt.restore(tmp_path / "a", Struct(jnp.ones(2), now))


@jax.tree_util.register_pytree_node_class
class Named:
    """Its auxiliary data are the names of its children."""

    def __init__(self, **children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> Any:
        return tuple(self.children.values()), tuple(self.children)

    @classmethod
    def tree_unflatten(cls, names: Any, children: Any) -> "Named":
        return cls(**dict(zip(names, children, strict=True)))


def test_children_that_changed_places_are_no_match(tmp_path):
    ckpt.save(tmp_path / "a", Named(v=jnp.zeros(2), w=jnp.ones(2)))
    with pytest.raises(ckpt.StructureMismatch, match="aux_data"):
        ckpt.restore(tmp_path / "a", Named(w=jnp.ones(2), v=jnp.zeros(2)))


class Field(eqx.Module):
    w: jax.Array
    f: Any


class Renamed(eqx.Module):
    w: jax.Array
    g: Any


class Two(eqx.Module):
    w: jax.Array
    f: Any
    g: Any


class Bare(eqx.Module):
    w: jax.Array


class Mark:
    """Says that something is elsewhere."""


def field(f: Any, value: float = 1.0) -> Field:
    return Field(jnp.full(2, value), f)


DIFFER: dict[str, tuple[Any, Any]] = {
    "function": (jax.nn.relu, jax.nn.gelu),
    "jit": (jax.jit(jax.nn.relu), jax.jit(jax.nn.gelu)),
    "Lambda": (eqx.nn.Lambda(jax.nn.relu), eqx.nn.Lambda(jax.nn.gelu)),
    "partial": (functools.partial(jnp.sum, axis=0), functools.partial(jnp.max, axis=0)),
    "class": (Mark(), jnp.sin),
}


@pytest.mark.parametrize("name", DIFFER)
def test_functions_are_told_apart_by_their_names(name, tmp_path):
    one, other = DIFFER[name]
    ckpt.save(tmp_path / "one", field(one))
    assert ckpt.load(tmp_path / "one", field(one, 2.0)).w[0] == 1
    with pytest.raises(ckpt.StructureMismatch) as refused:
        ckpt.load(tmp_path / "one", field(other, 2.0))
    assert {entry.kind for entry in refused.value.mismatches} == {"function"}
    assert ckpt.load(tmp_path / "one", field(other, 2.0), unexpected="ignore").w[0] == 1


def test_without_a_target_a_function_is_missed_too(tmp_path):
    ckpt.save(tmp_path / "one", field(jax.tree_util.Partial(jax.nn.relu, 1)))
    with pytest.raises(ckpt.StructureMismatch, match=r"f: is the function .*relu"):
        ckpt.load(tmp_path / "one")
    assert ckpt.load(tmp_path / "one", only="**")["w"].shape == (2,)


def told(path: Path, target: Any, **arguments: Any) -> list[tuple[str, str | None, str | None]]:
    with pytest.raises(ckpt.StructureMismatch) as refused:
        ckpt.load(path, target, **arguments)
    assert {entry.kind for entry in refused.value.mismatches} == {"function"}
    assert 'unexpected="ignore"' in str(refused.value)
    assert ckpt.load(path, target, unexpected="ignore", **arguments) is not None
    return [(entry.path, entry.saved, entry.nearest) for entry in refused.value.mismatches]


ONES = jnp.ones(2)
SIN = "jax.numpy:sin"
RENAMED = [("f", SIN, "g"), ("g", "no function", "f")]


@pytest.mark.parametrize(
    ("saved", "target", "expected"),
    [
        (Field(ONES, jnp.sin), Renamed(ONES, jnp.sin), RENAMED),
        (Field(ONES, jnp.sin), Bare(ONES), [("f", SIN, None)]),
        (Two(ONES, jnp.sin, jnp.cos), Two(ONES, None, jnp.cos), [("f", SIN, None)]),
        (Two(ONES, None, jnp.cos), Two(ONES, jnp.sin, jnp.cos), [("f", "no function", None)]),
        (Field(ONES, [jnp.cos, jnp.sin]), Field(ONES, [jnp.cos]), [("f/1", SIN, None)]),
    ],
)
def test_a_function_on_one_side_is_told(saved, target, expected, tmp_path):
    ckpt.save(tmp_path / "one", saved)
    assert told(tmp_path / "one", target) == expected


def test_a_side_without_any_misses_nothing(tmp_path):
    whole = Field(ONES, jnp.sin)
    ckpt.save(tmp_path / "whole", whole)
    ckpt.save(tmp_path / "filtered", eqx.filter(whole, eqx.is_array))
    ckpt.save(tmp_path / "bare", Bare(ONES))
    assert ckpt.load(tmp_path / "whole", eqx.filter(whole, eqx.is_array)).f is None
    assert ckpt.load(tmp_path / "filtered", whole).f is whole.f
    assert ckpt.load(tmp_path / "bare", whole).f is whole.f


def test_a_renamed_field_is_found_by_rename(tmp_path):
    ckpt.save(tmp_path / "one", Field(ONES, jnp.sin))
    with pytest.raises(ckpt.StructureMismatch, match="rename="):
        ckpt.load(tmp_path / "one", Renamed(ONES, jnp.sin))
    assert ckpt.load(tmp_path / "one", Renamed(ONES, jnp.sin), rename={"f": "g"}).w[0] == 1
