"""Every state of the table comes back, without a target and into one; so does any tree of Hypothesis."""

import contextlib

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import testing
from tests.contract.tree import states
from tests.support.same_bits import bits
from tests.support.trees import QUICK, X, abstract, assert_same, round_trip

NOT_OF_JAX = ["int1", "uint1", "complex32", "bcomplex32"]  # they may be refused, by name


def order_of(value):
    """The keys of every dict, in their order."""
    if isinstance(value, dict):
        return [(key, order_of(part)) for key, part in value.items()]
    return [*map(order_of, value)] if isinstance(value, list | tuple) else None


@pytest.mark.parametrize("name", states.STATES)
def test_a_state_comes_back(tmp_path, name):
    with jax.enable_x64(True) if name.startswith("dtypes") else contextlib.nullcontext():
        state, want = states.STATES[name](), states.STATES[name]()
        found = {
            "no target": round_trip(tmp_path, state),
            "itself": ckpt.restore(tmp_path / "c", state=state)["state"],
        }
        for how, got in found.items():
            assert_same(got, want, how, sharding=True)
            testing.assert_same(got, want, how)
            assert order_of(got) == order_of(want), how
        if name.startswith(("dtypes", "keys")):
            assert_same(ckpt.load(tmp_path / "c", abstract(state, sharding=False)), want)
        if name.startswith("keys"):
            got = ckpt.load(tmp_path / "c", abstract(state))
            assert_same(got, want, sharding=True)


@pytest.mark.parametrize("name", states.BARE)
def test_a_bare_value_is_an_item_and_a_leaf(tmp_path, name):
    value, want = states.BARE[name](), states.BARE[name]()
    ckpt.save(tmp_path / "c", items={"a": value, "b": {"x": value}}, options=QUICK)
    assert_same(ckpt.load(tmp_path / "c"), {"a": want, "b": {"x": want}})
    assert_same(ckpt.load(tmp_path / "c", item="a"), want)


def test_the_list_of_dtypes_is_whole():
    """A dtype that a new jax or ml_dtypes brings must not be forgotten here."""
    known = {
        name
        for name, value in vars(ml_dtypes).items()
        if isinstance(value, type) and issubclass(value, np.generic)
    }
    assert known - set(NOT_OF_JAX) == set(states.ML_DTYPES)
    assert {str(np.dtype(code)) for code in "?bhilBHILefdFD"} == set(states.NUMPY_DTYPES)


@pytest.mark.parametrize("name", NOT_OF_JAX)
def test_dtypes_that_jax_lacks(tmp_path, name):
    if not hasattr(ml_dtypes, name):
        pytest.skip("ml_dtypes has no such dtype")
    tree = {"a": np.array([0, 1, 0], getattr(ml_dtypes, name))}
    try:
        got = round_trip(tmp_path, tree)
    except ckpt.UnsupportedLeaf as error:
        assert name in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert_same(got, tree)


def test_wide_dtypes_are_not_narrowed(tmp_path):
    """Saved with x64 and loaded without: the same values, or an error; never float32 in silence."""
    with jax.enable_x64(True):
        tree = {"d": jnp.array([1e300, 1 / 3]), "i": jnp.array([2**62 + 1]), "n": np.float64(1e300)}
        ckpt.save(tmp_path / "c", tree)
    try:
        got = ckpt.load(tmp_path / "c")
    except ckpt.CheckpointError as error:
        assert "x64" in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert_same(got, tree)
    got = ckpt.load(tmp_path / "c", as_numpy=True)
    assert bits(got["d"]) == bits(tree["d"])


def test_memory_map_is_an_array(tmp_path):
    mapped = np.memmap(tmp_path / "file", np.float32, "w+", shape=(4, 4))
    mapped[:] = 3
    np.testing.assert_array_equal(round_trip(tmp_path, {"m": mapped})["m"], np.full((4, 4), 3))


def test_what_was_loaded_is_the_callers(tmp_path):
    """Writing it changes no file, and writing the files changes nothing of it."""
    saved = {"a": np.zeros(3), "b": np.ones((1024, 1024)), "j": jnp.ones((1024, 1024))}
    ckpt.save(tmp_path / "c", saved)
    got = ckpt.load(tmp_path / "c")
    got["a"][0] = got["b"][0, 0] = 5
    assert ckpt.verify(tmp_path / "c").ok
    again = ckpt.load(tmp_path / "c")
    for path in (tmp_path / "c").rglob("d/*"):
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
    assert_same(again, saved)


def test_names_that_begin_alike_are_no_part_of_each_other(tmp_path):
    tree = states.STATES["names that begin alike"]()
    ckpt.save(tmp_path / "c", tree)
    assert_same(ckpt.load(tmp_path / "c", only="a"), {"a": tree["a"]})


def test_same_names_in_two_items_do_not_collide(tmp_path):
    ckpt.save(tmp_path / "c", one={"a.b": X}, two={"a": {"b": X}})
    assert_same(ckpt.load(tmp_path / "c"), {"one": {"a.b": X}, "two": {"a": {"b": X}}})
    ckpt.save(tmp_path / "one", model={"w": X})
    assert_same(ckpt.load(tmp_path / "one"), {"model": {"w": X}})


# ---- any keys (any tree of harmless keys: tests/contract/conformance/test_strategies.py) ---------

LEAF = st.one_of(st.integers(-9, 9), st.text(max_size=3))
KEYS = st.one_of(st.text("ab./~0", max_size=4), st.text(max_size=4), st.integers(-9, 99))
INNER = LEAF | st.dictionaries(KEYS, LEAF | st.dictionaries(KEYS, LEAF, max_size=2), max_size=3)
NESTED = st.dictionaries(KEYS, INNER, max_size=4)


def leaves_with_names(tree, path=()):
    """(array name, whether it is text) of every leaf, by the rule of Orbax's format."""
    if not isinstance(tree, dict):
        yield ".".join(map(str, path)), isinstance(tree, str)
        return
    for key, value in tree.items():
        yield from leaves_with_names(value, (*path, key))


def collides(tree):
    names = [*leaves_with_names(tree)]
    if len({name for name, _ in names}) < len(names):
        return True
    # texts nest by "/", and one cannot be inside another
    texts = [_pointer(name) for name, text in names if text]
    return any(a == b[: len(a)] for i, a in enumerate(texts) for j, b in enumerate(texts) if i != j)


def _pointer(name):
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in name.split("/"))


@hypothesis.given(NESTED)
@hypothesis.settings(max_examples=60)
def test_any_keys_come_back_or_are_refused(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("tree") / "c"
    if collides(tree):
        with pytest.raises(ckpt.UnsupportedLeaf):
            ckpt.save(path, tree, options=QUICK)
        assert not path.exists()
        return
    ckpt.save(path, tree, options=QUICK)
    assert_same(ckpt.load(path), tree)
