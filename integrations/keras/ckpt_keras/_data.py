"""A Grain pipeline that ``fit`` trains from: its iterator, and its position after a trained batch."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras

from ckpt_core import CheckpointError
from ckpt_keras._inside_fit import InsideFit
from ckpt_keras._kept import Kept


class FitData:
    """The iterator behind one call of ``fit``; CheckpointError if the position of the data cannot be saved. Keras makes its
    own from a dataset or loader, and on an accelerator draws one batch more than it has trained. So this class gives Keras
    an iterator, and remembers the state after the last trained batch. A user's iterator is used as it is.
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
        """Drops batches that a PyDataset's workers made before, in an earlier order. Keras' queue carries them into
        the next epoch, which then has some samples twice and others not at all; so may a worker that began late.
        """
        enqueuer = getattr(self._adapter, "enqueuer", None)
        if enqueuer is None or self._adapter.num_batches is None or enqueuer.is_running():
            return
        for carried in (enqueuer.future_queue, enqueuer.ready_queue):
            with contextlib.suppress(queue.Empty):
                while True:
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
