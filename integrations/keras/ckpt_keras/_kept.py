"""What a ``keras.utils.PyDataset`` keeps from epoch to epoch: what its ``get_state()`` gives, if it has that and
``set_state(state)``; else its own attributes that are generators of numpy or Python, or orders of the places 0 to n - 1.
"""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from typing import Any

import crc32c
import keras
import numpy as np

from ckpt_core import Stateful

MOST_BYTES = 16 << 20
"""No step holds a larger order."""

_SAMPLES, _LOOKED_AT_BYTES = 4096, 1 << 20
"""How much of an attribute is looked at: one that is shuffled changes in almost all of its elements."""

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


class Kept:
    """The state of a PyDataset between epochs, for as long as ``fit`` runs; of None it is empty."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._warned = set[str]()
        self._prints = self._look()

    def ended(self) -> None:
        """An epoch is over: warns once of each attribute that has changed and is not saved."""
        before, self._prints = self._prints, self._look()
        for name, text in self._prints.items():
            if before.get(name, text) != text and name not in self._warned:
                self._warned.add(name)
                what = "neither a generator nor an order of indices, which a step holds"
                self._warn(f"{name} changes from epoch to epoch, and is {what}")

    def state(self) -> dict[str, Any]:
        """What to save of the dataset; call it where no epoch is running."""
        if self._dataset is None:
            return {}
        if isinstance(self._dataset, Stateful):  # a copy, as the next epoch may change it
            return {"state": copy.deepcopy(self._dataset.get_state())}
        kept = self._attributes(kept=True)
        return {"attributes": {name: _stored(value) for name, value in kept.items()}}

    def set(self, state: dict[str, Any]) -> None:
        """Sets the result of ``state``, all of it or nothing, and warns of what does not fit."""
        if not state or self._dataset is None:
            return
        if isinstance(self._dataset, Stateful) != ("state" in state):
            kind = type(self._dataset).__name__
            when = "when" if "state" in state else "before"
            warnings.warn(
                f"the step was saved {when} {kind} had get_state() and set_state(state): what it kept from epoch to epoch "
                "is not restored, and fit may train on other batches than without the restart. The steps from here on can "
                "be restored",
                UserWarning,
                stacklevel=3,
            )
            return
        if "state" in state:
            self._dataset.set_state(state["state"])
            return
        own, held = self._attributes(kept=True), state.get("attributes", {})
        names = sorted(own.keys() | held.keys())
        unlike = ", ".join(name for name in names if not _fits(held.get(name), own.get(name)))
        if not unlike:
            for name, value in held.items():
                _put(self._dataset, name, own[name], value)
        elif not state.get("of_other_processes"):
            self._warn(
                f"{unlike} had another length or kind when the step was saved. All stay as they are"
            )
        self._prints = self._look()

    def _attributes(self, *, kept: bool) -> dict[str, Any]:
        """Its attributes that a step holds, or the others, without those of Keras' own class: workers, a queue."""
        known = vars(keras.utils.PyDataset())
        own = {name: value for name, value in vars(self._dataset).items() if name not in known}
        return {name: value for name, value in own.items() if _is_kept(value) == kept}

    def _look(self) -> dict[str, str]:
        """A checksum of a sample of each attribute that no step holds, as far as it can be read."""
        if self._dataset is None or isinstance(self._dataset, Stateful):
            return {}
        prints = {name: _print_of(value) for name, value in self._attributes(kept=False).items()}
        return {name: text for name, text in prints.items() if text}

    def _warn(self, what: str) -> None:
        kind = type(self._dataset).__name__
        warnings.warn(
            f"{kind}.{what}: fit goes on after a restart, but may train on other batches than without it. Let {kind} shuffle an "
            "array of indices, or give it the methods get_state() and set_state(state)",
            UserWarning,
            stacklevel=4,
        )


def _is_kept(value: Any) -> bool:
    """Whether it is a generator, or an order of places: each of 0 to n - 1 once."""
    if isinstance(value, _GENERATORS):
        return True
    if type(value) is list:
        if len(value) > MOST_BYTES >> 4 or not all(type(one) is int for one in value):
            return False
    elif type(value) is not np.ndarray or value.ndim != 1 or value.dtype.kind not in "iu":
        return False
    fits = len(value) > 1 and getattr(value, "nbytes", 0) <= MOST_BYTES
    return fits and np.array_equal(np.sort(value), np.arange(len(value)))


def _stored(value: Any) -> Any:
    """A copy; of a list an array, because a list would be a leaf for each place."""
    return copy.deepcopy(value) if isinstance(value, _GENERATORS) else np.array(value)


def _fits(saved: Any, now: Any) -> bool:
    if isinstance(now, (list, np.ndarray)):
        return isinstance(saved, np.ndarray) and saved.shape == np.shape(now)
    return isinstance(saved, _GENERATORS) and type(saved) is type(now)


def _put(dataset: Any, name: str, now: Any, saved: Any) -> None:
    """Sets an attribute in place, as others may hold its value, too."""
    if isinstance(now, np.random.Generator):
        now.bit_generator.state = saved.bit_generator.state
    elif isinstance(now, np.random.RandomState):
        now.set_state(saved.get_state())
    elif isinstance(now, random.Random):
        now.setstate(saved.getstate())
    elif isinstance(now, list):
        now[:] = saved.tolist()
    elif now.flags.writeable:
        now[:] = saved
    else:
        setattr(dataset, name, saved)


class _Sum:
    """A checksum of the beginning of what is written; EOFError when it is complete."""

    crc = 0
    left_bytes = _LOOKED_AT_BYTES

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        self.crc = crc32c.crc32c(view[: self.left_bytes], self.crc)
        self.left_bytes -= len(view)
        if self.left_bytes <= 0:
            raise EOFError


def _print_of(value: Any) -> str:
    """Of a dict, which may be a cache that grows, only its first entry counts; empty for what cannot be looked into."""
    if isinstance(value, dict):
        return _print_of(next(iter(value.values()))) if value else ""
    is_sequence = isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim)
    if is_sequence and len(value) > _SAMPLES:
        value = value[:: len(value) // _SAMPLES]
    into = _Sum()
    pickler = pickle.Pickler(into, 5, buffer_callback=lambda part: into.write(part.raw()))
    pickler.fast = True  # equal values are equal, whether they share parts or not
    try:
        pickler.dump(value)
    except Exception:  # whatever a class of the user's raises
        if into.left_bytes > 0:
            return ""
    return f"{into.crc:08x}"
