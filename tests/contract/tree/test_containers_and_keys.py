"""Round trips of containers and of their keys, however odd."""

import collections
import dataclasses
import functools
import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.same_bits import bits
from tests.support.trees import (
    QUICK,
    Keyed,
    Keyless,
    Moments,
    Plain,
    Registered,
    X,
    Y,
    assert_same,
    round_trip,
)


class Empty(NamedTuple):
    pass


# --------------------------------------------------------------------------------------- containers


def container_tree():
    return {
        "dict": {"b": jnp.ones(1), "a": 2},
        "ints": {3: jnp.ones(1), -1: 2, 0: {5: "x"}},
        "list": [jnp.ones(1), [2, [3]], ()],
        "tuple": (1, (2, (3,)), []),
        "named": Moments(jnp.ones(2), Moments(None, {"x": 1})),
        "plain": Plain(jnp.ones(2), [1]),
        "none": None,
        "empty": {"dict": {}, "list": [], "tuple": (), "named": Empty(), "nested": [[], {"x": {}}]},
        "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
        "optional": Moments(None, None),
    }


def test_containers(tmp_path):
    tree = container_tree()
    assert_same(round_trip(tmp_path, tree), tree)
    assert_same(ckpt.load(tmp_path / "c", tree), tree)


def test_the_order_of_keys_is_kept(tmp_path):
    got = round_trip(tmp_path, container_tree())
    assert [*got] == [*container_tree()]
    assert [*got["ints"]] == [3, -1, 0]
    assert [*got["ordered"]] == ["z", "a"]


def test_custom_nodes(tmp_path):
    tree = {
        "registered": Registered(jnp.ones(2), {"x": 1}, static="t"),
        "keyless": Keyless(jnp.ones(2), 3),
        "keyed": Keyed(jnp.zeros(2), [1, 2]),
    }
    got = round_trip(tmp_path, tree)
    assert [bits(x) for x in jax.tree.leaves(got)] == [bits(x) for x in jax.tree.leaves(tree)]
    like = {
        "registered": Registered(jnp.zeros(2), {"x": 0}, static="t"),
        "keyless": Keyless(jnp.zeros(2), 0),
        "keyed": Keyed(jnp.ones(2), [0, 0]),
    }
    assert_same(ckpt.load(tmp_path / "c", like), tree)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["width", "kind"]
)
@dataclasses.dataclass
class Layer:
    w: Any
    width: int
    kind: Any


def test_static_fields_come_back(tmp_path):
    got = round_trip(tmp_path, {"layer": Layer(jnp.ones(2), 8, np.dtype("int8"))})["layer"]
    assert type(got) is Layer
    assert (got.width, got.kind) == (8, np.dtype("int8"))


def test_classes_that_cannot_be_imported(tmp_path):
    """A NamedTuple comes back with its fields, also where its class is gone."""
    gone = collections.namedtuple("Gone", "first second")
    got = round_trip(tmp_path, {"n": gone(1, jnp.ones(2))})["n"]
    assert got._fields == ("first", "second")
    assert got.first == 1
    assert_same(got[1], jnp.ones(2))


def test_fields_that_have_changed(tmp_path, monkeypatch):
    """A class of that name with other fields is not the class that was saved."""
    ckpt.save(tmp_path / "c", {"n": Moments(1, 2)})
    module = __import__(Moments.__module__, fromlist=["x"])
    other = collections.namedtuple("Moments", "mu nu extra")
    monkeypatch.setattr(module, "Moments", other, raising=False)
    got = ckpt.load(tmp_path / "c")["n"]
    assert got._fields == ("mu", "nu")
    assert tuple(got) == (1, 2)


