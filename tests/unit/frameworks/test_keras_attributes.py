"""Attributes of a PyDataset: what a step holds of them, and their fingerprints."""

from __future__ import annotations

import collections
import copy
import functools
import random
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from ckpt_keras import _attributes, _rows
from ckpt_keras._owners import Found, attributes
from tests.support import keras_models as km
from tests.support.py_datasets import Batches, Sub, Table

keras = km.keras


VALUES = [
    3,
    2.5,
    "text",
    None,
    np.float32(1.5),
    np.array([3, 1, 2]),
    np.array(["b", "a"]),
    np.ones((2, 2), np.float16),
    [3, 1, 2],
    (3, 1, 2),
    {"a": [1, 2]},
    {"a": np.ones(3), 1: ["b"]},
    [np.int64(3), np.int64(1)],
    (np.str_("bb"), np.str_("a")),
    [(np.ones(2), np.array(["b"])), 1],
    random.Random(3),
    np.random.default_rng(3),
    np.random.RandomState(3),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_with_their_types(value):
    held = _attributes.stored(value)
    assert held is not None
    back = _attributes.restored(copy.deepcopy(held), copy.deepcopy(value))
    assert type(back) is type(value)
    assert _attributes.fingerprint(back) == _attributes.fingerprint(value)


@pytest.mark.parametrize(
    "value",
    [
        *(
            Sub([1, 2]),
            [np.ones(2), {1}],
            {1: np.ones(3 << 20)},
            {1, 2},
            b"bytes",
            10**5000,
            object(),
            iter([1]),
        ),
        *(np.ones(2, np.longdouble), np.ma.masked_array([1, 2], [True, False])),
        *(np.array([[1], None], object), np.zeros((3 << 20, 2))),
        *(random.SystemRandom(), type("Random", (random.Random,), {})(), collections.deque([1])),
    ],
    ids=range(15),
)
def test_what_a_step_does_not_hold(value: Any):
    assert _attributes.stored(value) is None


def test_a_generator_with_children_cannot_be_set():
    """Its state does not say how many it has had."""
    generator = np.random.default_rng(3)
    generator.spawn(1)
    assert _attributes.stored(generator) is None


def test_an_array_of_a_file_is_not_written(tmp_path: Path):
    file = np.memmap(tmp_path / "places", np.int64, "w+", shape=(4,))
    for value in (np.asarray(file)[:], file):
        dataset: Any = Batches()
        dataset.order = value
        one = attributes(dataset, Found(dataset))["order"]
        _attributes.put(one, np.ones(4, np.int64), in_place=True)
        assert not file.any() and dataset.order.all()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2, 3], [1, 3, 2]),
        ((1, 2), (2, 1)),
        (np.arange(3), np.arange(3)[::-1]),
        (np.arange(3), np.arange(4)),
        (np.arange(3), np.arange(3.0)),
        (np.array(["a", None], object), np.array([None, "a"], object)),
        (np.arange(5 << 20), np.roll(np.arange(5 << 20), 1)),
        (list(range(1 << 21)), list(range(1 << 21))[::-1]),
        ([0] * 99_999 + [1], [1] + [0] * 99_999),
        (np.eye(1, 5 << 20, 9)[0], np.eye(1, 5 << 20, 8)[0]),  # 40 MiB, and one that is not 0
        ({"paths": ["a", "b"]}, {"paths": ["b", "a"]}),
        ({0: 1, 1: 2}, {0: 2, 1: 1}),
        ([Table([1, 2])], [Table([2, 1])]),
        ([b"a", b"b"], [b"b", b"a"]),
        ([np.ones(2), np.zeros(2)], [np.zeros(2), np.ones(2)]),
        ([{"box": [1]}, {"box": [2]}], [{"box": [2]}, {"box": [1]}]),
        (["\ud800", "a"], ["a", "\ud800"]),
        # images with one border
        (
            [np.r_[np.zeros(6000), np.full(4000, one)] for one in (1, 2)],
            [np.r_[np.zeros(6000), np.full(4000, one)] for one in (2, 1)],
        ),
    ],
)
def test_fingerprints_tell_sequences_apart(one: Any, other: Any):
    assert _attributes.fingerprint(one) == _attributes.fingerprint(copy.copy(one))
    assert _attributes.fingerprint(one) != _attributes.fingerprint(other)


def test_equal_values_are_equal_in_every_process(run_python: Any):
    """Which parts they share does not count, nor the seeds of hashes and generators."""
    shared = [1.5, "a"]
    assert _attributes.fingerprint([shared, shared]) == _attributes.fingerprint(
        [[1.5, "a"], [1.5, "ab"[:1]]]
    )
    one, other = np.random.default_rng(), np.random.default_rng()
    other.bit_generator.state = one.bit_generator.state
    assert _attributes.fingerprint([one]) == _attributes.fingerprint([other])
    code = """
import json
from ckpt_keras import _attributes, _rows
from ckpt_keras._owners import Found, attributes
print(json.dumps(_attributes.fingerprint({"a", "b", "c", "d"})))
"""
    assert run_python(code) == run_python(code) == _attributes.fingerprint({"a", "b", "c", "d"})


