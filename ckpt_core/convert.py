"""Writes what a checkpoint holds in the formats of other programs.

ckpt export runs/1/100 weights --to safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ckpt_core._directory import place, resolve
from ckpt_core._errors import CheckpointError, CheckpointExists, CheckpointNotFound
from ckpt_core._format import safetensors
from ckpt_core._format.rules import Rule, rules_from
from ckpt_core._format.rules_back import Export, exports
from ckpt_core._layout.regions import whole
from ckpt_core._load.checkpoint import Checkpoint, OrbaxItem, SavedItem
from ckpt_core._load.opening import open_checkpoint
from ckpt_core._load.readers.orbax import with_specs
from ckpt_core._load.readers.pipeline import read_leaves
from ckpt_core._load.readers.wants import Array, Want
from ckpt_core._options import MIB, Options, checked_options
from ckpt_core._storage import new_context
from ckpt_core._tree import format_path
from ckpt_core._tree.leaves import LeafSpec, as_logical, dtype_from_name
from ckpt_core._tree.match import positions_of, selector

_KINDS = frozenset({"jax", "numpy", "numpy_scalar", "int", "float", "bool"})
_PIECE_BYTES = 4 * MIB


def export_safetensors(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    /,
    *,
    item: str | None = None,
    only: str | Iterable[str] | None = None,
    rules: Iterable[Rule | Mapping[str, Any]] | None = None,
    max_shard_bytes: int = 5 * 1024 * MIB,
    metadata: Mapping[str, str] | None = None,
    options: Options | None = None,
) -> list[str]:
    """The files that were written: the arrays of a checkpoint as safetensors.

    Streamed: holds a few batches of 128 MiB, or the largest tensor. Every byte of a checkpoint of ckpt is
    verified as it is read. Each file appears when all of it is there, an index after the files that it names.

    Args:
        checkpoint: path or URL of a checkpoint.
        target: a path that ends with ``.safetensors``: one file; else a folder, for ``model.safetensors``, or
            ``model-00001-of-...`` and their index where that would be larger than ``max_shard_bytes``.
        item: which item; may be left out if the checkpoint has one of arrays only.
        only: patterns of the leaves to write, as for ``load``.
        rules: the rules of a load, which are taken backwards. A leaf that no rule names is called by its
            path, with dots.
        max_shard_bytes: the most bytes of tensors in a file, unless one tensor has more.
        metadata: texts for the files' ``__metadata__``.
        options: ``storage_options`` of it says how to reach a bucket.

    Raises:
        CheckpointNotFound: no checkpoint or item there, or ``only`` matches no leaf.
        CheckpointCorrupt: a byte of it is not as it was saved.
        CheckpointExists: such files are at ``target`` already.
        StructureMismatch: leaves do not fit the rules.
        CheckpointError: a leaf is of a kind that the format does not have.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp, shutil
        >>> shutil.rmtree("/tmp/ckpt-docs/weights", ignore_errors=True)
        >>> ckpt.save("/tmp/ckpt-docs/one", {"w": jnp.ones(3)}, overwrite=True)
        >>> [path] = ckpt.convert.export_safetensors("/tmp/ckpt-docs/one", "/tmp/ckpt-docs/weights")
        >>> ckpt.load(path)["w"]
        Array([1., 1., 1.], dtype=float32)
    """
    chosen = checked_options(options)
    where = _local(target)
    opened = open_checkpoint(checkpoint, chosen)
    context = new_context()
    saved = _item_of(opened, item)
    if isinstance(saved, OrbaxItem):
        saved = with_specs(opened, saved, context)
    positions = positions_of(saved.paths, saved.specs, selector(only, item=saved.name))
    if not positions:
        raise CheckpointNotFound(f"{opened.path}: only={only!r} matches no leaf of {saved.name!r}")
    _refuse_kinds(opened, saved, positions)
    paths = [_text(saved, position) for position in positions]
    plan = exports(rules_from(rules or ()), paths, [saved.specs[n] for n in positions])
    plan.sort(key=lambda one: -dtype_from_name(one.dtype).itemsize)  # so that each is aligned
    with opened.held():
        arrays = _arrays(opened, saved, positions, plan, chosen, context)
        return _write(where, _shards(where, plan, max_shard_bytes), arrays, dict(metadata or {}))


def _local(target: str | os.PathLike[str]) -> str:
    where, local = resolve(target)
    if not local:
        raise CheckpointError(f"{where}: an export is written to a disk: copy it from there")
    inside = [where] if where.endswith(safetensors.SUFFIX) else []
    if not inside and os.path.isdir(where):
        ends = (safetensors.SUFFIX, safetensors.INDEX_SUFFIX)
        inside = [f"{where}/{name}" for name in os.listdir(where) if name.endswith(ends)]
    for path in inside:
        if os.path.lexists(path):
            raise CheckpointExists(f"{path} exists already: choose another path, or delete it")
    return where


def _item_of(opened: Checkpoint, name: str | None) -> SavedItem:
    trees = {key: item for key, item in opened.items.items() if item.form == "tree"}
    if name is None and len(trees) == 1:
        return next(iter(trees.values()))
    if name not in trees:
        told = f"no item {name!r} of arrays" if name is not None else "several items of arrays"
        raise CheckpointNotFound(
            f"{opened.path} has {told}: say which with item=, of {', '.join(trees) or 'none'}"
        )
    return trees[name]


def _refuse_kinds(opened: Checkpoint, item: SavedItem, positions: Sequence[int]) -> None:
    known = set(safetensors.DTYPES.values())
    wrong = [
        f"{format_path(item.paths[n])} ({item.specs[n]})"
        for n in positions
        if item.specs[n].kind not in _KINDS or item.specs[n].dtype not in known
    ]
    if wrong:
        shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise CheckpointError(
            f"{opened.path}: safetensors has no place for {shown}: choose the others with only="
        )


def _text(item: SavedItem, position: int) -> str:
    return "/".join(map(str, item.paths[position]))


def _arrays(
    opened: Checkpoint,
    item: SavedItem,
    positions: Sequence[int],
    plan: Sequence[Export],
    options: Options,
    context: Any,
) -> Iterator[tuple[Export, Array]]:
    """Each tensor, in order; what several in a row are made of is read once."""
    wants: list[Want] = []
    before: object = None
    for one in plan:
        if (one.leaves, one.index) != before:
            before = (one.leaves, one.index)
            wants += [_want(item, positions[leaf], one.index) for leaf in one.leaves]
    source = read_leaves(opened, item, wants, options, context)
    before, parts = None, list[Array]()
    for one in plan:
        if (one.leaves, one.index) != before:
            before = (one.leaves, one.index)
            parts = [_row(item, next(source), len(one.index)) for _ in one.leaves]
        yield one, one.make(parts)


def _want(item: SavedItem, leaf: int, index: tuple[int, ...]) -> Want:
    rest = whole(item.specs[leaf].stored_shape)[len(index) :]
    return Want(leaf, [(*((n, n + 1) for n in index), *rest)])


def _row(item: SavedItem, read: tuple[Want, Mapping[Any, Array]], stacked: int) -> Array:
    want, parts = read
    (part,) = parts.values()
    array = as_logical(part, item.specs[want.leaf])
    return array.reshape(array.shape[stacked:])


def _shards(where: str, plan: Sequence[Export], max_bytes: int) -> list[tuple[str, list[Export]]]:
    """The files, each with its tensors."""
    if where.endswith(safetensors.SUFFIX):
        return [(where, list(plan))]
    shards: list[list[Export]] = [[]]
    size = 0
    for one in plan:
        bytes_ = LeafSpec("jax", one.dtype, one.shape).stored_bytes
        if shards[-1] and size + bytes_ > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(one)
        size += bytes_
    if len(shards) == 1:
        return [(f"{where}/model.safetensors", shards[0])]
    count = len(shards)
    return [
        (f"{where}/model-{n:05}-of-{count:05}.safetensors", shard)
        for n, shard in enumerate(shards, 1)
    ]


def _write(
    where: str,
    shards: Sequence[tuple[str, Sequence[Export]]],
    arrays: Iterator[tuple[Export, Array]],
    metadata: dict[str, str],
) -> list[str]:
    for path, shard in shards:
        place(path, _pieces(shard, arrays, metadata))
    paths = [path for path, _ in shards]
    if len(shards) > 1:
        total = sum(
            LeafSpec("jax", one.dtype, one.shape).stored_bytes
            for _, shard in shards
            for one in shard
        )
        files = {one.name: os.path.basename(path) for path, shard in shards for one in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        paths.append(f"{where}/model{safetensors.INDEX_SUFFIX}")
        place(paths[-1], [json.dumps(index, indent=2).encode()])
    return paths


def _pieces(
    shard: Sequence[Export], arrays: Iterator[tuple[Export, Array]], metadata: dict[str, str]
) -> Generator[bytes]:
    yield safetensors.dump_header([(one.name, one.dtype, one.shape) for one in shard], metadata)
    for _ in shard:
        _, array = next(arrays)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, data.size, _PIECE_BYTES):
            yield data[start : start + _PIECE_BYTES].tobytes()
