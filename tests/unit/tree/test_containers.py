"""Containers that are more than a dict or a list: their kind comes back, and none holds itself."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._format.treedef import load_nodes
from ckpt_core._tree import MAX_DEPTH
from ckpt_core._tree.leaves import LeafSpec
from ckpt_core._tree.match import MatchRules, match


class Recent(collections.defaultdict[str, Any]):
    """A subclass that jax was not told of."""


@jax.tree_util.register_pytree_with_keys_class
class Ranked(dict[str, Any]):
    """A dict of the user's, registered, that remembers its rank."""

    rank = 0

    def tree_flatten_with_keys(self) -> Any:
        keys = sorted(self)
        return [(jax.tree_util.DictKey(key), self[key]) for key in keys], (tuple(keys), self.rank)

    @classmethod
    def tree_unflatten(cls, known: Any, children: Any) -> Ranked:
        made = cls(zip(known[0], children, strict=True))
        made.rank = known[1]
        return made


def own_factory() -> int:
    return 7


def name_of(factory: Any) -> str:
    """For the names of tests, which must be the same in every process."""
    return getattr(factory, "__name__", str(factory))


FACTORIES: list[Any] = [int, float, list, dict, set, collections.OrderedDict, None]


def made(factory: Any) -> collections.defaultdict[Any, Any]:
    return collections.defaultdict(factory, {"b": jnp.ones(2), "a": 3, 5: np.zeros(2)})


def assert_defaultdict(got: Any, factory: Any) -> None:
    assert type(got) is collections.defaultdict
    assert got.default_factory is factory
    assert list(got) == ["b", "a", 5]


@pytest.mark.parametrize("factory", FACTORIES, ids=name_of)
def test_a_defaultdict_of_builtins_comes_back_without_a_target(
    tmp_path: Path, factory: Any
) -> None:
    ckpt.save(tmp_path / "a", {"outer": [made(factory)]})
    assert_defaultdict(ckpt.load(tmp_path / "a")["outer"][0], factory)
    (leaf, *_) = ckpt.inspect(tmp_path / "a").items["state"].leaves
    assert leaf.path == "outer/0/b"


@pytest.mark.parametrize("factory", [*FACTORIES, own_factory, lambda: 3], ids=name_of)
def test_a_defaultdict_in_the_target_gives_its_factory(tmp_path: Path, factory: Any) -> None:
    ckpt.save(tmp_path / "a", made(factory))
    ckpt.save(tmp_path / "b", dict(made(factory)))
    for name in "ab":
        assert_defaultdict(ckpt.load(tmp_path / name, made(factory)), factory)
        assert_defaultdict(ckpt.restore(tmp_path / name, state=made(factory))["state"], factory)
    assert type(ckpt.load(tmp_path / "a", dict(made(factory)))) is dict


@pytest.mark.parametrize("factory", [own_factory, lambda: 3, sys.exit], ids=name_of)
def test_a_factory_that_a_checkpoint_may_not_name_is_said(tmp_path: Path, factory: Any) -> None:
    ckpt.save(tmp_path / "a", made(factory))
    with pytest.warns(UserWarning, match="comes back as a dict.*Give a target"):
        got = ckpt.load(tmp_path / "a")
    assert type(got) is dict and list(got) == ["b", "a", 5]


def test_a_part_of_a_defaultdict_stays_one_where_all_of_it_is_there(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", {"x": made(int), "y": 1})
    assert_defaultdict(ckpt.load(tmp_path / "a", only="x/**")["x"], int)


def test_other_dicts_keep_their_kind(tmp_path: Path) -> None:
    ordered = collections.OrderedDict(b=1, a=2)
    ranked = Ranked(z=jnp.ones(1), y=2)
    ranked.rank = 9
    tree = {"ordered": ordered, "ranked": ranked}
    ckpt.save(tmp_path / "a", tree)
    got = ckpt.load(tmp_path / "a", tree)
    assert type(got["ordered"]) is collections.OrderedDict and list(got["ordered"]) == ["b", "a"]
    assert type(got["ranked"]) is Ranked and got["ranked"].rank == 9
    assert type(ckpt.load(tmp_path / "a")["ordered"]) is collections.OrderedDict


@pytest.mark.parametrize("value", [collections.Counter(a=2), Recent(int, a=1)], ids=repr)
def test_a_dict_that_nobody_registered_is_refused_by_its_type(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"x: cannot save a .*(Counter|Recent)"):
        ckpt.save(tmp_path / "a", {"x": value})
    ckpt.save(tmp_path / "b", {"x": {"a": 1}})
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"x: a .*(Counter|Recent) cannot be a target"):
        ckpt.load(tmp_path / "b", {"x": value})


