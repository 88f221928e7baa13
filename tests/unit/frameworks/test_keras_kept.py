"""What is kept of a PyDataset, and what is set of it: without ``fit``."""

from __future__ import annotations

import collections
import copy
import io
import multiprocessing
import random
import threading
import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ckpt_keras import _attributes
from ckpt_keras._kept import Kept
from tests.support import keras_models as km
from tests.support.py_datasets import (
    ALL,
    Batches,
    Global,
    Labelled,
    Names,
    Sub,
    Table,
    made_as,
)

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
    assert set(saved) == {"order", "rng"}


def test_an_order_is_one_of_what_is_there():
    """A run whose files were renamed trains on the new ones."""
    dataset: Any = Names()
    state = after_an_epoch(dataset)
    again: Any = Names()
    again.on_epoch_end()
    again.samples[3] = ("renamed", 3)
    (said,) = made_as(state, again)
    assert said.startswith("Names.samples had other elements or another order")
    assert ("renamed", 3) in again.samples

    same: Any = Names()
    same.on_epoch_end()
    elements, held = {id(one) for one in same.samples}, same.samples
    assert made_as(state, same) == []
    assert same.samples == dataset.samples and {id(one) for one in same.samples} == elements
    assert same.samples is held and same.order == dataset.order


def test_a_dataset_without_a_state_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = Kept(keras.utils.PyDataset())
        kept.ended()
        kept.set({})
    assert not kept.state()["attributes"]


class Places(Labelled):
    """Places beside labels that are shuffled, too, as nobody would."""

    def __init__(self) -> None:
        super().__init__()
        self.on_epoch_end()
        np.random.shuffle(self.order)


def test_places_are_set_in_the_first_epoch_if_nothing_else_differs():
    dataset: Any = Places()
    state = Kept(dataset).state()
    assert set(state["attributes"]) == {"order", "rng"}
    assert set(state["fingerprints"]) >= {"x", "y", "files", "labels", "order", "rng"}
    same = copy.deepcopy(dataset)
    order = same.order
    np.random.shuffle(order)
    assert made_as(state, same) == []
    assert same.order is order and np.array_equal(order, dataset.order)  # others may hold it, too

    again: Any = Places()
    before = again.order.copy()
    (said,) = made_as(state, again)
    assert said.startswith("Places.files, Places.labels had other elements")
    assert "Places.order, Places.rng cannot be put in the order of the checkpoint" in said
    assert np.array_equal(again.order, before)


class LeavesOut:
    """Does not say what it holds."""

    def __init__(self, labels: Any) -> None:
        self.labels = labels

    def __getstate__(self) -> Any:
        return {}


def closure(labels: Any) -> Any:
    return lambda place: labels[place]


def with_attribute(labels: Any) -> Any:
    def look(place: int) -> Any:
        return place

    vars(look)["labels"] = labels
    return look


@pytest.mark.parametrize(
    "make",
    [
        lambda labels: {0: labels},
        lambda labels: dict(enumerate(labels)),
        lambda labels: (labels, 1),
        lambda labels: np.array([[one] for one in labels] + [[None]], object),
        lambda labels: collections.deque(labels),
        lambda labels: [Table(labels)],
        lambda labels: {"a": {"b": {"c": {"d": {"e": {"f": [labels]}}}}}},
        lambda labels: np.eye(1, 5 << 20, labels[0])[0],
        lambda labels: [0] * 9_999 + labels,
        closure,
        with_attribute,
        Sub,
        bytes,
        str,
        lambda labels: io.BytesIO(bytes(labels)),
        lambda labels: labels[0],  # a number by which labels are found
        LeavesOut,
        lambda labels: [LeavesOut(labels)],
        lambda labels: multiprocessing.RawArray("i", labels),
    ],
    ids=range(19),
)
def test_whatever_differs_holds_back_an_order(make: Any):
    """Labels in any form: nobody knows what belongs to the places."""
    dataset: Any = Batches()
    np.random.shuffle(dataset.order)
    dataset.labels = make([4, 2, 3])
    state = Kept(dataset).state()
    again = copy.copy(dataset)
    again.labels, again.order = make([4, 2, 3]), np.arange(ALL)
    if not state["fingerprints"]["labels"].endswith(_attributes.UNKNOWN):
        assert made_as(state, again) == []
        assert np.array_equal(again.order, dataset.order)
    again = copy.copy(dataset)
    again.labels, again.order = make([2, 4, 3]), np.arange(ALL)
    (said,) = made_as(state, again)
    assert said.startswith("Batches.labels") and "Batches.order cannot be put" in said
    assert np.array_equal(again.order, np.arange(ALL))


