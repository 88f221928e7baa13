"""Functions in the fields of modules: told apart by their names, and told where they stand on one side only."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ckpt_core as ckpt

eqx = pytest.importorskip("equinox")


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
