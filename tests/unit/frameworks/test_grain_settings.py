"""What counts as a setting of a Grain pipeline: how it was made, and nothing that its use fills in."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_grain import ADAPTER, ignore_pipeline_changes, with_proof
from ckpt_grain._lines import FIRM, WHOLE
from ckpt_grain._pipeline import describe
from tests.support.grain_batches import READ, make_opened  # noqa: F401 (fixture)


class Words:
    """A tokenizer that takes long to load."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"Words({self.path!r})"


@dataclass
class LazyField(grain.transforms.Map):
    path: str
    words: Any = None

    def map(self, element: Any) -> Any:
        self.words = self.words or Words(self.path)
        return element


@dataclass
class Cache(grain.transforms.Map):
    path: str
    known: dict[int, int] = field(default_factory=dict)

    def map(self, element: Any) -> Any:
        return self.known.setdefault(int(element), int(element))


@dataclass
class NotOfTheConstructor(grain.transforms.Map):
    path: str
    calls: int = field(default=0, init=False)

    def map(self, element: Any) -> Any:
        self.calls += 1
        return element


class CountsInItsRepr(grain.transforms.Map):
    def __init__(self, path: str) -> None:
        self.path, self.calls = path, 0

    def map(self, element: Any) -> Any:
        self.calls += 1
        return element

    def __repr__(self) -> str:
        return f"CountsInItsRepr({self.path!r}, calls={self.calls})"


@dataclass
class CountsItsCalls(grain.transforms.Map):
    path: str
    calls: int = 0

    def map(self, element: Any) -> Any:
        self.calls += 1
        return element


class OwnNode(grain.MapDataset):
    """A dataset of one's own, which remembers what it gave."""

    def __init__(self, parent: Any, path: str) -> None:
        super().__init__(parent)
        self._path, self._last = path, None

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: int) -> Any:
        self._last = (index, self._parent[index])
        return self._last[1]


def mapped(cls: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda path: grain.MapDataset.range(40).map(cls(path))


LAZY = {
    cls.__name__: mapped(cls) for cls in (LazyField, Cache, NotOfTheConstructor, CountsInItsRepr)
} | {"OwnNode": lambda path: OwnNode(grain.MapDataset.range(40), path)}
FIRST_SEEN_ONLY = {"CountsItsCalls": mapped(CountsItsCalls)}
"""Settings that only an early look distinguishes from what a use has changed."""


def values(iterator: Any, number: int) -> list[list[int]]:
    return [np.asarray(next(iterator)).tolist() for _ in range(number)]


@pytest.mark.parametrize("name", LAZY | FIRST_SEEN_ONLY)
def test_an_unchanged_pipeline_resumes_in_the_loop_of_the_readme(name: str, tmp_path, opened):
    make = (LAZY | FIRST_SEEN_ONLY)[name]
    straight = values(opened(make("a")), 8)
    for start in (0, 3, 6):  # a third attempt resumes from what the second saved
        data = opened(make("a"))
        with ckpt.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
            restored = checkpointer.restore_latest(data=data)
            assert (restored.step + 1 if restored else 0) == start
            for step in range(start, min(start + 3, 8)):
                assert values(data, 1) == straight[step : step + 1]
                checkpointer.save(step, data=data)
    changed = opened(make("b"))
    checkpointer = ckpt.Checkpointer(tmp_path / "run")
    with checkpointer, pytest.raises(ckpt.StructureMismatch, match=r"'a'.*'b'"):
        checkpointer.restore_latest(data=changed)


@pytest.mark.parametrize("name", LAZY)
def test_an_unchanged_pipeline_resumes_though_it_was_first_seen_in_use(name: str, tmp_path, opened):
    data = opened(LAZY[name]("a"))
    before = values(data, 3)
    ckpt.save(tmp_path / "one", data=data)
    after = values(data, 3)
    again = opened(LAZY[name]("a"))
    ckpt.restore(tmp_path / "one", data=again)
    assert values(again, 3) == after and before != after


@pytest.mark.parametrize("name", sorted(LAZY.keys() - {"CountsInItsRepr"}))
def test_what_was_given_to_the_constructor_counts_however_it_was_seen(name, tmp_path, opened):
    data = opened(LAZY[name]("a"))
    values(data, 3)
    ckpt.save(tmp_path / "one", data=data)
    with pytest.raises(ckpt.StructureMismatch, match=r"'a'.*'b'"):
        ckpt.restore(tmp_path / "one", data=opened(LAZY[name]("b")))


@dataclass
class Optional(grain.transforms.Map):
    vocabulary: Any = None
    limit: int | None = None

    def map(self, element: Any) -> Any:
        return element


@pytest.mark.parametrize("changed", [{"limit": 5}, {"vocabulary": {"a": 2}}])
def test_optional_settings_count_where_they_were_seen_at_the_start(changed, tmp_path, opened):
    given = {"limit": 4, "vocabulary": {"a": 1}}
    data = opened(grain.MapDataset.range(40).map(Optional(**given)))
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        assert checkpointer.restore_latest(data=data) is None
        values(data, 2)
        checkpointer.save(1, data=data)
        other = opened(grain.MapDataset.range(40).map(Optional(**given | changed)))
        with pytest.raises(ckpt.StructureMismatch, match=next(iter(changed))):
            checkpointer.restore_latest(data=other)


def scale(element: Any, m: int, *, n: int = 0) -> Any:
    return element * m + n


@pytest.mark.parametrize("seen_first", [True, False])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (functools.partial(scale, m=2), functools.partial(scale, m=3)),
        (functools.partial(scale, m=2, n=1), functools.partial(scale, m=2)),
        (functools.partial(scale, m=np.int64(2)), functools.partial(scale, m=np.int64(5))),
        (
            functools.partial(functools.partial(scale, m=2), n=1),
            functools.partial(functools.partial(scale, m=2), n=4),
        ),
    ],
)
def test_arguments_of_a_partial_are_settings(one, other, seen_first: bool, tmp_path, opened):
    data = opened(grain.MapDataset.range(40).map(one))
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        if seen_first:
            checkpointer.restore_latest(data=data)
        values(data, 2)
        checkpointer.save(1, data=data)
        same = opened(grain.MapDataset.range(40).map(copy.copy(one)))
        checkpointer.restore_latest(data=same)
        changed = opened(grain.MapDataset.range(40).map(other))
        with pytest.raises(ckpt.StructureMismatch, match=r"saved .*[mn]="):
            checkpointer.restore_latest(data=changed)


