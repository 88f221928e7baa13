"""What ``fit`` keeps to itself, found once per training: its callbacks and its epochs.

Keras hands a callback neither the list that it stands in nor the iterator that it trains from, and
without them two things are out of reach: to be called after all other callbacks, so that a
learning rate they change is saved as changed, and to go on in the middle of an epoch. Both are
local variables of the functions that call us, so this module looks there. Where a version of
Keras has them no longer, nothing breaks: the callback then counts in the order of the list, and
an epoch that was interrupted is run from its beginning.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_MOST_FRAMES = 16


@dataclass(frozen=True)
class InsideFit:
    """The parts of a running ``fit``; None for what was not found.

    Attributes:
        callbacks: Keras' ``CallbackList``.
        epochs: Keras' epoch iterator.
        last_epoch: the argument ``epochs`` of fit.
    """

    callbacks: Any = None
    epochs: Any = None
    last_epoch: int | None = None


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
    return InsideFit(callbacks, epochs, last_epoch)


def go_around(inside: InsideFit, first: Any, last: Any) -> None:
    """Puts one callback before all others and one after them, from the next event on."""
    if inside.callbacks is None:
        return
    others = [other for other in inside.callbacks.callbacks if other not in (first, last)]
    # a new list: the one that is being walked through right now stays as it is
    inside.callbacks.callbacks = [first, *others, last]


def can_skip(inside: InsideFit) -> bool:
    """Whether an epoch can be entered in its middle."""
    return hasattr(inside.epochs, "_enumerate_iterator")


def skip_batches(inside: InsideFit, count: int, *, draw: bool) -> None:
    """Lets the next epoch begin after ``count`` batches.

    Args:
        inside: of the running fit.
        count: batches that were trained already.
        draw: whether to take these batches from the data and drop them; False where the data
            stands at the right place.
    """
    epochs = inside.epochs
    enumerate_all = epochs._enumerate_iterator

    def enumerate_rest() -> Iterator[Any]:
        del epochs._enumerate_iterator  # for this epoch only
        for begin, end, batches in enumerate_all():
            if begin >= count:
                yield begin, end, batches
            elif draw:
                for _ in range(min(end + 1, count) - begin):
                    next(batches, None)

    epochs._enumerate_iterator = enumerate_rest
