"""Saving: flatten, plan, snapshot, write, commit."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import crc32c
import jax
import numpy as np

from ckpt_core import _adapters, _processes, _snapshot
from ckpt_core._directory import Attempt, Form, LocalForm, StoreForm, resolve
from ckpt_core._errors import CheckpointError, UnsupportedLeaf
from ckpt_core._fork import refuse_in_forked_child
from ckpt_core._format import orbax, states
from ckpt_core._format.checksums import CHECKSUM_DIRECTORY, checksum_chunk, dump_checksums, stored_chunks
from ckpt_core._format.record import (
    RECORD_FILE,
    FileRecord,
    ItemRecord,
    LeafRecord,
    Record,
    dump_json,
    dump_record,
)
from ckpt_core._leaves import TEXT_KINDS, LeafSpec, as_stored, describe, to_host_array, to_text
from ckpt_core._options import MIB, Options
from ckpt_core._plan import Region, chunk_shape, gaps, whole
from ckpt_core._results import PendingSave, logger
from ckpt_core._storage import SMALL_LEAF_BYTES, ArrayWriter, KeyValues, Location, merge, new_context, read_index
from ckpt_core._tree import FlatTree, flatten, format_path

Piece = tuple[Region, np.ndarray[Any, Any]]

_RESERVED_ITEMS = frozenset({"metrics", "metadata"})
_ARGUMENTS = ("overwrite", "metadata", "options", "items", "metrics", "force")
_WHOLE_DIGEST_BYTES = 32 * MIB
"""Data files up to this size are digested whole; larger ones only where no checksum covers them."""


class _Nothing:
    """Stands for a state that was not passed, as None is a state."""


NOTHING = _Nothing()


@dataclass(frozen=True)
class ArrayToWrite:
    """One array: its name, what is stored, and the pieces that this process writes."""

    name: str
    spec: LeafSpec
    chunk: tuple[int, ...]
    pieces: list[Piece]

    @property
    def size_bytes(self) -> int:
        """Bytes of the pieces."""
        return sum(values.nbytes for _, values in self.pieces)


@dataclass(frozen=True)
class PreparedItem:
    """One item, safe from whatever the caller does next."""

    name: str
    record: ItemRecord
    names: tuple[str, ...] = ()
    arrays: tuple[ArrayToWrite, ...] = ()
    texts: dict[str, str] = field(default_factory=dict[str, str])
    all_shardings: tuple[dict[str, Any] | None, ...] = ()
    state_files: dict[str, bytes] = field(default_factory=dict[str, bytes])


@dataclass(frozen=True)
class Saved:
    """What a finished save was: for the log line."""

    path: str
    bytes: int
    total_secs: float


def save(
    path: str | os.PathLike[str],
    state: Any = NOTHING,
    /,
    *,
    overwrite: bool = False,
    metadata: Any = None,
    options: Options | None = None,
    items: Mapping[str, Any] | None = None,
    **named: Any,
) -> None:
    """A durable checkpoint at ``path``; returns when a power cut can no longer lose it.

    Blocks until everything is written, verified to be on disk and renamed into place. Where
    several processes run, all must call it, with the same structure.

    Args:
        path: of the checkpoint's directory; must not exist. Parents are made.
        state: one pytree or object, stored as one item named ``state``.
        overwrite: replace a checkpoint that is there, in one step.
        metadata: JSON of your own, kept with the checkpoint.
        options: see ``Options``.
        items: further named items, for names that are not identifiers or are argument names.
        **named: named items: models, optimizers, data iterators, pytrees.

    Raises:
        CheckpointExists: something is at ``path``.
        UnsupportedLeaf: a value that cannot be saved, named by path and type.
        OSError: the system refused (disk full, permission); nothing is left behind.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/one", {"w": jnp.ones(3)}, overwrite=True)
    """
    chosen = collect_items(state, items, named)
    single = not isinstance(state, _Nothing)
    prepare_save(
        path, chosen, single=single, overwrite=overwrite, metadata=metadata, options=options, copy=False
    )()


def save_async(
    path: str | os.PathLike[str],
    state: Any = NOTHING,
    /,
    *,
    overwrite: bool = False,
    metadata: Any = None,
    options: Options | None = None,
    items: Mapping[str, Any] | None = None,
    **named: Any,
) -> PendingSave:
    """A save in the background; returns when the state is safe from what the caller does next.

    Arrays may be donated and numpy arrays changed right after. Arguments and errors are those of
    ``save``; what fails later is raised by ``.result()``, or printed at exit with exit code 1.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> pending = ckpt.save_async("/tmp/ckpt-docs/two", {"w": jnp.ones(3)}, overwrite=True)
        >>> pending.result()
    """
    chosen = collect_items(state, items, named)
    single = not isinstance(state, _Nothing)
    work = prepare_save(
        path, chosen, single=single, overwrite=overwrite, metadata=metadata, options=options, copy=True
    )
    return PendingSave(resolve(path)[0], work, "ckpt-save")


def collect_items(
    state: Any, items: Mapping[str, Any] | None, named: Mapping[str, Any]
) -> dict[str, Any]:
    """The items by name that a call's arguments ask for.

    Raises:
        TypeError: a state together with items, none of both, or a name that looks like a
            misspelt argument.
    """
    twice = sorted(set(items or {}) & set(named))
    if twice:
        raise TypeError(f"items {', '.join(twice)} were passed twice: by name and in items=")
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
    for name in named:
        close = difflib.get_close_matches(name, _ARGUMENTS, n=1, cutoff=0.8)
        if close:
            raise TypeError(
                f"{name!r} looks like the argument {close[0]!r}: to save an item of this name, "
                f"pass items={{{name!r}: ...}}"
            )
    for name in chosen:
        _check_item_name(name)
    return chosen


def _check_item_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"item names must be text, got {name!r}")
    bad = not name or "/" in name or ".orbax-checkpoint-tmp" in name or "\0" in name or name.startswith((".", "_")) or len(name) > 200
    if bad or name in _RESERVED_ITEMS or name in (RECORD_FILE, orbax.COMMIT_FILE):
        raise ValueError(
            f"{name!r} cannot be the name of an item: use letters, digits, '-', '_' and '.', not "
            f"beginning with '.' or '_', and none of {', '.join(sorted(_RESERVED_ITEMS))}"
        )


def form_for(path: str, local: bool) -> Any:
    """How directories work where ``path`` lies."""
    return LocalForm() if local else StoreForm(lambda url: KeyValues(Location(url, False)))


def prepare_save(
    path: str | os.PathLike[str],
    items: Mapping[str, Any],
    *,
    single: bool,
    overwrite: bool,
    metadata: Any,
    options: Options | None,
    copy: bool,
    metrics: Mapping[str, float] | None = None,
    before_commit: Callable[[], None] | None = None,
) -> Callable[[], Saved]:
    """Takes the snapshot now and gives the function that writes and commits it.

    Args:
        copy: whether host memory that the caller could change is copied.
        metrics: numbers of the step.
        before_commit: called last before the commit; may raise to prevent it.
        (others: see ``save``)
    """
    refuse_in_forked_child()
    started = time.monotonic()
    options = options or Options()
    target, local = resolve(path)
    check_metadata(metadata)
    processes = _processes.this_run()
    tag = _processes.next_round()
    prepared = [_prepare(name, value, processes, options, copy, single) for name, value in items.items()]
    form: Form = form_for(target, local)
    token = secrets.token_hex(16)
    attempt = None
    if processes.index == 0:
        attempt = form.begin(target, overwrite=overwrite, durable=options.durable, token=token)
    logger.debug("%s: snapshot taken in %.3f s", target, time.monotonic() - started)

    def write_and_commit() -> Saved:
        save_ = _Write(form, target, local, prepared, processes, options, token, tag)
        written = save_.run(attempt, single, metadata, dict(metrics or {}), before_commit)
        total_secs = time.monotonic() - started
        logger.info(
            "%s: saved %.1f MB in %.3f s (%.2f GB/s)", target, written / 1e6, total_secs, written / total_secs / 1e9
        )
        return Saved(target, written, total_secs)

    return write_and_commit


def _prepare(
    name: str, value: Any, processes: _processes.Processes, options: Options, copy: bool, single: bool
) -> PreparedItem:
    try:
        return prepare_item(name, value, processes, options, copy)
    except UnsupportedLeaf as error:
        if single:
            raise
        message = f"item {name!r}: {error}"
        raise UnsupportedLeaf(message, leaf=error.leaf, type_name=error.type_name) from error


def check_metadata(metadata: Any) -> None:
    """Refuses metadata that JSON cannot hold."""
    try:
        json.dumps(metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"metadata must be plain JSON values: {error}") from error


def prepare_item(
    name: str, value: Any, processes: _processes.Processes, options: Options, copy: bool
) -> PreparedItem:
    """One item as it is now: flattened, planned, and snapshot."""
    adapter = _adapters.adapter_for(value)
    if adapter is not None and _adapters.is_per_process(adapter):
        state = adapter.get_state(value)
        files = states.dump(state, adapter.to_text(state), processes.index, processes.count)  # pyright: ignore
        record = ItemRecord("process", process_count=processes.count)
        return PreparedItem(name, record, state_files=files)
    flat = flatten(value, expand=_adapters.expand)
    return _prepare_tree(name, flat, processes, options, copy)


def _prepare_tree(
    name: str, flat: FlatTree, processes: _processes.Processes, options: Options, copy: bool
) -> PreparedItem:
    specs = _describe_all(flat)
    names = tuple(orbax.check_names(flat.paths))
    _snapshot.start_transfers([leaf for leaf in flat.leaves if isinstance(leaf, jax.Array) and not _is_key(leaf)])
    table = _ShardingTable()
    plan = _ChunkPlan(options.chunk_bytes)
    arrays: list[ArrayToWrite] = []
    leaves: list[LeafRecord] = []
    texts: dict[str, str] = {}
    for array_name, spec, leaf in zip(names, specs, flat.leaves, strict=True):
        if spec.kind in TEXT_KINDS:
            texts[array_name] = to_text(leaf, spec)
            leaves.append(LeafRecord(spec))
            table.add(None)
        elif spec.kind in ("jax", "key"):
            data = jax.random.key_data(leaf) if spec.kind == "key" else leaf
            regions, mine = _snapshot.owned_regions(data, processes.index)
            chunk = plan.chunk(spec, regions)
            pieces = [(region, as_stored(_snapshot.to_host(part), spec)) for region, part in mine]
            arrays.append(ArrayToWrite(array_name, spec, chunk, pieces))
            leaves.append(LeafRecord(spec, chunk, table.add(leaf)))
        else:
            host = to_host_array(leaf, spec)
            if copy and spec.kind == "numpy":
                host = host.copy()
            chunk = plan.chunk(spec, [whole(spec.stored_shape)])
            pieces = [(whole(spec.stored_shape), host)] if processes.index == 0 else []
            arrays.append(ArrayToWrite(array_name, spec, chunk, pieces))
            leaves.append(LeafRecord(spec, chunk))
            table.add(None)
    if texts:
        orbax.strings_file(texts, dict(zip(names, flat.paths, strict=True)))
    record = ItemRecord(
        "tree",
        flat.root,
        tuple(flat.paths),
        tuple(leaves),
        tuple(table.distinct),
        options.compression,
        processes.count,
    )
    return PreparedItem(name, record, names, tuple(arrays), texts, tuple(table.every))


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _describe_all(flat: FlatTree) -> list[LeafSpec]:
    specs: list[LeafSpec] = []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            where = format_path(path)
            raise UnsupportedLeaf(
                f"{where}: cannot save a jax.ShapeDtypeStruct: it has no values",
                leaf=where,
                type_name="jax.ShapeDtypeStruct",
            )
        specs.append(describe(leaf, path))
    return specs


class _ShardingTable:
    """The shardings of an item: each distinct one once, for our record, and one per leaf."""

    def __init__(self) -> None:
        self.distinct: list[dict[str, Any]] = []
        self.every: list[dict[str, Any] | None] = []
        self._positions: dict[Any, int | None] = {}
        self._described: dict[Any, dict[str, Any] | None] = {}

    def add(self, leaf: Any) -> int | None:
        """The position of a leaf's sharding; None for host leaves and uncommitted arrays."""
        if leaf is None:
            self.every.append(None)
            return None
        sharding = leaf.sharding
        if sharding not in self._described:
            described = _snapshot.describe_sharding(leaf)
            self._described[sharding] = described
        described = self._described[sharding]
        self.every.append(described)
        if described is None or not getattr(leaf, "committed", True):
            return None
        if sharding not in self._positions:
            self._positions[sharding] = len(self.distinct)
            self.distinct.append(described)
        return self._positions[sharding]


