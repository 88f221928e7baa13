"""Columns that a PyDataset shuffles together: in dicts and tuples, in a flat array, in elements that change in place."""

from __future__ import annotations

import collections
import copy
import random
from typing import Any

import numpy as np
import pytest

from ckpt_keras import _rows
from ckpt_keras._kept import Kept
from tests.support.py_datasets import ALL, Batches, made_as

FILES = [f"file {place}" for place in range(ALL)]
LABELS = list(range(ALL))

FORMS = {
    "dict": lambda x, y: {"x": x, "y": y},
    "arrays": lambda x, y: {"x": np.array(x), "y": np.array(y)},
    "tuple": lambda x, y: (x, y),
    "array in a tuple": lambda x, y: (x, np.array(y)),
    "list": lambda x, y: [x, y],
    "axis": lambda x, y: np.array([[FILES.index(one) for one in x], y]),
    "nested": lambda x, y: {"train": (x, y), "classes": ["a", "b"], "size": 3},
    "counter": lambda x, y: {0: x, 1: y, "drawn": random.random()},
    "apart": lambda x, y: {"x": x, "y": y, "partners": random.sample(range(ALL), ALL)},
}


@pytest.mark.parametrize("form", FORMS)
def test_columns_in_one_attribute_come_back_or_are_held(form: str):
    """A label that was corrected between the runs was undone without a word."""

    def make(order: Any, *corrected: int) -> Any:
        labels = [one + 100 * (one in corrected) for one in LABELS]
        return FORMS[form](*([of[place] for place in order] for of in (FILES, labels)))

    dataset: Any = Batches()
    dataset.data = make(range(ALL))
    kept = Kept(dataset)
    for _ in range(2):
        dataset.data = make(random.sample(range(ALL), ALL))
        kept.ended()
    state = kept.state()
    again: Any = Batches()
    again.data = make(range(ALL))
    assert made_as(state, again) == []
    assert str(again.data) == str(dataset.data)
    again.data = corrected = make(range(ALL), 3)
    (said,) = made_as(state, again)
    assert said.startswith("Batches.data had other elements")
    assert again.data is corrected


def test_columns_that_are_shuffled_in_place_are_compared_with_what_they_were():
    dataset: Any = Batches()
    dataset.data = {"x": list(FILES), "y": np.array(LABELS)}
    kept = Kept(dataset)
    order = random.sample(range(ALL), ALL)
    dataset.data["x"][:] = [FILES[place] for place in order]
    dataset.data["y"][:] = order
    kept.ended()
    (columns,) = kept.state()["rows"]
    assert columns == '[["data", ["key", "x"]], ["data", ["key", "y"]]]'
    again: Any = Batches()
    again.data = {"x": list(FILES), "y": np.array([LABELS[1], LABELS[0], *LABELS[2:]])}
    assert made_as(kept.state(), again)[0].startswith("Batches.data had other elements")
    assert again.data["x"] == FILES


BESIDE = {
    "map of labels": ({"a": 0, "b": 1}, {"a": 1, "b": 0}),
    "text": ("train", "test"),
    "only one": ([FILES[0]], [FILES[1]]),
    "other names": ({"a": 0}, {"a": 0, "b": 0}),
    "one array": (np.zeros(1), np.ones(1)),
    "order of names": (["cat", "dog"], ["dog", "cat"]),
    "order of an array": (np.array(["cat", "dog"]), np.array(["dog", "cat"])),
}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("kind", BESIDE)
def test_what_is_corrected_beside_the_columns_holds_them_back(kind: str, nested: bool):
    """The step's came back without a word: the map of labels that was wrong."""

    def make(beside: Any) -> Any:
        dataset: Any = Batches()
        inner = {"x": list(FILES), "y": np.array(LABELS), "beside": copy.copy(beside), "epoch": 0}
        inner |= {"last": "", "seen": []}
        dataset.data = {"train": inner, "size": 3} if nested else inner
        return dataset

    def change(dataset: Any) -> None:
        inner = dataset.data["train"] if nested else dataset.data
        order = random.sample(range(ALL), ALL)
        inner["x"][:] = [inner["x"][place] for place in order]
        inner["y"] = inner["y"][order]
        inner["epoch"] += 1
        inner["last"] = inner["x"][0]
        inner["seen"].append(inner["last"])

    was, corrected = BESIDE[kind]
    dataset = make(was)
    kept = Kept(dataset)
    change(dataset)
    kept.ended()
    again = make(was)
    assert made_as(kept.state(), again) == []
    assert str(again.data) == str(dataset.data)
    kept = Kept(again)
    change(again)
    kept.ended()
    other = make(corrected)
    before = copy.deepcopy(other.data)
    assert made_as(kept.state(), other)[0].startswith("Batches.data had other elements")
    assert str(other.data) == str(before)


