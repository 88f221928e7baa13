"""What a ``keras.utils.PyDataset`` keeps from epoch to epoch: the order in which it shuffles itself, a generator.

Such a dataset reorders an attribute in ``on_epoch_end``. A new process would begin with the order of the first
epoch, so a step holds what changes, generators, and orders of places, and fingerprints of all attributes.

Samples and their labels may be shuffled alike in two attributes, of which one alone can be set: then each sample would
get the label of another. Nobody can know what belongs together. So **a dataset is made exactly what it was at the step, or it is left as
it is**: when all that the step holds has been set, each attribute must have the fingerprint of the step, except for
numbers, for what is opened when it is used (``may_differ``), and for caches: dicts that have only grown. Otherwise all is put back, and a warning names what differs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import warnings
from collections.abc import Container, Iterable
from typing import Any

from ckpt_core import Stateful
from ckpt_keras import _attributes, _rows
from ckpt_keras._closed import is_closed
from ckpt_keras._owners import Attribute, Found, attributes, class_of
from ckpt_keras._rows import Column


class Kept:
    """The state of a PyDataset between epochs, for as long as ``fit`` runs; of None it is empty."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._found = Found(dataset)
        own, self._prints = self._look()
        self._began = {
            name: dataclasses.replace(one, value=_rows.copied(one.value))
            for name, one in own.items()
            if _rows.is_small(one.value)
        }
        self._prints_began = dict(self._prints)
        self._rows_began: dict[tuple[Column, ...], str] = {}
        self._stayed: dict[str, dict[str, str]] = {}
        self._objects = {name: one.value for name, one in own.items()}
        self._counts_of_entries = _entries(own)
        self._caches: set[str] = set()  # dicts that have only grown
        self._changing: set[str] = set()
        self._in_place: set[str] = set()  # of these, what has always been the same object
        self._renewed: set[str] = set()  # of these, what got other elements, not only another order
        self._counts: dict[str, Any] | None = None  # of the first epoch

    def ended(self) -> None:
        """An epoch is over: notes which attributes have changed, and warns of those that cannot be saved."""
        before, (own, self._prints) = self._prints, self._look()
        counts, self._counts_of_entries = self._counts_of_entries, _entries(own)
        for name in own.keys() & before.keys():
            one = own[name]
            if self._prints[name] == before[name] or is_closed(one.value):
                continue
            may_grow = (
                name in counts and name not in self._changing and _attributes.is_dict(one.value)
            )
            if may_grow and _attributes.began_as(
                one.value, counts[name], before[name], self._dataset
            ):
                self._caches.add(name)
                continue
            self._caches.discard(name)
            if one.value is self._objects.get(name) and name not in self._changing - self._in_place:
                self._in_place.add(name)
            else:
                self._in_place.discard(name)
            if name not in self._renewed and not self._has_kept_rows(own, name):
                self._renewed.add(name)
            if name not in self._changing and _attributes.stored(one.value) is None:
                self._warn(
                    f"{self._named([name])} changes from epoch to epoch and {_attributes.why_not(one.value)}, which no step holds"
                )
            self._changing.add(name)

    def state(self) -> dict[str, Any]:
        """What to save of the dataset; call it where no epoch is running."""
        if self._dataset is None:
            return {}
        if _says_its_state(self._dataset):
            return {
                "state": copy.deepcopy(self._dataset.get_state())
            }  # the next epoch may change it
        (own, prints), held = self._look(), dict[str, Any]()
        for name, one in own.items():
            kept = name in self._changing | self._caches or _attributes.is_generator(one.value)
            if kept or _attributes.is_order(one.value):
                stored = _attributes.stored(one.value, is_cache=name in self._caches)
                held |= {name: stored} if stored is not None else {}
        if self._counts is None:
            counts = {
                name: one.value for name, one in own.items() if _attributes.is_count(one.value)
            }
            self._counts = {
                name: _attributes.stored(value)
                for name, value in counts.items()
                if name not in held
            }
        return {
            "attributes": held,
            "fingerprints": prints,
            "found": dict.fromkeys(self._found.names(), 1),
            # The default of a class has become an attribute of the object, which others of its class have not.
            "of_objects": {name: 1 for name in held if own[name].owner is own[name].holder},
            "changing": dict.fromkeys(self._changing, 1),
            "in_place": dict.fromkeys(self._in_place, 1),
            "renewed": dict.fromkeys(self._renewed, 1),
            "caches": dict.fromkeys(self._caches, 1),
            "rows": {
                json.dumps(columns): self._rows_of_beginning(*columns)
                for columns in self._reordered_together(own, held)
            },
            "beside": {
                name: json.dumps(prints)
                for name in self._changing & held.keys() & self._began.keys()
                if (prints := self._stayed_beside(name, own[name]))
            },
        }

    def _stayed_beside(self, name: str, one: Attribute) -> dict[str, str]:
        """Fingerprints of what has not changed in an attribute that has, since fit began: a map of labels beside columns."""
        if name not in self._stayed:
            began = self._began[name]
            as_it_was = self._fingerprints({name: began}).items() <= self._prints_began.items()
            self._stayed[name] = self._beside(began) if as_it_was else {}
        if self._stayed[name]:
            now = self._beside(one, self._stayed[name])
            self._stayed[name] = dict(self._stayed[name].items() & now.items())
        return self._stayed[name]

    def _beside(self, one: Attribute, only: Container[str] | None = None) -> dict[str, str]:
        """The fingerprints of what is in an attribute, by the steps to it."""
        if not _rows.has_columns(one.value):
            return {}
        named = ((json.dumps(steps), part) for steps, part in _rows.inner(one.value))
        wanted = ((steps, part) for steps, part in named if only is None or steps in only)
        prints = {steps: _attributes.fingerprint(part, self._dataset) for steps, part in wanted}
        return {steps: text for steps, text in prints.items() if _attributes.same(text, text)}

    def _reordered_together(
        self, own: dict[str, Attribute], held: dict[str, Any]
    ) -> list[list[Column]]:
        """Columns that have always been in the same order, if in another one than at the beginning."""
        found = [
            column
            for name in self._changing & held.keys() & self._began.keys()
            if name not in self._renewed or _rows.has_columns(own[name].value)
            for column in _rows.columns(own[name].value, name)
            if len(column) == 1 or self._keeps_rows(own, column)
        ]
        groups: list[list[Column]] = []
        # Of the shorter ones each has a row, of which a flat one may have more elements.
        for column in sorted(found, key=lambda one: (_length(own, one), json.dumps(one))):
            few = (
                len(groups) <= _attributes.MOST_PARTS
            )  # the places of each class belong to nothing
            if not few or not any(self._joins(own, group, column) for group in groups):
                groups.append([column])
        return groups

    def _joins(self, own: dict[str, Attribute], group: list[Column], column: Column) -> bool:
        """Adds a column to those whose order it has, if it has it."""
        for parts in _rows.parts(column, _length(own, column), _length(own, group[0])):
            if self._keeps_rows(own, *group, *parts):
                group += parts
                return True
        return False

    def _has_kept_rows(self, own: dict[str, Attribute], name: str) -> bool:
        """Whether all that is in it is only in another order."""
        columns = [*_rows.columns(own[name].value, name)]
        return bool(columns) and all(self._keeps_rows(own, column) for column in columns)

    def _keeps_rows(self, own: dict[str, Attribute], *columns: Column) -> bool:
        """Whether columns have the rows with which fit began, in any order."""
        names = {name for name, *_ in columns}
        if any(name not in self._began or not _rows.is_small(own[name].value) for name in names):
            return False
        now, began = _values(own, columns), _values(self._began, columns)
        if now and began and all(map(_rows.is_plain, (*now, *began))):
            return _rows.same(now, began)
        rows = _sum_of(own, columns)
        return rows != "" and rows == self._rows_of_beginning(*columns)

    def _rows_of_beginning(self, *columns: Column) -> str:
        """Empty if elements have changed in place since, so that nobody knows them."""
        if columns not in self._rows_began:  # they stay the same, and take 3 s of a million
            began = {name: self._began[name] for name, *_ in columns}
            stayed = self._fingerprints(began).items() <= self._prints_began.items()
            self._rows_began[columns] = _sum_of(began, columns) if stayed else ""
        return self._rows_began[columns]

    def hold_counts(self, state: dict[str, Any]) -> None:
        """Adds to the ``state`` of the first epoch the numbers and arrays of numbers that this epoch has changed, as they were when it began."""
        counts, self._counts = self._counts or {}, {}
        for name, one in self._own().items() if counts else ():
            now = _attributes.fingerprint(one.value, self._dataset) if name in counts else ""
            if now and now != state["fingerprints"].get(name):
                state["attributes"][name], state["changing"][name] = counts[name], 1
                self._changing.add(name)
                self._renewed.add(name)

    def set(self, state: dict[str, Any]) -> None:
        """Sets the result of ``state``, all of it or nothing, and warns of what differs."""
        if not state or self._dataset is None:
            return
        if _says_its_state(self._dataset) != ("state" in state):
            self._warn_of_methods()
        elif "state" in state:
            self._dataset.set_state(state["state"])
        else:
            self._set_attributes(state)

    def _set_attributes(self, state: dict[str, Any]) -> None:
        own, held = self._own(), state.get("attributes", {})
        own = {
            name: one.of_object() if name in state.get("of_objects", {}) else one
            for name, one in own.items()
        }
        dicts = {name for name, one in own.items() if _attributes.is_dict(one.value)}
        self._caches |= state.get("caches", {}).keys() & dicts
        differing = self._differing(own, state)
        values = self._restored(own, {name: held[name] for name in differing & held.keys()}, state)
        why = differing - values.keys() or self._without_entries(own, values, state)
        if values and not why:
            why = self._of_other_rows(own, state) or self._set_all(own, values, state)
        if not why:
            self._changing |= state.get("changing", {}).keys()
            self._in_place |= state.get("in_place", {}).keys()
            self._objects = {name: one.value for name, one in self._own().items()}
            self._renewed |= state.get("renewed", {}).keys()
        elif not state.get("of_other_processes"):
            others = differing - why
            stay = (
                f", and {self._named(others)} cannot be put in the order of the checkpoint without it"
                if others
                else ""
            )
            self._warn(
                f"{self._named(why)} had other elements or another order when the step was saved{stay}. All stay as they "
                "are, so that samples keep their labels"
            )
        self._prints = self._look()[1]

    def _differing(self, own: dict[str, Attribute], state: dict[str, Any]) -> set[str]:
        """The names of what is not as in the step, or nobody can tell."""
        now, saved = self._fingerprints(own), state.get("fingerprints", {})
        held = state.get("attributes", {})
        # A class that is met in one of them alone: what leads to it differs, or is a cache.
        alone = self._found.names() ^ state.get("found", {}).keys()
        differing = set[str]()
        for name in now.keys() | saved.keys():
            if class_of(name) in alone:
                continue
            text = saved.get(name, "")
            if name in now and _attributes.same(now[name], text):
                continue
            if name in self._caches and name not in held:
                continue
            value = own[name].value if name in own else None
            if name in held or not _attributes.may_differ(value, text):
                differing.add(name)
        return differing

    def _restored(
        self, own: dict[str, Attribute], held: dict[str, Any], state: dict[str, Any]
    ) -> dict[str, Any]:
        """The values to set, of what fits."""
        values: dict[str, Any] = {}
        for name, one in held.items():
            try:
                renewed = name in state.get("renewed", {})
                values[name] = _attributes.restored(one, own[name].value, renewed=renewed)
            except (KeyError, ValueError):  # there is none, or it is something else
                continue
            # Places of a longer dataset, or of the part of another process, are none of this one.
            fixed = name not in state.get("renewed", {}) or state.get("of_other_processes")
            now = own[name].value
            if fixed and _attributes.is_sequence(now) and len(now) != len(values[name]):
                del values[name]
        return values

    def _without_entries(
        self, own: dict[str, Attribute], values: dict[str, Any], state: dict[str, Any]
    ) -> set[str]:
        """Caches that no step holds, beside something that may say what is in them: a switch, a counter, what was read so far."""
        changing, renewed = state.get("changing", {}), state.get("renewed", {})
        say_more = [
            name
            for name, value in values.items()
            if name in changing
            and not (_attributes.is_generator(value) or _attributes.is_order(value))
            and (name in renewed or not _attributes.is_sequence(value))
        ]
        prints, saved = self._fingerprints(own), state.get("fingerprints", {})
        lost = {
            name
            for name in self._caches - state.get("attributes", {}).keys()
            if not _attributes.same(prints.get(name, ""), saved.get(name, ""))
        }
        return lost if say_more else set()

    def _of_other_rows(self, own: dict[str, Attribute], state: dict[str, Any]) -> set[str]:
        """What was only reordered together, and has not the same rows in this program, files with other labels; or something else in
        what has stayed beside them: a map of labels."""
        for name, text in state.get("beside", {}).items():
            stayed = json.loads(text)
            if name in own and not stayed.items() <= self._beside(own[name], stayed).items():
                return {name}
        for columns, rows in state.get("rows", {}).items():
            if _sum_of(own, json.loads(columns)) != rows:
                return {name for name, *_ in json.loads(columns)}
        return set()

    def _set_all(
        self, own: dict[str, Attribute], values: dict[str, Any], state: dict[str, Any]
    ) -> set[str]:
        """Sets them, in place where the program does or may; what still differs from the step, for which all is put back."""
        # What the program replaces may be a list that somebody has passed, and uses elsewhere.
        replaced = state.get("changing", {}).keys() - state.get("in_place", {}).keys()
        prints = state.get("fingerprints", {})
        before = {name: _attributes.copied(own[name].value) for name in values}
        left = set[str]()
        for in_place in (values.keys() - replaced, values.keys(), set[str]()):
            instead: dict[tuple[int, str], Any] = {}
            try:
                for name, value in values.items():
                    # Two attributes that hold one object go on sharing it, if the step has one value of them.
                    shared = id(own[name].value), prints.get(name, name)
                    chosen = instead.setdefault(shared, value)
                    _attributes.put(own[name], chosen, in_place=name in in_place)
                left = self._differing(self._own(), state)
            except Exception:  # of a class that does not let itself be set
                left = set(values)
            if not left:
                return left
            for name, value in before.items():
                with contextlib.suppress(Exception):
                    _attributes.put_back(own[name], value)
        return left

    def _own(self) -> dict[str, Attribute]:
        if self._dataset is None or _says_its_state(self._dataset):
            return {}
        return attributes(self._dataset, self._found)

    def _look(self) -> tuple[dict[str, Attribute], dict[str, str]]:
        """All attributes and their fingerprints, also those of classes that are met only while they are read."""
        own, prints = self._own(), dict[str, str]()
        while own.keys() - prints.keys():
            prints |= self._fingerprints(
                {name: one for name, one in own.items() if name not in prints}
            )
            own |= self._own()
        return own, prints

    def _fingerprints(self, own: dict[str, Attribute]) -> dict[str, str]:
        return {
            name: _attributes.fingerprint(one.value, self._dataset, self._found)
            for name, one in own.items()
        }

    def _named(self, names: Iterable[str]) -> str:
        kind = f"{type(self._dataset).__name__}."
        named = sorted(name.replace(":", ".") if class_of(name) else kind + name for name in names)
        more = f" and {len(named) - 5} more" if len(named) > 5 else ""
        return ", ".join(named[:5]) + more

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
        has = _says_its_state(self._dataset)
        warnings.warn(
            f"the step was saved {'before' if has else 'when'} {kind} had get_state() and set_state(state): what it kept from epoch "
            "to epoch is not restored, and fit may train on other batches than without the restart. "
            "The steps from here on can be restored",
            UserWarning,
            stacklevel=3,
        )


def _says_its_state(dataset: Any) -> bool:
    try:
        return isinstance(dataset, Stateful)
    except Exception:  # its __getattr__ raises something else than AttributeError
        return False


def _entries(own: dict[str, Attribute]) -> dict[str, int]:
    return {name: len(one.value) for name, one in own.items() if _attributes.is_dict(one.value)}


def _values(own: dict[str, Attribute], columns: Iterable[Column]) -> list[Any]:
    """What has rows; empty if they have none."""
    try:
        values = [_rows.column(own[name].value, steps) for name, *steps in columns]
    except (KeyError, IndexError, TypeError):
        return []
    if not all(map(_attributes.is_sequence, values)) or len({len(value) for value in values}) != 1:
        return []
    return values


def _length(own: dict[str, Attribute], column: Column) -> int:
    return len(_values(own, [column])[0])


def _sum_of(own: dict[str, Attribute], columns: Iterable[Column]) -> str:
    """The same for any order of the same rows; empty where there are none."""
    values = _values(own, columns)
    return _rows.sum_of(values) if values else ""
