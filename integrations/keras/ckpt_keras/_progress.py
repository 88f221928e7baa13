"""The position of training, saved beside the model to resume ``fit``."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Progress:
    """Counters of a training, random state of the host, and the state of tracked callbacks.

    Attributes:
        unit: what steps count, ``epoch`` or ``batch``.
        epoch: the next epoch to run, or the running one.
        batch: finished batches of that epoch; 0 between epochs.
        batches: all batches so far.
        since_save: batches since the last save.
        run: the number of earlier calls of ``fit`` with the callback.
        first_step: the offset from epochs to step numbers.
        best: the best value of the monitored metric so far.
        stopped: whether a callback had ended the training.
        batch_size: samples per batch; None if unknown.
        batches_per_epoch: None if unknown.
        averages_swapped: whether weights and their averages are swapped.
        learning_rate: of the optimizer when ``fit`` began first, as the program had set it; None for a schedule.
        random_state: numpy's and Python's global generators, which shuffle arrays and PyDatasets.
        dataset: what a PyDataset keeps from epoch to epoch.
        callbacks: state of tracked callbacks.
    """

    unit: str = "epoch"
    epoch: int = 0
    batch: int = 0
    batches: int = 0
    since_save: int = 0
    run: int = 0
    first_step: int = 0
    best: float | None = None
    stopped: bool = False
    batch_size: int | None = None
    batches_per_epoch: int | None = None
    averages_swapped: bool = False
    learning_rate: float | None = None
    random_state: dict[str, Any] = field(default_factory=dict[str, Any])
    dataset: dict[str, Any] = field(default_factory=dict[str, Any])
    callbacks: dict[str, Any] = field(default_factory=dict[str, Any])

    def next_run(self) -> Progress:
        """For another ``fit`` with the same callback: epochs begin at 0, step numbers continue."""
        return Progress(
            unit=self.unit,
            batches=self.batches,
            since_save=self.since_save,
            run=self.run + 1,
            first_step=self.first_step + self.epoch,
            best=self.best,
        )

    def get_state(self) -> dict[str, Any]:
        """The fields, for the checkpoint."""
        # As int: when Orbax loads the model, it warns about bools in other items.
        return {n: int(v) if isinstance(v, bool) else v for n, v in vars(self).items()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Sets the fields from a checkpoint; those that it lacks keep their defaults."""
        known = {name: value for name, value in state.items() if name in vars(self)}
        vars(self).update(known)
        self.stopped, self.averages_swapped = bool(self.stopped), bool(self.averages_swapped)


def random_state(*, torch: bool = False) -> dict[str, Any]:
    """The global generators of numpy and Python, and optionally torch, as arrays and numbers."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, gauss_next = random.getstate()
    more = {"torch": np.array(sys.modules["torch"].get_rng_state())} if torch else {}
    return more | {
        "numpy": {
            "name": str(name),
            "keys": np.array(keys),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "python": {
            "version": version,
            "words": np.array(words, np.int64),
            "gauss_next": gauss_next,
        },
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Sets the generators to a result of ``random_state``."""
    if not state:
        return
    saved = state["numpy"]
    np.random.set_state(
        (saved["name"], saved["keys"], saved["position"], saved["has_gauss"], saved["gauss"])
    )
    torch: Any = sys.modules.get("torch")
    if "torch" in state and torch is not None:
        torch.set_rng_state(torch.from_numpy(np.array(state["torch"])))
    saved = state["python"]
    words = tuple(int(word) for word in saved["words"])
    random.setstate((int(saved["version"]), words, saved["gauss_next"]))
