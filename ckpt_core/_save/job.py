"""The job of one save and its items: the plain values that every part of the save reads."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ckpt_core import _processes
from ckpt_core._background import unfinished, wait_for_saves
from ckpt_core._directory import (
    Attempt,
    Backend,
    Scratch,
    SourceFile,
    is_file_name,
    pieces_of,
    resolve,
)
from ckpt_core._errors import CheckpointError, RefusedArgument
from ckpt_core._fork import HOME, forked
from ckpt_core._format import orbax_files
from ckpt_core._format.plain_json import frozen_metadata, numbers_in
from ckpt_core._format.record import (
    FOLDERS,
    RECORD_FILE,
    RESERVED_FOLDERS,
    FileRecord,
    ItemRecord,
    dump_json,
)
from ckpt_core._items import Json
from ckpt_core._lazy import JAX_SETTINGS, jax
from ckpt_core._options import METRICS_ARE_NUMBERS, Options, refuse_args, refuse_arguments, unnamed
from ckpt_core._processes import Processes
from ckpt_core._save.plan import TreePlan
from ckpt_core._storage import ArrayToWrite, backend_of
from ckpt_core._tree import FlatTree
from ckpt_core.arguments import NotPassed, an, check_flags

if TYPE_CHECKING:
    from ckpt_core._save.unchanged import Links


_ARGUMENTS = ("overwrite", "metadata", "options", "items", "metrics", "force")
_OF_METRICS = "metrics", "json"  # name and form of an item that Orbax takes for metrics, too


NOTHING = NotPassed("...")


class Guard(Protocol):
    """Asked on process 0: to ``claim`` before an attempt begins, and to ``check`` last before its commit."""

    def claim(self) -> None: ...
    def check(self) -> None: ...


@dataclass(frozen=True)
class RecordFields:
    """What the record (ckpt.json) holds besides the items."""

    single: bool  # the caller passed one state, not named items
    metadata: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])  # numbers, maybe on devices
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of jax, as in ``Record``
    shared: tuple[tuple[tuple[str, int], ...], ...] = ()  # as in ``Record``

    def frozen(self) -> RecordFields:
        """A copy that later changes do not reach, with metadata as JSON returns it, and jax's settings on this thread."""
        metadata = None if self.metadata is None else frozen_metadata(self.metadata)
        settings = {name: getattr(jax.config, name, None) for name in JAX_SETTINGS}
        return RecordFields(self.single, metadata, dict(self.metrics), settings)


@dataclass(frozen=True)
class SaveJob:
    """What one save has to do. Refuses forked children."""

    target: str  # absolute path, or URL
    on_disk: bool  # in a file system, not an object store
    backend: Backend
    fields: RecordFields
    options: Options
    processes: Processes  # that save together
    overwrite: bool = False
    own: bool = False  # a process-local checkpoint: all shards held here, replicas included
    step: int | None = None  # for events; None outside a Checkpointer
    guard: Guard | None = None  # None: this run may write
    links: Links | None = None  # what a Checkpointer remembers of its last step
    token: str | None = None  # None for a new one
    parent: tuple[int, str] | None = None  # number and token of the step that the state comes from
    change: Callable[[str, FlatTree], FlatTree] | None = None  # what is saved of an item's tree

    def __post_init__(self) -> None:
        HOME.is_used = True
        if os.getpid() != HOME.pid:
            raise forked()
        if self.options.flat and not self.own and not (self.on_disk and self.fields.single):
            what = "named items" if self.on_disk else "a bucket"
            raise RefusedArgument(
                f"Options(flat=True) is for one tree without a name in a directory, not for {what}: "
                "leave it out"
            )

    @functools.cached_property
    def writers(self) -> Processes:
        """The processes that write into the directory: one, if each has a checkpoint of its own."""
        return Processes(0, 1) if self.own else self.processes