class _ChunkPlan:
    """Chunk shapes, computed once for all arrays that are alike."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._known: dict[Any, tuple[int, ...]] = {}

    def chunk(self, spec: LeafSpec, regions: list[Region]) -> tuple[int, ...]:
        key = (spec.stored_dtype, spec.stored_shape, tuple(regions))
        found = self._known.get(key)
        if found is None:
            shape = spec.stored_shape
            itemsize = spec.stored_bytes // max(1, int(np.prod(shape))) or 1
            found = chunk_shape(shape, regions, itemsize, self._chunk_bytes)
            self._known[key] = found
        return found


class _Write:
    """Writing and committing one prepared save: everything that needs the disk."""

    def __init__(
        self,
        form: Form,
        target: str,
        local: bool,
        items: list[PreparedItem],
        processes: _processes.Processes,
        options: Options,
        token: str,
        tag: str,
    ) -> None:
        self._form = form
        self._target = target
        self._local = local
        self._items = items
        self._processes = processes
        self._options = options
        self._token = token
        self._tag = tag

    def run(
        self,
        attempt: Attempt | None,
        single: bool,
        metadata: Any,
        metrics: dict[str, float],
        before_commit: Callable[[], None] | None,
    ) -> int:
        """Writes, agrees, commits; gives the bytes of the arrays that this process wrote."""
        try:
            attempt = self._agree_to_start(attempt)
            written = self._together("written", lambda: self._write_items(attempt))
            self._together(
                "committed",
                lambda: self._commit(attempt, single, metadata, metrics, before_commit),
                only_first=True,
            )
            return written
        except BaseException:
            if attempt is not None and self._processes.index == 0:
                attempt.abort()
            raise

    def _agree_to_start(self, attempt: Attempt | None) -> Attempt:
        """Agreement 1: on the token, the structure and where to write."""
        if self._processes.count == 1:
            assert attempt is not None
            return attempt
        where = ""
        if attempt is not None:
            attempt.write("ckpt.token", self._token.encode())
            where = attempt.path
        mine = {"where": where, "token": self._token, "tree": self._tree_digest(), "path": self._target}
        others = [json.loads(text) for text in self._exchange("start", json.dumps(mine))]
        first = others[0]
        for key, what in (("path", "the path"), ("tree", "the structure of the state")):
            differing = [index for index, other in enumerate(others) if other[key] != first[key]]
            if differing:
                raise CheckpointError(
                    f"{self._target}: {what} on processes {differing} differs from that on process "
                    "0: all processes must save the same tree to the same path"
                )
        joined = attempt or self._form.join(self._target, first["where"], durable=self._options.durable)
        if attempt is None:
            self._token = first["token"]

        def see() -> None:
            try:
                seen = joined.read("ckpt.token")
            except FileNotFoundError:
                seen = b""
            if seen != self._token.encode():
                raise CheckpointError(
                    f"{self._target} is not a directory that all processes share: process "
                    f"{self._processes.index} does not see what process 0 wrote in it"
                )

        self._together("seen", see)
        return joined

    def _tree_digest(self) -> str:
        digest = hashlib.sha256()
        for item in self._items:
            specs = [str(leaf.spec) for leaf in item.record.leaves]
            digest.update(repr((item.name, item.record.form, item.names, specs)).encode())
        return digest.hexdigest()

    def _exchange(self, what: str, value: str) -> list[str]:
        return self._processes.exchange(f"{self._tag}/{what}", value, self._options.timeout_secs)

    def _together(self, what: str, work: Callable[[], Any], *, only_first: bool = False) -> Any:
        """Does the work and agrees that all did it; a failure of one is a failure of all."""
        result, error = None, None
        try:
            if not only_first or self._processes.index == 0:
                result = work()
        except BaseException as caught:
            error = caught
        if self._processes.count > 1:
            told = "" if error is None else f"{type(error).__name__}: {error}"
            others = self._exchange(what, told)
            failed = [(index, text) for index, text in enumerate(others) if text]
            if failed and error is None:
                index, text = failed[0]
                raise CheckpointError(f"{self._target}: process {index} failed to save: {text}")
        if error is not None:
            raise error
        return result

    def _write_items(self, attempt: Attempt) -> int:
        """The arrays, states and checksums of this process."""
        context = new_context(durable=self._options.durable)
        written = 0
        for item in self._items:
            for name, data in item.state_files.items():
                attempt.write(f"{item.name}/{name}", data)
                written += len(data)
            if item.record.form == "tree":
                written += self._write_arrays(attempt, item, context)
        # every process's databases are merged in the context that wrote this process's one
        self._context = context
        return written

    def _write_arrays(self, attempt: Attempt, item: PreparedItem, context: Any) -> int:
        options = self._options
        writer = ArrayWriter(
            Location(f"{attempt.path}/{item.name}", self._local),
            self._processes.index,
            context,
            target_data_file_bytes=options.target_data_file_bytes,
            max_host_bytes=options.max_host_bytes,
            zstd_level=options.zstd_level(),
        )
        checksums: dict[str, list[int]] = {}
        large: list[ArrayToWrite] = []
        for array in item.arrays:
            stored = (array.name, array.spec.stored_dtype, array.spec.stored_shape, array.chunk)
            if self._processes.index == 0:
                writer.put_metadata(*stored)
            if array.size_bytes > SMALL_LEAF_BYTES or options.compression is not None:
                writer.put_array(*stored, array.pieces)
                large.append(array)
                continue
            for key, values in stored_chunks(array.name, array.pieces, array.chunk):
                data = values.tobytes()
                writer.put_value(key, data)
                checksums[key] = [crc32c.crc32c(data)]
        writer.start()
        # checksums of what is large are computed while it is being written
        for array in large:
            for key, values in stored_chunks(array.name, array.pieces, array.chunk):
                checksums[key] = checksum_chunk(values)
        name = f"{item.name}/{CHECKSUM_DIRECTORY}/process_{self._processes.index}"
        attempt.write(name, dump_checksums(checksums))
        writer.finish()
        return sum(array.size_bytes for array in item.arrays)

    def _commit(
        self,
        attempt: Attempt,
        single: bool,
        metadata: Any,
        metrics: dict[str, float],
        before_commit: Callable[[], None] | None,
    ) -> None:
        """Process 0: merges, describes, and makes the checkpoint visible."""
        for item in self._items:
            if item.record.form == "tree":
                location = Location(f"{attempt.path}/{item.name}", self._local)
                merge(
                    location,
                    self._processes.count,
                    self._context,
                    target_data_file_bytes=self._options.target_data_file_bytes,
                )
        for name, data in self._metadata_files(metadata, metrics):
            attempt.write(name, data)
        record = Record(
            items={item.name: item.record for item in self._items},
            files=self._digests(attempt),
            token=self._token,
            single=single,
            metadata=metadata,
            metrics=metrics,
            versions=library_versions(),
            topology=_snapshot.topology(),
            created_unix_secs=time.time(),
        )
        if before_commit is not None:
            before_commit()
        attempt.commit(RECORD_FILE, dump_record(record))

    def _metadata_files(self, metadata: Any, metrics: dict[str, float]) -> Iterable[tuple[str, bytes]]:
        """Everything that Orbax reads besides the arrays."""
        handlers: dict[str, str] = {}
        for item in self._items:
            handlers[item.name] = orbax.HANDLERS[_handler(item)]
            if item.record.form == "process":
                note = dump_json({"format": "ckpt process state", "process_count": self._processes.count})
                yield f"{item.name}/metadata", note
                yield f"{item.name}/data.json", note
                continue
            specs = [leaf.spec for leaf in item.record.leaves]
            chunks = [leaf.chunk for leaf in item.record.leaves]
            yield f"{item.name}/{orbax.ITEM_METADATA}", orbax.item_metadata(item.record.tree, specs)
            yield f"{item.name}/{orbax.SHARDING_FILE}", orbax.sharding_file(item.names, item.all_shardings)
            yield (
                f"{item.name}/{orbax.ARRAY_METADATA}",
                orbax.array_metadatas(item.names, specs, chunks),
            )
            if item.texts:
                paths = dict(zip(item.names, item.record.paths, strict=True))
                yield f"{item.name}/{orbax.STRINGS_FILE}", orbax.strings_file(item.texts, paths)
        if metrics:
            handlers["metrics"] = orbax.HANDLERS["json"]
            yield "metrics/metrics", dump_json(metrics)
        yield orbax.STEP_METADATA, orbax.step_metadata(handlers, metadata)
        text = f"Checkpoint commit was successful to {self._target}"
        yield orbax.COMMIT_FILE, text.encode(errors="surrogateescape")

    def _digests(self, attempt: Attempt) -> dict[str, FileRecord]:
        """Size and digest of every file, the other processes' included."""
        covered = self._covered(attempt)
        found: dict[str, FileRecord] = {}
        for name, size in attempt.files().items():
            if size > _WHOLE_DIGEST_BYTES and name in covered:
                crc = _crc_of_ranges(attempt.path, name, gaps(size, covered[name]))
                found[name] = FileRecord(size, crc, data=True)
            else:
                found[name] = FileRecord(size, crc32c.crc32c(attempt.read(name)))
        return found

    def _covered(self, attempt: Attempt) -> dict[str, list[tuple[int, int]]]:
        """For the data files that are too large to digest whole: what block checksums cover."""
        found: dict[str, list[tuple[int, int]]] = {}
        large = any(size > _WHOLE_DIGEST_BYTES for size in attempt.files().values()) and self._local
        for item in self._items:
            # what is compressed is checked when it is decoded, and its stored bytes here
            if not large or item.record.form != "tree" or item.record.codec is not None:
                continue
            index = read_index(Location(f"{attempt.path}/{item.name}", True), self._context)
            for key, extent in index.items():
                if extent.file and not key.endswith("zarr.json"):
                    ranges = found.setdefault(f"{item.name}/{extent.file}", [])
                    ranges.append((extent.offset, extent.size_bytes))
        return found


def _handler(item: PreparedItem) -> str:
    if item.record.form == "process":
        return "json"
    return "text_tree" if item.texts else "tree"


def _crc_of_ranges(directory: str, name: str, ranges: list[tuple[int, int]]) -> int:
    crc = 0
    with open(os.path.join(directory, name), "rb") as file:
        for start, stop in ranges:
            file.seek(start)
            crc = crc32c.crc32c(file.read(stop - start), crc)
    return crc


def library_versions() -> dict[str, str]:
    """Versions of ckpt, of what it rests on, and of the frameworks in use."""
    names = {"ckpt-core": "ckpt_core", "jax": "jax", "numpy": "numpy", "tensorstore": "tensorstore"}
    frameworks = {"flax": "flax", "optax": "optax", "keras": "keras", "torch": "torch", "torchax": "torchax", "grain": "grain"}
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for distribution, module in (names | frameworks).items():
        if module in sys.modules:
            found[distribution] = _version(distribution)
    return found


_versions: dict[str, str] = {}


def _version(distribution: str) -> str:
    if distribution not in _versions:
        try:
            _versions[distribution] = version(distribution)
        except PackageNotFoundError:
            _versions[distribution] = "unknown"
    return _versions[distribution]
