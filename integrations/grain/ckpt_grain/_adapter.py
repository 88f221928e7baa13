"""Gets and sets the state of Grain iterators, in which it corrects types that JSON loses and workers that have not started."""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import grain
import jax
import numpy as np
from grain import experimental as grain_experimental

from ckpt_core import CheckpointError, Mismatch, StructureMismatch, UnsupportedLeaf
from ckpt_grain import _pipeline

IteratorT = TypeVar("IteratorT")

_ITERATORS = (grain.DatasetIterator, grain.DataLoaderIterator, grain_experimental.ElasticIterator)
# Not iterators: accepted only so that the error can say what to pass instead.
_PIPELINES = (grain.MapDataset, grain.IterDataset, grain.DataLoader)


class GrainAdapter:
    """Reads and sets ``{"grain": Grain's state, "pipeline": description of the pipeline}``. The position is after the elements
    that ``next`` has returned, without those that Grain has only prefetched.
    """

    per_process = True
    """Every process has its own position, and so its own file."""

    def __init__(self) -> None:
        self._descriptions = weakref.WeakKeyDictionary[Any, dict[str, Any]]()
        self._tolerant = weakref.WeakSet[Any]()

    def accepts(self, cls: type, /) -> bool:
        """Whether objects of this class are Grain iterators or pipelines."""
        return issubclass(cls, _ITERATORS + _PIPELINES)

    def get_state(self, obj: Any, /) -> dict[str, Any]:
        """A copy of the state, which later ``next`` calls do not change; CheckpointError if the iterator was closed."""
        if isinstance(obj, Proven):
            state, next_element = obj.peek()
            return {**copy.deepcopy(state), "next": next_element}
        inner = _unwrapped(obj)
        if isinstance(inner, grain.DataLoaderIterator):
            inner = getattr(inner, "_iterator", inner)
        if getattr(inner, "_closed", False):
            raise CheckpointError(
                f"the Grain iterator {type(obj).__name__} is closed: save before closing it, and restore into a new one"
            )
        return {**self.get_position(obj), "pipeline": copy.deepcopy(self._description_of(obj))}

    def notice(self, obj: Any, /) -> None:
        """Describes the pipeline of a new iterator before its use fills caches."""
        self._description_of(_unwrapped(obj))

    def get_position(self, obj: Any, /) -> dict[str, Any]:
        """Where the iterator stands: no description of the pipeline, no proof."""
        inner, state = _unwrapped(obj), obj.get_state()
        # A copy, because Grain returns objects that it still uses; with other states for some workers.
        return {"grain": copy.deepcopy(state, _unstarted_states(inner)), "pipeline": None}

    def set_state(self, obj: Any, state: dict[str, Any], /) -> None:
        """Sets the iterator to the saved position, and starts its prefetching. StructureMismatch if the pipeline differs, when
        nothing was changed, or if its next element is not the one that the saved run would have seen.
        """
        self.check_state(obj, state)
        if isinstance(obj, Proven):
            obj.ahead = None  # of another position
            self.set_state(obj.iterator, state)
            wanted = state.get("next")  # None if it was saved without proof
            if wanted is not None and (found := obj.peek()[1]) != wanted:
                raise StructureMismatch(
                    [Mismatch("next element", "digest", wanted, found)],
                    where="the data pipeline",
                    advice="The position was restored, and other data comes from it: has the data changed, or "
                    "a function of the pipeline? Restore into the iterator without with_proof to accept it.",
                )
            return
        _let_go_of_workers(obj, state["grain"])
        # A deep copy, because Grain keeps the state and changes it later.
        obj.set_state(copy.deepcopy(state["grain"]))
        # The first elements are then produced while the arrays are being read.
        if hasattr(obj, "start_prefetch"):
            obj.start_prefetch()

    def check_state(self, obj: Any, state: dict[str, Any], /) -> None:
        """Raises StructureMismatch with every difference to the saved pipeline; does not change the iterator."""
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
        return {"grain": _after_json(json.loads(text)), "pipeline": None}

    def ignore_pipeline_changes(self, obj: IteratorT) -> IteratorT:
        """Marks an iterator so that ``set_state`` compares process counts only; returns it."""
        self._tolerant.add(_unwrapped(obj))
        return obj

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


