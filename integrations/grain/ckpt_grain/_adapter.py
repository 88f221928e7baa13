"""The adapter: gets and sets the state of Grain iterators, compares their pipelines, and proves their resume.

It corrects Grain's states: types that JSON loses, and workers that have not started.
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
import weakref
from collections.abc import Callable, Iterator
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
        state = _forget_unstarted(_unwrapped(obj), obj.get_state())
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
        _let_go_of_workers(obj, state["grain"])
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
        return {"grain": _after_json(json.loads(text)), "pipeline": None}

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


T = TypeVar("T")
_END = object()


class Proven(grain.DatasetIterator[T], Generic[T]):
    """An iterator with a look ahead: a save digests the pipeline's next element, and keeps it for ``next``."""

    def __init__(self, iterator: Any) -> None:
        super().__init__()
        self.iterator = iterator
        self._ahead: tuple[Any, Any] | None = None

    def __next__(self) -> T:
        if self._ahead is None:
            return next(self.iterator)
        _, element = self._ahead
        if element is _END:
            raise StopIteration
        self._ahead = None
        return element

    def peek(self, position_of: Callable[[Any], Any]) -> tuple[Any, str]:
        """The position before the next element, and the digest of that element."""
        if self._ahead is None:
            position = position_of(self.iterator)
            self._ahead = position, next(self.iterator, _END)
        position, element = self._ahead
        return position, "end" if element is _END else _digest(element)

    def forget(self) -> None:
        """Drops the element that was looked at, because the position has changed."""
        self._ahead = None

    def get_state(self) -> Any:
        """Grain's state of the wrapped iterator, before the next element."""
        return self.iterator.get_state() if self._ahead is None else self._ahead[0]["grain"]

    def set_state(self, state: Any) -> None:
        """Sets the wrapped iterator to a Grain state, without a check."""
        self.forget()
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


def _forget_unstarted(obj: Any, state: Any) -> Any:
    """The state of ``obj`` with empty states, which mean the beginning, for workers that have not started. Until a worker
    of ``mp_prefetch`` has returned an element, Grain takes its state from the main process, which does not know the
    worker's part. With few files that state points outside of the part, and the restored iterator fails.
    """
    unstarted = {
        id(worker._state)
        for interleave in _interleaves(obj)
        for worker in interleave._iterators_in_use
        if _runs_in_another_process(worker)
        and getattr(worker, "_next_index", None) == 0
        and getattr(worker, "_state", None)
    }
    return _without(state, unstarted) if unstarted else state


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


def _runs_in_another_process(worker: Any) -> bool:
    # A thread of this process receives the elements from the other process.
    source = getattr(worker, "_maybe_nonnative_parent", worker)
    return hasattr(source, "_iter_parent")


def _without(node: Any, unstarted: set[int]) -> Any:
    if isinstance(node, dict):
        return {
            key: [{} if id(sub) in unstarted else sub for sub in value]
            if key == _SUB_STATES
            else _without(value, unstarted)
            for key, value in node.items()
        }
    return [_without(child, unstarted) for child in node] if isinstance(node, list) else node


def _holds_empty(node: Any) -> bool:
    if isinstance(node, dict):
        if any(sub == {} for sub in node.get(_SUB_STATES, ())):
            return True
        return any(_holds_empty(child) for child in node.values())
    return isinstance(node, list) and any(_holds_empty(child) for child in node)
