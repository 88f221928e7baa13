"""``frozen`` makes what ``dataclass(frozen=True)`` makes, and compiles ``__init__`` alone."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckpt_core._frozen import frozen


class Fields:
    name: str
    sizes: tuple[int, ...] = ()
    note: object = field(default=None, compare=False)
    secret: int = field(default=7, repr=False)
    options: dict[str, int] = field(default_factory=dict, hash=False)


class One:
    value: Any


class NoFields:
    pass


class Own:
    name: str = ""

    def __repr__(self) -> str:
        return "own"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self))

    def __hash__(self) -> int:
        return 4


class OwnEq:
    """Its hash comes from the fields, as a frozen dataclass has it."""

    name: str = ""

    def __eq__(self, other: object) -> bool:
        return True


def _copied(cls: type[Any], how: Callable[[type[Any]], Any]) -> Any:
    own = {
        name: what for name, what in vars(cls).items() if name not in ("__dict__", "__weakref__")
    }
    return how(type(cls.__name__, cls.__bases__, own))


@frozen(slots=True)
class Slots:
    name: str
    size: int = 1


@frozen
class Base:
    name: str


@frozen
class Below(Base):
    size: int = 1


VALUES: dict[str, tuple[type[Any], list[dict[str, Any]]]] = {
    "fields": (
        Fields,
        [
            {"name": "a"},
            {"name": "a", "note": 3},
            {"name": "a", "secret": 8},
            {"name": "b", "sizes": (1, 2)},
            {"name": "b", "sizes": (1, 2), "options": {"a": 1}},
        ],
    ),
    "one field": (One, [{"value": float("nan")}, {"value": 3}, {"value": (3,)}]),
    "no fields": (NoFields, [{}, {}]),
    "own methods": (Own, [{"name": "a"}, {"name": "b"}]),
    "own comparison": (OwnEq, [{"name": "a"}, {"name": "b"}]),
}


@pytest.mark.parametrize("name", VALUES)
def test_as_a_dataclass(name: str) -> None:
    cls, values = VALUES[name]
    ours, theirs = _copied(cls, frozen), _copied(cls, dataclass(frozen=True))
    assert inspect.signature(ours) == inspect.signature(theirs)
    one, other = [ours(**value) for value in values], [theirs(**value) for value in values]
    assert [repr(x).rpartition(".")[2] for x in one] == [repr(x).rpartition(".")[2] for x in other]
    assert [[x == y for x in one] for y in one] == [[x == y for x in other] for y in other]
    assert [len({x, y}) for x in one for y in one] == [len({x, y}) for x in other for y in other]
    assert not any(x == y for x in one for y in other if cls is not OwnEq)
    assert dataclasses.is_dataclass(ours) and ours.__dataclass_params__.frozen
    for x in one:
        with pytest.raises(dataclasses.FrozenInstanceError):
            x.name = "other"
        assert copy.deepcopy(x) == x


@pytest.mark.parametrize("value", [Slots("a", 2), Base("a"), Below("a", 2)], ids=repr)
def test_goes_to_other_processes(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value
    assert dataclasses.replace(value, name="b") != value


def test_what_inherits_is_no_other() -> None:
    assert Base("a") != Below("a", 1)
    assert repr(Below("a")) == "Below(name='a', size=1)"
    assert {Base("a"), Base("a"), Below("a")} == {Below("a"), Base("a")}
    assert not hasattr(Slots("a"), "__dict__")


def test_what_users_derive() -> None:
    @dataclass(frozen=True)
    class Mine(Below):
        more: int = 2

    assert Mine("a") == Mine("a", 1, 2) != Mine("a", 1, 3)


def test_keyword_only() -> None:
    made: Any = _copied(Fields, frozen(kw_only=True))
    with pytest.raises(TypeError, match="argument"):
        made("a")
    assert made(name="a").name == "a"


def test_an_object_that_holds_itself() -> None:
    held: list[Any] = []
    made = _copied(Fields, frozen)("a", note=held)
    held.append(made)
    assert "note=[...]" in repr(made)


def test_the_core_has_no_other_frozen_dataclasses() -> None:
    """But for the benchmark framework, whose options users derive from."""
    package = Path(inspect.getfile(frozen)).parent

    def others() -> Iterator[str]:
        for file in package.rglob("*.py"):
            inner = file.relative_to(package)
            if inner.parts[0] != "bench" and inner.name != "_frozen.py":
                yield from (
                    f"{inner}:{number}"
                    for number, line in enumerate(file.read_text().splitlines(), 1)
                    if line.lstrip().startswith("@") and "frozen=True" in line
                )

    assert not list(others())
