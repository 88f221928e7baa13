"""Items taken apart, planned and snapshot: everything a save does on the caller's thread."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from ckpt_core import _adapters, _processes, _snapshot
from ckpt_core._format import orbax, states
from ckpt_core._format.record import ItemRecord
from ckpt_core._leaves import TEXT_KINDS, as_stored, to_host_array, to_text
from ckpt_core._options import Options
from ckpt_core._plan import within
from ckpt_core._save.codecs import refuse_idle
from ckpt_core._save.plan import Compression, PlannedLeaf, TreePlan, outline_of, plan_tree
from ckpt_core._staging import Copy
from ckpt_core._storage import ArrayToWrite
from ckpt_core._tree import NONE, FlatTree, flatten


@dataclass(frozen=True)
class PreparedItem:
    """One item, safe from whatever the caller does next.

    Attributes:
        name: of the item.
        record: what ckpt.json says of it.
        plan: how a tree is stored; None for the state of one process.
        arrays: what this process writes of it.
        texts: leaves that are stored as text, by array name.
        state_files: of an item with one state per process.
        landing: gives the arrays, once what was copied on the device has come to the host; ``arrays``
            is empty until then. Called where nobody waits.
    """

    name: str
    record: ItemRecord
    plan: TreePlan | None = None
    arrays: tuple[ArrayToWrite, ...] = ()
    texts: dict[str, str] = field(default_factory=dict[str, str])
    state_files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    landing: Callable[[], tuple[ArrayToWrite, ...]] | None = None

    @property
    def folder(self) -> str:
        """Where its files are, relative to the checkpoint."""
        return orbax.folder_of(self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays, one for each leaf."""
        return () if self.plan is None else self.plan.names

    def landed(self) -> PreparedItem:
        """The same item with its arrays on the host; blocks until they are."""
        if self.landing is None:
            return self
        return replace(self, arrays=self.landing(), landing=None)


def prepare_item(
    name: str,
    value: Any,
    processes: _processes.Processes,
    options: Options,
    copy: Copy | None,
    own: bool = False,
) -> PreparedItem:
    """One item as it is now: flattened, planned, and snapshot.

    Args:
        copy: copies host memory that the caller could change; None where nothing is copied.
        own: of a checkpoint that this process writes for itself: all that it holds, whoever else
            holds it too.
    """
    adapter = _adapters.adapter_for(value)
    if adapter is not None and _adapters.is_per_process(adapter):
        state = adapter.get_state(value)
        files = states.dump(state, adapter.to_text(state), processes.index, processes.count)  # pyright: ignore
        record = ItemRecord("process", NONE, process_count=processes.count)
        return PreparedItem(name, record, state_files=files)
    expand_one, writable = _adapters.expander(stored=True), False

    def expand(obj: Any) -> Any:
        nonlocal writable
        writable = writable or _adapters.has_writable_arrays(_adapters.adapter_for(obj))
        return expand_one(obj)

    flat = flatten(value, expand=expand, saving=True)
    return _prepare_tree(name, flat, processes, options, (copy, copy if writable else None), own)


def _prepare_tree(
    name: str,
    flat: FlatTree,
    processes: _processes.Processes,
    options: Options,
    copy: tuple[Copy | None, Copy | None],
    own: bool,
) -> PreparedItem:
    outline, data = outline_of(flat)
    plan = plan_tree(
        outline,
        processes.index,
        processes.count,
        options.chunk_bytes,
        _rules(name, options.compression),
        own,
    )
    texts = {
        plan.names[position]: to_text(flat.leaves[position], outline.specs[position])
        for position in plan.texts
    }
    if texts:
        orbax.strings_file(texts, dict(zip(plan.names, flat.paths, strict=True)))
    prepared = PreparedItem(name, plan.record, plan, texts=texts)
    copy_numpy, copy_jax = copy
    parts = _parts(plan, data, copy_numpy)
    sources = [
        weakref.ref(leaf) if spec.kind == "jax" else None
        for leaf, spec in zip(flat.leaves, outline.specs, strict=True)
    ]
    # elsewhere than on a CPU the array comes to the host as a copy anyway
    copy_now = copy_jax if jax.default_backend() == "cpu" else None
    # what stage() enqueues may run after the caller wrote to memory that the arrays share
    if options.snapshot != "host" and copy_numpy is not None and copy_now is None:
        _snapshot.stage(parts, options.snapshot)
        return replace(prepared, landing=lambda: _landed(plan, sources, parts))
    _snapshot.start_transfers(parts)
    to_host: Callable[[Any], Any] = np.asarray
    if copy_now is not None:
        to_host = functools.partial(_copied, copy_now)
    _bring_to_host(plan, parts, to_host)
    return replace(prepared, landing=functools.partial(_arrays, plan, sources, parts))