def _as_json(value: Any) -> Any:
    """numpy numbers and bytes as plain JSON values; our own file keeps their types."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return repr(value)  # the core refuses such a value, with its path


ADAPTER = GrainAdapter()
"""The entry point ``ckpt_core.adapters: grain`` refers to this object."""


T = TypeVar("T")
_END = object()


class Proven(grain.DatasetIterator[T], Generic[T]):
    """An iterator with a look ahead: a save digests the pipeline's next element, and keeps it for ``next``."""

    def __init__(self, iterator: Any) -> None:
        super().__init__()
        self.iterator = iterator
        self.ahead: tuple[Any, Any] | None = None

    def __next__(self) -> T:
        if self.ahead is None:
            return next(self.iterator)
        _, element = self.ahead
        if element is _END:
            raise StopIteration
        self.ahead = None
        return element

    def peek(self) -> tuple[Any, str]:
        """The position before the next element, and the digest of that element."""
        if self.ahead is None:
            position = ADAPTER.get_state(self.iterator)
            self.ahead = position, next(self.iterator, _END)
        position, element = self.ahead
        return position, "end" if element is _END else _digest(element)

    def get_state(self) -> Any:
        """Grain's state of the wrapped iterator, before the next element."""
        return self.iterator.get_state() if self.ahead is None else self.ahead[0]["grain"]

    def set_state(self, state: Any) -> None:
        """Sets the wrapped iterator to a Grain state, without a check."""
        self.ahead = None  # of another position
        self.iterator.set_state(state)

    def start_prefetch(self) -> None:
        """Calls the wrapped iterator's method, if it has one."""
        if hasattr(self.iterator, "start_prefetch"):
            self.iterator.start_prefetch()

    def close(self) -> None:
        """Closes the wrapped iterator."""
        getattr(self.iterator, "_iterator", self.iterator).close()


def _digest(element: Any) -> str:
    """SHA-256 of an element: its structure, and type, shape and bytes of its leaves."""
    found = hashlib.sha256()
    leaves, _ = jax.tree_util.tree_flatten_with_path(element)
    for path, leaf in leaves:
        value = leaf if isinstance(leaf, (str, bytes)) else np.asarray(leaf)
        if isinstance(value, np.ndarray) and value.dtype != object:
            what, data = f"{value.dtype} {value.shape}", value.tobytes()
        else:
            what, data = type(leaf).__name__, repr(leaf).encode(errors="surrogatepass")
        found.update(f"{jax.tree_util.keystr(path)} {what} {len(data)}\n".encode() + data)
    return found.hexdigest()[:32]


_SUB_STATES = "iterators_in_use_states"
"""The key under which an interleaving iterator (``mp_prefetch`` makes one) stores its parts."""


def _unstarted_states(obj: Any) -> dict[int, Any]:
    """Id of the state of each worker that has not started -> the empty state, which means the beginning. Until a worker
    of ``mp_prefetch`` has returned an element, Grain takes its state from the main process, which does not know the
    worker's part. With few files that state points outside of the part, and the restored iterator fails.
    """
    return {
        id(worker._state): {}
        for interleave in _interleaves(obj)
        for worker in interleave._iterators_in_use
        # A thread of this process receives the elements from the other process.
        if hasattr(getattr(worker, "_maybe_nonnative_parent", worker), "_iter_parent")
        and getattr(worker, "_next_index", None) == 0
        and getattr(worker, "_state", None)
    }


def _let_go_of_workers(obj: Any, state: Any) -> None:
    """Closes the workers of ``obj`` if a state is empty: running ones would ignore it and keep their position."""
    if not _holds_empty(state):
        return
    for interleave in _interleaves(obj):
        for worker in interleave._iterators_in_use:
            if worker is not None:
                worker.close()
        interleave._iterators_in_use = [None] * len(interleave._iterators_in_use)


def _after_json(state: Any) -> Any:
    """A state from Grain's own file, with the tuples and int keys that JSON cannot represent."""
    if isinstance(state, list):
        return [_after_json(item) for item in state]
    if not isinstance(state, dict):
        return state
    fixed = {key: _after_json(value) for key, value in state.items()}
    if {"remainder_slices", "elements_from_buffer_after_checkpoint"} <= fixed.keys():
        # ConcatThenSplit compares with tuples: it takes a list for a remainder that does not exist.
        slices = fixed["remainder_slices"]
        fixed["remainder_slices"] = {key: tuple(value) for key, value in slices.items()}
    if isinstance(fixed.get("future_states"), dict):
        fixed["future_states"] = {int(key): value for key, value in fixed["future_states"].items()}
    return fixed


def _interleaves(obj: Any) -> Iterator[Any]:
    """The interleaving iterators of a pipeline that runs in this process."""
    stack = [obj]
    while stack:
        iterator = stack.pop()
        if hasattr(iterator, "_iterators_in_use"):
            yield iterator
        if isinstance(iterator, grain.DatasetIterator):
            stack.extend(getattr(iterator, "_parents", ()))


def _holds_empty(node: Any) -> bool:
    """Whether a state has the empty state of a worker in it."""
    if isinstance(node, dict):
        return {} in node.get(_SUB_STATES, ()) or any(map(_holds_empty, node.values()))
    return isinstance(node, list) and any(map(_holds_empty, node))
