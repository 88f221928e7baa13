"""What functions in modules are called: arguments, transformations, marks; and what is told of them."""

from __future__ import annotations

import dataclasses
import enum
import functools
import pathlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._format import record
from ckpt_core._tree.code import code_name, function_name, same_function

eqx = pytest.importorskip("equinox")

KEY = jax.random.key(0)


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@dataclasses.dataclass(frozen=True)
class Settings:
    axis: int = 0
    function: Any = jnp.sin


class Mark:
    """Says that something is elsewhere."""


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


def field(f: Any, value: float = 1.0) -> Field:
    return Field(jnp.full(2, value), f)


def check(saved: Any, other: Any, path: Path) -> None:
    """The one loads into itself, and not where the other is."""
    ckpt.save(path, field(saved))
    found = ckpt.load(path, field(saved, 2.0))
    assert found.w[0] == 1 and code_name(found.f) == code_name(saved)
    with pytest.raises(ckpt.StructureMismatch) as refused:
        ckpt.load(path, field(other, 2.0))
    assert [entry.kind for entry in refused.value.mismatches] == ["function"]
    assert ckpt.load(path, field(other, 2.0), unexpected="ignore").w[0] == 1


ARGUMENTS = {
    "list": ([0, 1], [1, 0]),
    "tuple": ((0, (1,)), (0, 1)),
    "list or tuple": ([0], (0,)),
    "dict": ({"a": 1}, {"a": 2}),
    "set": ({1, 2}, {1, 3}),
    "slice": (slice(1, None), slice(2, None)),
    "range": (range(3), range(4)),
    "dtype of jax": (jnp.float32, jnp.bfloat16),
    "dtype of numpy": (np.float32, np.float64),
    "dtype": (np.dtype("f4"), np.dtype(">f4")),
    "function": (jnp.sin, jnp.cos),
    "partial": (functools.partial(jnp.sum, axis=0), functools.partial(jnp.sum, axis=1)),
    "numpy scalar": (np.float32(0.1), np.float32(0.2)),
    "width of a scalar": (np.float32(1), np.float16(1)),
    "enum": (Kind.ONE, Kind.TWO),
    "precision": (jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT),
    "path": (pathlib.Path("a/b"), pathlib.Path("a/c")),
    "path or text": (pathlib.Path("a"), "a"),
    "text": ("x", "y"),
    "text with a colon": ("gs.a:x", "gs.b:x"),
    "None": (None, 0),
    "number": (1, 1.0),
    "array": (np.arange(3), np.arange(3) + 1),
    "jax array": (jnp.arange(3), jnp.arange(3) + 1),
    "shape of an array": (np.zeros((2, 3)), np.zeros((3, 2))),
    "dtype of an array": (np.zeros(2, "f4"), np.zeros(2, "i4")),
    "key": (jax.random.key(1), jax.random.key(2)),
    "dataclass": (Settings(), Settings(function=jnp.cos)),
    "ellipsis": (..., None),
    "class": (int, float),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_a_partial_count(name: str, tmp_path: Path):
    one, other = ARGUMENTS[name]
    partials = [functools.partial(jnp.sum, axis=value) for value in (one, other)]
    check(*partials, tmp_path / "by name")
    check(*(functools.partial(jnp.sum, value) for value in (one, other)), tmp_path / "by place")
    check(*(functools.partial(p, keepdims=True) for p in partials), tmp_path / "of a partial")


def test_arrays_are_the_same_by_what_they_hold():
    names = {
        function_name(functools.partial(jnp.add, array))
        for array in (np.arange(3, dtype="i4"), jnp.arange(3), np.arange(6, dtype="i4")[::2] // 2)
    }
    assert len(names) == 1


def cyclic() -> Any:
    values: list[Any] = []
    values.append(values)
    return values


@pytest.mark.parametrize(
    "argument", [object(), cyclic(), [object()], {"a": object()}, np.array([object()]), iter([1])]
)
def test_an_argument_that_cannot_be_compared_is_named(argument: Any, tmp_path: Path):
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"^f: cannot save a .*'axis' \(") as refused:
        ckpt.save(tmp_path / "one", field(functools.partial(jnp.sum, axis=argument)))
    assert type(argument).__name__ in str(refused.value)


def closure(fn: Any) -> Any:
    def squared(x: Any) -> Any:
        return fn(x) ** 2

    return squared


def decorated(fn: Any) -> Any:
    return functools.wraps(fn)(lambda x: fn(x))


TRANSFORMED: dict[str, Any] = {
    "jit": jax.jit,
    "vmap": jax.vmap,
    "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
    "partial of vmap": lambda f: functools.partial(jax.vmap(f), 1),
    "jit of a partial": lambda f: jax.jit(functools.partial(f, 1)),
    "grad": jax.grad,
    "checkpoint": jax.checkpoint,
    "custom_jvp": jax.custom_jvp,
    "custom_vjp": jax.custom_vjp,
    "Partial": jax.tree_util.Partial,
    "filter_jit": eqx.filter_jit,
    "filter_vmap": eqx.filter_vmap,
    "filter_grad": eqx.filter_grad,
    "filter_checkpoint": eqx.filter_checkpoint,
    "filter_custom_jvp": eqx.filter_custom_jvp,
    "filter_custom_vjp": eqx.filter_custom_vjp,
    "Lambda": eqx.nn.Lambda,
    "closure": closure,
    "decorator": decorated,
}


@pytest.mark.parametrize("names", [("relu", "gelu"), ("silu", "softplus")])
@pytest.mark.parametrize("how", TRANSFORMED)
def test_transformed_functions_are_told_apart(how: str, names: tuple[str, str], tmp_path: Path):
    one, other = (TRANSFORMED[how](getattr(jax.nn, name)) for name in names)
    ckpt.save(tmp_path / "one", field(one))
    assert ckpt.load(tmp_path / "one", field(one, 2.0)).w[0] == 1
    with pytest.raises(ckpt.StructureMismatch) as refused:
        ckpt.load(tmp_path / "one", field(other))
    entry = next(entry for entry in refused.value.mismatches if entry.kind == "function")
    assert names[0] in str(entry.saved) and names[1] in str(entry.wanted)


def test_without_a_target_a_wrapped_function_is_missed_too(tmp_path: Path):
    ckpt.save(tmp_path / "one", field(jax.tree_util.Partial(jax.nn.relu, 1)))
    with pytest.raises(ckpt.StructureMismatch, match=r"f: is the function .*relu"):
        ckpt.load(tmp_path / "one")
    assert ckpt.load(tmp_path / "one", only="**")["w"].shape == (2,)


class Scaled:
    """Wraps a function, and has a number that may change."""

    def __init__(self, fn: Any) -> None:
        self.fn, self.scale = fn, 2.0

    def __call__(self, x: Any) -> Any:
        return self.scale * self.fn(x)


def test_a_wrapper_with_a_state_is_no_code(tmp_path: Path):
    with pytest.raises(ckpt.UnsupportedLeaf, match="f: cannot save a "):
        ckpt.save(tmp_path / "one", field(Scaled(jnp.sin)))


def test_names_of_before_still_fit(tmp_path: Path, monkeypatch):
    name = "jax._src.nn.functions:vmap.<locals>.vmap_f"
    assert same_function(name, f"{name} of jax._src.nn.functions:relu")
    assert same_function(f"{name}(1, x='a')", f"{name}(1, x='a') of jax.nn:relu")
    assert not same_function(f"{name} of jax.nn:gelu", f"{name} of jax.nn:relu")
    assert function_name(functools.partial(jnp.sum, 1, axis="a", b=None)) == (
        f"{function_name(jnp.sum)}(1, axis='a', b=None)"
    )
    # and what was not recorded then is missed by nobody
    monkeypatch.setattr(record, "dump_statics", lambda root: [])
    saved = Two(jnp.ones(2), jax.tree_util.Partial(jnp.sin), jnp.cos)
    ckpt.save(tmp_path / "one", saved)
    other = Two(jnp.zeros(2), jax.tree_util.Partial(jnp.tan), jnp.cos)
    assert ckpt.load(tmp_path / "one", other).w[0] == 1


def tied(seed: int) -> Any:
    key = jax.random.key(seed)
    pair = eqx.nn.Embedding(3, 4, key=key), eqx.nn.Linear(4, 3, use_bias=False, key=key)
    return eqx.nn.Shared(pair, where=lambda p: p[1].weight, get=lambda p: p[0].weight)


LAYERS: dict[str, Any] = {
    "Shared": tied,
    "WeightNorm": lambda seed: eqx.nn.WeightNorm(eqx.nn.Linear(2, 3, key=jax.random.key(seed))),
    "SpectralNorm": lambda seed: eqx.nn.make_with_state(eqx.nn.SpectralNorm)(
        eqx.nn.Linear(2, 3, key=jax.random.key(seed)), "weight", key=jax.random.key(seed)
    ),
    "BatchNorm": lambda seed: eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "b", mode="ema"),
    "Sequential": lambda seed: eqx.nn.Sequential(
        [eqx.nn.Conv1d(1, 2, 3, key=jax.random.key(seed)), eqx.nn.MaxPool1d(2), eqx.nn.Dropout()]
    ),
    "MLP with PReLU": lambda seed: eqx.nn.MLP(
        2, 2, 2, 1, activation=eqx.nn.PReLU(0.1 + seed), key=jax.random.key(seed)
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_equinox_come_back(name: str, tmp_path: Path):
    saved, other = LAYERS[name](0), LAYERS[name](1)
    ckpt.save(tmp_path / "one", saved)
    abstract = eqx.filter_eval_shape(lambda: other)
    for target in (other, abstract):
        found = ckpt.load(tmp_path / "one", target)
        arrays = [eqx.filter(tree, eqx.is_array) for tree in (found, saved)]
        assert jax.tree.structure(found) == jax.tree.structure(target)
        assert bool(eqx.tree_equal(*(jax.tree.leaves(tree) for tree in arrays)))


def test_a_mark_is_code_by_its_class(tmp_path: Path):
    ckpt.save(tmp_path / "one", field(Mark()))
    assert isinstance(ckpt.load(tmp_path / "one", field(Mark(), 2.0)).f, Mark)
    with pytest.raises(ckpt.StructureMismatch, match="Mark"):
        ckpt.load(tmp_path / "one", field(jnp.sin))
    with pytest.raises(ckpt.UnsupportedLeaf):
        ckpt.save(tmp_path / "two", {"plain dict": Mark()})


class WithField(Mark):
    def __init__(self) -> None:
        self.count = 1


class WithSlot:
    __slots__ = ("count",)


class WithMethod(Mark):
    def close(self) -> None: ...


def local_mark() -> Any:
    class Local: ...

    return Local()


@pytest.mark.parametrize(
    "value", [WithField(), WithSlot(), WithMethod(), local_mark(), object(), KEY.dtype]
)
def test_what_may_hold_something_is_no_mark(value: Any, tmp_path: Path):
    with pytest.raises(ckpt.UnsupportedLeaf, match="f: cannot save a "):
        ckpt.save(tmp_path / "one", field(value))


# ------------------------------------------------------------------- functions on one side only


def told(path: Path, target: Any, **arguments: Any) -> list[tuple[str, str | None, str | None]]:
    with pytest.raises(ckpt.StructureMismatch) as refused:
        ckpt.load(path, target, **arguments)
    assert {entry.kind for entry in refused.value.mismatches} == {"function"}
    assert 'unexpected="ignore"' in str(refused.value)
    assert ckpt.load(path, target, unexpected="ignore", **arguments) is not None
    return [(entry.path, entry.saved, entry.nearest) for entry in refused.value.mismatches]


ONES = jnp.ones(2)
SIN = "jax.numpy:sin"


@pytest.mark.parametrize(
    ("saved", "target", "expected"),
    [
        (
            Field(ONES, jnp.sin),
            Renamed(ONES, jnp.sin),
            [("f", SIN, "g"), ("g", "no function", "f")],
        ),
        (Field(ONES, jnp.sin), Bare(ONES), [("f", SIN, None)]),
        (Two(ONES, jnp.sin, jnp.cos), Renamed(ONES, jnp.cos), [("f", SIN, None)]),
        (Two(ONES, jnp.sin, jnp.cos), Two(ONES, None, jnp.cos), [("f", SIN, None)]),
        (Two(ONES, None, jnp.cos), Two(ONES, jnp.sin, jnp.cos), [("f", "no function", None)]),
        (Field(ONES, [jnp.cos, jnp.sin]), Field(ONES, [jnp.cos]), [("f/1", SIN, None)]),
        (
            Field(ONES, {"a": jnp.cos, "b": jnp.sin}),
            Field(ONES, {"a": jnp.cos}),
            [("f/b", SIN, None)],
        ),
    ],
)
def test_a_function_on_one_side_is_told(saved: Any, target: Any, expected: Any, tmp_path: Path):
    ckpt.save(tmp_path / "one", saved)
    assert told(tmp_path / "one", target) == expected


def test_what_stands_against_an_array_is_told_once(tmp_path: Path):
    ckpt.save(tmp_path / "one", Two(ONES, jnp.sin, jnp.cos))
    ckpt.save(tmp_path / "two", Two(ONES, ONES, jnp.cos))
    for path, target, kind in (
        ("one", Two(ONES, ONES, jnp.cos), "missing"),
        ("two", Two(ONES, jnp.sin, jnp.cos), "unexpected"),
    ):
        with pytest.raises(ckpt.StructureMismatch) as refused:
            ckpt.load(tmp_path / path, target)
        assert [(entry.path, entry.kind) for entry in refused.value.mismatches] == [("f", kind)]
    assert told(tmp_path / "one", Two(ONES, ONES, jnp.cos), missing="keep") == [("f", SIN, None)]


@pytest.mark.parametrize("make", [lambda f: Field(ONES, f), lambda f: Two(ONES, f, jnp.cos)])
def test_a_side_without_any_misses_nothing(make: Any, tmp_path: Path):
    whole, filtered = make(jnp.sin), eqx.filter(make(jnp.sin), eqx.is_array)
    ckpt.save(tmp_path / "whole", whole)
    ckpt.save(tmp_path / "filtered", filtered)
    assert ckpt.load(tmp_path / "whole", filtered).f is None
    assert ckpt.load(tmp_path / "filtered", whole).f is whole.f
    ckpt.save(tmp_path / "bare", Bare(ONES))
    assert ckpt.load(tmp_path / "bare", whole).f is whole.f


def test_a_renamed_field_is_found_by_rename(tmp_path: Path):
    ckpt.save(tmp_path / "one", Field(ONES, jnp.sin))
    with pytest.raises(ckpt.StructureMismatch, match="rename="):
        ckpt.load(tmp_path / "one", Renamed(ONES, jnp.sin))
    assert ckpt.load(tmp_path / "one", Renamed(ONES, jnp.sin), rename={"f": "g"}).w[0] == 1
