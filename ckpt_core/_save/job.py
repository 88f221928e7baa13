"""The job of one save and its items: the plain values that every part of the save reads."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ckpt_core import _processes
from ckpt_core._directory import Backend, Scratch, SourceFile, is_file_name, resolve
from ckpt_core._errors import RefusedArgument
from ckpt_core._fork import HOME, forked
from ckpt_core._format import orbax_write
from ckpt_core._format.plain_json import refuse_keys
from ckpt_core._format.record import RECORD_FILE, RESERVED_FOLDERS, ItemRecord
from ckpt_core._frozen import frozen
from ckpt_core._options import Options, refuse_arguments, unnamed
from ckpt_core._processes import Processes
from ckpt_core._save.plan import TreePlan
from ckpt_core._storage import ArrayToWrite, backend_of

if TYPE_CHECKING:
    from ckpt_core._save.dedup_links import Links


_ARGUMENTS = ("overwrite", "metadata", "options", "items", "metrics", "force")


class _Nothing:
    """Default of the argument ``state``, since None is a valid state."""

    def __repr__(self) -> str:
        return "..."  # what help() shows of the argument


NOTHING = _Nothing()


class Guard(Protocol):
    """Decides whether this run may write to a directory; called on process 0 only.

    Either method may raise; the save is then undone.
    """

    def take(self) -> None:
        """Claims the directory. Called before the attempt begins, which deletes leftover files."""
        ...

    def check(self) -> None:
        """Raises if another run has claimed the directory. Called last before the commit."""
        ...


@frozen
class RecordFields:
    """What the record (ckpt.json) holds besides the items.

    Attributes:
        single: True if the caller passed one state, not named items.
        metadata, metrics: as the user passed them.
        shared: objects that stand in several items, as in ``Record``.
    """

    single: bool
    metadata: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    shared: tuple[tuple[tuple[str, int], ...], ...] = ()

    def frozen(self) -> RecordFields:
        """A copy that later changes by the caller do not reach; metadata as JSON returns it.

        Raises:
            TypeError: the metadata is not JSON.
        """
        return RecordFields(self.single, frozen_metadata(self.metadata), dict(self.metrics))


@frozen
class SaveJob:
    """What one save has to do.

    Attributes:
        target: absolute path or URL of the checkpoint.
        local: True in a file system, False in an object store.
        backend: the storage to write to.
        fields: what the record holds besides the items.
        options: options of the save.
        processes: the processes that save together.
        overwrite: whether to replace an existing checkpoint.
        own: plan a process-local checkpoint: write every shard held here, replicas included.
        step: step number, reported in events; None outside a Checkpointer.
        guard: decides whether this run may write to the directory; None: it may.
        links: what a Checkpointer remembers of its last step, to hard-link unchanged files.
        token: of the save; None for a new one.
        parent: number and token of the step that the saved state continues from, or None.
        flat: describe the only item at the top, too; never in a local directory, where only ckpt reads.
    """

    target: str
    local: bool
    backend: Backend
    fields: RecordFields
    options: Options
    processes: Processes
    overwrite: bool = False
    own: bool = False
    step: int | None = None
    guard: Guard | None = None
    links: Links | None = None
    token: str | None = None
    parent: tuple[int, str] | None = None
    flat: bool = False

    @functools.cached_property
    def writers(self) -> Processes:
        """The processes that write into the directory: one, if each has a checkpoint of its own."""
        return Processes(0, 1) if self.own else self.processes


Landed = tuple[tuple[ArrayToWrite, ...], dict[str, str]]
"""What is written, and what is compared; see ``PreparedItem``."""


@frozen
class PreparedItem:
    """One item after the snapshot: later changes by the caller do not reach it.

    Attributes:
        name: name of the item.
        record: what ckpt.json says of the item.
        plan: how the pytree is stored; None for a data pipeline's state.
        arrays: what this process writes; empty until ``landing`` was called.
        texts: for each leaf that is stored as text, the text, by array name.
        state_files: for a data pipeline, the content of this process's state files, by name; for
            other items without arrays, the small files that process 0 writes.
        others: in a local directory, the state files of other processes, which the record holds.
        sources: of ``Files``, the larger files, which are copied while the save runs.
        scratch: the directory in which they are, if a function wrote them.
        handler: of ``Files``, type name of the handler by which Orbax loads them; None: as JSON.
        values: with several processes, the values of which each has one of its own, as texts that
            they compare, by array name; complete when ``landing`` was called.
        landing: function that waits until all data is on the host and returns arrays and values; None
            if the item has them. Called by the thread that writes.
    """

    name: str
    record: ItemRecord
    plan: TreePlan | None = None
    arrays: tuple[ArrayToWrite, ...] = ()
    texts: dict[str, str] = field(default_factory=dict[str, str])
    state_files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    others: dict[str, bytes] = field(default_factory=dict[str, bytes])
    sources: tuple[SourceFile, ...] = ()
    scratch: Scratch | None = None
    handler: str | None = None
    values: dict[str, str] = field(default_factory=dict[str, str])
    landing: Callable[[], Landed] | None = None

    @functools.cached_property
    def folder(self) -> str:
        """The item's directory, relative to the checkpoint."""
        return orbax_write.FOLDERS.get(self.name, self.name)

    def landed(self) -> PreparedItem:
        """The item with its arrays on the host; blocks until they are there."""
        if self.landing is None:
            return self
        arrays, values = self.landing()
        return replace(self, arrays=arrays, values=values, landing=None)

    @property
    def names(self) -> tuple[str, ...]:
        """Array name of each leaf."""
        return () if self.plan is None else self.plan.names


