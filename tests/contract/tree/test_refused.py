"""What cannot be saved is refused by path and type, and nothing is left behind; an object that a program changes in place
stays one, at two places of a tree and in two items.
"""

import collections
import dataclasses
import decimal
import functools
import random
import types
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.faults.crafted.signed import read_record, write_record
from tests.support.trees import Moments, X, Y


def deleted_array():
    array = jnp.ones(3) + 1
    array.delete()
    return array


UNSUPPORTED = {
    "float0": lambda: np.zeros(3, jax.dtypes.float0),
    "object array": lambda: np.array([1, "a", None], object),
    "string array": lambda: np.array(["a", "b"]),
    "datetime array": lambda: np.array(["2020-01-01"], "datetime64[D]"),
    "timedelta": lambda: np.timedelta64(3, "s"),
    "structured array": lambda: np.zeros(2, [("x", "f4"), ("y", "i4")]),
    "void": lambda: np.void(b"abc"),
    "long double": lambda: np.zeros(2, np.longdouble),
    "masked array": lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    "abstract array": lambda: jax.ShapeDtypeStruct((2,), jnp.float32),
    "deleted array": deleted_array,
    "set": lambda: {1, 2},
    "frozenset": lambda: frozenset({1}),
    "function": lambda: len,
    "lambda": lambda: lambda x: x,
    "class": lambda: Moments,
    "module": lambda: types,
    "object": lambda: object(),
    "iterator": lambda: iter([1, 2]),
    "bytearray": lambda: bytearray(b"x"),
    "range": lambda: range(3),
    "decimal": lambda: decimal.Decimal(1),
    "path": lambda: Path("x"),
    "ellipsis": lambda: ...,
    "str subclass": lambda: type("Name", (str,), {})("x"),
    "int subclass": lambda: type("Count", (int,), {})(3),
    "random subclass": lambda: random.SystemRandom(),
    "bit generator": lambda: np.random.PCG64(3),
    "counter": lambda: collections.Counter(a=2),
    "dict subclass": lambda: type("Recent", (collections.defaultdict,), {})(int, a=1),
    "dict with a bool key": lambda: {True: 1},
    "dict with a tuple of floats as key": lambda: {(1, 2.0): 1},
    "dict with a tuple of bools as key": lambda: {(1, (True,)): 1},
    "dict with a tuple of None as key": lambda: {(None,): 1},
    "dict with a tuple of bytes as key": lambda: {(b"x",): 1},
    "dict with a tuple of frozensets as key": lambda: {("a", frozenset[int]()): 1},
    "dict with None as key": lambda: {None: 1},
    "dict with a float key": lambda: {1.5: 1},
    "dict with a bytes key": lambda: {b"x": 1},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_leaves(tmp_path, name):
    value = UNSUPPORTED[name]()
    with pytest.raises(ckpt.UnsupportedLeaf) as caught:
        ckpt.save(tmp_path / "c", {"good": np.ones(2), "inner": [1, {"x/y": value}]})
    assert isinstance(caught.value, TypeError)
    assert "inner/1/x~1y" in str(caught.value)
    assert caught.value.leaf.startswith("inner/1/x~1y")
    if name.startswith("dict with"):
        assert "tuples of them" in str(caught.value)
        assert caught.value.type_name in str(caught.value)
    else:
        assert type(value).__name__ in caught.value.type_name
        assert type(value).__name__ in str(caught.value)
    assert not any(tmp_path.iterdir()), "nothing is left behind"


def test_unsupported_leaf_of_an_item_names_the_item(tmp_path):
    with pytest.raises(ckpt.UnsupportedLeaf) as caught:
        ckpt.save(tmp_path / "c", model={"w": X}, opt={"s": {1}})
    assert "opt" in str(caught.value)


def test_tracers_are_refused(tmp_path):
    def step(x):
        ckpt.save(tmp_path / "c", {"x": x})
        return x

    for traced in (jax.jit(step), jax.grad(lambda x: step(x).sum())):
        with pytest.raises(ckpt.UnsupportedLeaf, match="it is being traced: save outside of jit"):
            traced(jnp.ones(2))
    assert not any(tmp_path.iterdir())


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


def test_names_longer_than_the_array_database_holds(tmp_path):
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"has 64002 bytes, and .* up to 64000"):
        ckpt.save(tmp_path / "longer", {"\u00e9" * 32_001: np.arange(3)})
    assert not (tmp_path / "longer").exists()


