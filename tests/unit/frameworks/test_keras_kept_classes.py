"""What a PyDataset keeps in classes and modules: objects, labels and counters that a class has, and classes in attributes."""

from __future__ import annotations

import argparse
import enum
import functools
import importlib
import itertools
import logging
import random
import sys
import types
import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ckpt_keras import _attributes
from ckpt_keras._kept import Kept
from ckpt_keras._owners import Found
from tests.support import keras_models as km
from tests.support.py_datasets import ALL, Batches, made_as

keras = km.keras
LABELS = [place % 6 for place in range(ALL)]


class Config:
    """Labels in an object."""

    def __init__(self) -> None:
        self.labels = list(LABELS)


def with_an_object() -> tuple[Any, Any]:
    class OfAClass(Batches):
        cfg: Any = Config()

    return OfAClass(), OfAClass.cfg


def settings() -> Any:
    class Settings:
        labels: ClassVar[Any] = list(LABELS)

    return Settings


def with_a_class() -> tuple[Any, Any]:
    dataset: Any = Batches()
    dataset.cfg = settings()
    return dataset, dataset.cfg


def with_a_list_of_classes() -> tuple[Any, Any]:
    dataset: Any = Batches()
    dataset.parts = [settings()]
    return dataset, dataset.parts[0]


def with_objects_of_a_class() -> tuple[Any, Any]:
    dataset: Any = Batches()
    cls = settings()
    dataset.parts = [cls(), cls()]
    return dataset, cls


def with_a_module() -> tuple[Any, Any]:
    dataset: Any = Batches()
    cfg: Any = types.ModuleType("settings_of_the_program")
    dataset.cfg, cfg.labels = cfg, list(LABELS)
    return dataset, cfg


MADE = [
    with_an_object,
    with_a_class,
    with_a_list_of_classes,
    with_objects_of_a_class,
    with_a_module,
]


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_labels_that_a_class_or_a_module_has_come_back_with_the_files(make: Any):
    """Files came back in the order of the step, and the labels of the new process with them."""

    def made() -> tuple[Any, Any]:
        dataset, cfg = make()
        dataset.files = [f"file {place}" for place in range(ALL)]
        return dataset, cfg

    dataset, cfg = made()
    kept = Kept(dataset)
    together = list(zip(dataset.files, cfg.labels, strict=True))
    random.shuffle(together)
    dataset.files, cfg.labels = map(list, zip(*together, strict=True))
    kept.ended()
    again, its_cfg = made()
    assert made_as(kept.state(), again) == []
    assert (again.files, its_cfg.labels) == (dataset.files, cfg.labels)

    corrected, its_cfg = made()
    its_cfg.labels[3] += 1
    (said,) = made_as(kept.state(), corrected)
    assert "labels" in said and "files" in said and "had other elements" in said
    assert corrected.files == [f"file {place}" for place in range(ALL)]


class Single:
    """The only one of its class, which refers to it, and to itself."""

    only: ClassVar[Any] = None
    of: ClassVar[Any] = None

    def __new__(cls) -> Single:
        if cls.only is None:
            cls.only = super().__new__(cls)
            cls.only.own = cls.only
        return cls.only


Single.of = Single


class Kind(enum.Enum):
    FILES = 1
    NAMES = (2,)


class ManyThings(Batches):
    logger = logging.getLogger(__name__)
    mean = functools.partial(np.mean, axis=0)
    kind = Kind.NAMES
    single = Single()
    datasets: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        self.things: Any = [keras.losses.MeanSquaredError, np.float32, Single, Kind, int, list[int]]
        self.loss, self.dtype, self.transform, self.kinds = self.things[:4]
        self.numpy, self.keras, self.system = np, keras, sys
        self.add, self.relu = keras.ops.add, keras.activations.relu
        self.member, self.arguments = Kind.FILES, argparse.Namespace(size=3)
        self.itself, self.own_class = self, type(self)
        type(self).datasets = [self]