# ------------------------------------------------------------------------ what holds itself


class Own:
    """Gives whatever state it is told to."""

    def __init__(self, state: Callable[[Own], Any]) -> None:
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


CIRCLES: dict[str, tuple[Callable[[], Any], str]] = {
    "dict": (circular_dict, "deep/again: a dict that holds itself"),
    "list": (circular_list, "l/1/1: a list that holds itself"),
    "state": (lambda: {"o": Own(lambda own: {"me": own})}, "o/me: a Own that holds itself"),
    "state is itself": (lambda: {"o": Own(lambda own: own)}, "o: a Own that holds itself"),
    "state of a dict": (lambda: {"o": Own(lambda own: circular_dict())}, "o/deep/again: a dict"),
    "ever new": (lambda: {"o": Own(lambda own: Own(own._state))}, "nested too deeply"),
    "ever new below": (lambda: {"o": Own(lambda own: {"x": Own(own._state)})}, "nested"),
}


@pytest.mark.parametrize("kind", CIRCLES)
def test_what_holds_itself_is_refused_by_its_path(tmp_path: Path, kind: str) -> None:
    make, message = CIRCLES[kind]
    for save in (ckpt.save, lambda path, tree: ckpt.save_async(path, tree).result()):
        with pytest.raises(ckpt.UnsupportedLeaf, match=message):
            save(tmp_path / "a", make())
    with pytest.raises(ckpt.UnsupportedLeaf, match=message):
        ckpt.save(tmp_path / "a", items={"data": make()})
    ckpt.save(tmp_path / "b", {"w": 1})
    with pytest.raises(ckpt.UnsupportedLeaf):
        ckpt.load(tmp_path / "b", make())
    with pytest.raises(ckpt.UnsupportedLeaf, match=message):
        ckpt.restore(tmp_path / "b", state=make())


def test_one_object_in_two_places_does_not_hold_itself(tmp_path: Path) -> None:
    shared = {"w": jnp.ones(2)}
    ckpt.save(tmp_path / "a", {"one": shared, "two": [shared, shared]})
    assert len(ckpt.inspect(tmp_path / "a").items["state"].leaves) == 3


def nested(depth: int) -> Any:
    tree: Any = 1.0
    for _ in range(depth):
        tree = {"a": tree}
    return tree


@pytest.mark.parametrize("depth", [MAX_DEPTH + 2, 5_000, 100_000])
def test_a_tree_that_is_too_deep_is_refused(tmp_path: Path, depth: int) -> None:
    tree = nested(depth)
    with pytest.raises(ckpt.UnsupportedLeaf, match="deep"):
        ckpt.save(tmp_path / "a", tree)
    ckpt.save(tmp_path / "b", {"w": 1})
    with pytest.raises(ckpt.UnsupportedLeaf, match="deep"):
        ckpt.load(tmp_path / "b", tree)


def test_a_deep_tree_on_a_deep_stack_gets_an_error_of_ours(tmp_path: Path) -> None:
    def deeper(count: int) -> None:
        if count:
            deeper(count - 1)
        else:
            ckpt.save(tmp_path / "a", nested(MAX_DEPTH - 10))

    with pytest.raises(ckpt.UnsupportedLeaf, match="nested too deeply for Python"):
        deeper(sys.getrecursionlimit() // 2)


def test_a_saved_structure_whose_keys_are_a_text_or_stand_twice_is_damage() -> None:
    """Each letter of a text would be a key; and nobody has renamed anything where two are equal."""
    with pytest.raises(ValueError, match="impossible keys"):
        load_nodes([["custom", "x:Y", ".."], 0, 0], [])
    leaf = LeafSpec("numpy", "float32", (2,))
    with pytest.raises(ckpt.CheckpointCorrupt, match="two leaves have the path 'a/b'"):
        match([(("a", "b"), leaf)] * 2, [(("a", "b"), leaf)], MatchRules())