@dataclasses.dataclass
class Plain:
    w: Any
    step: int = 0

    @functools.cached_property
    def doubled(self) -> int:
        return 2 * self.step


class Slot:
    __slots__ = ("hidden",)


@dataclasses.dataclass(slots=True)
class Slotted(Slot):
    w: Any


class Point(NamedTuple):
    x: Any


class Named(Point):
    """A NamedTuple with room for attributes."""


@dataclasses.dataclass
class AlsoDict(dict):
    w: Any = 1


@dataclasses.dataclass
class AlsoList(list):
    w: Any = 1


def with_attribute(value: Any, name: str = "extra", content: Any = 5) -> Any:
    object.__setattr__(value, name, content)
    return value


BEYOND = {
    "dataclass": lambda: with_attribute(Plain(np.ones(2))),
    "slots": lambda: with_attribute(Slotted(np.ones(2)), "hidden"),
    "namedtuple": lambda: with_attribute(Named(np.ones(2))),
}


@pytest.mark.parametrize("kind", BEYOND)
def test_attributes_beside_the_fields_are_refused(tmp_path, kind):
    value = BEYOND[kind]()
    with pytest.raises(
        ckpt.UnsupportedLeaf, match=r"^a/0: cannot save .*: (extra|hidden) would be lost"
    ) as told:
        ckpt.save(tmp_path / "a", {"a": [value]})
    assert told.value.leaf == "a/0"
    assert type(value).__name__ in told.value.type_name
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"item 'x': .*would be lost"):
        ckpt.save(tmp_path / "a", x=value)
    assert not (tmp_path / "a").exists()


def test_what_follows_from_the_fields_is_no_loss(tmp_path):
    value = Plain(np.ones(2), 4)
    assert value.doubled == 8
    ckpt.save(tmp_path / "a", [value, Slotted(1), Named(2), Point(3)])
    back = ckpt.load(tmp_path / "a")
    assert (back[0].step, back[0].doubled, back[1].w, back[2].x, back[3].x) == (4, 8, 1, 2, 3)
    like = with_attribute(Plain(np.zeros(2), 1), "extra", "mine")
    assert like.doubled == 2
    loaded = ckpt.load(tmp_path / "a", [like, Slotted(0), Named(0), Point(0)])[0]
    assert loaded.doubled == 8, "what was computed of the target is not what was loaded"
    assert loaded.extra == "mine", "what the target holds beside its fields stays"


@pytest.mark.parametrize(("value", "name"), [(AlsoDict(3), "dict"), (AlsoList(3), "list")])
def test_a_dataclass_with_contents_is_refused(tmp_path, value, name):
    with pytest.raises(
        ckpt.UnsupportedLeaf,
        match=f"deep/0: .*a dataclass and a {name}.*register_pytree_node, or save a plain",
    ):
        ckpt.save(tmp_path / "a", {"deep": [value]})
    ckpt.save(tmp_path / "b", {"deep": [{"w": 1}]})
    with pytest.raises(ckpt.UnsupportedLeaf, match=f"a dataclass and a {name}"):
        ckpt.load(tmp_path / "b", {"deep": [value]})


