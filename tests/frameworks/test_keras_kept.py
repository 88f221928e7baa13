"""What is kept of a PyDataset, and what is set of it: without ``fit``."""

from __future__ import annotations

import collections
import copy
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_keras import _attributes
from ckpt_keras._kept import Kept
from tests.support import keras_models as km
from tests.support.py_datasets import ALL, Batches, Global, Labelled, Large, Names

keras = km.keras


def kept_after(make: Any, epochs: int) -> tuple[Any, dict[str, Any]]:
    dataset = make()
    dataset.on_epoch_end()
    kept = Kept(dataset)
    for _ in range(epochs):
        dataset.on_epoch_end()
        kept.ended()
    return dataset, kept.state()["attributes"]


def test_the_data_itself_is_not_saved():
    for epochs in (0, 2):
        _, saved = kept_after(Global, epochs)
        assert set(saved) == {"order", "rng"}
    _, saved = kept_after(Batches, 2)
    assert set(saved) == {"rng"}


def test_an_order_is_one_of_what_is_there():
    """A run whose files were renamed trains on the new ones."""
    dataset, saved = kept_after(Names, 2)
    again = Names()
    again.samples[3] = ("renamed", 3)
    with pytest.warns(
        UserWarning, match=r"Names.samples is not as in the checkpoint \(48 elements"
    ):
        Kept(again).set({"attributes": {"samples": saved["samples"]}})
    assert ("renamed", 3) in again.samples

    same = Names()
    same.on_epoch_end()
    elements = {id(one) for one in same.samples}
    Kept(same).set({"attributes": saved})
    assert same.samples == dataset.samples and {id(one) for one in same.samples} == elements
    assert same.order == dataset.order


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
@pytest.mark.parametrize("renewed", [False, True])
def test_values_come_back_with_their_types(value, renewed):
    held = _attributes.stored(value, renewed=renewed)
    assert held is not None
    back = _attributes.restored(copy.deepcopy(held), copy.deepcopy(value))
    assert type(back) is type(value)
    assert _attributes.seen(back).content == _attributes.seen(value).content


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([1, 2, 3], [1, 3, 2]),
        (np.arange(3), np.arange(3)[::-1]),
        (np.arange(5 << 20), np.arange(5 << 20)[::-1]),
        ({"a": 1}, {"a": 2}),
        ([[1], [2]], [[2], [1]]),
        (np.array([[1], None], object), np.array([None, [1]], object)),
    ],
)
def test_a_change_is_seen(before, after):
    assert _attributes.seen(before).content == _attributes.seen(copy.copy(before)).content
    assert _attributes.seen(before).content != _attributes.seen(after).content
    assert _attributes.seen(before).elements == _attributes.seen(after).elements or isinstance(
        before, dict
    )


@pytest.mark.parametrize(
    "value", [{"a": np.ones(2)}, [np.ones(2)], {1: [2]}, keras.layers.Dense(1)]
)
def test_what_stays_is_no_change(value):
    assert _attributes.seen(value).content == _attributes.seen(value).content


def test_a_change_inside_an_object_is_seen():
    class Sampler:
        def __init__(self) -> None:
            self.order = [1, 2, 3]

    sampler = Sampler()
    before = _attributes.seen(sampler)
    assert before.content == _attributes.seen(sampler).content
    sampler.order.reverse()
    assert before.content != _attributes.seen(sampler).content


def test_a_dataset_without_a_state_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = Kept(keras.utils.PyDataset())
        kept.ended()
        kept.set({})
    assert not any(kept.state().values())


