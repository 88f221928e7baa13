"""Optax states: ordinary pytrees, which must come back node for node and bit for bit."""

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest

import ckpt_core as ckpt

pytest.importorskip("optax")
import jax
import jax.numpy as jnp
import optax

from tests.support.compiling import make_quick_compilation  # noqa: F401 (fixture)
from tests.support.optax_cases import (  # noqa: F401 (fixture)
    CASES,
    FLAT,
    NAMES,
    Everything,
    check,
    filled,
    make_everything,
    params_of,
    public_factories,
)

# Some factories are deprecated, or can only be called in a way that is.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*will be (required|removed)"),
]


@pytest.mark.parametrize("name", NAMES)
def test_every_state_comes_back(name, everything):
    saved = everything.saved[name]
    check(everything.from_init[name], saved)
    check(everything.from_abstract[name], saved)
    check(everything.without_target[name], saved)


def test_no_factory_is_left_out():
    assert len(NAMES) > 140
    assert set(public_factories()) <= set(CASES)


def test_weak_types_come_back(tmp_path):
    # Without them every step would be compiled again after a restore.
    state = {"init": optax.adam(1e-2).init({"scale": jnp.asarray(1.0)}), "scale": jnp.asarray(1.0)}
    state["lbfgs"] = optax.lbfgs(memory_size=2).init(FLAT)
    weak = [leaf.weak_type for leaf in jax.tree.leaves(state)]
    assert any(weak)
    ckpt.save(tmp_path / "a", state)
    for loaded in (ckpt.load(tmp_path / "a"), ckpt.load(tmp_path / "a", state)):
        assert [leaf.weak_type for leaf in jax.tree.leaves(loaded)] == weak


class RenamedAdamState(NamedTuple):
    """What a later Optax might call its ScaleByAdamState."""

    count: Any
    mu: Any
    nu: Any


def test_a_class_that_was_renamed_with_the_same_fields(tmp_path):
    state = filled(optax.adam(1e-2).init(FLAT))
    ckpt.save(tmp_path / "a", state)
    target = (RenamedAdamState(*state[0]), *state[1:])
    loaded = ckpt.load(tmp_path / "a", jax.tree.map(jnp.zeros_like, target))
    check(loaded, target)


def test_nodes_without_leaves_are_distinguished(tmp_path):
    state = {
        "empty": optax.EmptyState(),
        "masked": optax.MaskedNode(),
        "none": None,
        "tuple": (),
        "list": [],
        "dict": {},
        "ordered": OrderedDict([("z", ()), ("a", None)]),
    }
    ckpt.save(tmp_path / "a", state)
    loaded = ckpt.load(tmp_path / "a")
    assert {key: type(value) for key, value in loaded.items()} == {
        key: type(value) for key, value in state.items()
    }
    assert list(loaded["ordered"]) == ["z", "a"]