def test_optax_states(tmp_path):
    optax = pytest.importorskip("optax")
    transform = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.cosine_decay_schedule(1e-3, 100), mask={"w": True, "b": False}),
    )
    state = transform.init({"w": jnp.ones((3, 2)), "b": jnp.ones(2)})
    got = round_trip(tmp_path, state)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    assert_same(jax.tree.leaves(got), jax.tree.leaves(state))
    got = ckpt.load(tmp_path / "c", transform.init({"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}))
    assert jax.tree.structure(got) == jax.tree.structure(state)


LEAVES = {
    "jax": None,  # made in the test: no work for jax while pytest collects
    "numpy": np.arange(3),
    "numpy_scalar": np.float32(2),
    "key": None,  # made in the test
    "int": 5,
    "big": 2**100,
    "float": 2.5,
    "bool": True,
    "complex": 2j,
    "str": "text",
    "bytes": b"bytes",
    "none": None,
    "dict": {},
    "list": [],
    "tuple": (),
    "random": random.Random(3),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_bare_value_is_a_tree(tmp_path, name):
    made = {"key": lambda: jax.random.key(3), "jax": lambda: jnp.arange(3.0)}
    value = made[name]() if name in made else LEAVES[name]
    assert_same(round_trip(tmp_path, value), value)
    ckpt.save(tmp_path / "items", items={"a": value, "b": {"x": value}}, options=QUICK)
    got = ckpt.load(tmp_path / "items")
    assert_same(got, {"a": value, "b": {"x": value}})
    assert_same(ckpt.load(tmp_path / "items", item="a"), value)


def test_one_keyword_item_is_a_dict_of_one(tmp_path):
    ckpt.save(tmp_path / "c", model={"w": np.ones(2)})
    assert_same(ckpt.load(tmp_path / "c"), {"model": {"w": np.ones(2)}})


def test_the_same_array_twice(tmp_path):
    """Shared leaves are saved under both names."""
    array, numpy_array = jnp.arange(1000.0), np.arange(10**5)
    tree = {"a": array, "b": [array, numpy_array], "c": numpy_array}
    assert_same(round_trip(tmp_path, tree), tree)


def test_many_leaves(tmp_path):
    tree = {f"layer{i}": {"w": np.full((4, 4), i, np.float32), "i": i} for i in range(500)}
    assert_same(round_trip(tmp_path, tree), tree)


def test_deep_trees(tmp_path):
    deep = jnp.ones(1)
    for level in range(200):
        deep = {"d": deep} if level % 2 else [deep]
    assert_same(round_trip(tmp_path, deep), deep)
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ckpt.UnsupportedLeaf):
        ckpt.save(tmp_path / "deeper", deep)
    while isinstance(deep, list):  # freed step by step: C recursion would overflow
        (deep,) = deep


def test_a_cycle_is_refused(tmp_path):
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ckpt.UnsupportedLeaf):
        ckpt.save(tmp_path / "c", {"cycle": cycle})


# --------------------------------------------------------------------------------------------- keys


ODD_KEYS = [
    "", " ", ".", "..", "a.b", "a/b", "/", "//", "~", "~0", "~1", "a~1b", "\\", "\n", "é", "中文",
    "\U0001f600", "'", '"', "%2F", "#", "?", "*", "**", "c", "c/0", "zarr.json", ".zarray", "d",
    "manifest.ocdbt", "(root)", "None", "0", "-1", "x" * 300, "\x00", "\x7f", "a" + "/b" * 50,
]  # fmt: skip


@pytest.mark.parametrize(
    "make", [lambda i: np.full(3, i), lambda i: f"t{i}", lambda i: i], ids="ats"
)
def test_odd_keys(tmp_path, make):
    # Names of texts nest by "/" and read "~0" as "~"; the next test has each of them alone.
    alone = ("/", "~0", "~1") if isinstance(make(0), str) else ()
    keys = [key for key in ODD_KEYS if not any(part in key for part in alone)]
    tree = {"outer": {key: make(index) for index, key in enumerate(keys)}}
    assert_same(round_trip(tmp_path, tree), tree)
    assert_same(ckpt.load(tmp_path / "c", tree), tree)


@pytest.mark.parametrize("key", [key for key in ODD_KEYS if "/" in key or "~" in key])
def test_odd_keys_of_text(tmp_path, key):
    assert_same(
        round_trip(tmp_path, {key: "text", "n": {key: "more"}}), {key: "text", "n": {key: "more"}}
    )


@pytest.mark.parametrize("key", ODD_KEYS)
def test_odd_keys_at_the_top(tmp_path, key):
    tree = {key: np.arange(3), "other": {key: {key: jnp.ones(2)}}}
    if key == "other":
        tree.pop("other")
    assert_same(round_trip(tmp_path, tree), tree)


def test_lone_surrogates_in_keys(tmp_path):
    """File names with bytes that are no text look like this."""
    tree = {"\udcff": np.ones(2), "x": {"\ud800": 1}}
    try:
        got = round_trip(tmp_path, tree)
    except ckpt.UnsupportedLeaf:
        return
    assert_same(got, tree)


def test_names_that_begin_alike(tmp_path):
    """No array's keys in the database are another's."""
    names = ["a", "a/b", "a/c", "a/c/0", "a/c/0/0", "a/zarr.json", "ab", "a.b", "a-", "a0", "c/0"]
    tree = {name: np.full((2, 2), index) for index, name in enumerate(names)}
    assert_same(round_trip(tmp_path, tree), tree)
    assert_same(ckpt.load(tmp_path / "c", only="a"), {"a": tree["a"]})


@pytest.mark.parametrize(
    ("tree", "one", "other"),
    [
        ({"a.b": X, "a": {"b": Y}}, "a.b", "a/b"),
        ({"a": {"b": Y}, "a.b": X}, "a.b", "a/b"),
        ({"a": [X], "a.0": Y}, "a/0", "a.0"),
        ({0: X, "0": Y}, "0", "0"),
        ({"a": {"": X}, "a.": Y}, "a/", "a."),
        ({"x": {"a.b": "text", "a": {"b": "more"}}}, "x/a.b", "x/a/b"),
        ({"a": {"b/c.d": 1}, "a.b/c": {"d": 2}}, "a/b~1c.d", "a.b~1c/d"),
        ({"n": Moments(X, Y), "n.mu": Y}, "n/mu", "n.mu"),
    ],
)
def test_colliding_names_are_refused(tmp_path, tree, one, other):
    with pytest.raises(ckpt.UnsupportedLeaf) as caught:
        ckpt.save(tmp_path / "c", tree)
    assert one in str(caught.value)
    assert other in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_same_names_in_two_items_do_not_collide(tmp_path):
    ckpt.save(tmp_path / "c", one={"a.b": X}, two={"a": {"b": Y}})
    assert_same(ckpt.load(tmp_path / "c"), {"one": {"a.b": X}, "two": {"a": {"b": Y}}})


def test_names_as_long_as_the_array_database_holds(tmp_path):
    longest = {"k" * 64_000: np.arange(3), "b": np.ones((1,) * 20)}
    ckpt.save(tmp_path / "long", longest)
    assert list(ckpt.load(tmp_path / "long")) == list(longest)
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"has 64002 bytes, and .* up to 64000"):
        ckpt.save(tmp_path / "longer", {"\u00e9" * 32_001: np.arange(3)})
    assert not (tmp_path / "longer").exists()
