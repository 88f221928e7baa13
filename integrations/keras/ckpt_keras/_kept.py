"""What a ``keras.utils.PyDataset`` keeps from epoch to epoch: the order in which it shuffles itself, a generator.

Such a dataset reorders an attribute in ``on_epoch_end``. A new process would begin with the order of the first
epoch, so what changes is saved: attributes that were seen to change, generators, and, before the first epoch is over,
whatever could be an order. What changes and cannot be saved is named in a warning, as are places that were drawn with
replacement for the first epoch, if they are others after a restart within it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

from ckpt_core import Stateful
from ckpt_keras import _attributes
from ckpt_keras._attributes import Seen


class Kept:
    """The state of a PyDataset between epochs, for as long as ``fit`` runs; of None it is empty.

    The dataset's ``on_epoch_end`` was called once, as Keras does before training.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._seen: dict[str, Seen] = {name: _attributes.seen(v) for name, v in self._own()}
        self._changing: set[str] = set()
        self._renewed: set[str] = set()
        self._warned: set[str] = set()
        self._first_epoch = True

    def ended(self) -> None:
        """An epoch is over: notes which attributes have changed, and warns of those that cannot be saved."""
        self._first_epoch = False
        for name, value in self._own():
            before, now = self._seen.get(name), _attributes.seen(value)
            self._seen[name] = now
            if before is None or before.content == now.content:
                continue
            self._changing.add(name)
            if before.elements != now.elements:
                self._renewed.add(name)
            if (
                _attributes.stored(value, renewed=name in self._renewed) is None
                and name not in self._warned
            ):
                self._warned.add(name)
                self._warn(
                    name,
                    f"changes from epoch to epoch and {_attributes.why_not(value)}, which no step holds",
                )

    def state(self) -> dict[str, Any]:
        """What to save of the dataset; call it where no epoch is running."""
        if self._dataset is None:
            return {}
        if isinstance(self._dataset, Stateful):
            return {
                "state": copy.deepcopy(self._dataset.get_state())
            }  # the next epoch may change it
        kept = {
            name: _attributes.stored(value, renewed=name in self._renewed)
            for name, value in self._own()
            if self._is_kept(name, value)
        }
        state: dict[str, Any] = {
            "attributes": {name: held for name, held in kept.items() if held is not None}
        }
        if self._first_epoch:
            drawn = {name: _attributes.drawn(v) for name, v in self._own() if name not in kept}
            state["drawn"] = {name: text for name, text in drawn.items() if text is not None}
        return state

    def set(self, state: dict[str, Any]) -> None:
        """Sets the result of ``state``; warns of an attribute that no longer fits, which keeps its value."""
        if isinstance(self._dataset, Stateful):
            if "state" in state:
                self._dataset.set_state(state["state"])
            return
        own = dict(self._own())
        for name, held in state.get("attributes", {}).items():
            try:
                value = _attributes.restored(held, own[name])
            except (KeyError, ValueError) as error:
                why = "there is none" if isinstance(error, KeyError) else str(error)
                self._warn(name, f"is not as in the checkpoint ({why}), and is left as it is")
                continue
            setattr(self._dataset, name, value)
            self._seen[name] = _attributes.seen(value)
            self._changing.add(name)
            if held.get("renewed"):
                self._renewed.add(name)
        for name, text in state.get("drawn", {}).items():
            if _attributes.drawn(own.get(name)) != text:
                self._warn(
                    name,
                    "had other elements or another order when the step was saved, in its first epoch",
                )

    def _is_kept(self, name: str, value: Any) -> bool:
        if name in self._changing or _attributes.is_generator(value):
            return True
        return self._first_epoch and _attributes.may_be_order(value)

    def _own(self) -> Iterable[tuple[str, Any]]:
        if isinstance(self._dataset, Stateful):
            return ()
        return list(getattr(self._dataset, "__dict__", {}).items())

    def _warn(self, name: str, what: str) -> None:
        kind = type(self._dataset).__name__
        warnings.warn(
            f"{kind}.{name} {what}: fit goes on after a restart, but may train on other batches than without it. Give {kind} "
            "the methods get_state() and set_state(state), or let it shuffle an array of indices",
            UserWarning,
            stacklevel=3,
        )