def test_what_changes_beside_the_columns_comes_back():
    """A history that grows differs from the program's whenever fit begins anew."""
    dataset: Any = Batches()
    dataset.data = {"x": list(FILES), "history": {}}
    kept = Kept(dataset)
    for epoch in range(2):
        random.shuffle(dataset.data["x"])
        dataset.data["history"] |= {f"{epoch}": f"{epoch}"}
        kept.ended()
    again: Any = Batches()
    again.data = {"x": list(FILES), "history": {"by": "hand"}}
    assert made_as(kept.state(), again) == []
    assert again.data == dataset.data


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("kind", [list, np.array])
def test_labels_in_a_flat_array_belong_to_rows(kind: Any, beside: bool):
    """Two labels were exchanged between the runs: its elements are the same, but not its rows."""

    def flat(labels: list[int]) -> Any:
        pairs = np.array([labels, [0] * ALL])
        return kind((pairs.T if beside else pairs).ravel().tolist())

    def make(order: Any, labels: list[int]) -> Any:
        dataset: Any = Batches()
        dataset.order = None
        dataset.a_flat = flat([labels[place] for place in order])
        dataset.files = [FILES[place] for place in order]
        return dataset

    dataset = make(range(ALL), LABELS)
    kept = Kept(dataset)
    shuffled = make(random.sample(range(ALL), ALL), LABELS)
    dataset.a_flat, dataset.files = shuffled.a_flat, shuffled.files
    kept.ended()
    again = make(range(ALL), LABELS)
    assert made_as(kept.state(), again) == []
    assert again.files == dataset.files and list(again.a_flat) == list(dataset.a_flat)
    again = make(range(ALL), [LABELS[1], LABELS[0], *LABELS[2:]])
    (said,) = made_as(kept.state(), again)
    assert said.startswith("Batches.a_flat, Batches.files had other elements")
    assert again.files == FILES


def test_elements_that_change_in_place_in_the_first_epoch_are_other_elements():
    """What fit began with was read only after it had changed, and held all back after a restart."""

    def make() -> Any:
        dataset: Any = Batches()
        dataset.samples = [[place, place * 2, 1.0] for place in range(ALL)]
        return dataset

    dataset = make()
    kept = Kept(dataset)
    random.shuffle(dataset.samples)
    for sample in dataset.samples:
        sample[2] *= 0.5
    kept.ended()
    again = make()
    assert made_as(kept.state(), again) == []
    assert again.samples == dataset.samples


@pytest.mark.parametrize(
    ("value", "columns"),
    [
        ([], []),
        ([1, 2], [()]),
        ([[1, 2], [3, 4]], [()]),
        ({"a": 1}, []),
        ({"a": [1, 2], (1, 2): [3, 4]}, [(("key", "a"),)]),
        ({place: [1, 2] for place in range(1025)}, []),
        ({np.int64(3): [1, 2]}, [(("key", 3),)]),
        (np.ones((17, 2)), [()]),
        ((np.ones(17), np.ones((17, 3))), [(("key", 0),), (("key", 1),)]),
    ],
    ids=range(9),
)
def test_where_columns_are(value: Any, columns: Any):
    assert [steps for _, *steps in _rows.columns(value, "name")] == [list(one) for one in columns]


CLASSES = np.arange(ALL) % 6


def as_lists() -> Any:
    places: Any = collections.defaultdict(list)
    for place, label in enumerate(CLASSES.tolist()):
        places[label].append(place)
    return places


@pytest.mark.parametrize(
    "make",
    [
        as_lists,
        lambda: {label: np.flatnonzero(label == CLASSES) for label in np.unique(CLASSES)},
        lambda: {label: np.arange(label % 7) for label in range(100)},
        lambda: collections.OrderedDict((str(label), [label, 3]) for label in range(100)),
    ],
    ids=["defaultdict", "numbers of numpy", "many", "OrderedDict"],
)
def test_places_of_each_class_come_back(make: Any):
    """Only plain dicts with keys of Python came back; all others held the order back."""
    dataset: Any = Batches()
    dataset.by_class = make()
    kept = Kept(dataset)
    for places in dataset.by_class.values():
        np.random.shuffle(places)
    np.random.shuffle(dataset.order)
    kept.ended()
    again: Any = Batches()
    again.by_class = its_own = make()
    assert made_as(kept.state(), again) == []
    assert again.by_class is its_own
    assert str(its_own) == str(dataset.by_class)
    assert np.array_equal(again.order, dataset.order)

    label = next(key for key, places in its_own.items() if len(places) > 1)
    again.by_class = make()
    again.by_class[label][0] = 1000
    before = copy.deepcopy(again.by_class)
    assert made_as(kept.state(), again)[0].startswith("Batches.by_class")
    assert str(again.by_class) == str(before)