class Places(Labelled):
    """Places beside labels that are shuffled, too, as nobody would; and what cannot be looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.on_epoch_end()
        np.random.shuffle(self.order)


def test_places_are_set_in_the_first_epoch_if_nothing_else_differs():
    dataset = Places()
    state = Kept(dataset).state()
    assert set(state["attributes"]) == {"order", "rng"}
    assert set(state["constant"]) == {"x", "y", "files", "labels"}
    same = copy.deepcopy(dataset)
    order = same.order
    np.random.shuffle(order)
    Kept(same).set(state)
    assert same.order is order and np.array_equal(order, dataset.order)  # others may hold it, too

    again = Places()
    before = again.order.copy()
    what = r"Places.order cannot .* with Places.files, Places.labels, and all stay"
    with pytest.warns(UserWarning, match=what):
        Kept(again).set(state)
    assert np.array_equal(again.order, before)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        collections.deque([1, 2]),
        [{1}],
        [collections.deque([1])],
        [object()],
        {"deep": {"deeper": {"deepest": {"still": {"deeper": [1]}}}}},
        np.array([[1], {2}, None], object),
    ],
    ids=range(7),
)
def test_what_cannot_be_looked_into_may_belong_to_an_order(value: Any):
    dataset = Batches()
    np.random.shuffle(dataset.order)
    dataset.labels = value
    assert _attributes.fingerprint(value) == _attributes.UNKNOWN
    state = Kept(dataset).state()
    Kept(copy.copy(dataset)).set(state)  # nothing moves
    again = copy.copy(dataset)
    again.order = dataset.order[::-1].copy()
    before = again.order.copy()
    with pytest.warns(UserWarning, match=r"Batches.order cannot .* with Batches.labels, and all"):
        Kept(again).set(state)
    assert np.array_equal(again.order, before)


def test_a_step_that_does_not_say_what_else_there_was_is_not_trusted_in_the_first_epoch():
    dataset = Labelled()
    dataset.on_epoch_end()
    held = _attributes.stored(dataset.files, renewed=False)
    again = Labelled()
    with pytest.warns(UserWarning, match=r"Labelled.files cannot .* what the step does not hold"):
        Kept(again).set({"attributes": {"files": held}, "drawn": {}})
    assert again.files == Labelled().files


def test_what_was_never_seen_to_change_does_not_hold_back_an_order():
    """Labels that were corrected between two runs, beside indices that are shuffled."""
    dataset = Global()
    dataset.on_epoch_end()
    kept = Kept(dataset)
    assert set(kept.state()["constant"]) == {"x", "y"}
    dataset.on_epoch_end()
    kept.ended()
    state, order = kept.state(), dataset.order.copy()
    again = Global()
    again.y[3] += 1
    with pytest.warns(UserWarning, match=r"Global\.y had other elements"):
        Kept(again).set(state)
    assert np.array_equal(again.order, order) and not np.array_equal(again.y, dataset.y)


def test_a_run_that_goes_on_is_in_no_first_epoch():
    _, order = kept_after(Names, 2)
    dataset = Names()
    dataset.on_epoch_end()
    kept = Kept(dataset)
    kept.set({"attributes": order, "constant": {}, "first_epoch": 0})
    state = kept.state()
    assert set(state["constant"]) == {"x", "y"} and not state["first_epoch"]
    assert {"samples", "order", "rng"} == set(state["attributes"])  # have not changed here, and do


def test_what_was_left_is_not_constant_in_the_next_step():
    """Killed twice: the second step had it as what never changes, and the third process set the order without it."""
    kept = Kept(dataset := Large())
    kept.set(
        {"attributes": {}, "constant": {}, "changing": {"labels": "1 reordered"}, "first_epoch": 0}
    )
    assert "labels" in kept.state()["changing"] and dataset is not None


class Raises:
    """An object whose attributes cannot be asked for, such as a dict with attributes, or a closed file."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class RaisesInSlots:
    __slots__ = ("never_set",)

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


WEIRD = {"raises": Raises(), "in a list": [Raises()], "in slots": RaisesInSlots()}


@pytest.mark.parametrize("value", WEIRD.values(), ids=WEIRD)
def test_what_raises_does_not_end_fit(value: Any):
    dataset = Batches()
    dataset.settings = value
    dataset.order = list(range(ALL))
    kept = Kept(dataset)
    state = kept.state()
    kept.ended()
    dataset.order.reverse()
    kept.leave_out_scratch(state)
    kept.state()


