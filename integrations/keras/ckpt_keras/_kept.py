"""What a ``keras.utils.PyDataset`` keeps from epoch to epoch: the order in which it shuffles itself, a generator.

Such a dataset reorders an attribute in ``on_epoch_end``. A new process would begin with the order of the first
epoch, so what changes is saved: attributes that were seen to change, generators, and, before the first epoch is over,
what is an order of places. What changes and cannot be saved is named in a warning.

Samples and their labels may be shuffled alike in two attributes, of which one alone can be set: then each sample would
get the label of another. After the first epoch it is known what changes, and all of it is set, or, where a part has
no form for a step, only places of samples (``is_order``). Before, nobody knows what belongs together: places are set if all
else has the same fingerprint as in the step, and otherwise nothing. What is not as it was is named in a warning.
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
        self._renewed: set[str] = set()  # of these, what got other elements, not only another order
        self._warned: set[str] = set()
        self._first_epoch = True
        self._fingerprints: dict[str, str | None] = {}  # of what does not change
        self._at_state: dict[str, Seen] | None = None

    def ended(self) -> None:
        """An epoch is over: notes which attributes have changed, and warns of those that cannot be saved."""
        self._first_epoch = False
        for name, value in self._own():
            before, now = self._seen.get(name), _attributes.seen(value)
            self._seen[name] = now
            if before is None or before.content == now.content:
                continue
            self._changing.add(name)
            if before.elements is None or before.elements != now.elements:
                self._renewed.add(name)
            if self._stored(name, value) is None and name not in self._warned:
                self._warned.add(name)
                self._warn(
                    f"{self._named([name])} changes from epoch to epoch and {_attributes.why_not(value)}, which no step holds"
                )

    def state(self) -> dict[str, Any]:
        """What to save of the dataset; call it where no epoch is running."""
        if self._dataset is None:
            return {}
        if isinstance(self._dataset, Stateful):
            return {
                "state": copy.deepcopy(self._dataset.get_state())
            }  # the next epoch may change it
        held: dict[str, Any] = {}
        constant: dict[str, str] = {}
        changing: dict[str, str] = {}
        for name, value in self._own():
            stored = self._stored(name, value) if self._is_kept(name, value) else None
            if stored is not None:
                held[name] = stored
            elif name in self._changing:
                reordered = "" if name in self._renewed else _REORDERED
                changing[name] = f"{_attributes.fingerprint(value)}{reordered}"
            else:
                if name not in self._fingerprints:
                    self._fingerprints[name] = _attributes.fingerprint(value)
                if (text := self._fingerprints[name]) is not None:
                    constant[name] = text
        if self._first_epoch and self._at_state is None:
            self._at_state = {name: _attributes.seen(value) for name, value in self._own()}
        first = int(self._first_epoch)
        return {
            "attributes": held,
            "constant": constant,
            "changing": changing,
            "first_epoch": first,
        }

    def leave_out_scratch(self, state: dict[str, Any]) -> None:
        """Leaves out of the first epoch's ``state`` what that epoch has changed, and not only reordered: counts and caches."""
        if self._at_state is None or not state.get("first_epoch"):
            return
        before, self._at_state = self._at_state, {}
        for name, value in self._own() if before else ():
            if name in before and name in state["constant"]:
                now = _attributes.seen(value)
                renewed = now.elements is None or now.elements != before[name].elements
                if now.content != before[name].content and renewed:
                    del state["constant"][name]

    def set(self, state: dict[str, Any]) -> None:
        """Sets the result of ``state``; warns of an attribute that no longer fits, which keeps its value."""
        if not state or self._dataset is None:
            return
        if isinstance(self._dataset, Stateful) != ("state" in state):
            self._warn_of_methods()
        elif "state" in state:
            self._dataset.set_state(state["state"])
        else:
            self._set_attributes(state)

    def _set_attributes(self, state: dict[str, Any]) -> None:
        own, saved = dict(self._own()), state.get("attributes", {})
        values, refused = self._restored(own, saved)
        moved = {
            name for name, value in values.items() if _attributes.fingerprint(value) is not None
        }
        # A step of an older version is of the first epoch if it says what was drawn for it, and does not say what else there was.
        first = bool(state.get("first_epoch", "drawn" in state))
        others = state.get("constant", {}) if first else state.get("changing", {})
        differing = {
            name: text
            for name, text in others.items()
            if name in own and _differs(text, _attributes.fingerprint(own[name]))
        }
        if first:
            sure = "constant" in state and not differing and not refused
            apart = set() if sure else moved
        elif differing or refused:
            shuffled = any(text.endswith(_REORDERED) for text in differing.values())
            apart = {name for name in moved if shuffled or not _attributes.is_order(values[name])}
        else:
            apart = set[str]()
        self._first_epoch = first
        self._changing |= (saved.keys() | state.get("changing", {}).keys()) & own.keys()
        self._renewed |= {name for name, held in saved.items() if held.get("renewed")}
        for name in values.keys() - apart:
            if not (name in moved and _attributes.put(own[name], values[name])):
                setattr(self._dataset, name, values[name])
        for name in values:
            self._seen[name] = _attributes.seen(getattr(self._dataset, name))
        if apart:
            beside = self._named(differing.keys() | refused) or "what the step does not hold"
            self._warn(
                f"{self._named(apart)} cannot be put in the order of the checkpoint together with {beside}, and all stay as they "
                "are, so that samples keep their labels"
            )
        elif not state.get("of_other_processes"):
            constant = state.get("constant", {})
            now = {name: _attributes.fingerprint(own[name]) for name in constant if name in own}
            if others := {name for name, text in now.items() if text != constant[name]}:
                self._warn(
                    f"{self._named(others)} had other elements or another order when the step was saved"
                )

    def _restored(
        self, own: dict[str, Any], saved: dict[str, Any]
    ) -> tuple[dict[str, Any], set[str]]:
        """The values to set, of what is not as in the step, and the names of what does not fit."""
        values: dict[str, Any] = {}
        refused = set[str]()
        for name, held in saved.items():
            try:
                value = _attributes.restored(held, own[name])
            except (KeyError, ValueError) as error:
                why = "there is none" if isinstance(error, KeyError) else str(error)
                self._warn(
                    f"{self._named([name])} is not as in the checkpoint ({why}), and is left as it is"
                )
                refused.add(name)
                continue
            text = _attributes.fingerprint(value)
            if text is None or _differs(text, _attributes.fingerprint(own[name])):
                values[name] = value
        return values, refused

    def _is_kept(self, name: str, value: Any) -> bool:
        if name in self._changing or _attributes.is_generator(value):
            return True
        return self._first_epoch and _attributes.is_order(value)

    def _stored(self, name: str, value: Any) -> dict[str, Any] | None:
        return _attributes.stored(value, renewed=name in self._renewed)

    def _own(self) -> Iterable[tuple[str, Any]]:
        if isinstance(self._dataset, Stateful):
            return ()
        return list(getattr(self._dataset, "__dict__", {}).items())

    def _named(self, names: Iterable[str]) -> str:
        kind, named = type(self._dataset).__name__, sorted(names)
        more = f" and {len(named) - 5} more" if len(named) > 5 else ""
        return ", ".join(f"{kind}.{name}" for name in named[:5]) + more

    def _warn(self, what: str) -> None:
        kind = type(self._dataset).__name__
        warnings.warn(
            f"{what}: fit goes on after a restart, but may train on other batches than without it. Seed the generators before "
            f"the dataset is made, let {kind} shuffle an array of indices, or give it the methods get_state() and set_state(state)",
            UserWarning,
            stacklevel=4,
        )

    def _warn_of_methods(self) -> None:
        kind = type(self._dataset).__name__
        has = isinstance(self._dataset, Stateful)
        warnings.warn(
            f"the step was saved {'before' if has else 'when'} {kind} had get_state() and set_state(state): what it kept from epoch "
            "to epoch is not restored, and fit may train on other batches than without the restart. "
            "The steps from here on can be restored",
            UserWarning,
            stacklevel=3,
        )


_REORDERED = " reordered"


def _differs(saved: str, now: str | None) -> bool:
    """Whether a fingerprint is of something else, as far as anybody knows."""
    return saved.removesuffix(_REORDERED) != now or now == _attributes.UNKNOWN