@dataclass(frozen=True)
class PreparedItem:
    """One item after the snapshot: later changes by the caller do not reach it."""

    name: str
    record: ItemRecord
    plan: TreePlan | None = None  # None for a data pipeline's state
    arrays: tuple[ArrayToWrite, ...] = ()  # that this process writes; empty until ``landed``
    texts: dict[str, str] = field(default_factory=dict[str, str])  # of text leaves, by array name
    # of a data pipeline: of this process; of other items without arrays: the small files of process 0
    state_files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    # in a local directory: the state files of other processes, which the record holds
    others: dict[str, bytes] = field(default_factory=dict[str, bytes])
    sources: tuple[SourceFile, ...] = ()  # of ``Files``: larger files, copied while the save runs
    scratch: Scratch | None = None  # the directory in which they are, if a function wrote them
    handler: str | None = None  # of ``Files``: type name of Orbax's handler; None: JSON
    # by array name, those that each process has one of, as texts to compare; complete after ``landed``
    values: dict[str, str] = field(default_factory=dict[str, str])
    compares: bool = False  # whether other processes have such values
    taken: dict[tuple[int, int], Any] | None = None  # of its leaves, until ``landed``
    origins: Sequence[Any] = ()  # weak references to the jax arrays among the leaves, or None
    landing: Callable[[], None] | None = None  # brings that to the host; None: it is there

    @functools.cached_property
    def folder(self) -> str:
        """The item's directory, relative to the checkpoint."""
        return FOLDERS.get(self.name, self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """Array name of each leaf."""
        return () if self.plan is None else self.plan.names


def save_job(
    path: str | os.PathLike[str], fields: RecordFields, options: Options, **more: Any
) -> SaveJob:
    """The job of a save by all processes; ``more`` are fields of ``SaveJob``."""
    if type(more["overwrite"]) is not bool:
        check_flags(overwrite=more["overwrite"])
    target, local = resolve(path)
    if unfinished:  # what is begun later is committed later
        wait_for_saves(target, options.timeout_secs)
    run = _processes.this_run()
    return SaveJob(target, local, backend_of(local, options), fields, options, run, **more)


def collect_items(
    state: Any, items: Mapping[str, Any] | None, named: Mapping[str, Any]
) -> dict[str, Any]:
    """The items of a call, by name. TypeError for arguments that do not go together, ValueError for an impossible name."""
    if not (items is None or isinstance(items, Mapping)):
        raise unnamed(items)
    twice = sorted(set(items or {}) & set(named))
    if twice:
        raise TypeError(f"items {', '.join(twice)} were passed twice: by name and in items=")
    for name, value in {"state": state, **(items or {}), **named}.items():
        if "orbax" in type(value).__module__:
            refuse_args(name, value, "save(..., state) or save(..., model=model)")
    if named:
        refuse_arguments(named, _ARGUMENTS, 0.8, beside_a_state=state is not NOTHING)
    chosen = {**(items or {}), **named}
    if state is not NOTHING:
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


def check_item_name(name: Any) -> None:
    """Raises TypeError if a name is no text, ValueError if no directory inside a checkpoint can have it."""
    if not isinstance(name, str):
        raise TypeError(f"item names must be text, got {name!r}")
    bad = not is_file_name(name) or name.startswith("_") or ".orbax-checkpoint-tmp" in name
    taken = {*RESERVED_FOLDERS, RECORD_FILE, orbax_files.COMMIT_FILE}
    if bad or name in taken:
        raise RefusedArgument(
            f"{name!r} cannot be the name of an item: use letters, digits, '-', '_' and '.', not "
            f"beginning with '.' or '_', and none of {', '.join(sorted(taken))}"
        )


def metrics_of(metrics: Mapping[str, float] | None, items: Mapping[str, object]) -> dict[str, Any]:
    """The numbers of a step, from ``metrics=`` or an item ``metrics`` that is Json; TypeError for both, or no number. Those that
    devices still compute are not waited for.
    """
    if isinstance(item := items.get("metrics"), Json):
        if metrics:
            raise TypeError(
                "pass the metrics by metrics=, or all of them as an item that is Json, not both"
            )
        return {name: float(number) for name, number in numbers_in(item.value).items()}
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics must be a dict of numbers by name, got {an(metrics)}: {METRICS_ARE_NUMBERS}"
        )
    numbers: dict[str, Any] = {}
    for name, value in metrics.items():
        array: Any = value if isinstance(value, jax.Array) else np.asarray(value)
        kind = getattr(array.dtype, "kind", None)  # None: of random keys
        is_real = kind in {*"fiub"}
        if kind == "V":  # those that jax adds, such as bfloat16
            is_real = array.dtype.name.startswith(("bfloat", "float", "int", "uint"))
        if not (isinstance(name, str) and array.ndim == 0 and is_real):
            shape: object = getattr(value, "shape", None)
            what = f"{an(value)} of shape {shape}" if shape else an(value)
            raise TypeError(
                f"metrics takes numbers, and {name!r} is {what}: {_instead(name, value)}"
            )
        numbers[name] = array
    return numbers


