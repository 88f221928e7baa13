"""What all exports have in common, the tensors of a checkpoint one by one; and the exports as safetensors and npz."""

from __future__ import annotations

import contextlib
import itertools
import json
import operator
import os
import zipfile
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._directory import has_sign, kind_at, place, placed, resolve
from ckpt_core._errors import CheckpointError, CheckpointExists, CheckpointNotFound
from ckpt_core._format import safetensors
from ckpt_core._format.rules import Export, Rule, exports, rules_from
from ckpt_core._layout.regions import whole
from ckpt_core._options import MIB, Options, checked_options
from ckpt_core._read import Array, Want, read_leaves, with_specs
from ckpt_core._saved import Checkpoint, OrbaxItem, SavedItem, open_checkpoint
from ckpt_core._tree import Path, format_path
from ckpt_core._tree.leaves import LeafSpec, as_logical, dtype_from_name
from ckpt_core._tree.match import positions_of
from ckpt_core._tree.patterns import patterns_of, read_again, selector, unmatched_patterns
from ckpt_core._words import some
from ckpt_core.arguments import answering

NUMPY_DTYPES = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
_KINDS = frozenset({"jax", "numpy", "numpy_scalar", "int", "float", "bool"})
_TIED = "_tied_weights"
"""The key, beside a module's names, that holds ``{first name: {other name: True}}`` of weights that are saved once."""
PathLike = str | os.PathLike[str]
Rules = Iterable[Rule | Mapping[str, Any]] | None
Arrays = Iterator[tuple[Export, Array]]


class Format(NamedTuple):
    """What a format has room for; ``advice`` says what to do with other dtypes, up to the argument ``exclude=``."""

    name: str
    dtypes: Collection[str]
    advice: str = "leave them out with"


@contextlib.contextmanager
def exported(
    checkpoint: PathLike,
    format: Format,
    options: Options | None,
    item: str | None,
    only: str | Iterable[str] | None,
    exclude: str | Iterable[str] | None,
    rules: Rules,
) -> Generator[tuple[list[Export], Arrays]]:
    """The tensors of a checkpoint, those of large elements first, so that each is aligned; and each with its values."""
    options = checked_options(options)
    opened = open_checkpoint(checkpoint, options)
    saved = _item_of(opened, item)
    if isinstance(saved, OrbaxItem):
        saved = with_specs(opened, saved)
    named, leaves = _with_all_names(saved.paths)
    specs = [saved.specs[n] for n in leaves]
    written = _chosen(opened.path, saved.name, named, specs, read_again(only), read_again(exclude))
    positions = [leaves[n] for n in written]
    _refuse_kinds(opened, saved, positions, format)
    paths = ["/".join(map(str, named[n])) for n in written]
    plan = exports(rules_from(rules or ()), paths, [saved.specs[n] for n in positions])
    plan.sort(key=lambda one: -dtype_from_name(one.dtype).itemsize)
    alike = itertools.groupby(plan, operator.attrgetter("leaves", "index"))
    groups = [(leaves, index, list(made)) for (leaves, index), made in alike]
    wants = [_want(saved, positions[leaf], index) for leaves, index, _ in groups for leaf in leaves]
    read = read_leaves(opened, saved, wants, options)

    def arrays() -> Arrays:
        for leaves, index, made in groups:  # what several tensors in a row are made of is read once
            parts = [_row(saved, next(read), len(index)) for _ in leaves]
            for one in made:
                yield one, one.make(parts)

    with opened.reading(), contextlib.closing(read):
        yield plan, arrays()


def _with_all_names(paths: Sequence[Path]) -> tuple[list[Path], list[int]]:
    """Each tensor's path, and its leaf's position: ``("_tied_weights", "embed", "head")`` is ``head``, in ``embed``."""
    positions = {path: position for position, path in enumerate(paths)}
    found: list[tuple[Path, int]] = []
    for position, path in enumerate(paths):
        match path:
            case (*above, marked, first, other) if marked == _TIED and (*above, first) in positions:
                found.append(((*above, other), positions[(*above, first)]))
            case _:
                found.append((path, position))
    return [path for path, _ in found], [position for _, position in found]


def _chosen(
    where: str, item: str, paths: Sequence[Path], specs: Sequence[LeafSpec], only: Any, exclude: Any
) -> list[int]:
    """Positions of the leaves to be written; there is one at least."""
    found = [*positions_of(paths, specs, selector(only, item=item))]
    if exclude is not None:
        excluded = {*positions_of(paths, specs, selector(exclude, item=item))}
        found = [n for n in found if n not in excluded]
    for argument, patterns in (("only", only), ("exclude", exclude)):
        if idle := unmatched_patterns(patterns, [(item, paths)]):
            raise CheckpointNotFound(f"{where}: {argument}={idle} matches no leaf of {item!r}")
    if not found:
        asked = f"only={only!r}, exclude={exclude!r} leave" if only or exclude else "there is"
        raise CheckpointNotFound(f"{where}: {asked} no leaf of {item!r}")
    return found


def new_file(target: PathLike) -> str:
    """The path of a file to write, on a disk, where nothing is."""
    where = local(target)
    refuse_existing(where)
    return where


