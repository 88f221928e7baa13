"""What a ``keras.utils.PyDataset`` keeps from epoch to epoch: the order in which it shuffles itself, a generator.

Such a dataset reorders an attribute in ``on_epoch_end``. A new process would begin with the order of the first
epoch, so what changes is saved: attributes that were seen to change, generators, and, before the first epoch is over,
whatever could be an order. What changes and cannot be saved is named in a warning.

Samples and their labels may be shuffled alike in two attributes, of which one alone can be set: then each sample would
get the label of another. So a step has fingerprints of all sequences that it does not hold. Where one of them is not
as it was, it is put in order by the same permutation if that gives what was saved; else no sequence of its length is set.
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
        self._scratch_known = False
        self._at_state: dict[str, str] = {}

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
        kept = {
            name: _attributes.stored(value, renewed=name in self._renewed)
            for name, value in self._own()
            if self._is_kept(name, value)
        }
        held = {name: value for name, value in kept.items() if value is not None}
        state: dict[str, Any] = {"attributes": held, "loose": {}, "constant": {}}
        state["first_epoch"] = int(self._first_epoch)
        self._at_state = _attributes.fingerprints(self._own())
        for name, text in self._at_state.items():
            if name in held:
                continue
            changes = self._first_epoch or name.partition(".")[0] in self._changing
            state["loose" if changes else "constant"][name] = text
        return state

    def leave_out_scratch(self, state: dict[str, Any]) -> None:
        """Leaves out of the last ``state`` what the running epoch has changed: counts and caches, which are no order.

        Not what changed together with an order, as in an ``on_epoch_begin`` that shuffles.
        """
        if not self._first_epoch or self._scratch_known or not state.get("loose"):
            return
        self._scratch_known = True
        now = _attributes.fingerprints(self._own())
        changed = {name: text for name, text in self._at_state.items() if now.get(name) != text}
        orders = {
            _attributes.length_of(changed[name]) for name in changed.keys() & state["attributes"]
        }
        for name in changed.keys() & state["loose"]:
            if _attributes.length_of(changed[name]) not in orders:
                del state["loose"][name]

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
        own = dict(self._own())
        values: dict[str, Any] = {}
        stuck = set[int]()  # lengths of sequences that cannot all be set
        saved = state.get("attributes", {})
        for name, held in saved.items():
            try:
                values[name] = _attributes.restored(held, own[name])
            except (KeyError, ValueError) as error:
                why = "there is none" if isinstance(error, KeyError) else str(error)
                self._warn(
                    f"{self._named([name])} is not as in the checkpoint ({why}), and is left as it is"
                )
                stuck |= {_attributes.length_of_held(held)}
        now = _attributes.fingerprints(own.items())
        moved = {
            name: value
            for name, value in values.items()
            if name in now and _attributes.fingerprint(value) != now[name]
        }
        loose = {
            name: text
            for name, text in state.get("loose", {}).items()
            if now.get(name, text) != text
        }
        following = self._following(own, moved, loose)
        left = {name: text for name, text in loose.items() if name not in following}
        stuck |= {_attributes.length_of(text) for text in left.values()}
        stuck |= {_attributes.length_of(now[name]) for name in left}
        moving = moved | following
        apart = {name for name, value in moving.items() if stuck & {len(own[name]), len(value)}}
        self._first_epoch = bool(state.get("first_epoch", 1))
        self._changing |= values.keys() | following.keys()
        self._renewed |= {name for name, held in saved.items() if held.get("renewed")}
        for name, value in (values | following).items():
            if name not in apart:
                setattr(self._dataset, name, value)
                self._seen[name] = _attributes.seen(value)
        if apart:
            self._warn(
                f"{self._named(apart)} cannot be put in the order of the checkpoint together with "
                f"{self._named(left) or 'what was left as it is'}, and all stay as they are, so that samples keep their labels"
            )
        elif not state.get("of_other_processes"):
            fixed = state.get("constant", {})
            others = left.keys() | {n for n in fixed if now.get(n, fixed[n]) != fixed[n]}
            if others:
                self._warn(
                    f"{self._named(others)} had other elements or another order when the step was saved"
                )

    def _following(
        self, own: dict[str, Any], moved: dict[str, Any], loose: dict[str, str]
    ) -> dict[str, Any]:
        """What was shuffled together with an order, put in that order: the fingerprint shows that it was."""
        found: dict[str, Any] = {}
        for order, value in moved.items():
            if not (_attributes.may_be_order(own[order]) and _attributes.may_be_order(value)):
                continue
            try:
                places = _attributes.places_of(value, own[order])
            except KeyError:  # other elements
                continue
            for name, text in loose.items():
                if name in own and len(own[name]) == len(places):
                    again = _attributes.taken_from(own[name], places)
                    if again is not None and _attributes.fingerprint(again) == text:
                        found[name] = again
        return found

    def _is_kept(self, name: str, value: Any) -> bool:
        if name in self._changing or _attributes.is_generator(value):
            return True
        return self._first_epoch and _attributes.may_be_order(value)

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
