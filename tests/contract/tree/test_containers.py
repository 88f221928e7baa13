"""Classes of containers: what comes back without a target, what a target decides."""

import collections
import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.faults.crafted.signed import read_record, write_record
from tests.support.same_bits import bits
from tests.support.trees import Keyed, Keyless, Moments, Plain, Registered, assert_same, round_trip


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
    other = collections.namedtuple("Moments", "mu nu extra")
    monkeypatch.setattr(sys.modules[Moments.__module__], "Moments", other)
    got = ckpt.load(tmp_path / "c")["n"]
    assert got._fields == ("mu", "nu")
    assert tuple(got) == (1, 2)


def own_factory() -> int:
    return 7


def name_of(factory: Any) -> str:
    """For the names of tests, which must be the same in every process."""
    return getattr(factory, "__name__", str(factory))


def defaultdict_of(factory: Any) -> Any:
    return collections.defaultdict(factory, {"b": jnp.ones(2), "a": 3, 5: np.zeros(2)})


def assert_defaultdict(got: Any, factory: Any) -> None:
    assert type(got) is collections.defaultdict
    assert got.default_factory is factory
    assert list(got) == ["b", "a", 5]


def test_defaultdicts_of_builtins_come_back_without_a_target(tmp_path):
    every = [int, float, list, dict, set, collections.OrderedDict, None]
    ckpt.save(tmp_path / "a", [*map(defaultdict_of, every), 1])
    *found, one = ckpt.load(tmp_path / "a")
    assert one == 1
    for got, factory in zip(found, every, strict=True):
        assert_defaultdict(got, factory)
    assert_defaultdict(ckpt.load(tmp_path / "a", only="0/**")[0], int)


@pytest.mark.parametrize("factory", [int, None, own_factory, lambda: 3], ids=name_of)
def test_a_defaultdict_in_the_target_gives_its_factory(tmp_path, factory):
    ckpt.save(tmp_path / "a", defaultdict_of(factory))
    ckpt.save(tmp_path / "b", dict(defaultdict_of(factory)))
    for name in "ab":
        assert_defaultdict(ckpt.load(tmp_path / name, defaultdict_of(factory)), factory)
    assert type(ckpt.load(tmp_path / "a", dict(defaultdict_of(factory)))) is dict


@pytest.mark.parametrize("factory", [own_factory, lambda: 3, sys.exit], ids=name_of)
def test_a_factory_that_a_checkpoint_may_not_name_is_said(tmp_path, factory):
    ckpt.save(tmp_path / "a", defaultdict_of(factory))
    with pytest.warns(UserWarning, match="comes back as a dict.*Give a target"):
        got = ckpt.load(tmp_path / "a")
    assert type(got) is dict and list(got) == ["b", "a", 5]


def test_a_saved_structure_whose_keys_are_a_text_or_stand_twice_is_damage(tmp_path):
    """Each letter of a text would be a key; and nobody has renamed anything where two are equal."""
    ckpt.save(tmp_path / "a", {"a": 1, "b": 2})
    record = read_record(tmp_path / "a")
    assert record["items"]["state"]["nodes"][0][2] == ["a", "b"]
    for keys in ("ab", ["a", "a"]):
        record["items"]["state"]["nodes"][0][2] = keys
        write_record(tmp_path / "a", record)
        with pytest.raises(ckpt.CheckpointCorrupt):
            ckpt.load(tmp_path / "a", {"a": 0, "b": 0})


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Any
    b: Any = None


@dataclasses.dataclass
class OtherOrder:
    first: Any
    second: Any


jax.tree_util.register_dataclass(OtherOrder, ["second", "first"], [])


@pytest.mark.parametrize(
    "value",
    [
        Plain(1.5, 2),
        Frozen(Plain([1, 2], None)),
        Registered(1.5, 2),
        OtherOrder(1, 2),
        {"deep": [Registered(Moments(1, Frozen(2)), 3)]},
        Registered(1.5, 2, ("x", 2)),
    ],
    ids=repr,
)
def test_dataclasses_come_back_as_what_they_were(tmp_path, value):
    ckpt.save(tmp_path / "one", value)
    found = ckpt.load(tmp_path / "one")
    assert type(found) is type(value) and found == value


def test_what_cannot_be_made_again_comes_back_as_a_dict_of_its_fields(tmp_path, monkeypatch):
    ckpt.save(tmp_path / "one", {"p": Frozen(1.5), "o": OtherOrder(2.5, 1)})
    for cls in (Frozen, OtherOrder):
        fields = [*(field.name for field in dataclasses.fields(cls)), "new"]
        changed = dataclasses.make_dataclass(cls.__name__, fields)
        monkeypatch.setattr(sys.modules[__name__], cls.__name__, changed)
    found = ckpt.load(tmp_path / "one")
    assert found == {"p": {"inner": 1.5, "b": None}, "o": {"first": 2.5, "second": 1}}