def _instead(name: object, value: object) -> str:
    """Advice for the message about a metric that is not a number."""
    if not isinstance(name, str):
        return "names are str"
    if isinstance(value, dict):
        inner = next(iter(value), "train")
        return f"give each number a name of its own, such as {f'{name}/{inner}'!r}"
    if isinstance(value, str) or value is None:
        return (
            "leave it out, save it as metadata={...}, or save all metrics as an item: "
            'items={"metrics": ckpt.Json({...})}'
        )
    if getattr(value, "shape", None):
        return "take one number of it, such as its mean"
    return METRICS_ARE_NUMBERS


def metadata_files(
    job: SaveJob, fields: RecordFields, items: Sequence[PreparedItem]
) -> dict[str, bytes]:
    """Name and content of all files that Orbax reads besides the arrays."""
    handlers, found = dict[str, str](), dict[str, bytes]()
    for item in items:
        form = "json" if item.record.form != "tree" else "text_tree" if item.texts else "tree"
        handlers[item.folder] = item.handler or orbax_files.HANDLERS[form]
        if item.record.form == "process":
            note = dump_json({"format": "ckpt process state", "process_count": job.writers.count})
            found |= dict.fromkeys([f"{item.folder}/metadata", f"{item.folder}/data.json"], note)
            continue
        if item.plan is None:
            continue
        # in a local directory only ckpt reads
        for folder in (f"{item.folder}/", *([""] if job.options.flat and not job.own else [])):
            found |= {folder + name: data for name, data in item.plan.files}
            if item.texts:
                paths = dict(zip(item.names, item.record.paths, strict=True))
                texts = orbax_files.strings_file(item.texts, paths)
                found[folder + orbax_files.STRINGS_FILE] = texts
    stored = [one.state_files for one in items if (one.name, one.record.form) == _OF_METRICS]
    if fields.metrics or stored:
        handlers["metrics"] = orbax_files.HANDLERS["json"]
        numbers = dump_json(dict(fields.metrics))
        found["metrics/metrics"] = stored[0]["data.json"] if stored else numbers
    found[orbax_files.STEP_METADATA] = orbax_files.step_metadata(handlers, fields.metadata)
    text = f"Checkpoint commit was successful to {job.target}"
    said = text.encode(errors="surrogateescape")
    if not job.on_disk:  # there Orbax asks for one in each item that it opens by itself
        mark = orbax_files.COMMIT_FILE
        for item in items:
            if item.record.form != "files" or mark in item.record.notes:
                found[f"{item.folder}/{mark}"] = said
    return found | {orbax_files.COMMIT_FILE: said}


def write_sources(
    item: PreparedItem, attempt: Attempt, job: SaveJob, links: Links | None
) -> dict[str, FileRecord]:
    """Copies or links an item's larger files into the attempt: their records, by path. CheckpointError if one has changed."""
    found: dict[str, FileRecord] = {}
    for source in item.sources:
        name = f"{item.folder}/{source.name}"
        linked = None if links is None else links.link_file(name, attempt.path, source)
        if linked is not None:
            found[name] = linked
        elif job.on_disk:
            found[name] = _copied(source, name, attempt)
        else:
            found[name] = attempt.write(name, b"".join(pieces_of(source)))
    if item.scratch is not None:
        item.scratch.close()
    return found


def _copied(source: SourceFile, name: str, attempt: Attempt) -> FileRecord:
    size_bytes = crc32 = 0

    def pieces() -> Iterator[bytes]:
        nonlocal size_bytes, crc32
        for piece in pieces_of(source):
            size_bytes += len(piece)
            crc32 = zlib.crc32(piece, crc32)
            yield piece

    attempt.write_data(name, pieces())
    if size_bytes != source.size_bytes:
        raise CheckpointError(f"{source.path} became shorter while it was being saved")
    return FileRecord(size_bytes, crc32)