class Own:
    """Gives whatever state it is told to."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def get_state(self) -> Any:
        return self._state(self)

    def set_state(self, state: Any) -> None:
        raise AssertionError("nothing is to be set")


def circular_dict() -> Any:
    tree: dict[str, Any] = {"w": jnp.ones(1), "deep": {}}
    tree["deep"]["again"] = tree
    return tree


def circular_list() -> Any:
    tree: list[Any] = [1]
    tree.append((2, tree))
    return {"l": tree}


def nested(depth: int) -> Any:
    tree: Any = 1.0
    for _ in range(depth):
        tree = {"a": tree}
    return tree


ENDLESS = {
    "dict": (circular_dict, "deep/again: a dict that holds itself"),
    "list": (circular_list, "l/1/1: a list that holds itself"),
    "state": (lambda: {"o": Own(lambda own: {"me": own})}, "o/me: an Own that holds itself"),
    "state is itself": (lambda: {"o": Own(lambda own: own)}, "o: an Own that holds itself"),
    "state of a dict": (lambda: {"o": Own(lambda own: circular_dict())}, "o/deep/again: a dict"),
    "ever new": (lambda: {"o": Own(lambda own: Own(own._state))}, "nested too deeply"),
    "ever new below": (lambda: {"o": Own(lambda own: {"x": Own(own._state)})}, "nested"),
    "a level too deep": (lambda: nested(302), "deep"),
    "too deep for C": (lambda: nested(100_000), "deep"),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_does_not_end_is_refused_by_its_path(tmp_path, kind):
    make, message = ENDLESS[kind]
    for save in (ckpt.save, lambda path, tree: ckpt.save_async(path, tree).result()):
        with pytest.raises(ckpt.UnsupportedLeaf, match=message):
            save(tmp_path / "a", make())
    with pytest.raises(ckpt.UnsupportedLeaf, match=message):
        ckpt.save(tmp_path / "a", items={"data": make()})
    assert not any(tmp_path.iterdir())
    ckpt.save(tmp_path / "b", {"w": 1})
    with pytest.raises(ckpt.UnsupportedLeaf):
        ckpt.load(tmp_path / "b", make())
    with pytest.raises(ckpt.UnsupportedLeaf, match=message):
        ckpt.restore(tmp_path / "b", state=make())


MAKE = {
    "generator": lambda: np.random.default_rng(3),
    "random_state": lambda: np.random.RandomState(3),
    "python": lambda: random.Random(3),
    "array": lambda: np.arange(6.0),
    "big array": lambda: np.arange(200_000.0),
    "big-endian": lambda: np.arange(6, dtype=">f4"),
}


@pytest.fixture(params=MAKE)
def make(request):
    return MAKE[request.param]


def in_a_tree(one: Any, other: Any) -> dict[str, Any]:
    return {"state": {"a": [one, 1], "b": {"rng": other, "w": np.ones(2)}}}


def in_two_items(one: Any, other: Any) -> dict[str, Any]:
    return {"a": [one, 1], "b": {"rng": other, "w": np.ones(2)}}


PLACES = [in_a_tree, in_two_items]


def pair(items: Any) -> tuple[Any, Any]:
    tree = items.get("state", items)
    return tree["a"][0], tree["b"]["rng"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_without_a_target_it_is_one_again(tmp_path, make, where, place):
    shared = make()
    path = str(tmp_path / "a") if where == "disk" else f"memory://{tmp_path.name}/a"
    ckpt.save(path, items=place(shared, shared))
    for as_numpy in (False, True):
        one, other = pair(ckpt.load(path, as_numpy=as_numpy))
        assert one is other is not shared and type(one) is type(shared)
    one, other = pair(ckpt.load_async(path).result())
    assert one is other
    assert ckpt.verify(path).ok


@pytest.mark.parametrize("place", PLACES)
def test_a_target_says_whether_it_is_one(tmp_path, make, place):
    ckpt.save(tmp_path / "one", items=place(*[make()] * 2))
    ckpt.save(tmp_path / "two", items=place(make(), make()))
    fresh = make()

    def restored(name: str, one: Any, other: Any) -> bool:
        got = pair(dict(ckpt.restore(tmp_path / name, items=place(one, other))))
        return got[0] is got[1]

    assert restored("one", fresh, fresh)
    assert not restored("one", fresh, make())
    assert not restored("two", fresh, fresh), "they were two when they were saved"
    one, other = pair(ckpt.load(tmp_path / "two"))
    assert one is not other


def test_kinds_that_nobody_can_change_are_left_alone(tmp_path):
    ones = jnp.ones(3)
    ckpt.save(tmp_path / "a", [ones, ones, "text", "text", 7, 7])
    assert not read_record(tmp_path / "a")["items"]["state"].get("shared")
    # as jax arrays, what was one numpy array may be two: nobody can change them
    array = np.ones(3, np.float32)
    ckpt.save(tmp_path / "b", [array, array])
    assert ckpt.load(tmp_path / "b", [ones, ones])[1].tolist() == [1, 1, 1]


class Maker:
    """Makes arrays for each save, which may lie where those of another object have lain."""

    def __init__(self, value: float) -> None:
        self.value = value

    def get_state(self) -> dict[str, Any]:
        return {"x": np.full(1000, self.value)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.value = float(state["x"][0])


def test_arrays_that_are_made_for_the_save_are_not_taken_for_one(tmp_path):
    makers = {f"m{n}": Maker(n) for n in range(20)}
    ckpt.save(tmp_path / "a", items=makers)
    assert not read_record(tmp_path / "a").get("shared")
    fresh = {name: Maker(-1) for name in makers}
    ckpt.restore(tmp_path / "a", items=fresh)
    assert [one.value for one in fresh.values()] == list(range(20))


@pytest.mark.parametrize("tier", [False, True])
def test_steps_of_a_run(tmp_path, tier):
    """Each as it was when it was saved, in local parts too."""
    rng, array = np.random.default_rng(1), np.zeros(3)
    local = tmp_path / "local" if tier else None
    options = ckpt.Options(local_max_to_keep=2) if tier else None
    with ckpt.Checkpointer(tmp_path / "run", local_directory=local, options=options) as run:
        run.save(0, a={"rng": rng, "x": array}, b={"rng": rng, "x": array})
        run.save(1, a={"rng": rng, "x": array}, b={"rng": np.random.default_rng(1), "x": array})
    for directory in (tmp_path / "run", *(local or tmp_path).glob("*/process_*")):
        with ckpt.Checkpointer(directory, read_only=True) as reading:
            first, second = reading.load(0), reading.load(1)
        assert first["a"]["rng"] is first["b"]["rng"] and first["a"]["x"] is first["b"]["x"]
        assert second["a"]["rng"] is not second["b"]["rng"]
        assert second["a"]["x"] is second["b"]["x"]


OF_A_TREE = [[[0, 9]], [[0, 0]], [[0]], [[0, 1], [1, 0]], [[0, 2]], [["0", 1]], 3, [[2, 3]]]
OF_ITEMS = [
    [[["a", 0]]], [[["a", 0], ["c", 0]]], [[["a", 0], ["b", 9]]], [[["a", 0], ["b", -1]]],
    [[["a", 0], ["b", 0]], [["a", 0], ["b", 1]]], [[["a", 0], ["b", 1]]], [[[["a"], 0], ["b", 0]]],
    7, {"a": 1},
]  # fmt: skip


@pytest.mark.parametrize("entry", OF_A_TREE)
def test_an_impossible_entry_of_a_tree_is_damage(tmp_path, entry):
    rng = np.random.default_rng(1)
    ckpt.save(tmp_path / "a", [rng, rng, 1, 1])
    record = read_record(tmp_path / "a")
    assert record["items"]["state"]["shared"] == [[0, 1]]
    record["items"]["state"]["shared"] = entry
    write_record(tmp_path / "a", record)
    with pytest.raises(ckpt.CheckpointCorrupt, match="fields do not fit"):
        ckpt.load(tmp_path / "a")


@pytest.mark.parametrize("entry", OF_ITEMS)
def test_an_impossible_entry_of_items_is_damage(tmp_path, entry):
    ckpt.save(tmp_path / "a", a=[np.ones(2)], b=[np.ones(2), np.ones(3)])
    write_record(tmp_path / "a", read_record(tmp_path / "a") | {"shared": entry})
    with pytest.raises(ckpt.CheckpointCorrupt):
        ckpt.load(tmp_path / "a")
