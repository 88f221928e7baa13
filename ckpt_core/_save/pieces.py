"""``writer``: a checkpoint that is built piece by piece, with one commit at the end."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_core._adapters import introduce
from ckpt_core._errors import CheckpointError, UnsupportedLeaf
from ckpt_core._fork import HOME
from ckpt_core._format.plain_json import frozen_metadata
from ckpt_core._layout.regions import whole
from ckpt_core._options import MIB, Options, checked_options
from ckpt_core._save.job import PreparedItem, RecordFields, SaveJob, check_item_name, save_job
from ckpt_core._save.plan import PlannedLeaf, TreeSignature, refuse_unmatched
from ckpt_core._save.prepare import landed, plan_item, prepare_item
from ckpt_core._save.protocol import Save
from ckpt_core._storage import ArrayToWrite
from ckpt_core._tree import format_path
from ckpt_core._tree.flatten import Key, Node, Path
from ckpt_core.arguments import answering

_SMALL_ADD_BYTES = 8 * MIB  # what is added in smaller pieces waits in memory, until it fills a file
_WAITING_BYTES = 64 * MIB  # so much of it waits at most
_DICTS = ("dict", "ordered")


@answering
def writer(
    path: str | os.PathLike[str],
    /,
    *,
    overwrite: bool = False,
    metadata: Any = None,
    options: Options | None = None,
) -> CheckpointWriter:
    """A context manager with ``add(name, tree)``: builds a checkpoint that is never in memory as a whole.

    Nothing is visible at ``path`` before the block ends, and an exception in it leaves nothing. What
    is written is what ``save`` would write, given all of it at once. One process alone writes. Memory
    is that of one ``add`` and about 200 MB.

    Args:
        path: as for ``save``.
        overwrite: as for ``save``.
        metadata: as for ``save``.
        options: as for ``save``.

    Raises:
        CheckpointError: several processes run.

    Example:
        >>> import ckpt_core as ckpt, numpy as np, tempfile
        >>> path = tempfile.mkdtemp() + "/converted"
        >>> with ckpt.writer(path) as w:
        ...     for layer in range(3):
        ...         w.add("params", {f"layer_{layer}": {"kernel": np.ones((2, 2))}})
        ...     w.add("config", ckpt.Json({"layers": 3}))
        >>> sorted(ckpt.load(path)["params"])
        ['layer_0', 'layer_1', 'layer_2']
    """
    return writer_of(path, RecordFields(False, metadata), overwrite=overwrite, options=options)


def writer_of(
    path: str | os.PathLike[str], fields: RecordFields, *, overwrite: bool, options: Options | None
) -> CheckpointWriter:
    """``writer``, also for a checkpoint of one state, which is its item ``state``."""
    kept = replace(fields.frozen(), settings={})  # pieces may come from other programs
    job = save_job(path, kept, checked_options(options), overwrite=overwrite)
    count = job.processes.count
    if count > 1:
        raise CheckpointError(
            f"ckpt.writer({job.target!r}): {count} processes run, and a writer is for one alone: run it in a "
            "program without jax.distributed, or call ckpt.save in all processes"
        )
    return CheckpointWriter(job)


class CheckpointWriter:
    """What ``writer`` returns. ``add`` may be called from any thread; calls take turns."""

    def __init__(self, job: SaveJob) -> None:
        self._job = job
        self._turn = threading.Lock()
        self._is_new = True
        self._writing: _PieceWrite | None = None  # inside of the with block
        self._failure: BaseException | None = None

    def __enter__(self) -> CheckpointWriter:
        if not self._is_new:
            raise CheckpointError(
                f"{self._job.target}: a writer is for one with block: make another"
            )
        self._is_new = False
        writing = _PieceWrite(self._job)
        writing.operation.happened("save_started")
        with writing.operation.failing("save_failed", "beginning"):
            writing.begin()
            self._writing = writing
        return self

    def add(self, name: str, tree: Any, /) -> None:
        """Writes an item, or a part of one; when it returns, the arrays may be changed and deleted. A pytree of
        dictionaries may come in parts: dictionaries of the same path are joined. All other items (a bare array, a live
        object, ``Files``, ``Json``) are added once. If the value is refused, the writer is as before; if it cannot be
        written, nothing more can be.
        """
        check_item_name(name)
        with self._turn:
            writing = self._begun()
            adapter = introduce({name: tree})[name]
            (item,) = prepare_item(name, tree, adapter, [self._job], None, None, [])
            self._take(writing, item)

    def declare(
        self, name: str, signature: TreeSignature, texts: Mapping[int, str], /
    ) -> Callable[[Iterable[tuple[int, np.ndarray[Any, Any]]]], None]:
        """A function that takes (position, stored array) of leaves of a new item, and writes them: every
        leaf that is not in ``texts`` must be given once. For ``ckpt_core.convert``: unlike ``add`` it
        takes any structure in parts, without shardings, and host arrays as leaves of any kind of arrays.
        """
        check_item_name(name)
        with self._turn:
            writing = self._begun()
            plan = plan_item(name, signature, self._job)
            named = {plan.names[position]: text for position, text in texts.items()}
            self._take(writing, PreparedItem(name, plan.record, plan, texts=named))

        def put(leaves: Iterable[tuple[int, np.ndarray[Any, Any]]]) -> None:
            with self._turn:
                writing = self._begun()
                arrays = [
                    _whole(plan.names[position], plan.leaves[position], values)
                    for position, values in leaves
                ]
                with self._noting_failure():
                    writing.put(name, arrays)

        return put

    def _take(self, writing: _PieceWrite, item: PreparedItem) -> None:
        writing.refuse_clash(item)
        with self._noting_failure():
            writing.take(item)

    def _begun(self, call: str = "add") -> _PieceWrite:
        """What writes; raises if nothing can be added (any more)."""
        if self._writing is None:
            raise CheckpointError(f"{self._job.target}: {call}() is for inside of the with block")
        self._refuse_failed()
        return self._writing

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            raise CheckpointError(
                f"{self._job.target}: a part could not be written (see the cause), so nothing is: start again"
            ) from self._failure

    @contextlib.contextmanager
    def _noting_failure(self) -> Generator[None]:
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise

    def set_metadata(self, metadata: Any) -> None:
        """Replaces the metadata by what a conversion found out inside the ``with`` block; TypeError if it is not JSON."""
        with self._turn:
            writing = self._begun("set_metadata")
            writing.fields = replace(writing.fields, metadata=frozen_metadata(metadata))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        writing, self._writing = self._writing, None
        if writing is None or os.getpid() != HOME.pid:
            return
        try:
            with self._turn, writing.operation.failing("save_failed", "beginning"):
                if error is not None:
                    raise error
                self._refuse_failed()
                writing.finish()
        except BaseException as failure:
            writing.drop()
            if failure is not error:
                raise
        else:
            writing.operation.committed(writing.written_bytes, 0.0)


def _whole(name: str, leaf: PlannedLeaf, values: np.ndarray[Any, Any]) -> ArrayToWrite:
    pieces = ((whole(leaf.spec.stored_shape), values),)
    return ArrayToWrite(name, leaf.spec, leaf.chunk, pieces, leaf.size_bytes, leaf.codec, None)


class PieceTree:
    """The parts of one item that were added so far: dictionaries at the same path are joined, all else comes whole."""

    def __init__(self, first: PreparedItem) -> None:
        self.first = first
        # at the path of each dictionary and of each node that came whole: the keys of the one, the leaves of the other
        self._nodes: dict[Path, tuple[Node, dict[Key, None], list[Any]]] = {}
        self._paths: dict[str, str] = {}  # array name -> path
        self._texts: dict[str, str] = {}

    def refuse(self, part: PreparedItem) -> None:
        """Raises UnsupportedLeaf if a part has what is there already, or another container at its path."""
        for path, node, _ in _nodes(part.record.tree, ()):
            there = self._nodes[path][0] if path in self._nodes else node
            alike = (there.kind, there.type_name) == (node.kind, node.type_name)
            if path in self._nodes and (node.kind not in _DICTS or not alike):
                raise taken(part.name, format_path(path))
        for name, path in zip(part.names, part.record.paths, strict=True):
            if name in self._paths:
                where = format_path(path)
                raise UnsupportedLeaf(
                    f"item {part.name!r}: leaves {self._paths[name]!r} and {where!r} would both be stored as {name!r} "
                    "in Orbax's format, which cannot distinguish them: rename one of them",
                    leaf=where,
                )

    def add(self, part: PreparedItem) -> None:
        """Adds a part that ``refuse`` lets pass."""
        assert part.plan is not None
        signature = part.plan.signature
        paths = signature.paths
        objects: list[object] = [None] * len(paths)
        for group in signature.shared:
            one = object()
            for position in group:
                objects[position] = one
        columns = (paths, signature.specs, signature.shardings, signature.stored, objects)
        for path, node, own in _nodes(part.record.tree, zip(*columns, strict=True)):
            self._nodes.setdefault(path, (node, {}, own))
            if path:
                self._nodes[path[:-1]][1][path[-1]] = None
        self._paths |= zip(part.names, map(format_path, paths), strict=True)
        self._texts |= part.texts

    def whole(self, job: SaveJob) -> PreparedItem:
        """The item of all parts, without its arrays."""
        leaves: list[Any] = []
        root = self._grown((), leaves)
        columns = [tuple(leaf[column] for leaf in leaves) for column in range(4)]
        places: dict[object, list[int]] = {}
        for position, leaf in enumerate(leaves):
            if leaf[4] is not None:
                places.setdefault(leaf[4], []).append(position)
        shared = tuple(map(tuple, places.values()))
        plan = plan_item(self.first.name, TreeSignature(root, *columns, shared=shared), job)
        return replace(self.first, record=plan.record, plan=plan, texts=self._texts)

    def _grown(self, path: Path, leaves: list[Any]) -> Node:
        """The structure of all parts below a path; adds its leaves, in its order."""
        node, keys, own = self._nodes[path]
        leaves += own
        if node.kind not in _DICTS:
            return node
        children = tuple(self._grown((*path, key), leaves) for key in keys)
        return replace(node, keys=tuple(keys), children=children)


def _nodes(root: Node, leaves: Iterable[Any]) -> Iterator[tuple[Path, Node, list[Any]]]:
    """Path and node of each dictionary, and of each other node in one, with its leaves; parents first."""
    left = iter(leaves)
    waiting: list[tuple[Path, Node]] = [((), root)]
    while waiting:
        path, node = waiting.pop()
        is_dict = node.kind in _DICTS
        yield path, node, [] if is_dict else [*itertools.islice(left, _leaf_count(node))]
        if is_dict:
            inside = zip(node.keys, node.children, strict=True)
            waiting += [((*path, key), child) for key, child in inside][::-1]


def _leaf_count(node: Node) -> int:
    return 1 if node.kind == "leaf" else sum(map(_leaf_count, node.children))


def taken(item: str, where: str) -> UnsupportedLeaf:
    """The error for what was added already."""
    what = f"item {item!r}: {where}" if where else f"item {item!r}"
    return UnsupportedLeaf(
        f"{what} was added already, and only dictionaries can be added in parts: add each leaf once, or all "
        "of the item at once",
        leaf=where or item,
    )


class _PieceWrite(Save):
    """Writes pieces of items into one attempt, then commits it."""

    def __init__(self, job: SaveJob) -> None:
        super().__init__(job)
        self._trees: dict[str, PieceTree] = {}
        self._host_bytes = min(self._host_bytes, _WAITING_BYTES)

    def refuse_clash(self, item: PreparedItem) -> None:
        """Raises UnsupportedLeaf if an item, or a part of one, does not go together with what is there."""
        tree = self._trees.get(item.name)
        if tree is not None and item.plan is not None:
            tree.refuse(item)
        elif any(item.name == other.name for other in self.items):
            raise taken(item.name, "")

    def take(self, item: PreparedItem) -> None:
        """Writes an item or a part of one, or copies its arrays if they are small."""
        if item.plan is None:
            self.written_bytes += self._start_item(item)
            self.items.append(item)
            return
        arrived = landed(item)
        item = replace(arrived, arrays=())
        tree = self._trees.get(item.name)
        if tree is None:
            tree = self._trees[item.name] = PieceTree(item)
            self.items.append(item)
            self._writer(item)
        tree.add(item)
        self.put(item.name, arrived.arrays)

    def put(self, name: str, arrays: Sequence[ArrayToWrite]) -> None:
        """Writes arrays of an item that was taken, or copies them if they are small."""
        added_bytes = sum(array.size_bytes for array in arrays)
        self.written_bytes += added_bytes
        if added_bytes <= _SMALL_ADD_BYTES:
            self._writers[name].put(arrays, _SMALL_ADD_BYTES)
        else:
            self._writers[name].put(arrays)
            self._writers[name].settle()

    def finish(self) -> None:
        """Writes what waits and all metadata, and commits."""
        if not self.items:
            raise CheckpointError(
                f"{self.job.target}: nothing was added, so there is nothing to save"
            )
        rules = self.job.options.compression
        whole = {name: tree.whole(self.job) for name, tree in self._trees.items()}
        if isinstance(rules, Mapping):
            refuse_unmatched(rules, [(name, item.record.paths) for name, item in whole.items()])
        self.items[:] = [whole.get(item.name, item) for item in self.items]
        with self._workers:
            self._describe()
            for writer in self._writers.values():
                writer.start()
            self._settle()
        self.commit()

    def drop(self) -> None:
        """Waits for what is on its way, and removes everything that is not committed."""
        self._workers.end(drop=True)
        self._give_back()
