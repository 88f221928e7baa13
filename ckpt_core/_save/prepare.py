"""Flattens, plans and snapshots items: all that a save does while the caller waits.

A step that goes to several tiers is flattened and copied once: each tier has a plan of its own (``SaveJob.own``), and
takes what it writes from what was copied once.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt_core import _adapters
from ckpt_core._devices import shardings, transfer
from ckpt_core._devices.transfer import Copy
from ckpt_core._directory import Scratch, SourceFile, files_below, pieces_of
from ckpt_core._errors import CheckpointError, CheckpointNotFound, UnsupportedLeaf
from ckpt_core._format import orbax_files, process_state
from ckpt_core._format.plain_json import refuse_keys
from ckpt_core._format.record import ItemRecord, dump_json
from ckpt_core._items import Files, Json, SavedFiles
from ckpt_core._layout.regions import within
from ckpt_core._lazy import jax
from ckpt_core._options import MIB
from ckpt_core._platform import ROOTS
from ckpt_core._save.agree import text_of_array, text_of_text
from ckpt_core._save.job import PreparedItem as PreparedItem, SaveJob
from ckpt_core._save.plan import (
    PlannedLeaf,
    TreePlan,
    TreeSignature,
    plan_tree,
    refuse_unmatched,
    signature_of,
)
from ckpt_core._storage import ArrayToWrite
from ckpt_core._tree import NONE, flatten
from ckpt_core._tree.leaves import (
    CHANGEABLE_KINDS,
    TEXT_KINDS,
    LeafSpec,
    as_stored,
    to_host_array,
    to_text,
)

if TYPE_CHECKING:
    from ckpt_core._save.protocol import Save

Live = list[tuple[Any, bool]]
"""The live objects of an item, each with whether it may stand there twice."""
Taken = dict[tuple[int, int], Any]
"""What was taken of each leaf, by its position and that of the shard in ``PlannedLeaf.held.mine``: first on devices, later
numpy arrays. Of a leaf that no sharding places there is one, at 0, or none."""
NOTES: tuple[str, ...] = ("metadata", "data.json")
"""Where Orbax's Json handlers look, of v0 and of v1."""
_HELD_BYTES = MIB  # smaller files are read before the save returns
_HELD_BYTES_IN_ALL = 64 * MIB


def take_snapshot(
    items: Mapping[str, Any],
    saves: Sequence[Save],
    copy: Copy | None = None,
    begins: Save | None = None,
) -> None:
    """Flattens, plans, and copies or references all values as they are now, once for all saves of one step. ``copy`` copies
    host memory that the caller could change meanwhile; None: it waits. With several processes, an error is raised
    later, in ``agree``, where the others wait. ``begins`` is the save that then begins on process 0, in a file system.
    """
    jobs = [one.job for one in saves]
    for one in saves:
        one.operation.happened("save_started")
    shared = SharedObjects() if len(items) > 1 else None
    lives: list[Live] = [[] for _ in items]
    try:
        with saves[0].operation.watched("taking the snapshot"):
            fields, adapters = jobs[0].fields.frozen(), _adapters.introduce(items)
            prepared = [
                prepare_item(name, value, adapters[name], jobs, copy, shared, live)
                for (name, value), live in zip(items.items(), lives, strict=True)
            ]
            if any(lives):
                advice = "Save it at one of these places, or a copy of it at the other"
                _adapters.refuse_twice(items, lives, advice)
            rules = jobs[0].options.compression
            if isinstance(rules, Mapping):
                refuse_unmatched(
                    rules, [(first.name, first.record.paths) for first, *_ in prepared]
                )
            fields = replace(fields, shared=() if shared is None else shared.groups())
            for one, own in zip(saves, zip(*prepared, strict=True), strict=True):
                one.items, one.fields = [*own], fields
            if begins is not None and jobs[0].on_disk and jobs[0].processes.index == 0:
                begins.begin()
        for one in saves:
            one.blocking_secs = one.operation.happened("snapshot_taken")
    except BaseException as error:
        if jobs[0].processes.count > 1 and isinstance(error, Exception):
            for one in saves:
                one.refusal = error
            return
        for one in saves:
            one.give_up(error)
        raise