@pytest.mark.parametrize("value", [object(), iter([1]), (one for one in [1])], ids=range(3))
def test_what_cannot_be_looked_into_may_belong_to_an_order(value: Any):
    dataset: Any = Batches()
    np.random.shuffle(dataset.order)
    dataset.labels = [value]
    state = Kept(dataset).state()
    again = copy.copy(dataset)
    again.order = np.arange(ALL)
    if type(value) is object:
        assert made_as(state, again) == []  # it has nothing in it
    else:
        assert made_as(state, again)[0].startswith("Batches.labels had")
        assert np.array_equal(again.order, np.arange(ALL))


def test_what_is_filled_or_opened_when_it_is_used_holds_nothing_back(tmp_path: Path):
    """Keras draws the first batch before fit begins: a cache is not empty then."""

    def make() -> Any:
        dataset: Any = Batches()
        dataset.cache, dataset.file, dataset.lock = {0: 1}, None, threading.Lock()
        return dataset

    with open(tmp_path / "file", "w") as file:
        dataset = make()
        kept = Kept(dataset)
        np.random.shuffle(dataset.order)
        dataset.cache[3], dataset.file = np.ones(3), file
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kept.ended()
        state = kept.state()
    again = make()
    assert made_as(state, again) == []
    assert np.array_equal(again.order, dataset.order)
    assert (again.cache, again.file) == ({0: 1}, None)


def test_a_dict_that_is_filled_anew_is_no_cache():
    dataset: Any = Batches()
    dataset.labels = {0: b"1"}
    kept = Kept(dataset)
    dataset.labels = {1: b"1", 0: b"1"}
    np.random.shuffle(dataset.order)
    with pytest.warns(UserWarning, match=r"Batches.labels changes from epoch to epoch"):
        kept.ended()
    again: Any = Batches()
    again.labels = {0: b"1"}
    assert made_as(kept.state(), again)[0].startswith("Batches.labels had")
    assert np.array_equal(again.order, np.arange(ALL))


