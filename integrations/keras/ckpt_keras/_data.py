"""The data that ``fit`` trains from: the position of a Grain pipeline after a trained batch, and what a PyDataset keeps."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import crc32c
import jax
import keras
import numpy as np

from ckpt_core import CheckpointError, Stateful
from ckpt_keras._inside_fit import InsideFit


class FitData:
    """The iterator behind one call of ``fit``; CheckpointError if its position cannot be saved. Keras makes one from a dataset,
    and on an accelerator draws one batch more than it has trained. So this class gives Keras an iterator, and remembers the
    state after the last trained batch. A user's iterator is used as it is.
    """

    def __init__(self, data: Any, inside: InsideFit) -> None:
        self._given = data
        self.given = data is not None
        self._adapter: Any = inside.adapter
        self._is_iterator = hasattr(type(data), "__next__")
        self._feed: _Feed | None = None
        self._next_feed: _Feed | None = None
        self._each_epoch = False
        self.kept = Kept(getattr(self._adapter, "py_dataset", None))
        """What a PyDataset keeps from epoch to epoch."""
        self.shuffles_by_torch = type(self._adapter).__name__ == "TorchDataLoaderAdapter"
        """Whether torch's global random state determines the order of the batches."""
        self.before_epoch()
        if not self.given:
            return
        self._refuse_others()
        if self._is_iterator:
            return
        make = self._adapter.get_jax_iterator
        self._make: Callable[[], Iterator[Any]] = lambda: iter(make())
        self._each_epoch = inside.epochs.steps_per_epoch is None
        self._next_feed = _Feed(self._make())
        self._adapter.get_jax_iterator = self._hand_out

    def _refuse_others(self) -> None:
        cls, kind, why = type(self._given), type(self._given).__name__, ""
        takes = "data= takes Grain datasets, loaders and iterators"
        again = "Leave data= away: the batches that were trained already are then drawn again and dropped"
        if {one.__module__.partition(".")[0] for one in cls.__mro__} & {"torch", "torchdata"}:
            why = (
                f"{takes}, whose position can be saved; a {kind} of torch has none. {again}, in the order of torch's global "
                "random state, which is saved"
            )
        elif hasattr(cls, "on_epoch_end"):
            why = f"{takes}; a {kind} is a PyDataset of Keras. {again}, and what the dataset changes between epochs is saved"
        elif self._is_iterator and _reads_ahead():
            why = (
                "data= is an iterator, and on this device Keras draws from it before it trains: its position is "
                "not that of the model. Pass the dataset itself, to fit and as data="
            )
        elif not self._is_iterator and getattr(self._adapter, "_dataset", None) is not self._given:
            why = (
                f"data= is a {kind} that fit does not train from: pass the same object "
                "to both, fit(dataset, callbacks=[OrbaxCheckpointCallback(directory, data=dataset)])"
            )
        elif not self._is_iterator and "get_jax_iterator" in vars(self._adapter):
            why = (
                "two callbacks of one fit have data=, and only one can follow the position: pass data= to the one that "
                "training is to go on from"
            )
        if why:
            raise CheckpointError(why)

    def before_epoch(self) -> None:
        """Drops batches that workers made in an earlier order: Keras would train some samples twice, and others not at all."""
        enqueuer = getattr(self._adapter, "enqueuer", None)
        if enqueuer is None or self._adapter.num_batches is None or enqueuer.is_running():
            return
        for carried in (enqueuer.future_queue, enqueuer.ready_queue):
            while not carried.empty():
                carried.get(block=False)

    def target(self) -> Any:
        """The iterator to restore into: the one that ``fit`` draws from next."""
        if self._is_iterator:
            return self._given
        assert self._next_feed is not None
        return self._next_feed.iterator

    def restored(self) -> None:
        """Drops the batches that Keras drew from the user's iterator before it was restored."""
        peeked = getattr(self._adapter, "_first_batches", None)
        if self._is_iterator and isinstance(peeked, list):
            peeked.clear()

    def item(self, batches: int, *, between_epochs: bool) -> Any:
        """An iterator positioned after the last trained batch; ``batches`` counts as ``trained`` did."""
        if self._is_iterator:
            return self._given
        if self._next_feed is not None:
            return self._next_feed.iterator  # nothing was drawn yet
        if self._feed is None or (between_epochs and self._each_epoch):
            return self._make()
        return self._feed.at(batches, self._make)

    def trained(self, batches: int) -> None:
        """Sets the count of trained batches at the beginning of an epoch."""
        feed = self._next_feed or (None if self._each_epoch else self._feed)
        if feed is not None and feed.first_batch is None:
            feed.first_batch = batches

    def _hand_out(self) -> Any:
        self._feed, self._next_feed = self._next_feed or _Feed(self._make()), None
        return self._feed


