"""Flattens, plans and snapshots items: all that a save does while the caller waits."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_core import _adapters
from ckpt_core._devices import shardings, transfer
from ckpt_core._devices.staging import Copy
from ckpt_core._errors import UnsupportedLeaf
from ckpt_core._format import orbax_write, process_state
from ckpt_core._format.record import ItemRecord
from ckpt_core._items import Files, Json, SavedFiles
from ckpt_core._layout.regions import within
from ckpt_core._lazy import jax
from ckpt_core._save.compared import text_of_array, text_of_text
from ckpt_core._save.compression import refuse_idle
from ckpt_core._save.job import Landed, SaveJob
from ckpt_core._save.job import PreparedItem as PreparedItem
from ckpt_core._save.plain_items import prepare_files, prepare_json
from ckpt_core._save.plan import (
    Compression,
    PlannedLeaf,
    TreePlan,
    TreeSignature,
    plan_tree,
    signature_of,
)
from ckpt_core._save.shared_objects import SharedObjects
from ckpt_core._storage import ArrayToWrite
from ckpt_core._tree import NONE, FlatTree, flatten
from ckpt_core._tree.leaves import TEXT_KINDS, as_stored, to_host_array, to_text


def prepare_items(
    items: Mapping[str, Any], job: SaveJob
) -> tuple[list[PreparedItem], tuple[tuple[tuple[str, int], ...], ...]]:
    """Flattens, plans and snapshots all items of a save; also returns ``RecordFields.shared``.

    Raises:
        UnsupportedLeaf: a value cannot be saved; the message says path, type, and item if named.
        ValueError: a pattern of ``Options.compression`` matches no leaf.
    """
    shared = SharedObjects() if len(items) > 1 else None
    prepared = [prepare_item(name, value, job, shared) for name, value in items.items()]
    rules = job.options.compression
    if isinstance(rules, Mapping):
        refuse_idle(rules, [(item.name, item.record.paths) for item in prepared])
    return prepared, () if shared is None else shared.groups()


def prepare_item(
    name: str, value: Any, job: SaveJob, shared: SharedObjects | None = None
) -> PreparedItem:
    """Flattens, plans and snapshots one item.

    Args:
        name, value, job: the item.
        shared: notes its leaves, if they may stand in other items, too.

    Raises:
        UnsupportedLeaf: as for ``prepare_items``.
    """
    try:
        return _prepare(name, value, job, shared)
    except UnsupportedLeaf as error:
        if job.fields.single:
            raise
        message = f"item {name!r}: {error}"
        named = UnsupportedLeaf(message, leaf=error.leaf, type_name=error.type_name)
        raise named.with_traceback(error.__traceback__) from None


def _prepare(name: str, value: Any, job: SaveJob, shared: SharedObjects | None) -> PreparedItem:
    if isinstance(value, Json):
        return prepare_json(name, value, job)
    if isinstance(value, Files | SavedFiles):
        return prepare_files(name, value, job)
    adapter = _adapters.adapter_for(value)
    if adapter is not None and _adapters.is_per_process(adapter):
        return _prepare_state(name, value, adapter, job)
    expand_one, writable = _adapters.expander(stored=True), False

    def expand(obj: Any) -> Any:
        nonlocal writable
        writable = writable or _adapters.has_writable_arrays(_adapters.adapter_for(obj))
        return expand_one(obj)

    flat = flatten(value, expand=expand, saving=True)
    return _prepare_tree(name, flat, job, job.copy if writable else None, shared)


def _prepare_state(name: str, value: Any, adapter: Any, job: SaveJob) -> PreparedItem:
    """Prepares a data pipeline, of which each process saves its own state."""
    state, processes = adapter.get_state(value), job.processes
    text = adapter.to_text(state)
    files = process_state.dump(state, text, processes.index, processes.count)
    record = ItemRecord("process", NONE, process_count=processes.count)
    return PreparedItem(name, record, state_files=files)


def _prepare_tree(
    name: str,
    flat: FlatTree,
    job: SaveJob,
    copy_jax: Copy | None,
    shared: SharedObjects | None,
) -> PreparedItem:
    """Plans a pytree and takes its snapshot.

    Args:
        name: name of the item.
        flat: the pytree.
        job: job of the save.
        copy_jax: copies jax arrays whose memory the caller can write to (torchax, for example);
            None if there are none.
        shared: as for ``prepare_item``.
    """
    signature, data = signature_of(flat)
    if shared is not None:
        shared.note(name, flat.leaves, signature.specs)
    plan = plan_item(name, signature, job)
    texts = {
        plan.names[position]: to_text(flat.leaves[position], signature.specs[position])
        for position in plan.texts
    }
    if texts:
        # called for its checks only, so that a text that cannot be stored fails on this thread
        orbax_write.strings_file(texts, dict(zip(plan.names, flat.paths, strict=True)))
    prepared = PreparedItem(name, plan.record, plan, texts=texts)
    leaves = _snapshots(plan, flat.leaves, data, job.copy)
    alone = job.processes.count == 1 or job.own
    compared = [] if alone else _compared(plan, leaves, data, job.copy)
    held = [*leaves, *(one for one in compared if not one.plan.takes)]
    told = {} if alone else texts
    # on an accelerator, the transfer to the host makes a copy anyway
    copy_now = copy_jax if jax.default_backend() == "cpu" else None
    # stage() only enqueues copies, which may run after the caller has written to shared memory: so
    # arrays that need copy_now are copied here instead
    if job.options.snapshot != "host" and job.copy is not None and copy_now is None:
        transfer.stage([leaf.parts for leaf in held], job.options.snapshot)
        return replace(prepared, landing=functools.partial(_landed, held, leaves, compared, told))
    transfer.start_transfers(leaf.parts for leaf in held)
    to_host: Callable[[Any], Any] = np.asarray
    if copy_now is not None:
        to_host = functools.partial(_copied, copy_now)
    _bring_to_host(held, to_host)
    return replace(prepared, landing=functools.partial(_arrays, leaves, compared, told))


def plan_item(name: str, signature: TreeSignature, job: SaveJob) -> TreePlan:
    """The plan of a pytree of this signature, as the item ``name`` of a save."""
    return plan_tree(
        signature,
        job.processes.index,
        job.processes.count,
        job.options.chunk_bytes,
        _rules(name, job.options.compression),
        job.own,
    )


class LeafSnapshot:
    """The snapshot of one leaf.

    Attributes:
        plan: how the leaf is stored.
        parts: the shards that this process writes, first on devices, later as numpy arrays.
        source: weak reference to the jax array; None for other leaves.
    """

    __slots__ = ("parts", "plan", "source")

    def __init__(self, plan: PlannedLeaf, parts: list[Any], source: Any) -> None:
        self.plan, self.parts, self.source = plan, parts, source


def _copied(copy: Copy, part: Any) -> Any:
    return copy(np.asarray(part))


def _landed(
    held: list[LeafSnapshot],
    leaves: list[LeafSnapshot],
    compared: list[LeafSnapshot],
    texts: Mapping[str, str],
) -> Landed:
    """Brings staged copies to the host and frees their device memory; blocks meanwhile.

    Args:
        held: all snapshots.
        leaves, compared, texts: as for ``_arrays``.
    """
    try:
        _bring_to_host(held, np.asarray)
        return _arrays(leaves, compared, texts)
    finally:
        for one in (held, leaves, compared):
            one.clear()


def _rules(item: str, compression: str | Mapping[str, str | None] | None) -> Compression:
    """``Options.compression`` as a hashable value, since plans are cached by it."""
    if isinstance(compression, Mapping):
        return item, tuple(compression.items())
    return compression


def _snapshots(
    plan: TreePlan, values: Sequence[Any], data: Sequence[Any], copy_numpy: Copy | None
) -> list[LeafSnapshot]:
    """For each leaf, the parts that this process writes: shards on devices, or host arrays.

    Args:
        plan: plan of the pytree.
        values: the leaves.
        data: the leaves, with PRNG key arrays replaced by their key data.
        copy_numpy: copies numpy arrays; None if the caller waits, so that nothing is copied.
    """
    found: list[LeafSnapshot] = []
    for leaf, value, stored in zip(plan.leaves, values, data, strict=True):
        source = weakref.ref(value) if leaf.spec.kind == "jax" else None
        if leaf.whole is not None:
            parts = [stored]
        elif leaf.held is not None:
            held = transfer.held_data(stored, leaf.held)
            parts = [held[position] for position, _ in leaf.takes]
        elif leaf.takes:
            parts = [_host_part(leaf, stored, copy_numpy)]
        else:
            parts = []
        found.append(LeafSnapshot(leaf, parts, source))
    return found


def _compared(
    plan: TreePlan, leaves: Sequence[LeafSnapshot], data: Sequence[Any], copy_numpy: Copy | None
) -> list[LeafSnapshot]:
    """Snapshots of all values of which every process has one of its own, but for texts.

    Process 0 writes them, so its snapshots are those of ``leaves``; the others take them for comparison only.

    Args:
        plan, data, copy_numpy: as for ``_snapshots``.
        leaves: the snapshot of each leaf.
    """
    found: list[LeafSnapshot] = []
    for snapshot, stored in zip(leaves, data, strict=True):
        leaf = snapshot.plan
        if leaf.name not in plan.unshared or leaf.spec.kind in TEXT_KINDS:
            continue
        if not leaf.takes:
            part = stored if leaf.held is not None else _host_part(leaf, stored, copy_numpy)
            snapshot = LeafSnapshot(leaf, [part], None)
        found.append(snapshot)
    return found


def _host_part(leaf: PlannedLeaf, value: Any, copy_numpy: Copy | None) -> np.ndarray[Any, Any]:
    """The array as which a value of the host is stored, copied if the caller could change it."""
    host = to_host_array(value, leaf.spec)
    return copy_numpy(host) if copy_numpy is not None and leaf.spec.kind == "numpy" else host


def _bring_to_host(leaves: Iterable[LeafSnapshot], to_host: Callable[[Any], Any]) -> None:
    """Replaces shards on devices by host arrays that the caller cannot change; blocks meanwhile."""
    with transfer.fetching():
        for leaf in leaves:
            if leaf.plan.held is not None:
                parts = leaf.parts
                for position, part in enumerate(parts):
                    parts[position] = to_host(part)


def _arrays(
    leaves: Iterable[LeafSnapshot], compared: Iterable[LeafSnapshot], texts: Mapping[str, str]
) -> Landed:
    """The arrays that this process writes, from parts on the host, and the values that all compare.

    Args:
        leaves: the snapshot of each leaf.
        compared: those of arrays of which each process has one of its own.
        texts: those that are stored as text, which are no arrays.
    """
    arrays: list[ArrayToWrite] = []
    for leaf in leaves:
        plan = leaf.plan
        if plan.whole is not None:
            pieces = [(plan.whole, leaf.parts[0])]
        elif plan.spec.kind in TEXT_KINDS:
            continue
        elif plan.held is None:
            takes = zip(plan.takes, leaf.parts, strict=True)
            pieces = [(regions[0], host) for (_, regions), host in takes]
        else:
            pieces = _device_pieces(plan, plan.held, leaf.parts)
        arrays.append(
            ArrayToWrite(
                plan.name, plan.spec, plan.chunk, pieces, plan.size_bytes, plan.codec, leaf.source
            )
        )
    told = {leaf.plan.name: text_of_array(leaf.parts[0], leaf.plan.spec) for leaf in compared}
    return tuple(arrays), told | {name: text_of_text(text) for name, text in texts.items()}


def _device_pieces(
    leaf: PlannedLeaf, held: shardings.LocalShards, parts: list[np.ndarray[Any, Any]]
) -> list[transfer.Piece]:
    """Pairs of a region that this process writes, and its values in the stored dtype."""
    spec = leaf.spec
    pieces: list[transfer.Piece] = []
    for (position, regions), part in zip(leaf.takes, parts, strict=True):
        region = held.mine[position][0]
        carried = spec.stored_dtype != spec.dtype and spec.kind != "key"
        host = as_stored(part, spec) if carried else part
        for taken in regions:
            pieces.append((taken, host if taken == region else host[within(taken, region)]))
    return pieces