class Nested(keras.utils.PyDataset):
    """Another dataset in it, and an object that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Global()
        self.augment = Table(np.random.default_rng())

    def on_epoch_end(self) -> None:
        self.inner.on_epoch_end()
        self.augment.columns.random(3)


def test_objects_in_it_are_restored_too():
    dataset: Any = Nested()
    state = after_an_epoch(dataset)
    again: Any = Nested()
    assert made_as(state, again) == []
    assert np.array_equal(again.inner.order, dataset.inner.order)
    assert again.augment.columns.random() == dataset.augment.columns.random()


class OfTheClass(Batches):
    labels: ClassVar[list[str]] = [f"class-{place}" for place in range(ALL)]


def test_attributes_of_the_class_are_compared():
    dataset: Any = OfTheClass()
    np.random.shuffle(dataset.order)
    state = Kept(dataset).state()
    again: Any = OfTheClass()
    OfTheClass.labels.reverse()
    assert made_as(state, again)[0].startswith("OfTheClass.labels had")
    OfTheClass.labels.reverse()
    assert made_as(state, again) == []


def test_what_another_attribute_holds_too_is_not_written_into():
    """`names` began as `all_names`: written in place, it had put both into another order."""
    dataset: Any = Batches()
    dataset.names = dataset.all_names = [f"n{place}" for place in range(ALL)]
    kept = Kept(dataset)
    dataset.names = dataset.names[::-1]
    kept.ended()
    again: Any = Batches()
    again.names = again.all_names = [f"n{place}" for place in range(ALL)]
    assert made_as(kept.state(), again) == []
    assert again.names == dataset.names and again.all_names == dataset.all_names

    views: Any = Batches()
    views.both = np.arange(2 * ALL)
    views.first = views.both[:ALL]
    kept = Kept(views)
    views.first[...] = views.first[::-1].copy()
    kept.ended()
    again: Any = Batches()
    again.both = np.arange(2 * ALL)
    again.first = again.both[:ALL]
    assert made_as(kept.state(), again) == []
    assert np.array_equal(again.both, views.both) and again.first.base is again.both


class Locked(Batches):
    """Lets some things be set, and then no more."""

    locked = False

    def __setattr__(self, name: str, value: Any) -> None:
        if self.locked and name == "labels":
            raise AttributeError(name)
        super().__setattr__(name, value)


def test_a_list_of_the_user_is_written_into_only_by_who_does_so():
    """Lists that were passed in, and are used elsewhere: `names` is replaced here, `shuffled` changed in place."""

    def make() -> tuple[Any, list[str], list[str]]:
        dataset: Any = Batches()
        dataset.names, dataset.shuffled = ([f"n{n}" for n in range(ALL)] for _ in range(2))
        return dataset, dataset.names, dataset.shuffled

    dataset, *_ = make()
    kept = Kept(dataset)
    for _ in range(3):
        dataset.names = dataset.names[::-1]
        random.shuffle(dataset.shuffled)
        kept.ended()
    again, names, shuffled = make()
    assert made_as(kept.state(), again) == []
    assert again.names == dataset.names != names == [f"n{n}" for n in range(ALL)]
    assert again.shuffled is shuffled and shuffled == dataset.shuffled


def test_all_is_put_back_where_one_cannot_be_set():
    def make() -> Any:
        dataset = Locked()
        dataset.order, dataset.labels = list(range(ALL)), tuple(range(ALL))
        return dataset

    dataset = make()
    kept = Kept(dataset)
    dataset.order.reverse()
    dataset.labels = dataset.labels[::-1]
    dataset.rng.random(3)
    kept.ended()
    again = make()
    before = copy.deepcopy(again)
    again.locked = True
    (said,) = made_as(kept.state(), again)
    assert "All stay as they are" in said
    assert (again.order, again.labels) == (before.order, before.labels)
    assert again.rng.random() == before.rng.random()


def test_what_was_only_reordered_together_must_be_the_same_rows():
    """Two labels were corrected between the runs: the old ones came back, without a word."""
    state = after_an_epoch(Labelled())
    again: Any = Labelled()
    again.labels[[3, 4]] = again.labels[[4, 3]]
    before = again.labels.copy()
    (said,) = made_as(state, again)
    assert said.startswith("Labelled.files, Labelled.labels had other elements")
    assert np.array_equal(again.labels, before) and again.files == Labelled().files


def test_labels_that_were_corrected_hold_back_the_indices():
    """Whether they are in another order, nobody can tell."""
    dataset: Any = Global()
    state = after_an_epoch(dataset)
    again: Any = Global()
    again.y[3] += 1
    (said,) = made_as(state, again)
    assert said.startswith("Global.y had other elements") and "Global.order" in said
    assert np.array_equal(again.order, np.arange(ALL))


@pytest.mark.parametrize(
    "change",
    [
        lambda dataset: dataset.__dict__.pop("files"),
        lambda dataset: setattr(dataset, "targets", [1, 2]),
    ],
)
def test_names_that_came_or_went_hold_back(change: Any):
    dataset: Any = Labelled()
    np.random.shuffle(dataset.order)
    state = Kept(dataset).state()
    again = copy.copy(dataset)
    again.order = np.arange(ALL)
    change(again)
    (said,) = made_as(state, again)
    assert "Labelled.order cannot be put" in said and np.array_equal(again.order, np.arange(ALL))


def test_a_step_of_an_earlier_version_sets_nothing():
    dataset: Any = Labelled()
    dataset.on_epoch_end()
    held = _attributes.stored(dataset.files)
    again: Any = Labelled()
    assert made_as({"attributes": {"files": held}, "drawn": {}}, again)
    assert again.files == Labelled().files


def test_a_run_that_goes_on_saves_what_it_had_saved():
    state = after_an_epoch(Names())
    dataset: Any = Names()
    dataset.on_epoch_end()
    kept = Kept(dataset)
    kept.set(state)
    after = kept.state()
    assert {"samples", "order", "rng"} == set(after["attributes"])  # have not changed here, and do
    assert after["rows"] == state["rows"] != {}


def test_counts_of_the_first_epoch_are_held_as_they_were_when_it_began():
    dataset: Any = Batches()
    dataset.hits = np.ones(ALL)
    kept = Kept(dataset)
    state = kept.state()
    assert "hits" not in state["attributes"]
    dataset.hits += 1
    kept.hold_counts(state)
    again = copy.copy(dataset)
    again.hits = np.zeros(ALL)
    assert made_as(state, again) == []
    assert np.array_equal(again.hits, np.ones(ALL))


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
    dataset: Any = Batches()
    dataset.settings = value
    dataset.order = list(range(ALL))
    kept = Kept(dataset)
    state = kept.state()
    kept.ended()
    dataset.order.reverse()
    kept.hold_counts(state)
    kept.state()


def test_tensors_that_numpy_does_not_take_are_no_error():
    torch = pytest.importorskip("torch")
    dataset: Any = Batches()
    dataset.table = torch.ones(3, requires_grad=True)
    kept = Kept(dataset)
    kept.ended()
    state = kept.state()
    again = copy.copy(dataset)
    again.table = torch.zeros(3, requires_grad=True)
    again.order = again.order[::-1].copy()
    assert made_as(state, again)[0].startswith("Batches.table had")


def test_what_became_none_is_left_or_set():
    dataset: Any = Batches()
    kept = Kept(dataset)
    dataset.order = None
    kept.ended()
    again: Any = Batches()
    assert made_as(kept.state(), again) == [] and again.order is None


def test_parts_of_an_array_of_a_file_differ(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.arange(8))
    file = np.load(tmp_path / "x.npy", mmap_mode="r")
    one, other = _attributes.fingerprint(file[:4]), _attributes.fingerprint(file[4:])
    assert one != other and one == _attributes.fingerprint(file[:4])
    dataset: Any = Batches()
    dataset.window = file[:4]
    state = Kept(dataset).state()
    again = copy.copy(dataset)
    again.window, again.order = file[4:], again.order[::-1].copy()
    assert made_as(state, again)[0].startswith("Batches.window had")


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
        self.remembered = {b"drawn": random.random()}


@pytest.mark.filterwarnings("ignore:.*changes from epoch to epoch:UserWarning")
def test_what_no_step_holds_holds_back_all():
    """It may be a cache, or what was shuffled with the files."""
    dataset: Any = Cached()
    state = after_an_epoch(dataset)
    again: Any = Cached()
    again.on_epoch_end()
    files, labels, order = list(again.files), again.labels.copy(), again.order.copy()
    (said,) = made_as(state, again)
    assert said.startswith("Cached.remembered had") and "Cached.files, Cached.labels" in said
    assert again.files == files and np.array_equal(again.labels, labels)
    assert np.array_equal(again.order, order)


def test_files_that_are_others_hold_back_what_belongs_to_them():
    state = after_an_epoch(Labelled())
    assert {"files", "labels"} <= state["attributes"].keys()
    again: Any = Labelled()
    again.files[3] = "renamed"
    before = again.labels.copy()
    (said,) = made_as(state, again)
    assert np.array_equal(again.labels, before) and again.files[3] == "renamed"
    assert said.startswith("Labelled.files, Labelled.labels had other elements")


def test_data_of_another_number_of_processes_is_not_named():
    """Each has a part of it, and the warning of the callback says what goes on."""
    state = after_an_epoch(Global())
    again: Any = Global()
    again.order = again.order[:24]
    assert made_as(state | {"of_other_processes": 1}, again) == [] and len(again.order) == 24
    assert made_as(state, again)[0].startswith("Global.order had other elements")
    assert len(again.order) == 24
