"""The position of training, saved beside the model to resume ``fit``, and where an interrupted epoch goes on.

One process stores what belongs to its host (random state, what its dataset keeps) with the counters of ``fit``. Several
have an item for it, as numpy's global generator has another seed in every process unless the program seeds it.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FIT = "fit"
"""Name of the item with the counters."""

HOST = "fit_of_process"
"""Name of the item of what each process has of its own."""


@dataclass
class Progress:
    """Counters of a training, random state of the host, and the state of tracked callbacks."""

    unit: str = "epoch"  # of steps: epoch or batch
    epoch: int = 0  # the next to run, or the running one
    batch: int = 0  # finished ones of that epoch; 0 between epochs
    batches: int = 0  # all so far
    since_save: int = 0  # batches
    run: int = 0  # number of earlier calls of fit with the callback
    first_step: int = 0  # offset from epochs to step numbers
    best: float | None = None  # of the monitored metric
    stopped: bool = False  # by a callback
    batch_size: int | None = None
    batches_per_epoch: int | None = None
    averages_swapped: bool = False
    # when fit began first, as the program had set it; None for a schedule
    learning_rate: float | None = None
    # numpy's and Python's global generators, which shuffle arrays and PyDatasets
    random_state: dict[str, Any] = field(default_factory=dict[str, Any])
    # what a PyDataset keeps from epoch to epoch
    dataset: dict[str, Any] = field(default_factory=dict[str, Any])
    callbacks: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        inside = f"epoch {self.epoch + 1}, batch {self.batch}"
        return inside if self.batch else f"epoch {self.epoch}"

    def step(self, steps_per_epoch: int) -> int:
        """The number of the step that holds this position."""
        if self.unit == "batch":
            return self.batches
        # An interrupted epoch gets the number that the complete epoch will have.
        epoch = self.epoch if self.batch else self.epoch - 1
        return (self.first_step + epoch) * steps_per_epoch

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


class OfProcess:
    """The state of one process of several; ``state`` is empty to restore, ``count`` is how many processes run."""

    per_process = True

    def __init__(self, state: dict[str, Any], count: int) -> None:
        self.state = state
        self.count = count

    def get_state(self) -> dict[str, Any]:
        return {"state": self.state, "processes": self.count}

    def check_state(self, state: dict[str, Any], /) -> None:
        """Any number of processes may go on: whoever restores logs it."""

    def set_state(self, state: dict[str, Any], /) -> None:
        self.state, self.count = state["state"], int(state["processes"])


# ------------------------------------------------------------------------------ random state


_OF_NUMPY = ("name", "keys", "position", "has_gauss", "gauss")


def random_state(*, torch: bool = False) -> dict[str, Any]:
    """The global generators of numpy and Python, and optionally torch, as arrays and numbers."""
    version, words, gauss_next = random.getstate()
    more = {"torch": np.array(sys.modules["torch"].get_rng_state())} if torch else {}
    return more | {
        "numpy": dict(zip(_OF_NUMPY, np.random.get_state(), strict=True)),
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
    np.random.set_state(tuple(state["numpy"][name] for name in _OF_NUMPY))
    torch: Any = sys.modules.get("torch")
    if "torch" in state and torch is not None:
        torch.set_rng_state(torch.from_numpy(np.array(state["torch"])))
    saved = state["python"]
    words = tuple(map(int, saved["words"]))
    random.setstate((int(saved["version"]), words, saved["gauss_next"]))


# ------------------------------------------------------------------------ an interrupted epoch


@dataclass(frozen=True)
class Batches:
    """What ``fit`` trains from: samples per batch and batches per epoch; None if unknown."""

    size: int | None = None
    count: int | None = None


def entered_at(saved: Progress, now: Batches, together: int = 1) -> tuple[int, str | None]:
    """The number of finished batches of an interrupted epoch, and a warning for the user or None. If the batch size
    changed, samples are counted: none is left out, and at most a part of a batch is trained twice. ``together`` batches
    are one call of the compiled step; a partly finished group is run again.
    """
    before, samples = Batches(saved.batch_size, saved.batches_per_epoch), ""
    done, left = saved.batch, "; some batches may be trained twice"
    others = True
    if before.size and now.size and before.size != now.size:
        trained = done * before.size
        done = trained // now.size
        again = trained - (done - done % together) * now.size
        samples = f" ({trained} samples)"
        left = f"; {again} samples are trained twice" if again else ""
    elif before.count and now.count and before.count != now.count:
        done = done * now.count // before.count
    else:
        others = False
    done = min(done - done % together, now.count or done)
    if done == saved.batch and not others:
        return done, None
    return done, (
        f"epoch {saved.epoch + 1} was interrupted after {_amount(saved.batch, before)}{samples}, and this fit has other "
        f"batches: it goes on after {_amount(done, now)}{left}. With the batches that the run began with it goes on "
        "exactly where it stopped"
    )


def _amount(done: int, batches: Batches) -> str:
    of = "" if batches.count is None else f" of {batches.count}"
    size = "" if batches.size is None else f" of {batches.size} samples"
    return f"{done}{of} batches{size}"