def test_tensors_that_numpy_does_not_take_are_no_error():
    torch = pytest.importorskip("torch")
    dataset = Batches()
    dataset.table = torch.ones(3, requires_grad=True)
    kept = Kept(dataset)
    kept.ended()
    assert kept.state()["constant"]["table"] == _attributes.UNKNOWN


def test_what_became_none_is_left_or_set():
    dataset = Batches()
    kept = Kept(dataset)
    dataset.order = None
    kept.ended()
    state = kept.state()
    again = Batches()
    Kept(again).set(state)
    assert again.order is None


def test_an_array_of_a_file_is_not_written(tmp_path: Path):
    file = np.memmap(tmp_path / "places", np.int64, "w+", shape=(4,))
    view = np.asarray(file)[:]
    assert not _attributes.put(view, np.ones(4, np.int64)) and not file.any()
    assert not _attributes.put(file, np.ones(4, np.int64)) and not file.any()
    assert _attributes.put(np.zeros(4), np.ones(4))


def after_an_epoch(dataset: Any) -> dict[str, Any]:
    dataset.on_epoch_end()
    kept = Kept(dataset)
    dataset.on_epoch_end()
    kept.ended()
    return kept.state()


class Cached(Labelled):
    """Remembers something of another kind in every epoch, beside places that are shuffled, too."""

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        np.random.shuffle(self.order)
        self.remembered = {object(): 1}


@pytest.mark.filterwarnings("ignore:.*changes from epoch to epoch:UserWarning")
def test_what_no_step_holds_holds_back_all_but_places():
    """It may be a cache, or what was shuffled with the files: places say nothing of either."""
    dataset = Cached()
    state = after_an_epoch(dataset)
    again = Cached()
    again.on_epoch_end()
    files, labels = list(again.files), again.labels.copy()
    what = r"Cached.files, Cached.labels cannot .* with Cached.remembered, and all stay"
    with pytest.warns(UserWarning, match=what):
        Kept(again).set(state)
    assert again.files == files and np.array_equal(again.labels, labels)
    assert np.array_equal(again.order, dataset.order)


def test_files_that_are_others_hold_back_what_belongs_to_them():
    state = after_an_epoch(Labelled())
    assert not state["first_epoch"] and {"files", "labels"} <= state["attributes"].keys()
    again = Labelled()
    again.files[3] = "renamed"
    before = again.labels.copy()
    with pytest.warns(UserWarning, match=r"Labelled\.") as caught:
        Kept(again).set(state)
    assert np.array_equal(again.labels, before) and again.files[3] == "renamed"
    said = [str(one.message) for one in caught]
    assert "Labelled.files is not as in the checkpoint" in said[0]
    assert "Labelled.labels cannot be put in the order of the checkpoint" in said[1]


def test_data_of_another_number_of_processes_is_not_compared():
    """Each has a part of it, and the warning of the callback says what goes on."""
    dataset, _ = kept_after(Batches, 1)
    state = Kept(dataset).state()
    again = Batches()
    again.y = again.y[:24]
    Kept(again).set(state | {"of_other_processes": 1})
    with pytest.warns(UserWarning, match=r"Batches\.y had other elements"):
        Kept(again).set(state)


class Table:
    """Holds what it has in slots."""

    __slots__ = ("columns",)

    def __init__(self, columns: Any) -> None:
        self.columns = columns


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
        (Table([1, 2]), Table([2, 1])),
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
    assert _attributes.fingerprint(one) not in (None, _attributes.fingerprint(other))


@pytest.mark.parametrize(
    "value",
    [
        3,
        "text",
        None,
        len,
        Batches,
        {},
        {"lr": 0.1},
        object(),
        np.random.default_rng(0),
        keras.layers.Dense(1),
    ],
)
def test_what_holds_no_samples_has_no_fingerprint(value: Any):
    assert _attributes.fingerprint(value) is None
