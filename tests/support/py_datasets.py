"""Datasets of Keras that shuffle themselves."""

import random
from typing import Any

import numpy as np

from tests.support import keras_models as km

ALL = 48


class Batches(km.keras.utils.PyDataset):
    """Twelve batches; subclasses change the order of the samples."""

    def __init__(self, workers: int = 1, **how: Any) -> None:
        super().__init__(workers=workers, max_queue_size=4, **how)
        self.x, self.y = km.data()
        self.order: Any = np.arange(ALL)
        self.rng: Any = np.random.default_rng(random.getrandbits(32))

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        part = [int(place) for place in self.order[index * 4 : index * 4 + 4]]
        return self.x[part], self.y[part]


class Global(Batches):
    """Indices, shuffled by numpy's own generator."""

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


class OwnGenerator(Batches):
    def on_epoch_end(self) -> None:
        self.rng.shuffle(self.order)


class Noisy(Batches):
    """Draws with each batch."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + self.rng.random(x.shape).astype("f4"), y


class Says(Global):
    """Has the two methods, which are then all that counts."""

    def get_state(self) -> dict[str, Any]:
        return {"order": self.order}

    def set_state(self, state: dict[str, Any]) -> None:
        self.order = state["order"]


class Labelled(Batches):
    """Files and their labels, in two attributes that are shuffled alike."""

    def __init__(self, kind: Any = list) -> None:
        super().__init__()
        self.kind = kind
        self.files: Any = [f"image-{place}" for place in range(ALL)]
        self.labels = kind([place % 6 for place in range(ALL)])

    def on_epoch_end(self) -> None:
        places = random.sample(range(ALL), ALL)
        self.files = [self.files[place] for place in places]
        self.labels = self.kind([self.labels[place] for place in places])

    def __getitem__(self, index: int) -> Any:
        part = [int(name.removeprefix("image-")) for name in self.files]
        assert [place % 6 for place in part] == list(self.labels)  # each file has its own label
        part = part[index * 4 : index * 4 + 4]
        return self.x[part], self.y[part]
