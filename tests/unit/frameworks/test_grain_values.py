"""Settings of a Grain pipeline count by value: arrays, functions, and objects without a ``repr``."""

from __future__ import annotations

import datetime
import enum
import functools
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_grain import ADAPTER, _arrays, ignore_pipeline_changes
from ckpt_grain._lines import FIRM, WHOLE
from ckpt_grain._pipeline import describe
from ckpt_grain._values import MAX_ITEMS, ValueText
from tests.support.grain_batches import READ, make_opened  # noqa: F401 (fixture)


class Plain:
    """Without a ``repr``, as most are."""

    def __init__(self, a: Any, b: Any = None) -> None:
        self.a, self._b, self.seen = a, b, []

    def apply(self, element: Any) -> Any:
        self.seen.append(element)
        return element


class Slotted:
    __slots__ = ("a",)

    def __init__(self, a: Any) -> None:
        self.a = a


class WithRepr(Plain):
    def __repr__(self) -> str:
        return f"WithRepr({self.a}, seen={len(self.seen)})"


@dataclass
class Hidden:
    table: Any = field(repr=False)


class Color(enum.Enum):
    RED = object()
    BLUE = object()


def keep(element: Any, z: Any = None) -> Any:
    return element


def make_closure(z: Any) -> Callable[[Any], Any]:
    return lambda element: (z, element)[1]


def make_default(z: Any) -> Callable[[Any], Any]:
    def function(element: Any, z: Any = z) -> Any:
        return element

    return function


def make_decorated(z: Any) -> Callable[[Any], Any]:
    @functools.wraps(keep)
    def function(element: Any) -> Any:
        return keep(element, z)

    return function


def double(element: Any) -> Any:
    return 2 * element


def halve(element: Any) -> Any:
    return element // 2


VALUES: dict[str, tuple[Any, Any]] = {
    "array": (np.ones(2), np.zeros(2)),
    "dtype": (np.ones(2, np.float32), np.ones(2, np.float64)),
    "long array": (np.arange(5000), np.arange(5000)[::-1]),
    "array of objects": (np.array(["a", None]), np.array(["b", None])),
    "array of texts": (np.array(["a", "b"]), np.array(["a", "c"])),
    "structured": (np.zeros(2, "i4,f8"), np.ones(2, "i4,f8")),
    "jax array": (jnp.ones(2), jnp.zeros(2)),
    "jax key": (jax.random.key(0), jax.random.key(1)),
    "nested": ({"a": [np.ones(2)]}, {"a": [np.zeros(2)]}),
    "keys": ({1: 2}, {"1": 2}),
    "long dict": (dict.fromkeys(range(20_000)), dict.fromkeys(range(20_000), 1)),
    "long list": (list(range(20_000)), [*range(19_999), -1]),
    "long bytes": (b"a" * 20_000, b"b" * 20_000),
    "object": (Plain(1), Plain(2)),
    "object with an array": (Plain(np.ones(2)), Plain(np.zeros(2))),
    "object, private": (Plain(1, 2), Plain(1, 3)),
    "object with slots": (Slotted(1), Slotted(2)),
    "object with a repr": (WithRepr(1), WithRepr(2)),
    "field without repr": (Hidden(np.ones(2)), Hidden(np.zeros(2))),
    "path": (Path("/a"), Path("/b")),
    "enum": (Color.RED, Color.BLUE),
    "dtype object": (np.dtype("f4"), np.dtype("f8")),
    "date": (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
    "pattern": (re.compile("a" * 300 + "b"), re.compile("a" * 300 + "c")),
    "lambda": (lambda x: x + 1, lambda x: x + 2),
    "operator": (operator.itemgetter(1), operator.itemgetter(2)),
    "class": (int, float),
}
# Those that a use may fill are left out where the pipeline was first seen in use.
FILLED_BY_USE = {"nested", "keys", "long dict", "long list"}

FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "lambda": (lambda x: x * 2, lambda x: x * 3),
    "constants in a set": (lambda x: x in {1, 2}, lambda x: x in {1, 3}),
    "names": (lambda x: np.sin(x), lambda x: np.cos(x)),
    "inside": (lambda x: [y + 1 for y in x], lambda x: [y + 2 for y in x]),
    "defaults": (lambda x, k=1: x * k, lambda x, k=2: x * k),
    "keywords": (lambda x, *, k=1: x * k, lambda x, *, k=2: x * k),
    "another": (double, halve),
    "jit": (jax.jit(double), jax.jit(halve)),
    "cache": (functools.lru_cache(double), functools.lru_cache(halve)),
    "ufunc": (np.negative, np.absolute),
    "method": (Plain(1).apply, Plain(2).apply),
    "object that is called": (functools.partial(double), functools.partial(halve)),
}