def prepare_item(
    name: str,
    value: Any,
    adapter: Any,
    jobs: Sequence[SaveJob],
    copy: Copy | None,
    shared: SharedObjects | None,
    live: Live,
) -> list[PreparedItem]:
    """Prepares an item for each job, as ``take_snapshot`` does; ``shared`` notes its leaves, ``live`` its live objects."""
    try:
        if isinstance(value, Json):
            return [prepare_json(name, value, job) for job in jobs]
        if isinstance(value, Files | SavedFiles):
            return prepare_files(name, value, jobs)
        per_process = getattr(adapter, "per_process", False)
        if per_process or getattr(adapter, "accepts_any_structure", False):
            live.append((value, False))
            live = []  # what is inside of it is its own
        if per_process:
            processes = jobs[0].processes  # each saves a state of its own
            state = adapter.get_state(value)
            text = adapter.to_text(state)
            files = process_state.dump(state, text, processes.index, processes.count)
            record = ItemRecord("process", NONE, process_count=processes.count)
            return [PreparedItem(name, record, state_files=files)] * len(jobs)
        return _prepare_tree(name, value, jobs, copy, shared, live)
    except UnsupportedLeaf as error:
        if jobs[0].fields.single:
            raise
        message = f"item {name!r}: {error}"
        named = UnsupportedLeaf(message, leaf=error.leaf, type_name=error.type_name)
        raise named.with_traceback(error.__traceback__) from None


def _prepare_tree(
    name: str,
    value: Any,
    jobs: Sequence[SaveJob],
    copy: Copy | None,
    shared: SharedObjects | None,
    live: Live,
) -> list[PreparedItem]:
    """Plans a pytree for each job, and takes its snapshot; ``live`` gets its live objects."""
    flat = flatten(value, expand=_adapters.expander(stored=True, live=live), saving=True)
    if jobs[0].change is not None:
        flat = jobs[0].change(name, flat)
    signature, data = signature_of(flat)
    if shared is not None:
        shared.note(name, flat.leaves, signature.specs)
    plans = [plan_item(name, signature, job) for job in jobs]
    first, texts = plans[0], dict[str, str]()
    for position in first.texts:
        texts[first.names[position]] = to_text(flat.leaves[position], signature.specs[position])
    if texts:
        # called for its checks only, so that a text that cannot be stored fails on this thread
        orbax_files.strings_file(texts, dict(zip(first.names, flat.paths, strict=True)))
    taken: Taken = {}
    compare = [job.processes.count > 1 and not job.own for job in jobs]
    for plan, compares in zip(plans, compare, strict=True):
        _take_parts(plan, data, taken, copy, compares)
    options = jobs[0].options
    # on an accelerator, the transfer to the host makes a copy anyway
    adapters = {_adapters.adapter_for(obj) for obj, _ in live}
    writable = any(getattr(adapter, "arrays_are_writable", False) for adapter in adapters)
    copy_now = copy if writable and jax.default_backend() == "cpu" else None
    landing: Callable[[], None] | None = None
    # stage() only enqueues copies, which may run after the caller has written to shared memory: so
    # arrays that need copy_now are copied here instead
    if options.snapshot != "host" and copy is not None and copy_now is None:
        transfer.stage(taken, options.snapshot)
        landing = _Landing(taken)
    else:
        transfer.bring_to_host(taken, copy_now, staged=False)
    linking = any(job.links is not None for job in jobs)
    origins = [
        weakref.ref(leaf) if linking and spec.kind == "jax" else None
        for leaf, spec in zip(flat.leaves, signature.specs, strict=True)
    ]
    return [
        PreparedItem(
            name,
            plan.record,
            plan,
            texts=texts,
            compares=compares,
            taken=taken,
            origins=origins,
            landing=landing,
        )
        for plan, compares in zip(plans, compare, strict=True)
    ]


def plan_item(name: str, signature: TreeSignature, job: SaveJob) -> TreePlan:
    """The plan of a pytree of this signature, as the item ``name`` of a save."""
    options, processes, rules = job.options, job.processes, job.options.compression
    if isinstance(rules, Mapping):  # as a value that can be hashed: plans are cached by it
        rules = name, tuple(rules.items())
    return plan_tree(
        signature, processes.index, processes.count, options.chunk_bytes, rules, job.own
    )