def save_job(
    path: str | os.PathLike[str], fields: RecordFields, options: Options, **more: Any
) -> SaveJob:
    """The job of a save by all processes of this run; ``more`` are further fields of ``SaveJob``.

    Raises:
        ForkedProcess: called in a forked child.
        ValueError: ``Options(flat=True)`` where it means nothing.
    """
    target, local = resolve(path)
    run = _processes.this_run()
    return make_job(target, local, backend_of(local, options), run, fields, options, **more)


def make_job(
    target: str,
    local: bool,
    backend: Backend,
    processes: Processes,
    fields: RecordFields,
    options: Options,
    **more: Any,
) -> SaveJob:
    """``save_job`` where it is known already what the path means, and who saves."""
    HOME.is_used = True
    if os.getpid() != HOME.pid:
        raise forked()
    if options.flat and not (local and fields.single):
        what = "named items" if local else "a bucket"
        raise RefusedArgument(
            f"Options(flat=True) is for one tree without a name in a directory, not for {what}: "
            "leave it out"
        )
    return SaveJob(target, local, backend, fields, options, processes, flat=options.flat, **more)


def collect_items(
    state: Any, items: Mapping[str, Any] | None, named: Mapping[str, Any]
) -> dict[str, Any]:
    """The items to save, by name, from the arguments of a call.

    Raises:
        TypeError: the caller passed both a state and named items, neither, one name twice, or a
            name that looks like a misspelt argument.
        ValueError: a name cannot be the name of a directory inside a checkpoint.
    """
    if not (items is None or isinstance(items, Mapping)):
        raise unnamed(items)
    twice = sorted(set(items or {}) & set(named))
    if twice:
        raise TypeError(f"items {', '.join(twice)} were passed twice: by name and in items=")
    if named:
        beside = not isinstance(state, _Nothing)
        refuse_arguments(named, _ARGUMENTS, 0.8, beside_a_state=beside)
    chosen = {**(items or {}), **named}
    if not isinstance(state, _Nothing):
        if chosen:
            raise TypeError(
                f"pass one state, or named items ({', '.join(chosen)}), not both: "
                "give the state a name too"
            )
        return {"state": state}
    if not chosen:
        raise TypeError("nothing to save: pass a state, or named items such as model=model")
    for name in chosen:
        check_item_name(name)
    return chosen


def frozen_metadata(metadata: Any) -> Any:
    """A copy of the metadata, as JSON returns it.

    Raises:
        TypeError: the metadata is not JSON.
    """
    if metadata is None:
        return None
    try:
        refuse_keys(metadata)
        return json.loads(json.dumps(metadata))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"metadata must be plain JSON values: {error}") from None


def check_item_name(name: Any) -> None:
    """Raises if a name cannot be that of an item.

    Raises:
        TypeError: it is no text.
        ValueError: no directory inside a checkpoint can have it.
    """
    if not isinstance(name, str):
        raise TypeError(f"item names must be text, got {name!r}")
    bad = not is_file_name(name) or name.startswith("_") or ".orbax-checkpoint-tmp" in name
    taken = {*RESERVED_FOLDERS, RECORD_FILE, orbax_write.COMMIT_FILE}
    if bad or name in taken:
        raise RefusedArgument(
            f"{name!r} cannot be the name of an item: use letters, digits, '-', '_' and '.', not "
            f"beginning with '.' or '_', and none of {', '.join(sorted(taken))}"
        )