def refuse_existing(path: str) -> None:
    """Raises CheckpointExists if anything is at a path."""
    if kind_at(path, follow=False):
        raise CheckpointExists(f"{path} exists already: choose another path, or delete it")


def local(target: PathLike) -> str:
    """The absolute path of a target on a disk, outside of checkpoints and runs, which a file would change."""
    where, on_disk = resolve(target)
    if not on_disk:
        raise CheckpointError(f"{where}: an export is written to a disk: copy it from there")
    for around in (where, *map(str, PurePath(where).parents)):
        if has_sign(around):
            raise CheckpointError(
                f"{where} lies inside the checkpoint {around}, which would no longer be what was saved: name another target"
            )
    inside = os.listdir(where) if kind_at(where) == "directory" else []
    if any(has_sign(os.path.join(where, one)) for one in inside):
        raise CheckpointError(f"{where} is a directory of checkpoints: name another target")
    return where


def _item_of(opened: Checkpoint, name: str | None) -> SavedItem:
    trees = {key: item for key, item in opened.items.items() if item.form == "tree"}
    if name is None and len(trees) == 1:
        return next(iter(trees.values()))
    if name not in trees:
        held = f"no item {name!r} of arrays" if name is not None else "several items of arrays"
        raise CheckpointNotFound(
            f"{opened.path} has {held}: say which with item=, of {', '.join(trees) or 'none'}"
        )
    return trees[name]


def _refuse_kinds(
    opened: Checkpoint, item: SavedItem, positions: Sequence[int], format: Format
) -> None:
    specs, dtypes = item.specs, format.dtypes
    wrong = [n for n in positions if specs[n].kind not in _KINDS or specs[n].dtype not in dtypes]
    if wrong:
        shown = some([f"{format_path(item.paths[n])} ({specs[n]})" for n in wrong])
        advice = f"{format.advice} exclude={patterns_of(wrong, item.paths)}"
        raise CheckpointError(f"{opened.path}: {format.name} has no place for {shown}: {advice}")


def _want(item: SavedItem, leaf: int, index: tuple[int, ...]) -> Want:
    rest = whole(item.specs[leaf].stored_shape)[len(index) :]
    return Want(leaf, [(*((n, n + 1) for n in index), *rest)])


def _row(item: SavedItem, read: tuple[Want, Mapping[Any, Array]], stacked: int) -> Array:
    want, parts = read
    (part,) = parts.values()
    array = as_logical(part, item.specs[want.leaf])
    return array.reshape(array.shape[stacked:])


_PIECE_BYTES = 4 * MIB
_SAFETENSORS = Format("safetensors", frozenset(safetensors.DTYPES.values()))


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
    where = local(target)
    inside = [where] if where.endswith(safetensors.SUFFIX) else []
    if not inside and kind_at(where) == "directory":
        ends = (safetensors.SUFFIX, safetensors.INDEX_SUFFIX)
        inside = [f"{where}/{name}" for name in os.listdir(where) if name.endswith(ends)]
    for path in inside:
        refuse_existing(path)
    with exported(checkpoint, _SAFETENSORS, options, item, only, exclude, rules) as (plan, arrays):
        shards = _shards(where, plan, max_shard_bytes)
        for path, shard in shards:
            place(path, _pieces(shard, arrays, dict(metadata or {})))
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


def _pieces(shard: Sequence[Export], arrays: Arrays, metadata: dict[str, str]) -> Generator[bytes]:
    yield safetensors.dump_header([(one.name, one.dtype, one.shape) for one in shard], metadata)
    for _ in shard:
        _, array = next(arrays)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, data.size, _PIECE_BYTES):
            yield data[start : start + _PIECE_BYTES].tobytes()


_NPZ = Format(
    "npz", NUMPY_DTYPES, "numpy has no such dtype: write safetensors, or leave them out with"
)


@answering
def export_npz(
    checkpoint: PathLike,
    target: PathLike,
    /,
    *,
    item: str | None = None,
    only: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    rules: Rules = None,
    options: Options | None = None,
) -> list[str]:
    """The file that was written: arrays by name, which ``numpy.load`` reads; not compressed.

    Streamed, as ``export_safetensors``, whose arguments it has.

    Args:
        checkpoint: path or URL of a checkpoint.
        target: the file, such as ``model.npz``.
        item, only, exclude, rules, options: as for ``export_safetensors``.

    Raises:
        CheckpointError: numpy lacks a dtype, such as bfloat16.
        CheckpointNotFound, CheckpointCorrupt, CheckpointExists, StructureMismatch: as ``export_safetensors``.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> ckpt.save(f"{folder}/one", {"w": jnp.ones(3)})
        >>> [path] = ckpt.convert.export_npz(f"{folder}/one", f"{folder}/model.npz")
    """
    where = new_file(target)
    with (
        exported(checkpoint, _NPZ, options, item, only, exclude, rules) as (plan, arrays),
        placed(where) as temporary,
        zipfile.ZipFile(temporary, "w") as archive,
    ):
        if cut := [one.name for one in plan if "\0" in one.name]:
            raise CheckpointError(
                f"{cut[0]!r}: an npz cuts names at zero bytes: rename it by rules="
            )
        for one, array in arrays:
            with archive.open(f"{one.name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, array, allow_pickle=False)
    return [where]
