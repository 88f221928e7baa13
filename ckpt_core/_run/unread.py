"""Values that a training saves and does not use: restored and not read, or new at each save."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from ckpt_core import _adapters
from ckpt_core._errors import RestoredValueIgnored, has_set
from ckpt_core._items import Files, Json, SavedFiles, names_a_form
from ckpt_core._operation import logger
from ckpt_core._results import Restored
from ckpt_core._run.steps import RunSteps
from ckpt_core._tree import flatten

_CONSTANT = ". A constant of the program is saved as ckpt.Json(...) or ckpt.Files(...)"


_Pipeline = tuple[weakref.ref[Any], str | None, bool]
_ARGUMENTS = ("metrics", "metadata", "options")  # of calls: no items can be passed by these names


@dataclass
class UnreadValues:
    """Results of the last restore that nobody read, and items that it left out: what is saved under the name of a value that
    was never read cannot derive from it.
    """

    _step: int | None = None
    # item that a restore returned -> what was read of that restore
    _returned: dict[str, Set[str]] = field(default_factory=dict[str, Set[str]])
    _taken: set[str] = field(default_factory=set[str])
    _left_out: Set[str] = frozenset()
    # item -> the last one, its position, None once the user was warned, and whether it was seen to move
    _pipelines: dict[str, _Pipeline] = field(default_factory=dict[str, _Pipeline])
    _asked: set[str] = field(default_factory=set[str])
    # item -> the object into which it was restored
    _placed: dict[str, weakref.ref[Any]] = field(default_factory=dict[str, weakref.ref[Any]])
    _half: Set[str] = frozenset()  # items of a restore that failed with objects set

    def watch(self, restored: Restored, targets: Mapping[str, Any], unexpected: str) -> None:
        """Notes what a restore returned instead of setting it and, unless ``unexpected="ignore"``, what it left out."""
        # Keep no reference to the result itself: it holds every restored array.
        # parts of a step may be restored one after the other
        if self._step != restored.step or unexpected != "error":
            self._returned, self._taken, self._placed = {}, set(), {}
        self._step = restored.step
        self._half = self._half - set(targets)
        for name, target in targets.items():
            self._returned.pop(name, None)
            if _comes_back(target):
                self._returned[name] = restored.read_items
        self._taken |= set(targets)
        self._left_out = restored.saved_items - self._taken if unexpected == "error" else set()
        self._asked = {*self._returned, *self._left_out, *self._half}
        for name in targets.keys() - self._returned.keys():
            with contextlib.suppress(TypeError):  # of a class without weak references
                self._placed[name] = weakref.ref(targets[name])

    def took(self, step: int, item: str | None) -> None:
        """Notes that an item of a step was loaded by itself."""
        if step == self._step and item is not None:
            self._taken.add(item)
            self._left_out = self._left_out - {item}

    def failed(self, targets: Mapping[str, Any], error: BaseException) -> None:
        """Notes that a restore failed. The processes ask each other: objects may be set on one."""
        self._half |= set(targets if has_set(error) else ())
        self._asked |= set(targets)

    def check_on_all(self, items: Mapping[str, Any], steps: RunSteps) -> None:
        """Raises on all processes if ``check`` does on one: the others would wait for it."""
        # of several processes none raises for items that concern no restore
        if steps.processes.count == 1 or self._asked.isdisjoint(items):
            self.check(items)
            return
        steps.round("save").all(functools.partial(self.check, items))
        self._asked.difference_update(items)  # they need not agree on these again

    def check(self, items: Mapping[str, Any]) -> None:
        """Raises RestoredValueIgnored if an item is saved that the restore left out, or returned without anybody reading it."""
        for name, value in items.items():
            if isinstance(value, Files | Json | SavedFiles):
                continue  # constants and files, which each program makes anew
            if name in self._half:
                raise RestoredValueIgnored(
                    f"the last restore of item {name!r} failed or was interrupted when it had set objects: "
                    "restore again before you save, or begin anew with another Checkpointer",
                    item=name,
                )
            if name not in self._returned.get(name, {name}):
                raise RestoredValueIgnored(
                    f"item {name!r} was restored from step {self._step}, and its value was never read. It "
                    "cannot be set in place, so what is being saved has not grown from it: training would "
                    f"go on from a fresh state. Take the value right after the restore: {name} = "
                    f"restored[{name!r}]{_CONSTANT}",
                    item=name,
                )
            given = f"items={{{name!r}: ...}}" if name in _ARGUMENTS else f"{name}="
            if name in self._left_out and not _adapters.is_written_anew(value):
                raise RestoredValueIgnored(
                    f"step {self._step}, which was restored, holds an item {name!r} that was not restored, "
                    f"and now one of that name is being saved: training would go on from a fresh one{_CONSTANT}. Pass "
                    f"{given} to the restore too, or, if it is meant to begin anew, say so there: "
                    'unexpected="ignore"',
                    item=name,
                )

    def watch_pipelines(self, items: Mapping[str, Any]) -> None:
        """Warns if training does not seem to take its batches from the pipelines of a step that is saved."""
        for name, value in items.items():
            adapter = _adapters.adapter_for(value)
            if getattr(adapter, "per_process", False):
                self._say_if_another(name, value)
                with contextlib.suppress(Exception):  # what is wrong with it the save itself raises
                    self._compare(name, value, adapter)

    def _say_if_another(self, name: str, pipeline: Any) -> None:
        """Warns, once, if a pipeline was restored and another one is saved in its place."""
        placed = self._placed.pop(name, None)
        if placed is not None and placed() is not pipeline:
            logger.warning(
                "item %r was restored from step %s into one %s, and another is saved now: its data do not go on from there. "
                "Take the batches from the one that was restored, and save that",
                name,
                self._step,
                type(pipeline).__name__,
            )

    def _compare(self, name: str, pipeline: Any, adapter: Any) -> None:
        """Warns, once, if the third save has the position of the second: of one pipeline, or of a new one each time."""
        last, position, moves = self._pipelines.get(name, (None, "", False))
        same = last is not None and last() is pipeline
        if position is None or (same and moves):
            return
        now: str | None = ""
        if last is not None:
            take = getattr(adapter, "get_position", None) or adapter.get_state
            now = repr(take(pipeline))
            if now == position:
                self._say_it_stands(name, pipeline, same)
                now = None
        self._pipelines[name] = weakref.ref(pipeline), now, same and position not in ("", now)

    def _say_it_stands(self, name: str, pipeline: Any, same: bool) -> None:
        if same:
            text = (
                "item %r, a %s, is at one position at each save: training takes its batches from another iterator, such as "
                "the one that `for batch in dataset` makes, and a restart reads these data again. Take them from the one "
                "that is saved: for batch in %s"
            )
        else:
            text = (
                "item %r is another %s at each save, and always at one position: a restart reads its first data "
                "again. Pass the iterator from which training takes its batches: data = iter(dataset) once, before "
                "the loop, then save(..., %s=data)"
            )
        logger.warning(text, name, type(pipeline).__name__, name)


def _comes_back(target: Any) -> bool:
    """Whether a target has leaves that no adapter sets in place: the restore returns those."""
    if _adapters.adapter_for(target) is not None:
        return False
    if target is ...:  # so the caller has left it out
        return False
    if names_a_form(target):
        return True
    flat = flatten(target, expand=lambda obj, _: ((), list) if _adapters.adapter_for(obj) else None)
    return bool(flat.leaves)
