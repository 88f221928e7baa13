"""The position of training, saved beside the model to resume ``fit``, and where an interrupted epoch continues.

What belongs to a host (random state, what its dataset keeps) is beside the counters of ``fit``; an item of its own if several
processes save, since numpy's global generator has another seed in each unless the program seeds it.
"""

from __future__ import annotations

import inspect
import logging
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt_core import Stateful, UnsupportedLeaf

logger = logging.getLogger("ckpt_keras")

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
        vars(self).update({name: one for name, one in state.items() if name in vars(self)})
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


_NUMPY_STATE = ("name", "keys", "position", "has_gauss", "gauss")


def random_state(*, torch: bool = False) -> dict[str, Any]:
    """The global generators of numpy and Python, and optionally torch, as arrays and numbers."""
    version, words, gauss = random.getstate()
    more = {"torch": np.array(sys.modules["torch"].get_rng_state())} if torch else {}
    return more | {
        "numpy": dict(zip(_NUMPY_STATE, np.random.get_state(), strict=True)),
        "python": {"version": version, "words": np.array(words, np.int64), "gauss_next": gauss},
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Sets the generators to a result of ``random_state``."""
    if not state:
        return
    np.random.set_state(tuple(state["numpy"][name] for name in _NUMPY_STATE))
    torch: Any = sys.modules.get("torch")
    if "torch" in state and torch is not None:
        torch.set_rng_state(torch.from_numpy(np.array(state["torch"])))
    saved = state["python"]
    words = tuple(map(int, saved["words"]))
    random.setstate((int(saved["version"]), words, saved["gauss_next"]))


@dataclass(frozen=True)
class Batches:
    """What ``fit`` trains from: samples per batch and batches per epoch; None if unknown."""

    size: int | None = None
    count: int | None = None


def skipped_batches(saved: Progress, now: Batches, together: int = 1) -> tuple[int, str | None]:
    """The number of finished batches of an interrupted epoch, and a warning or None. If the batch size changed, samples count:
    none is left out. ``together`` batches are one call of the compiled step; a partly finished group is run again.
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


_PLAIN = (bool, int, float, str, bytes, np.generic, type(None))


def states_of(callbacks: Sequence[Any]) -> dict[str, Any]:
    """The state of each callback by its class and number: of ``get_state``, else every attribute that is not an argument of
    ``__init__``. The code sets arguments, so a changed ``patience`` takes effect after a restart.
    """
    return {name: _state_of(callback) for name, callback in _numbered(callbacks)}


def set_states(callbacks: Sequence[Any], states: dict[str, Any]) -> None:
    """Sets the result of ``states_of``; callbacks that are not in it are left unchanged."""
    for name, callback in _numbered(callbacks):
        if name not in states:
            logger.warning("track: %s was not tracked when the checkpoint was saved", name)
        elif isinstance(callback, Stateful):
            callback.set_state(states[name])
        else:
            vars(callback).update(states[name])


def _numbered(callbacks: Sequence[Any]) -> list[tuple[str, Any]]:
    counts, named = Counter[str](), list[tuple[str, Any]]()
    for callback in callbacks:
        name = type(callback).__name__
        counts[name] += 1
        named.append((name if counts[name] == 1 else f"{name}_{counts[name]}", callback))
    return named


def _state_of(callback: Any) -> Any:
    if isinstance(callback, Stateful):
        return callback.get_state()
    cls, state = type(callback), dict[str, Any]()
    inits = [vars(base)["__init__"] for base in cls.__mro__[:-1] if "__init__" in vars(base)]
    arguments = {name for init in inits for name in inspect.signature(init).parameters}
    for name, value in vars(callback).items():
        of_keras = type(value).__module__.partition(".")[0] == "keras"
        known = name in arguments or name in ("params", "_model", "validation_data")
        if not (known or of_keras or callable(value)):
            state[name] = _copied(value, f"{cls.__name__}.{name}")
    return state


def _copied(value: Any, where: str) -> Any:
    """A copy, which later epochs do not change."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(part, where) for part in value)
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        return {key: _copied(part, f"{where}[{key!r}]") for key, part in value.items()}
    if hasattr(value, "__array__"):
        return np.array(value)
    raise UnsupportedLeaf(
        f"track: {where} is a {type(value).__name__}, which cannot be saved. Give the callback get_state() and "
        "set_state(), or leave it out of track=",
        leaf=where,
        type_name=type(value).__name__,
    )
