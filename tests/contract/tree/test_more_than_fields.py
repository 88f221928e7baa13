"""What a container holds beside what is saved of it: refused, kept in a target, or not lost at least."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
import pytest

import ckpt_core as ckpt

T = TypeVar("T")


@dataclasses.dataclass
class Plain:
    w: Any
    step: int = 0

    @functools.cached_property
    def doubled(self) -> int:
        return 2 * self.step


class Below(Plain):
    """No dataclass of its own, but of one."""


@dataclasses.dataclass
class Frozen(Generic[T]):
    w: T


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


@dataclasses.dataclass
class AlsoOrdered(collections.OrderedDict):
    w: Any = 1


@dataclasses.dataclass(frozen=True)
class AlsoInt(int):
    w: Any = 1


def with_attribute(value: Any, name: str = "extra", content: Any = 5) -> Any:
    object.__setattr__(value, name, content)
    return value


BEYOND = {
    "dataclass": lambda: with_attribute(Plain(np.ones(2))),
    "subclass": lambda: with_attribute(Below(np.ones(2))),
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
    ckpt.save(tmp_path / "a", [value, Frozen[int](3), Slotted(1), Named(2), Point(3)])
    back = ckpt.load(tmp_path / "a")
    assert (back[0].step, back[0].doubled, back[1].w, back[2].w, back[3].x) == (4, 8, 3, 1, 2)
    like = Plain(np.zeros(2), 1)
    assert like.doubled == 2
    loaded = ckpt.load(tmp_path / "a", [like, Frozen(0), Slotted(0), Named(0), Point(0)])[0]
    assert loaded.doubled == 8, "what was computed of the target is not what was loaded"


def test_a_target_keeps_what_it_holds_beside_its_fields(tmp_path):
    ckpt.save(tmp_path / "a", Plain(np.ones(2), 4))
    loaded = ckpt.load(tmp_path / "a", with_attribute(Plain(np.zeros(2)), "extra", "mine"))
    assert (loaded.step, loaded.extra) == (4, "mine")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (AlsoDict(3), "dict"),
        (AlsoList(3), "list"),
        (AlsoOrdered(3), "dict"),
        (AlsoInt(3), "int"),
    ],
)
def test_a_dataclass_with_contents_is_refused(tmp_path, value, name):
    with pytest.raises(ckpt.UnsupportedLeaf, match=f"deep/0: .*a dataclass and a {name}"):
        ckpt.save(tmp_path / "a", {"deep": [value]})
    ckpt.save(tmp_path / "b", {"deep": [{"w": 1}]})
    with pytest.raises(ckpt.UnsupportedLeaf, match=f"a dataclass and a {name}"):
        ckpt.load(tmp_path / "b", {"deep": [value]})


class Twins:
    """A registered class, both children of which say that their key is ``half``."""

    def __init__(self, one: Any, other: Any) -> None:
        self.halves = (one, other)


jax.tree_util.register_pytree_with_keys(
    Twins,
    lambda twins: ([(jax.tree_util.GetAttrKey("half"), half) for half in twins.halves], None),
    lambda _, halves: Twins(*halves),
)


def test_children_that_share_a_key_all_come_back(tmp_path):
    one, other = {"a": np.ones(2)}, {"b": np.zeros(3)}
    ckpt.save(tmp_path / "t", {"twins": Twins(one, other)})
    back = ckpt.load(tmp_path / "t")["twins"]
    assert [list(half) for half in back] == [["a"], ["b"]]
    assert [list(half) for half in ckpt.inspect(tmp_path / "t").items["state"].tree["twins"]] == [
        ["a"],
        ["b"],
    ]
    like = Twins({"a": np.zeros(2)}, {"b": np.ones(3)})
    assert ckpt.load(tmp_path / "t", {"twins": like})["twins"].halves[1]["b"].tolist() == [0, 0, 0]


def test_leaves_that_share_a_key_are_refused(tmp_path):
    with pytest.raises(ckpt.UnsupportedLeaf, match="half"):
        ckpt.save(tmp_path / "t", Twins(1, 2))