PLAIN = st.one_of(
    st.lists(st.sampled_from("abc"), min_size=3, max_size=3),
    st.lists(st.integers(0, 2), min_size=3, max_size=3),
)
SIDES = st.lists(PLAIN, min_size=2, max_size=2)


@hypothesis.settings(max_examples=400)
@hypothesis.given(SIDES, SIDES)
def test_rows_are_compared_as_their_sums_are(now: list[Any], before: list[Any]) -> None:
    for columns in ((now[:1], before[:1]), (now, before)):
        sums = [_rows.sum_of(side) for side in columns]
        assert _rows.same(*columns) == (sums[0] == sums[1])


@pytest.mark.parametrize(
    "value", [[True, 1], [1, "a"], [1.0], [np.int64(1)], np.arange(3), [[1]]], ids=range(6)
)
def test_what_may_be_changed_in_place_or_equals_another_is_not_plain(value: Any) -> None:
    assert not _rows.is_plain(value)
    assert _rows.is_plain(["a", "b"])
    assert _rows.is_plain((1, 2))


@pytest.mark.parametrize(
    "value", [{1: [2], "a": 3}, {"b": {"a": 1}}, {2: "x", 1: "y"}, {}], ids=range(4)
)
def test_dicts_come_back_with_their_keys(value: Any) -> None:
    again = _attributes.restored(_attributes.stored(value), {})
    assert again == value
    assert list(again) == list(value)


def test_equal_arrays_have_one_fingerprint_whatever_their_strides() -> None:
    for side in (8, 400):  # a large one is read by itself
        value = np.arange(side * side).reshape(side, side)
        made = [value, value.T.copy().T, np.repeat(value, 2, 0)[::2], value[::-1].copy()[::-1]]
        assert len({_attributes.fingerprint(one) for one in made}) == 1
        assert len({_attributes.fingerprint([one, one]) for one in made}) == 1
        assert _attributes.fingerprint(value.T) != _attributes.fingerprint(value)


def test_a_large_array_that_many_share_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    write = _attributes._Sum.write  # pyright: ignore[reportPrivateUsage]

    def count(into: Any, data: Any) -> int:
        counted.append(memoryview(data).nbytes)
        return write(into, data)

    monkeypatch.setattr(_attributes._Sum, "write", count)  # pyright: ignore[reportPrivateUsage]
    shared = np.ones(1 << 20, np.uint8)
    samples = [Table((shared, number)) for number in range(50)]
    print_of = _attributes.fingerprint(samples)
    assert sum(counted) < 2 * shared.nbytes
    assert print_of == _attributes.fingerprint([Table((shared.copy(), n)) for n in range(50)])


def test_functions_of_the_global_random_state_stay_the_same() -> None:
    """`self.shuffle = np.random.shuffle` held all back: the state is no part of the dataset."""
    for function in (random.shuffle, np.random.shuffle):
        before = _attributes.fingerprint([function])
        function([1, 2, 3])
        assert _attributes.fingerprint([function]) == before
    generator = np.random.RandomState(3)
    before = _attributes.fingerprint([generator.bytes])
    generator.shuffle([1, 2, 3])
    assert _attributes.fingerprint([generator.bytes]) != before


def test_functions_that_remember_results_are_what_they_compute() -> None:
    """`self.load = functools.lru_cache(8)(self.read)` could not be looked into."""
    read = Table([1, 2]).columns.index
    load = functools.lru_cache(8)(read)
    before = _attributes.fingerprint(load)
    load(2)
    assert _attributes.same(_attributes.fingerprint(load), before)
    other = functools.lru_cache(8)(Table([2, 1]).columns.index)
    assert _attributes.fingerprint(other) != before


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_numbers_of_numpy_is_read_as_an_array(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pickle took 25 s for a million, several times in each epoch."""
    asked: list[Any] = []
    real = _attributes._Pickler.reducer_override
    monkeypatch.setattr(
        _attributes._Pickler,
        "reducer_override",
        lambda self, value: asked.append(value) or real(self, value),
    )
    order = kind(np.random.default_rng(0).permutation(10_000))
    print_of = _attributes.fingerprint(order)
    assert len(asked) < 10
    assert print_of != _attributes.fingerprint(kind(sorted(order)))
    assert print_of != _attributes.fingerprint(kind(map(np.int32, order)))
    mixed = kind([np.int64(1), np.float64(2.5)])
    assert _attributes.fingerprint(mixed) != _attributes.fingerprint(kind([np.int64(1), 2.5]))