@pytest.mark.parametrize("wrap", [lambda data: data, with_proof])
@pytest.mark.parametrize("saved", [2, 3, 16])
def test_another_number_of_processes_is_never_waved_through(saved: int, wrap, opened):
    state = ADAPTER.get_state(opened(grain.MapDataset.range(40)))
    state["pipeline"]["processes"] = saved
    data = wrap(opened(grain.MapDataset.range(40)))
    for target in (data, ignore_pipeline_changes(data)):
        with pytest.raises(ckpt.StructureMismatch, match=f"saved {saved}, wanted 1") as refused:
            ADAPTER.set_state(target, state)
        text = str(refused.value)
        assert "ignore_pipeline_changes" not in text  # which would be refused as well
        assert "as many processes as saved it" in text and "begin the data anew" in text
        assert "ElasticIterator" in text and "unexpected='ignore'" in text
    assert values(data, 1) == [[0, 1]]  # nothing was moved


def test_a_changed_pipeline_may_be_accepted_and_only_then_is_that_advised(tmp_path: Path, opened):
    ckpt.save(tmp_path / "one", data=opened(grain.MapDataset.range(40)))
    other = opened(grain.MapDataset.range(44))
    with pytest.raises(ckpt.StructureMismatch, match="ignore_pipeline_changes"):
        ckpt.restore(tmp_path / "one", data=other)
    ckpt.restore(tmp_path / "one", data=ignore_pipeline_changes(other))


def test_what_is_described_firmly_leaves_out_only_what_a_use_may_fill(opened):
    data = opened(grain.MapDataset.range(40).seed(3).shuffle().map(Optional({"a": 1}, 7)))
    whole, firm = (" ".join(describe(data, how)["lines"]) for how in (WHOLE, FIRM))
    assert "Optional(vocabulary={a: 1}, limit=7)" in whole and "Optional(limit=7)" in firm
    assert whole.replace("vocabulary={a: 1}, ", "") == firm