def _copied(copy: Copy, part: Any) -> Any:
    return copy(np.asarray(part))


def _landed(
    plan: TreePlan, sources: Sequence[Any], parts: list[list[Any]]
) -> tuple[ArrayToWrite, ...]:
    """Staged copies on the host; their room on the device is free again."""
    try:
        _bring_to_host(plan, parts, np.asarray)
        return _arrays(plan, sources, parts)
    finally:
        parts.clear()


def _rules(item: str, compression: str | Mapping[str, str | None] | None) -> Compression:
    if isinstance(compression, Mapping):
        return item, tuple(compression.items())
    return compression


def refuse_idle_patterns(items: list[PreparedItem], compression: Mapping[str, Any]) -> None:
    """Raises ValueError where a pattern of ``Options.compression`` matches no leaf."""
    refuse_idle(compression, [(item.name, item.record.paths) for item in items])


def _parts(plan: TreePlan, data: Sequence[Any], copy_numpy: Copy | None) -> list[list[Any]]:
    """For each leaf what this process writes of it: parts on devices, or arrays on the host."""
    found: list[list[Any]] = []
    for leaf, values in zip(plan.leaves, data, strict=True):
        if leaf.whole is not None:
            found.append([values])
        elif leaf.held is not None:
            parts = _snapshot.held_data(values, leaf.held)
            found.append([parts[position] for position, _ in leaf.takes])
        elif leaf.takes:
            host = to_host_array(values, leaf.spec)
            if copy_numpy is not None and leaf.spec.kind == "numpy":
                host = copy_numpy(host)
            found.append([host])
        else:
            found.append([])
    return found


def _bring_to_host(
    plan: TreePlan, parts: Sequence[list[Any]], to_host: Callable[[Any], Any]
) -> None:
    """Replaces parts on devices by arrays on the host, which nothing that the caller does changes."""
    with _snapshot.fetching():
        for leaf, values in zip(plan.leaves, parts, strict=True):
            if leaf.held is not None:
                for position, value in enumerate(values):
                    values[position] = to_host(value)


def _arrays(
    plan: TreePlan, sources: Sequence[Any], parts: Sequence[list[Any]]
) -> tuple[ArrayToWrite, ...]:
    """What this process writes, of parts on the host."""
    arrays: list[ArrayToWrite] = []
    for leaf, source, values in zip(plan.leaves, sources, parts, strict=True):
        name, spec, chunk, held, takes, size_bytes, codec, all_of_it = leaf
        if all_of_it is not None:
            pieces = [(all_of_it, values[0])]
        elif spec.kind in TEXT_KINDS:
            continue
        elif held is None:
            pieces = [(regions[0], host) for (_, regions), host in zip(takes, values, strict=True)]
        else:
            pieces = _device_pieces(leaf, held, values)
        arrays.append(ArrayToWrite(name, spec, chunk, pieces, size_bytes, codec, source))
    return tuple(arrays)


def _device_pieces(
    leaf: PlannedLeaf, held: _snapshot.Held, parts: list[np.ndarray[Any, Any]]
) -> list[_snapshot.Piece]:
    spec = leaf.spec
    pieces: list[_snapshot.Piece] = []
    for (position, regions), part in zip(leaf.takes, parts, strict=True):
        region = held.mine[position][0]
        carried = spec.stored_dtype != spec.dtype and spec.kind != "key"
        host = as_stored(part, spec) if carried else part
        for taken in regions:
            pieces.append((taken, host if taken == region else host[within(taken, region)]))
    return pieces
