"""What a PyDataset keeps beside its samples: caches, what describes them, elements that change in place, lists of one length."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from ckpt_keras._kept import Kept
from tests.support.py_datasets import ALL, Batches, made_as


@pytest.mark.parametrize("value", [5, True, [0, 3]], ids=["counter", "switch", "list"])
def test_what_may_describe_a_cache_is_not_set_without_it(value: Any):
    """`if self.full: return self.cache[place]` raised KeyError after a restart."""

    def make() -> Any:
        dataset: Any = Batches()
        dataset.cache, dataset.says = {}, type(value)()
        return dataset

    dataset = make()
    kept = Kept(dataset)
    np.random.shuffle(dataset.order)
    dataset.cache[3], dataset.says = np.ones(3), value
    kept.ended()
    again = make()
    assert made_as(kept.state(), again)[0].startswith("Batches.cache had")
    assert (again.says, again.cache) == (type(value)(), {})
    assert np.array_equal(again.order, np.arange(ALL))


def test_dicts_that_grow_come_back_if_a_step_holds_them():
    """Numbers that a dict gave to names were given anew, in another order."""
    dataset: Any = Batches()
    dataset.numbers, dataset.seen, dataset.full = {}, {}, False
    held_elsewhere = dataset.numbers
    kept = Kept(dataset)
    np.random.shuffle(dataset.order)
    dataset.numbers.update(b=0, a=1)
    dataset.seen.update({7: [1, "x"], 3: None})
    dataset.full = True
    kept.ended()
    again: Any = Batches()
    again.numbers, again.seen, again.full = {}, {}, False
    held_elsewhere = again.numbers
    assert made_as(kept.state(), again) == []
    assert list(again.numbers.items()) == [("b", 0), ("a", 1)]
    assert held_elsewhere is again.numbers
    assert (again.seen, again.full) == ({7: [1, "x"], 3: None}, True)


def test_elements_that_change_in_place_are_other_elements():
    dataset: Any = Batches()
    dataset.samples = [[place, place * 2, 1.0] for place in range(ALL)]
    kept = Kept(dataset)
    for _ in range(2):
        random.shuffle(dataset.samples)
        for sample in dataset.samples:
            sample[2] *= 0.5
        kept.ended()
    again: Any = Batches()
    again.samples = [[place, place * 2, 1.0] for place in range(ALL)]
    assert made_as(kept.state(), again) == []
    assert again.samples == dataset.samples


def test_lists_of_one_length_that_are_shuffled_apart_hold_their_own_rows():
    """Corrected labels came back as they had been, if a third list had another order."""

    def make(label: int) -> Any:
        dataset: Any = Batches()
        dataset.files = [f"file {place}" for place in range(ALL)]
        dataset.labels = [label, *range(1, ALL)]
        dataset.partners = [f"file {place}" for place in range(ALL)]
        return dataset

    dataset = make(0)
    kept = Kept(dataset)
    together = list(zip(dataset.files, dataset.labels, strict=True))
    random.shuffle(together)
    dataset.files, dataset.labels = map(list, zip(*together, strict=True))
    random.shuffle(dataset.partners)
    kept.ended()
    assert made_as(kept.state(), make(0)) == []
    assert made_as(kept.state(), make(1))[0].startswith("Batches.files, Batches.labels had")


class Closed(Batches):
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def test_a_dataset_that_raises_another_error_for_what_it_has_not():
    dataset = Closed()
    kept = Kept(dataset)
    np.random.shuffle(dataset.order)
    kept.ended()
    assert made_as(kept.state(), Closed()) == []


class Sampler:
    """Holds a list of the dataset."""

    def __init__(self, files: list[str]) -> None:
        self.files = files


@pytest.mark.parametrize("in_place", [True, False])
def test_one_list_in_two_attributes_stays_one(in_place: bool):
    """Counters that are 0 in the new process, one object, and differ in the step made two lists of it: others came with each label."""

    def make() -> Any:
        dataset: Any = Batches()
        dataset.files = [f"file {place}" for place in range(ALL)]
        dataset.labels = list(range(ALL))
        dataset.sampler = Sampler(dataset.files)
        dataset.stage, dataset.cycle = 0, 0
        return dataset

    dataset = make()
    kept = Kept(dataset)
    for _ in range(2):
        order = random.sample(range(ALL), ALL)
        files = [dataset.files[place] for place in order]
        if in_place:
            dataset.files[:] = files
        else:
            dataset.files = dataset.sampler.files = files
        dataset.labels = [dataset.labels[place] for place in order]
        dataset.stage, dataset.cycle = dataset.stage + 1, dataset.cycle + 2
        kept.ended()
    again = make()
    assert made_as(kept.state(), again) == []
    assert again.sampler.files is again.files
    assert (again.files, again.labels) == (dataset.files, dataset.labels)
    assert (again.stage, again.cycle) == (2, 4)


def test_one_list_in_two_attributes_that_hold_two_in_the_step():
    dataset: Any = Batches()
    dataset.files = dataset.sorted = list(range(100, 100 + ALL))
    kept = Kept(dataset)
    dataset.files = random.sample(dataset.files, ALL)
    kept.ended()
    again: Any = Batches()
    again.files = again.sorted = list(range(100, 100 + ALL))
    assert made_as(kept.state(), again) == []
    assert (again.files, again.sorted) == (dataset.files, dataset.sorted)


def test_an_object_of_a_class_without_a_module():
    kind: Any = type("Settings", (), {"__module__": None})
    dataset: Any = Batches()
    dataset.settings = kind()
    kept = Kept(dataset)
    np.random.shuffle(dataset.order)
    kept.ended()
    again: Any = Batches()
    again.settings = kind()
    assert made_as(kept.state(), again) == []
    assert np.array_equal(again.order, dataset.order)