def _take_parts(
    plan: TreePlan, data: Sequence[Any], taken: Taken, copy: Copy | None, compares: bool
) -> None:
    """Adds to ``taken`` what this plan writes and is not there yet: shards on devices, or host arrays; if it ``compares``,
    also values of which each process has one: process 0 writes them, and the others compare theirs.
    """
    for position, (name, leaf, stored) in enumerate(
        zip(plan.names, plan.leaves, data, strict=True)
    ):
        only = position, 0
        if leaf.whole is not None:
            taken[only] = stored
        elif leaf.writes:
            if leaf.held is None:
                if only not in taken:
                    taken[only] = _host_part(leaf, stored, copy)
            else:
                held = transfer.held_data(stored, leaf.held)
                for shard, _ in leaf.writes:
                    taken[position, shard] = held[shard]
        elif not compares or only in taken or leaf.spec.kind in TEXT_KINDS:
            continue
        elif name in plan.one_per_process:
            taken[only] = stored if leaf.held is not None else _host_part(leaf, stored, copy)


def _host_part(leaf: PlannedLeaf, value: Any, copy: Copy | None) -> np.ndarray[Any, Any]:
    """The array as which a value of the host is stored, copied if the caller could change it."""
    host = to_host_array(value, leaf.spec)
    return copy(host) if copy is not None and leaf.spec.kind == "numpy" else host


@dataclass
class _Landing:
    """Brings copies in device memory to the host once, on the first thread that writes, and frees that memory."""

    taken: Taken
    lock: threading.Lock = field(default_factory=threading.Lock)
    outcome: str | None = None  # None: not begun; empty: they are there; else why they are not

    def __call__(self) -> None:
        with self.lock:
            try:
                if self.outcome is None:
                    transfer.bring_to_host(self.taken, staged=True)
                    self.outcome = ""
            except BaseException as error:
                # as text: the error's traceback leads back here, and such a circle would hold the arrays
                self.outcome = f"{type(error).__name__}: {error}"
                self.taken.clear()
                raise
            if self.outcome:
                raise CheckpointError(f"the snapshot did not reach the host: {self.outcome}")


def landed(item: PreparedItem) -> PreparedItem:
    """The item with its arrays on the host, and the values that all compare; blocks until they are there."""
    plan, taken = item.plan, item.taken
    if plan is None or taken is None:
        return item
    if item.landing is not None:
        item.landing()
    arrays: list[ArrayToWrite] = []
    values: dict[str, str] = {}
    for position, (name, leaf, origin) in enumerate(
        zip(plan.names, plan.leaves, item.origins, strict=True)
    ):
        if leaf.spec.kind in TEXT_KINDS:
            continue
        if item.compares and name in plan.one_per_process:
            values[name] = text_of_array(taken[position, 0], leaf.spec)
        if leaf.whole is not None:
            pieces = ((leaf.whole, taken[position, 0]),)
        elif leaf.held is None:
            pieces = tuple([(regions[0], taken[position, 0]) for _, regions in leaf.writes])
        else:
            pieces = tuple(_device_pieces(position, leaf, leaf.held, taken))
        arrays.append(
            ArrayToWrite(name, leaf.spec, leaf.chunk, pieces, leaf.size_bytes, leaf.codec, origin)
        )
    if item.compares:
        values |= {name: text_of_text(text) for name, text in item.texts.items()}
    return replace(item, arrays=tuple(arrays), values=values, taken=None, origins=(), landing=None)


def _device_pieces(
    position: int, leaf: PlannedLeaf, held: shardings.LocalShards, taken: Taken
) -> Iterator[transfer.Piece]:
    """Pairs of a region that this process writes, and its values in the stored dtype."""
    spec = leaf.spec
    carried = spec.stored_dtype != spec.dtype and spec.kind != "key"
    for shard, regions in leaf.writes:
        region, part = held.mine[shard][0], taken[position, shard]
        host = as_stored(part, spec) if carried else part
        for one in regions:
            yield one, host if one == region else host[within(one, region)]