def assert_counts(one: Any, other: Any, seen_first: bool, run: Path, opened: Any) -> str:
    """A pipeline resumes with the same function, and is refused with another; the message."""
    data = opened(grain.MapDataset.range(40).map(one))
    with ckpt.Checkpointer(run, asynchronous=False) as checkpointer:
        if seen_first:
            assert checkpointer.restore_latest(data=data) is None
        checkpointer.save(1, data=data)
        checkpointer.restore_latest(data=opened(grain.MapDataset.range(40).map(one)))
        changed = opened(grain.MapDataset.range(40).map(other))
        with pytest.raises(ckpt.StructureMismatch, match="transform=") as refused:
            checkpointer.restore_latest(data=changed)
    return str(refused.value)


@pytest.mark.parametrize("seen_first", [True, False])
@pytest.mark.parametrize("name", VALUES)
def test_arguments_count_by_value(name: str, seen_first: bool, tmp_path, opened):
    one, other = VALUES[name]
    assert_counts(
        *(functools.partial(keep, z=z) for z in (one, other)), seen_first, tmp_path, opened
    )


@pytest.mark.parametrize("make", [make_closure, make_default, make_decorated])
@pytest.mark.parametrize("seen_first", [True, False])
@pytest.mark.parametrize("name", VALUES)
def test_what_a_function_holds_counts_by_value(name, seen_first, make, tmp_path, opened):
    one, other = VALUES[name]
    if seen_first or name not in FILLED_BY_USE:
        assert_counts(make(one), make(other), seen_first, tmp_path, opened)