class _Feed:
    """An iterator that counts its elements, and remembers its state before the last one."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator: Any = iterator
        self.first_batch: int | None = None
        self._drawn = 0
        self._before: Any = None
        self._before_last = False
        self._ahead = _reads_ahead()

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> Any:
        # Also before the first element: starting in mid-epoch draws one batch before training.
        self._before_last = self._ahead or not self._drawn
        if self._before_last:
            self._before = self.iterator.get_state()
        element = next(self.iterator)
        self._drawn += 1
        return element

    def at(self, batches: int, make: Callable[[], Iterator[Any]]) -> Any:
        """The iterator as it was when ``batches`` had been trained."""
        ahead = 0 if self.first_batch is None else self._drawn - (batches - self.first_batch)
        if not self._before_last or ahead <= 0:
            return self.iterator
        if ahead > 1:
            raise CheckpointError(
                f"Keras drew {ahead} batches more than it has trained, and the state before the last one only "
                "is known: save at the end of epochs"
            )
        earlier: Any = make()
        earlier.set_state(self._before)
        return earlier


def _reads_ahead() -> bool:
    """Whether Keras draws the next batch before it trains the current one."""
    return jax.default_backend() != "cpu" and keras.distribution.distribution() is None


MOST_BYTES = 16 << 20
"""No step holds a larger order."""

_SAMPLES, _LOOKED_AT_BYTES = 4096, 1 << 20
"""How much of an attribute is looked at: one that is shuffled changes in almost all of its elements."""


class Kept:
    """What a ``keras.utils.PyDataset`` keeps from epoch to epoch: what its ``get_state()`` gives, if it has that and
    ``set_state``; else its own generators of numpy or Python, and orders of the places 0 to n - 1. Of None it is empty.
    """

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
        stored = {name: _stored(value) for name, value in self._attributes()}
        return {"attributes": {name: one for name, one in stored.items() if one is not None}}

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
        own, held = self.state()["attributes"], state.get("attributes", {})
        forms = (
            {(name, type(one), np.shape(one)) for name, one in side.items()} for side in (own, held)
        )
        unlike = {name for name, *_ in set.symmetric_difference(*forms)}
        if not unlike:
            for name, value in held.items():
                self._put(name, value)
        elif not state.get("of_other_processes"):
            names = ", ".join(sorted(unlike))
            self._warn(
                f"{names} had another length or kind when the step was saved. All stay as they are"
            )
        self._prints = self._look()

    def _put(self, name: str, saved: Any) -> None:
        """Sets an attribute in place, as others may hold its value, too."""
        match now := vars(self._dataset)[name]:
            case np.random.Generator():
                now.bit_generator.state = saved.bit_generator.state
            case np.random.RandomState():
                now.set_state(saved.get_state())
            case random.Random():
                now.setstate(saved.getstate())
            case list():
                now[:] = saved.tolist()
            case _ if now.flags.writeable:
                now[:] = saved
            case _:
                setattr(self._dataset, name, saved)

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """Its attributes without those of Keras' own class: workers, a queue."""
        known = vars(keras.utils.PyDataset())
        return ((name, value) for name, value in vars(self._dataset).items() if name not in known)

    def _look(self) -> dict[str, str]:
        """A checksum of a sample of each attribute that no step holds, as far as it can be read."""
        if self._dataset is None or isinstance(self._dataset, Stateful):
            return {}
        others = ((name, value) for name, value in self._attributes() if _stored(value) is None)
        prints = ((name, _checksum_of(value)) for name, value in others)
        return {name: text for name, text in prints if text}

    def _warn(self, what: str) -> None:
        kind = type(self._dataset).__name__
        warnings.warn(
            f"{kind}.{what}: fit goes on after a restart, but may train on other batches than without it. Let {kind} shuffle an "
            "array of indices, or give it the methods get_state() and set_state(state)",
            UserWarning,
            stacklevel=4,
        )


def _stored(value: Any) -> Any:
    """What a step holds of an attribute: a copy of a generator, or an order of the places 0 to n - 1; else None."""
    if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random)):
        return copy.deepcopy(value)
    if type(value) is list:
        if len(value) > MOST_BYTES >> 4 or not all(type(one) is int for one in value):
            return None
    elif type(value) is not np.ndarray or value.ndim != 1 or value.dtype.kind not in "iu":
        return None
    fits = len(value) > 1 and getattr(value, "nbytes", 0) <= MOST_BYTES
    is_order = fits and np.array_equal(np.sort(value), np.arange(len(value)))
    return np.array(value) if is_order else None


class _Checksum:
    """A checksum of the beginning of what is written; EOFError when it is complete."""

    crc = 0
    left_bytes = _LOOKED_AT_BYTES

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        self.crc = crc32c.crc32c(view[: self.left_bytes], self.crc)
        self.left_bytes -= len(view)
        if self.left_bytes <= 0:
            raise EOFError


def _checksum_of(value: Any) -> str:
    """Of a dict, which may be a cache that grows, only its first entry counts; empty for what cannot be looked into."""
    if isinstance(value, dict):
        return _checksum_of(next(iter(value.values()))) if value else ""
    is_sequence = isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim)
    if is_sequence and len(value) > _SAMPLES:
        value = value[:: len(value) // _SAMPLES]
    into = _Checksum()
    pickler = pickle.Pickler(into, 5, buffer_callback=lambda part: into.write(part.raw()))
    pickler.fast = True  # equal values are equal, whether they share parts or not
    try:
        pickler.dump(value)
    except Exception:  # whatever a class of the user's raises
        if into.left_bytes > 0:
            return ""
    return f"{into.crc:08x}"
