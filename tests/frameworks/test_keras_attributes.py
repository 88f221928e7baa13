"""Attributes of a PyDataset: what a step holds of them, and their fingerprints."""

from __future__ import annotations

import collections
import copy
import random
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from ckpt_keras import _attributes
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
        *(Sub([1, 2]), [np.ones(2)], {1: [2]}, {1, 2}, b"bytes", 10**5000, object(), iter([1])),
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
        one = _attributes.attributes(dataset)["order"]
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
from ckpt_keras import _attributes
print(json.dumps(_attributes.fingerprint({"a", "b", "c", "d"})))
"""
    assert run_python(code) == run_python(code) == _attributes.fingerprint({"a", "b", "c", "d"})


COLUMNS = st.sampled_from(
    [
        ["a", "b", "a"],
        ["b", "a", "a"],
        ("a", "b", "a"),
        [1, 2, 1],
        [2, 1, 1],
        [1, 1, 2],
        [True, 2, 1],
        [1.0, 2.0, 1.0],
        [np.int64(1), 2, 1],
        ["1", "2", "1"],
        [1, "a", None],
        ["a", "b"],
        [object(), object(), object()],
        np.array([1, 2, 1]),
        np.array([1, 1, 2], np.int32),
        np.array([[1, 2], [2, 1], [1, 2]]),
        np.array(["a", "b", "a"]),
    ]
)


def of_one_length(columns: list[Any]) -> bool:
    return len({len(column) for column in columns}) == 1


SIDES = st.lists(COLUMNS, min_size=1, max_size=2).filter(of_one_length)


@hypothesis.settings(max_examples=400)
@hypothesis.given(SIDES, SIDES)
def test_rows_are_compared_as_their_sums_are(now: list[Any], before: list[Any]) -> None:
    hypothesis.assume(len(now) == len(before))
    sums = [_attributes.rows(side) for side in (now, before)]
    assert _attributes.same_rows(now, before) == (sums[0] == sums[1])