@pytest.mark.parametrize("seen_first", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_count_by_what_they_do(name: str, seen_first: bool, tmp_path, opened):
    assert_counts(*FUNCTIONS[name], seen_first, tmp_path, opened)


class Scale(grain.transforms.Map):
    """A transformation without a ``repr``, with a cache."""

    def __init__(self, mean: Any, table: Any = None) -> None:
        self.mean, self._table = mean, table

    def map(self, element: Any) -> Any:
        self._table = np.zeros(3) if self._table is None else self._table
        return element


@pytest.mark.parametrize("seen_first", [True, False])
def test_a_transformation_without_a_repr_counts_by_what_it_was_given(seen_first, tmp_path, opened):
    def make(mean: Any) -> Any:
        return opened(grain.MapDataset.range(40).map(Scale(mean)))

    data = make(np.ones(2))
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        if seen_first:
            checkpointer.restore_latest(data=data)
        next(data)  # fills the table
        checkpointer.save(1, data=data)
        checkpointer.restore_latest(data=make(np.ones(2)))
        with pytest.raises(ckpt.StructureMismatch, match="Scale"):
            checkpointer.restore_latest(data=make(np.zeros(2)))


def remembers() -> Any:
    """A function that fills what it holds."""
    known: dict[int, int] = {}
    calls = 0

    def function(element: Any, last: list[Any] = []) -> Any:  # noqa: B006 - this is the point
        nonlocal calls
        calls += 1
        known[calls] = calls
        last.append(element)
        return element

    def steps(element: Any) -> Any:
        return function(element) if calls > 0 else steps_of(element)

    def steps_of(element: Any) -> Any:
        return steps(function(element))

    function.__defaults__ = ([],)
    return steps


@pytest.mark.parametrize("seen_first", [True, False])
def test_what_a_function_fills_as_it_is_used_is_no_setting(seen_first: bool, tmp_path, opened):
    data = opened(grain.MapDataset.range(40).map(remembers()))
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        if seen_first:
            checkpointer.restore_latest(data=data)
        for _ in range(3):
            next(data)
        checkpointer.save(1, data=data)
        again = opened(grain.MapDataset.range(40).map(remembers()))
        checkpointer.restore_latest(data=again)
    assert next(again).tolist() == next(data).tolist()


class Lazy:
    """A source that opens its file when it is first asked, and says so."""

    def __init__(self, path: str) -> None:
        self._path, self.file = path, None

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        self.file = object()
        return int(index)

    def __repr__(self) -> str:
        return f"Lazy({self._path}, open={self.file is not None})"


@pytest.mark.parametrize("seen_first", [True, False])
def test_a_source_counts_by_what_it_was_made_with(seen_first: bool, tmp_path, opened):
    data = opened(grain.MapDataset.source(Lazy("a")))
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        if seen_first:
            checkpointer.restore_latest(data=data)
        next(data)
        checkpointer.save(1, data=data)
        again = opened(grain.MapDataset.source(Lazy("a")))
        checkpointer.restore_latest(data=again)
        assert next(again).tolist() == [2, 3]
        with pytest.raises(ckpt.StructureMismatch, match="source=Lazy"):
            checkpointer.restore_latest(data=opened(grain.MapDataset.source(Lazy("b"))))


@dataclass
class Several(grain.transforms.Map):
    path: str
    size: int
    label: str = "a, b=(c"

    def map(self, element: Any) -> Any:
        return element


def test_a_mismatch_shows_values_whole(opened):
    def state(path: str) -> Any:
        return ADAPTER.get_state(opened(grain.MapDataset.range(40).map(Several(path, 3))))

    other = opened(grain.MapDataset.range(40).map(Several("other", 3)))
    with pytest.raises(ckpt.StructureMismatch) as refused:
        ADAPTER.set_state(other, state("one"))
    wanted = "Several(path={}, size=3, label='a, b=(c')"
    one, two = (f"transform={wanted.format(repr(path))}" for path in ("one", "other"))
    assert f"saved {one}, wanted {two}\n" in str(refused.value)
    with pytest.raises(ckpt.StructureMismatch) as refused:  # what is cut says that it is
        ADAPTER.set_state(other, state("one" * 200))
    assert re.search(r"saved transform=\".*\"\.\.\. sha256:\w+, wanted t", str(refused.value))


@pytest.mark.parametrize("how", ["firm", "in a way of later versions", None])
def test_a_description_in_an_unknown_way_is_compared_as_it_is(how: str | None, opened):
    dataset = grain.MapDataset.range(40).map(functools.partial(keep, z=np.ones(2)))
    data = opened(dataset)
    state = ADAPTER.get_state(data)
    pipeline = {**describe(data, FIRM), "told": how}
    if how is None:
        del pipeline["told"]
    ADAPTER.set_state(opened(dataset), {**state, "pipeline": pipeline})
    other = "by another name"
    lines = [line.replace("transform=keep", f"transform={other}") for line in pipeline["lines"]]
    changed = {**pipeline, "lines": lines, "digest": ""}
    with pytest.raises(ckpt.StructureMismatch, match=f"{other}(?s:.*)ignore_pipeline_changes"):
        ADAPTER.set_state(data, {**state, "pipeline": changed})
    ADAPTER.set_state(ignore_pipeline_changes(data), {**state, "pipeline": changed})


@pytest.mark.parametrize("how", [WHOLE, FIRM])
def test_another_python_compares_functions_by_name(how: str, opened):
    def make(function: Any, z: Any) -> Any:
        return opened(grain.MapDataset.range(40).map(functools.partial(function, z=z)))

    state = ADAPTER.get_state(make(keep, 1))
    saved = describe(make(keep, 1), how)
    lines = [re.sub(r"code \w{12}", "code 0123456789ab", line) for line in saved["lines"]]
    assert lines != saved["lines"]
    saved |= {"lines": lines, "digest": "of these", "python": "cpython-399"}
    ADAPTER.set_state(make(keep, 1), {**state, "pipeline": saved})
    for function, z in ((keep, 2), (double, 1)):
        with pytest.raises(ckpt.StructureMismatch):
            ADAPTER.set_state(make(function, z), {**state, "pipeline": saved})
    with pytest.raises(ckpt.StructureMismatch, match="code 0123456789ab"):
        ADAPTER.set_state(
            make(keep, 1),
            {**state, "pipeline": saved | {"python": describe(make(keep, 1), how)["python"]}},
        )


def test_functions_are_described_the_same_in_every_process(run_python: Any) -> None:
    code = """
import json
from ckpt_grain._values import ValueText
def make(z):
    return lambda x: x in {"a", "b", "c", "d"} and z
print(json.dumps(ValueText(firm=False).text(make({"e", "f", "g", "h"}))))
"""
    first, second = (run_python(code, PYTHONHASHSEED=seed) for seed in "12")
    assert first == second and "[code " in first


def test_docstrings_and_places_do_not_count():
    def text_of(text: str) -> str:
        names: dict[str, Any] = {"__name__": "here"}
        exec(text, names)
        return ValueText(firm=False).text(names["f"])

    plain = text_of("def f(x):\n    'one'\n    return x + 1")
    assert text_of("\n\n\ndef f(x):\n    'another'\n    # why\n    return x + 1") == plain
    assert text_of("def f(x):\n    'one'\n    return x + 2") != plain


def test_of_very_large_arrays_blocks_count(monkeypatch):
    monkeypatch.setattr(_arrays, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(_arrays, "BLOCK_BYTES", 80)
    text_of = ValueText(firm=False).text
    array = np.arange(100_000).reshape(1000, 100)
    found = text_of(array)
    assert text_of(array.copy()) == found
    for index in ((0, 0), (-1, -1)):
        changed = array.copy()
        changed[index] += 1
        assert text_of(changed) != found
    assert text_of(array.T) != found and text_of(np.asfortranarray(array)) == found


def test_lists_are_described_up_to_a_length():
    text_of = ValueText(firm=False).text
    short, long = list(range(MAX_ITEMS)), list(range(MAX_ITEMS + 1))
    assert "entries" not in text_of(short) and text_of(long).startswith(f"[{MAX_ITEMS + 1} entries")