class SharedObjects:
    """Finds them while the items are prepared, one after the other."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Callable[[], Any], list[tuple[str, int]]]] = {}

    def note(self, item: str, leaves: Iterable[Any], specs: Iterable[LeafSpec]) -> None:
        """Notes the leaves of an item. Arrays, perhaps made for this save, are not kept alive: another may get the same id."""
        for position, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
            if spec.kind not in CHANGEABLE_KINDS:
                continue
            known = self._known.get(id(leaf))
            if known is None or known[0]() is not leaf:
                # numpy's generators, which are small, take no weak references
                is_array = spec.kind == "numpy"
                held = weakref.ref(leaf) if is_array else lambda leaf=leaf: leaf
                known = self._known[id(leaf)] = held, []
            known[1].append((item, position))

    def groups(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """For each object in several items, all places of it: item, and position of the leaf."""
        found = (places for _, places in self._known.values())
        return tuple(tuple(places) for places in found if len({item for item, _ in places}) > 1)


def prepare_json(name: str, item: Json, job: SaveJob) -> PreparedItem:
    """The item with its content as it is now; UnsupportedLeaf for a value or a key that JSON cannot hold."""
    try:
        refuse_keys(item.value)
        data = json.dumps(item.value, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedLeaf(
            f"Json takes plain values only (dicts with text keys, lists, text, numbers, True, False, None): {error}",
            type_name=type(item.value).__name__,
        ) from error
    files = dict.fromkeys(NOTES, data) if job.writers.index == 0 else {}
    record = ItemRecord("json", NONE, process_count=job.writers.count)
    compared: dict[str, str] = {}
    if job.processes.count > 1 and not job.own:  # the order of keys is no difference
        compared[""] = text_of_text(json.dumps(item.value, sort_keys=True))
    return PreparedItem(name, record, state_files=files, values=compared)


def prepare_files(
    name: str, item: Files | SavedFiles, jobs: Sequence[SaveJob]
) -> list[PreparedItem]:
    """For each job the item: small files as they are now, and where the others are; not too large for a bucket."""
    writing = [job for job in jobs if job.writers.index == 0]
    if not writing:
        return [_prepared(name, job) for job in jobs]
    source = item.copy_to if isinstance(item, SavedFiles) else item.source
    scratch = None
    if callable(source):
        scratch = Scratch(len(writing))
        try:
            source(Path(scratch.path))
        except CheckpointNotFound as error:
            raise CheckpointNotFound(
                f"item {name!r} is in a checkpoint that is gone ({error}): pass ckpt.Files(...) of files of your own"
            ) from error
        found = files_below(scratch.path)
    else:
        path = os.path.abspath(os.path.expanduser(source))
        for job in writing:
            _refuse_itself(path, job)
        found = files_below(path)
    total_bytes, most_bytes = sum(file.size_bytes for file in found), jobs[0].options.max_host_bytes
    if total_bytes > most_bytes and not all(job.on_disk for job in writing):
        raise CheckpointError(
            f"item {name!r}: its files have {total_bytes:,} bytes, and a save into a bucket holds them in memory, {most_bytes:,} "
            f"at most: pass options=ckpt.Options(max_host_bytes={total_bytes}), or keep the largest of them elsewhere"
        )
    names = {file.name.partition("/")[0] for file in found}
    handler = item.orbax_handler if isinstance(item, Files) else None
    notes = () if handler else tuple(note for note in NOTES if note not in names)
    said = {"format": "ckpt files", "files": {file.name: file.size_bytes for file in found}}
    held: dict[str, bytes] = dict.fromkeys(notes, dump_json(said))
    left, sources = _HELD_BYTES_IN_ALL, list[SourceFile]()
    for file in found:
        if file.size_bytes < min(_HELD_BYTES, left + 1):
            held[file.name] = b"".join(pieces_of(file))
            left -= file.size_bytes
        else:
            sources.append(file)
    if scratch is not None and not sources:
        for _ in writing:
            scratch.close()
        scratch = None
    content = {"state_files": held, "sources": tuple(sources), "scratch": scratch}
    mark = {orbax_files.COMMIT_FILE} - names  # in a bucket, Orbax wants it in each item
    return [
        _prepared(name, job, (*notes, *(() if job.on_disk else mark)), handler=handler, **content)
        if job.writers.index == 0
        else _prepared(name, job)
        for job in jobs
    ]


def _prepared(name: str, job: SaveJob, notes: tuple[str, ...] = (), **content: Any) -> PreparedItem:
    record = ItemRecord("files", NONE, process_count=job.writers.count, notes=notes)
    return PreparedItem(name, record, **content)


def _refuse_itself(path: str, job: SaveJob) -> None:
    """Raises UnsupportedLeaf if the checkpoint lies below ``path``: each would hold all the earlier ones."""
    around = os.path.realpath(path)
    on_disk = job.target.startswith(ROOTS)  # or in a bucket that is mounted
    if on_disk and os.path.realpath(job.target).startswith(f"{around.rstrip('/')}/"):
        raise UnsupportedLeaf(
            f"{path!r} holds the checkpoint that is being saved, {job.target!r}: save what is beside it, or by a "
            "function that copies that",
            type_name="file",
        )