def test_classes_of_libraries_singletons_and_members_say_nothing():
    dataset = ManyThings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = Kept(dataset)
        np.random.shuffle(dataset.order)
        kept.ended()
        state = kept.state()
    assert not any(print_of.endswith(_attributes.UNKNOWN) for print_of in kept._prints.values())  # pyright: ignore[reportPrivateUsage]
    assert state["found"].keys() == {f"{__name__}.Single", f"{__name__}.ManyThings"}
    again = ManyThings()
    assert made_as(state, again) == []
    assert np.array_equal(again.order, dataset.order)


class Counted(Batches):
    """Defaults of a class that become attributes of the object."""

    epoch = 0
    labels: ClassVar[Any] = list(LABELS)
    made = 0


def test_defaults_of_a_class_stay_as_they_are():
    """The other datasets of the class have them, too."""
    dataset: Any = Counted()
    kept = Kept(dataset)
    dataset.epoch, dataset.labels = 3, LABELS[::-1]
    Counted.made += 2
    kept.ended()
    state = kept.state()
    Counted.made = 0
    again: Any = Counted()
    again.labels = Counted.labels
    for of_object in (False, True):
        if not of_object:
            del again.labels
        assert made_as(state, again) == []
        assert (again.epoch, again.labels, Counted.made) == (3, LABELS[::-1], 2)
        assert (Counted.epoch, Counted.labels) == (0, LABELS)
    Counted.made = 0


def test_classes_that_a_cache_leads_to_are_no_part_of_it():
    """They are met only when it is filled."""

    def made() -> tuple[Any, Any]:
        dataset: Any = Batches()
        dataset.cache = {}
        return dataset, settings()

    dataset, cls = made()
    kept = Kept(dataset)
    np.random.shuffle(dataset.order)
    dataset.cache[3] = cls()
    kept.ended()
    again, _ = made()
    assert made_as(kept.state(), again) == []
    assert np.array_equal(again.order, dataset.order)


def test_classes_of_one_name_are_two():
    dataset: Any = Batches()
    dataset.parts = [settings(), settings()]
    state = Kept(dataset).state()
    again: Any = Batches()
    again.parts = [settings(), settings()]
    again.order = again.order[::-1].copy()
    again.parts[0].labels[3] += 1
    assert "Settings.labels had" in made_as(state, again)[0]


def test_counters_of_iterators_go_on():
    """`ids = itertools.count()` could not be looked into, and held everything back."""
    for start, step in ((0, 1), (-3, 2), (2**70, -1)):
        dataset: Any = Batches()
        dataset.ids = itertools.count(start, step)
        kept = Kept(dataset)
        np.random.shuffle(dataset.order)
        next(dataset.ids)
        kept.ended()
        again: Any = Batches()
        again.ids = itertools.count(start, step)
        assert made_as(kept.state(), again) == []
        assert next(again.ids) == next(dataset.ids) == start + step
        assert np.array_equal(again.order, dataset.order)


def test_a_package_of_the_program_may_be_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ckpt_keras._owners.is_library", lambda module: True)
    assert Found(Batches()).is_of_program(Batches)
    assert not Found(keras.utils.PyDataset()).is_of_program(Batches)
    assert not Found(Batches()).is_of_program(np.ndarray)


def test_a_library_may_be_in_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`pip install --target` leaves a note beside it."""
    for name in ("a_library_of_a_test", "a_package_of_a_test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("from . import part")
        (tmp_path / name / "part.py").write_text("class Thing: pass")
    (tmp_path / "a_library_of_a_test-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for name, expected in (("a_library_of_a_test", False), ("a_package_of_a_test", True)):
        part = importlib.import_module(f"{name}.part")
        assert Found(Batches()).is_of_program(part.Thing) == expected
        assert Found(Batches()).is_of_program(part) == expected
