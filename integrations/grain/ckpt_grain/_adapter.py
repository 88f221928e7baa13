"""Grain iterators: their state with the description of their pipeline, and both set again."""

from __future__ import annotations

import copy
import json
import warnings
import weakref
from typing import Any, TypeVar

import grain
import numpy as np
from grain import experimental as grain_experimental

from ckpt_core import CheckpointError, Mismatch, StructureMismatch, UnsupportedLeaf
from ckpt_grain import _pipeline, _repair
from ckpt_grain._how import EARLIER_FIRM, FIRM, WHOLE
from ckpt_grain._proof import Proven

IteratorT = TypeVar("IteratorT")

_ITERATORS = (
    grain.DatasetIterator,
    grain.DataLoaderIterator,
    grain_experimental.ElasticIterator,
)
# Not iterators: taken only so that passing one is answered with what to pass instead.
_PIPELINES = (grain.MapDataset, grain.IterDataset, grain.DataLoader)


class GrainAdapter:
    """Reads and sets the position of Grain iterators.

    A state is ``{"grain": what Grain gave, "pipeline": what produced it}``. The position is that of
    the elements which ``next`` has returned; what Grain prefetched beyond them is not counted.
    """

    per_process = True
    """Every process has its own position, hence its own file."""

    def __init__(self) -> None:
        self._descriptions: weakref.WeakKeyDictionary[Any, dict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._described_before: weakref.WeakKeyDictionary[
            Any, weakref.WeakKeyDictionary[Any, dict[str, Any]]
        ] = weakref.WeakKeyDictionary()
        self._tolerant: weakref.WeakSet[Any] = weakref.WeakSet()
        self._warned: weakref.WeakSet[Any] = weakref.WeakSet()

    def accepts(self, cls: type, /) -> bool:
        """Whether objects of this class are Grain iterators or pipelines."""
        return issubclass(cls, _ITERATORS + _PIPELINES)

    def get_state(self, obj: Any, /) -> dict[str, Any]:
        """A copy of the iterator's state, which later ``next`` calls leave alone.

        Raises:
            UnsupportedLeaf: a dataset or loader instead of an iterator.
            CheckpointError: the iterator was closed.
        """
        _require_iterator(obj)
        if isinstance(obj, Proven):
            state, next_element = obj.peek(self.get_state)
            return {**copy.deepcopy(state), "next": next_element}
        if _is_closed(obj):
            raise CheckpointError(
                f"the Grain iterator {_name(obj)} is closed: save before closing it, and restore into a "
                "new one"
            )
        description = self._describe(obj)
        state = _repair.forget_unstarted(obj, obj.get_state())
        # Grain hands out objects that it goes on using.
        return {"grain": copy.deepcopy(state), "pipeline": description}

    def notice(self, obj: Any, /) -> None:
        """Remembers what the pipeline of a new iterator is, before it is used and fills caches."""
        _require_iterator(obj)
        inner = obj.iterator if isinstance(obj, Proven) else obj
        if inner not in self._descriptions:
            self._descriptions[inner] = _pipeline.describe(inner, WHOLE)

    def get_position(self, obj: Any, /) -> dict[str, Any]:
        """A state to go back to: without the description of the pipeline, and without proof."""
        _require_iterator(obj)
        inner = obj.iterator if isinstance(obj, Proven) else obj
        state = _repair.forget_unstarted(inner, obj.get_state())
        return {"grain": copy.deepcopy(state), "pipeline": None}

    def set_state(self, obj: Any, state: dict[str, Any], /) -> None:
        """Puts the iterator where it was, and starts its prefetching.

        Raises:
            StructureMismatch: the pipeline is not the one that was saved; nothing was changed. Or
                it gives another next element than the saved one would have (``with_proof``).
        """
        self.check_state(obj, state)
        if isinstance(obj, Proven):
            self._set_proven(obj, state)
            return
        self._remember(obj, state["pipeline"])
        _repair.let_go_of_workers(obj, state["grain"])
        # Grain keeps what it is given, and changes it later.
        obj.set_state(copy.deepcopy(state["grain"]))
        # The first elements are made while the rest of the training is still being set up.
        if hasattr(obj, "start_prefetch"):
            obj.start_prefetch()

    def check_state(self, obj: Any, state: dict[str, Any], /) -> None:
        """Refuses a state that another pipeline gave; the iterator is not touched.

        Raises:
            StructureMismatch: with every difference between the two pipelines.
        """
        _require_iterator(obj)
        if isinstance(obj, Proven):
            self.check_state(obj.iterator, state)
            return
        saved = state["pipeline"]
        if saved is None:
            return
        if obj in self._tolerant:
            _pipeline.require_same_count(saved)
            return
        told = _pipeline.how_told(saved)
        now = self._descriptions.get(obj)
        if now is None or now["told"] != told:
            now = _pipeline.describe(obj, told)
        _pipeline.require_same(saved, now)

    def to_text(self, state: dict[str, Any], /) -> str:
        """The file that Grain's own Orbax handler would have written."""
        state_of_grain = state["grain"]
        if isinstance(state_of_grain, bytes):
            return state_of_grain.decode()
        return json.dumps(state_of_grain, indent=4, default=_as_json)

    def from_text(self, obj: Any, text: str, /) -> dict[str, Any]:
        """The state in a file of Grain's own handler, with what JSON lost of it put right."""
        if isinstance(obj, grain.DataLoaderIterator):
            return {"grain": text.encode(), "pipeline": None}
        return {"grain": _repair.after_json(json.loads(text)), "pipeline": None}

    def ignore_pipeline_changes(self, obj: IteratorT) -> IteratorT:
        """Marks an iterator so that ``set_state`` compares process counts only; returns it."""
        _require_iterator(obj)
        self._tolerant.add(obj.iterator if isinstance(obj, Proven) else obj)
        return obj

    def _set_proven(self, obj: Proven[Any], state: dict[str, Any]) -> None:
        obj.forget()
        self.set_state(obj.iterator, state)
        wanted = state.get("next")
        if wanted is None:
            return  # saved without
        _, found = obj.peek(self.get_state)
        if found != wanted:
            raise StructureMismatch(
                [Mismatch("next element", "digest", wanted, found)],
                where="the data pipeline",
                advice="The position was restored, and other data comes from it: has the data changed, or "
                "a function of the pipeline? Restore into the iterator without with_proof to accept it.",
            )

    def _remember(self, obj: Any, saved: dict[str, Any] | None) -> None:
        """What the pipeline is, before it is used, told as in what is restored.

        None is a restore that is taken back, or a state of Grain's own.
        """
        if saved is None:
            before = self._described_before.pop(obj, None)
            if before is not None:
                self._descriptions.pop(obj, None)
                self._descriptions.update(before)
            return
        self._described_before[obj] = weakref.WeakKeyDictionary(
            {obj: self._descriptions[obj]} if obj in self._descriptions else {}
        )
        told = _pipeline.how_told(saved)
        if obj not in self._descriptions or self._descriptions[obj]["told"] != told:
            self._descriptions[obj] = _pipeline.describe(
                obj, FIRM if told in (FIRM, EARLIER_FIRM) else WHOLE
            )

    def _describe(self, obj: Any) -> dict[str, Any]:
        """The description of the iterator's pipeline, made once: pipelines do not change.

        One that is met here for the first time may have given elements already, and caches of its
        transformations may be filled: what those are is left out.
        """
        if obj not in self._warned:
            for problem in _pipeline.problems(obj):
                warnings.warn(problem, UserWarning, stacklevel=2)
            self._warned.add(obj)
        if obj not in self._descriptions:
            self._descriptions[obj] = _pipeline.describe(obj, FIRM)
        return copy.deepcopy(self._descriptions[obj])


def ignore_pipeline_changes(iterator: IteratorT) -> IteratorT:
    """The same iterator, into which a state restores even if another pipeline gave it.

    Grain then decides: it may raise, or give other elements than the interrupted run would have
    seen. Use it where a change is meant::

        ckpt.restore(path, data=ckpt_grain.ignore_pipeline_changes(iterator))

    Another number of processes is refused all the same: nobody can mean what would come of it.
    """
    return ADAPTER.ignore_pipeline_changes(iterator)


def with_proof(iterator: Any) -> Proven[Any]:
    """The iterator, saved with a digest of its next element, which every restore then compares.

    A restore into another pipeline is refused anyway. This finds what no description of a pipeline
    can: another content of the files, another body of a function, numbers drawn elsewhere::

        data = ckpt_grain.with_proof(iter(dataset))

    Saving takes the next element out of the pipeline (and waits for it), digests it on the host,
    and gives it to the next ``next``. Restoring waits for it, too.
    """
    _require_iterator(iterator)
    return Proven(iterator)


def _require_iterator(obj: Any) -> None:
    if not isinstance(obj, _ITERATORS):
        raise UnsupportedLeaf(
            f"a Grain {_name(obj)} has no position: pass its iterator, it = iter(...), the one "
            "that training calls next() on",
            type_name=_name(obj),
        )


def _name(obj: Any) -> str:
    return type(obj).__name__


def _is_closed(obj: Any) -> bool:
    inner = getattr(obj, "_iterator", obj) if isinstance(obj, grain.DataLoaderIterator) else obj
    return bool(getattr(inner, "_closed", False))


def _as_json(value: Any) -> Any:
    """numpy numbers and bytes as JSON has them; our own file beside keeps their types."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return repr(value)  # the core refuses such a value, and can say where it stands


ADAPTER = GrainAdapter()
"""What the entry point ``ckpt_core.adapters: grain`` names."""
