"""Corrects Grain's states: types that JSON loses, and workers that have not started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain

_SUB_STATES = "iterators_in_use_states"
"""The key under which an interleaving iterator (``mp_prefetch`` makes one) stores its parts."""


def forget_unstarted(obj: Any, state: Any) -> Any:
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


def let_go_of_workers(obj: Any, state: Any) -> None:
    """Closes all workers of ``obj`` if a state in ``state`` is empty, so that they start again: a running one would
    ignore its empty state and keep its position.
    """
    if not _holds_empty(state):
        return
    for interleave in _interleaves(obj):
        for worker in interleave._iterators_in_use:
            if worker is not None:
                worker.close()
        interleave._iterators_in_use = [None] * len(interleave._iterators_in_use)


def after_json(state: Any) -> Any:
    """A state from Grain's own file, with the tuples and int keys that JSON cannot represent."""
    if isinstance(state, list):
        return [after_json(item) for item in state]
    if not isinstance(state, dict):
        return state
    fixed = {key: after_json(value) for key, value in state.items()}
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
