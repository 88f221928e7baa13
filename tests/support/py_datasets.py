"""Datasets of Keras that shuffle themselves."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy as np

from ckpt_keras._kept import Kept
from tests.support import keras_models as km

keras = km.keras
ALL = 48


class Batches(keras.utils.PyDataset):
    """Twelve batches; subclasses change the order of the samples."""

    def __init__(self, workers: int = 1) -> None:
        super().__init__(workers=workers, max_queue_size=4)
        self.x, self.y = km.data()
        self.order: Any = np.arange(ALL)
        self.rng: Any = np.random.default_rng(random.getrandbits(32))

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        part = [int(place) for place in self.order[index * 4 : index * 4 + 4]]
        return self.x[part], self.y[part]


class Global(Batches):
    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


class Drawn(Batches):
    """With replacement: each epoch has other elements, and not only another order."""

    def on_epoch_end(self) -> None:
        self.order = self.rng.integers(0, ALL, ALL)


class Chosen(Batches):
    """The same, as a list."""

    def on_epoch_end(self) -> None:
        self.order = random.choices(range(ALL), k=ALL)


class Names(Batches):
    def __init__(self, workers: int = 1) -> None:
        super().__init__(workers)
        self.samples = [(f"image-{place}", place) for place in range(ALL)]

    def on_epoch_end(self) -> None:
        random.shuffle(self.samples)
        self.order = [place for _, place in self.samples]


class Labelled(Batches):
    """The most usual one: files and their labels, in two attributes that are shuffled alike."""

    labels: Any = np.arange(ALL) % 6

    def __init__(self) -> None:
        super().__init__()
        self.files: Any = [f"image-{place}" for place in range(ALL)]
        self.labels = copy.deepcopy(type(self).labels)

    def on_epoch_end(self) -> None:
        places = random.sample(range(ALL), ALL)
        self.files = [self.files[place] for place in places]
        if isinstance(self.labels, np.ndarray):
            self.labels = self.labels[places]
        else:
            self.labels = type(self.labels)(self.labels[place] for place in places)
        self.check()

    def __getitem__(self, index: int) -> Any:
        self.check()
        part = [int(name.removeprefix("image-")) for name in self.files[index * 4 : index * 4 + 4]]
        return self.x[part], self.y[part]

    def check(self) -> None:
        """Every file has its own label."""
        label = dict(
            zip((f"image-{place}" for place in range(ALL)), type(self).labels, strict=True)
        )
        assert all(
            np.array_equal(label[name], one)
            for name, one in zip(self.files, self.labels, strict=True)
        )


class Large(Labelled):
    """What is shuffled with the files is too large for a step."""

    labels: Any = np.zeros((ALL, 100_000), np.float32)


Large.labels[:, 0] = np.arange(ALL)


class Sub(list):  # type: ignore[type-arg]
    """A list of another class, whose elements alone are not all of it."""


class Table:
    """Holds what it has in slots."""

    __slots__ = ("columns",)

    def __init__(self, columns: Any) -> None:
        self.columns = columns


def made_as(state: dict[str, Any], dataset: Any) -> list[str]:
    """Sets the state; the warnings, at most one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Kept(dataset).set(state)
    assert len(caught) <= 1
    return [str(one.message) for one in caught]
