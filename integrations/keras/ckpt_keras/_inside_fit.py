"""What ``fit`` keeps to itself, found once per training: its callbacks and its epochs.

Keras hands a callback neither the list that it stands in nor the iterator that it trains from, and
without them two things are out of reach: to be called after all other callbacks, so that a
learning rate they change is saved as changed, and to go on in the middle of an epoch. Both are
local variables of the functions that call us, so this module looks there. Where a version of
Keras has them no longer, nothing breaks: the callback then counts in the order of the list, and
an epoch that was interrupted is run from its beginning.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ckpt_keras._entering import Batches

_MOST_FRAMES = 16


@dataclass(frozen=True)
class InsideFit:
    """The parts of a running ``fit``; None for what was not found, and when it is over.

    Attributes:
        list_of_callbacks: gives Keras' ``CallbackList``. It is held by ``fit`` alone, so that its
            end is that of a fit which an exception ended, of which no callback is told.
        epochs: Keras' epoch iterator.
        last_epoch: the argument ``epochs`` of fit.
    """

    list_of_callbacks: Callable[[], Any] = lambda: None
    epochs: Any = None
    last_epoch: int | None = None

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


def look_around(callback: Any) -> InsideFit:
    """The parts of the ``fit`` that is calling ``callback`` right now."""
    callbacks = epochs = last_epoch = None
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
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
        return InsideFit(epochs=epochs, last_epoch=last_epoch)
    return InsideFit(weakref.ref(callbacks), epochs, last_epoch)


def go_around(inside: InsideFit, first: Any, last: Any) -> None:
    """Puts one callback before all others and one after them, from the next event on."""
    callbacks = inside.callbacks
    if callbacks is None:
        return
    others = [other for other in callbacks.callbacks if other not in (first, last)]
    # a new list: the one that is being walked through right now stays as it is
    callbacks.callbacks = [first, *others, last]


def when_over(inside: InsideFit, tell: Callable[[], None]) -> None:
    """Calls a function, not a method of what fit holds, when ``fit`` is gone, however it ended."""
    callbacks = inside.callbacks
    if callbacks is not None:
        weakref.finalize(callbacks, tell).atexit = False


def can_skip(inside: InsideFit) -> bool:
    """Whether an epoch can be entered in its middle."""
    return hasattr(inside.epochs, "_enumerate_iterator") and inside.callbacks is not None


def skip_batches(inside: InsideFit, model: Any, count: int, *, draw: bool) -> None:
    """Lets the next epoch begin after ``count`` batches.

    Args:
        inside: of the running fit.
        model: that trains.
        count: batches that were trained already.
        draw: whether to take these batches from the data and drop them; False where the data
            stands at the right place.
    """
    epochs = inside.epochs
    enumerate_all = epochs._enumerate_iterator

    def enumerate_rest() -> Iterator[Any]:
        del epochs._enumerate_iterator  # for this epoch only
        trains = False
        for begin, end, batches in enumerate_all():
            if begin < count:
                for _ in range(min(end + 1, count) - begin if draw else 0):
                    next(batches, None)
                continue
            if not trains:
                first = list(itertools.islice(batches, 1))  # of unknown length it may have ended
                if not first:
                    epochs._current_iterator = None
                    epochs.data_adapter.on_epoch_end()
                    break
                trains = True
                yield begin, end, itertools.chain(first, batches)
            else:
                yield begin, end, batches
        if not trains:
            yield from _nothing_to_train(inside, model, count)

    epochs._enumerate_iterator = enumerate_rest


def _nothing_to_train(inside: InsideFit, model: Any, count: int) -> Iterator[Any]:
    """One batch that trains nothing and that no callback sees.

    All batches of the epoch were trained, and what comes after them was not done: validation, and
    what callbacks do at its end. Keras goes there only with the logs of a batch.
    """
    logs = dict(model.get_metrics_result())
    train, callbacks = model.train_function, inside.callbacks
    names = ("on_train_batch_begin", "on_train_batch_end")
    kept = {name: vars(callbacks)[name] for name in names if name in vars(callbacks)}
    model.train_function = lambda state, batches: (logs, state)
    for name in names:
        setattr(callbacks, name, lambda *args, **kwargs: None)
    try:
        yield count, count, iter(())
    finally:
        model.train_function = train
        for name in names:
            delattr(callbacks, name)
            if name in kept:
                setattr(callbacks, name, kept[name])
