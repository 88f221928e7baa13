"""Finds ``fit``'s list of callbacks and epoch iterator, which Keras passes to no callback, in the frames that call it.

The list is to run after callbacks that change the learning rate, the iterator to continue in the middle of an epoch. Without
the iterator, as in a loop by hand, an interrupted epoch is run from its beginning.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ckpt_core import CheckpointError
from ckpt_keras._progress import Batches


@dataclass(frozen=True)
class InsideFit:
    """The parts of a running ``fit``; None for those that were not found."""

    # only `fit` refers to Keras' CallbackList: its garbage collection shows that `fit` is gone, even after an exception
    list_of_callbacks: Callable[[], Any]
    epochs: Any  # Keras' epoch iterator
    last_epoch: int | None  # the argument epochs of fit

    @property
    def callbacks(self) -> Any:
        """Keras' ``CallbackList``."""
        return self.list_of_callbacks()

    @property
    def adapter(self) -> Any:
        """Keras' adapter of the data."""
        return getattr(self.epochs, "data_adapter", None)

    @property
    def batches(self) -> Batches:
        """Size and number of the batches of an epoch."""
        size = getattr(self.adapter, "batch_size", None)
        count = getattr(self.epochs, "num_batches", None)
        return Batches(size or None, count or None)


def find_fit(callback: Any) -> InsideFit:
    """The parts of the ``fit`` that is calling ``callback`` right now; CheckpointError if no list of callbacks holds it."""
    callbacks = epochs = last_epoch = None
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        known = frame.f_locals
        owner = known.get("self")
        members = getattr(owner, "callbacks", None)
        if callbacks is None and isinstance(members, list) and callback in members:
            callbacks = owner
        if frame.f_code.co_name == "fit" and hasattr(known.get("epoch_iterator"), "data_adapter"):
            epochs, last_epoch = known["epoch_iterator"], known.get("epochs")
            break
        frame = frame.f_back
    if callbacks is None:
        kind = type(callback).__name__
        raise CheckpointError(
            f"{kind} is called, and is in no list of callbacks: pass it in callbacks= of fit. Your own loop takes "
            "KerasCheckpointManager(model, directory)"
        )
    return InsideFit(weakref.ref(callbacks), epochs, last_epoch)


def put_around(inside: InsideFit, first: Any, last: Any, over: Callable[[], None]) -> None:
    """Puts a callback before all others and one after them. When ``fit`` is gone it calls ``over``, which must not hold it."""
    callbacks = inside.callbacks
    others = [other for other in callbacks.callbacks if other not in (first, last)]
    # A new list, because Keras is iterating over the old one right now.
    callbacks.callbacks = [first, *others, last]
    weakref.finalize(callbacks, over).atexit = False


def skip_batches(inside: InsideFit, model: Any, count: int, *, draw: bool) -> None:
    """Lets the next epoch begin after ``count`` trained batches; ``draw``: the data has them still, and they are dropped."""
    epochs = inside.epochs
    enumerate_all = epochs._enumerate_iterator

    def enumerate_rest() -> Iterator[Any]:
        del epochs._enumerate_iterator  # the replacement is for this epoch only
        trains = False
        for begin, end, batches in enumerate_all():
            if begin < count:
                for _ in range(min(end + 1, count) - begin if draw else 0):
                    next(batches, None)
                continue
            if not trains:
                first = list(itertools.islice(batches, 1))  # empty if the data has ended
                if not first:
                    epochs._current_iterator = None
                    epochs.data_adapter.on_epoch_end()
                    break
                trains, batches = True, itertools.chain(first, batches)
            yield begin, end, batches
        if not trains:
            yield from _nothing_to_train(inside, model, count)

    epochs._enumerate_iterator = enumerate_rest


def _nothing_to_train(inside: InsideFit, model: Any, count: int) -> Iterator[Any]:
    """One batch that trains nothing and that no callback sees: without one Keras neither validates nor ends the epoch."""
    logs = dict(model.get_metrics_result())
    train, callbacks = model.train_function, inside.callbacks
    names = ("on_train_batch_begin", "on_train_batch_end")
    model.train_function = lambda state, batches: (logs, state)
    for name in names:
        setattr(callbacks, name, lambda *args, **kwargs: None)
    try:
        yield count, count, iter(())
    finally:
        model.train_function = train
        for name in names:
            delattr(callbacks, name)
