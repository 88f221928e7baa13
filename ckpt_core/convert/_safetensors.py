"""Safetensors: one file, or several and their index."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable, Mapping, Sequence

import numpy as np

from ckpt_core._directory import kind_at, place
from ckpt_core._format import safetensors
from ckpt_core._format.rules_back import Export
from ckpt_core._options import MIB, Options
from ckpt_core._tree.leaves import LeafSpec
from ckpt_core.arguments import answering
from ckpt_core.convert._outgoing import (
    Arrays,
    Format,
    PathLike,
    Rules,
    local,
    outgoing,
    refuse_existing,
)

_PIECE_BYTES = 4 * MIB
_FORMAT = Format("safetensors", frozenset(safetensors.DTYPES.values()))


@answering
def export_safetensors(
    checkpoint: PathLike,
    target: PathLike,
    /,
    *,
    item: str | None = None,
    only: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    rules: Rules = None,
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
        exclude: patterns of leaves to leave out, even if ``only`` matches them.
        rules: the rules of a load, which are taken backwards. A leaf that no rule names is called by its
            path, with dots.
        max_shard_bytes: the most bytes of tensors in a file, unless one tensor has more.
        metadata: texts for the files' ``__metadata__``.
        options: ``storage_options`` of it says how to reach a bucket.

    Raises:
        CheckpointNotFound: no checkpoint or item there, or a pattern matches no leaf.
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
    where = _checked(target)
    with outgoing(checkpoint, _FORMAT, options, item, only, exclude, rules) as found:
        plan, arrays = found
        shards = _shards(where, plan, max_shard_bytes)
        return _write(where, shards, arrays, dict(metadata or {}))


def _checked(target: PathLike) -> str:
    where = local(target)
    inside = [where] if where.endswith(safetensors.SUFFIX) else []
    if not inside and kind_at(where) == "directory":
        ends = (safetensors.SUFFIX, safetensors.INDEX_SUFFIX)
        inside = [f"{where}/{name}" for name in os.listdir(where) if name.endswith(ends)]
    for path in inside:
        refuse_existing(path)
    return where


def _bytes_of(one: Export) -> int:
    return LeafSpec("jax", one.dtype, one.shape).stored_bytes


def _shards(where: str, plan: Sequence[Export], max_bytes: int) -> list[tuple[str, list[Export]]]:
    """The files, each with its tensors."""
    if where.endswith(safetensors.SUFFIX):
        return [(where, list(plan))]
    shards: list[list[Export]] = [[]]
    size = 0
    for one in plan:
        if shards[-1] and size + _bytes_of(one) > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(one)
        size += _bytes_of(one)
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
    arrays: Arrays,
    metadata: dict[str, str],
) -> list[str]:
    for path, shard in shards:
        place(path, _pieces(shard, arrays, metadata))
    paths = [path for path, _ in shards]
    if len(shards) > 1:
        written = [(one, os.path.basename(path)) for path, shard in shards for one in shard]
        index = {
            "metadata": {"total_size": sum(_bytes_of(one) for one, _ in written)},
            "weight_map": dict(sorted((one.name, file) for one, file in written)),
        }
        paths.append(f"{where}/model{safetensors.INDEX_SUFFIX}")
        place(paths[-1], [json.dumps(index, indent=2).encode()])
    return paths


def _pieces(shard: Sequence[Export], arrays: Arrays, metadata: dict[str, str]) -> Generator[bytes]:
    yield safetensors.dump_header([(one.name, one.dtype, one.shape) for one in shard], metadata)
    for _ in shard:
        _, array = next(arrays)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, data.size, _PIECE_BYTES):
            yield data[start : start + _PIECE_BYTES].tobytes()
