"""The adapter: gets and sets the state of Grain iterators, and compares their pipelines."""

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
from ckpt_grain._proof import Proven

IteratorT = TypeVar("IteratorT")

_ITERATORS = (
    grain.DatasetIterator,
    grain.DataLoaderIterator,
    grain_experimental.ElasticIterator,
)
# Not iterators: accepted only so that the error can say what to pass instead.
_PIPELINES = (grain.MapDataset, grain.IterDataset, grain.DataLoader)


class GrainAdapter:
    """Reads and sets the position of Grain iterators.

    A state is ``{"grain": Grain's state, "pipeline": description of the pipeline}``. The position is
    after the elements that ``next`` has returned, without those that Grain has only prefetched.
    """

    per_process = True
    """Every process has its own position, and so its own file."""

    def __init__(self) -> None:
        self._descriptions: weakref.WeakKeyDictionary[Any, dict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._tolerant: weakref.WeakSet[Any] = weakref.WeakSet()

    def accepts(self, cls: type, /) -> bool:
        """Whether objects of this class are Grain iterators or pipelines."""
        return issubclass(cls, _ITERATORS + _PIPELINES)

    def get_state(self, obj: Any, /) -> dict[str, Any]:
        """A copy of the iterator's state, which later ``next`` calls do not change.

        Raises:
            UnsupportedLeaf: a dataset or loader instead of an iterator.
            CheckpointError: the iterator was closed.
        """
        if isinstance(obj, Proven):
            state, next_element = obj.peek(self.get_state)
            return {**copy.deepcopy(state), "next": next_element}
        if _is_closed(_unwrapped(obj)):
            raise CheckpointError(
                f"the Grain iterator {type(obj).__name__} is closed: save before closing it, and restore into a new one"
            )
        return {**self.get_position(obj), "pipeline": copy.deepcopy(self._description_of(obj))}

    def notice(self, obj: Any, /) -> None:
        """Describes the pipeline of a new iterator before its use fills caches."""
        self._description_of(_unwrapped(obj))

    def get_position(self, obj: Any, /) -> dict[str, Any]:
        """Where the iterator stands: no description of the pipeline, no proof."""
        state = _repair.forget_unstarted(_unwrapped(obj), obj.get_state())
        # A deep copy, because Grain returns objects that it still uses.
        return {"grain": copy.deepcopy(state), "pipeline": None}

    def set_state(self, obj: Any, state: dict[str, Any], /) -> None:
        """Sets the iterator to the saved position, and starts its prefetching.

        Raises:
            StructureMismatch: the pipeline differs from the saved one; nothing was changed. Or
                its next element is not the one that the saved run would have seen (``with_proof``).
        """
        self.check_state(obj, state)
        if isinstance(obj, Proven):
            self._set_proven(obj, state)
            return
        _repair.let_go_of_workers(obj, state["grain"])
        # A deep copy, because Grain keeps the state and changes it later.
        obj.set_state(copy.deepcopy(state["grain"]))
        # The first elements are then produced while the arrays are being read.
        if hasattr(obj, "start_prefetch"):
            obj.start_prefetch()

    def check_state(self, obj: Any, state: dict[str, Any], /) -> None:
        """Refuses the state of another pipeline; does not change the iterator.

        Raises:
            StructureMismatch: with every difference between the two pipelines.
        """
        inner, saved = _unwrapped(obj), state["pipeline"]
        if saved is not None:  # None in a file of Grain's own handler
            now = self._description_of(inner)
            _pipeline.require_same(saved, now, tolerant=inner in self._tolerant)

    def to_text(self, state: dict[str, Any], /) -> str:
        """The file that Grain's own Orbax handler would have written."""
        state_of_grain = state["grain"]
        if isinstance(state_of_grain, bytes):
            return state_of_grain.decode()
        return json.dumps(state_of_grain, indent=4, default=_as_json)

    def from_text(self, obj: Any, text: str, /) -> dict[str, Any]:
        """The state in a file of Grain's own handler, with the types that JSON lost restored."""
        if isinstance(obj, grain.DataLoaderIterator):
            return {"grain": text.encode(), "pipeline": None}
        return {"grain": _repair.after_json(json.loads(text)), "pipeline": None}

    def ignore_pipeline_changes(self, obj: IteratorT) -> IteratorT:
        """Marks an iterator so that ``set_state`` compares process counts only; returns it."""
        self._tolerant.add(_unwrapped(obj))
        return obj

    def _set_proven(self, obj: Proven[Any], state: dict[str, Any]) -> None:
        obj.forget()
        self.set_state(obj.iterator, state)
        wanted = state.get("next")
        if wanted is None:
            return  # saved without proof
        _, found = obj.peek(self.get_state)
        if found != wanted:
            raise StructureMismatch(
                [Mismatch("next element", "digest", wanted, found)],
                where="the data pipeline",
                advice="The position was restored, and other data comes from it: has the data changed, or "
                "a function of the pipeline? Restore into the iterator without with_proof to accept it.",
            )

    def _description_of(self, obj: Any) -> dict[str, Any]:
        """The description of the iterator's pipeline, made once, with warnings of what cannot resume exactly."""
        if obj not in self._descriptions:
            for problem in _pipeline.problems(obj):
                warnings.warn(problem, UserWarning, stacklevel=3)
            self._descriptions[obj] = _pipeline.describe(obj)
        return self._descriptions[obj]


def ignore_pipeline_changes(iterator: IteratorT) -> IteratorT:
    """Returns the iterator, marked so that the state of another pipeline restores into it.

    Grain then decides: it may raise, or return other elements than the interrupted run would have
    seen. Use it if the change is intended::

        ckpt.restore(path, data=ckpt_grain.ignore_pipeline_changes(iterator))

    Another number of processes is still refused: elements would be repeated or lost.
    """
    return ADAPTER.ignore_pipeline_changes(iterator)


def with_proof(iterator: Any) -> Proven[Any]:
    """Wraps an iterator: a save stores a digest of its next element, and every restore compares it.

    A restore into another pipeline is refused anyway. The digest also finds changes that the
    description does not show: other file contents, another function body, other random numbers::

        data = ckpt_grain.with_proof(iter(dataset))

    Saving takes the next element from the pipeline (and waits for it), digests it on the host,
    and keeps it for the next call of ``next``. Restoring waits for an element, too.
    """
    _unwrapped(iterator)
    return Proven(iterator)


def _unwrapped(obj: Any) -> Any:
    """The iterator without its proof; raises UnsupportedLeaf for anything that is none."""
    if isinstance(obj, _ITERATORS):
        return _unwrapped(obj.iterator) if isinstance(obj, Proven) else obj
    name = type(obj).__name__
    raise UnsupportedLeaf(
        f"a Grain {name} has no position: pass its iterator, it = iter(...), the one that training calls next() on",
        type_name=name,
    )


def _is_closed(obj: Any) -> bool:
    inner = getattr(obj, "_iterator", obj) if isinstance(obj, grain.DataLoaderIterator) else obj
    return bool(getattr(inner, "_closed", False))


def _as_json(value: Any) -> Any:
    """numpy numbers and bytes as plain JSON values; our own file keeps their types."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return repr(value)  # the core refuses such a value, with its path


ADAPTER = GrainAdapter()
"""The entry point ``ckpt_core.adapters: grain`` refers to this object."""
