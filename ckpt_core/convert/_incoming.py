"""``import_weights``: files of other formats become checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_core import _adapters
from ckpt_core._directory import resolve
from ckpt_core._errors import CheckpointError, CheckpointNotFound, Mismatch, StructureMismatch
from ckpt_core._format.rules import Rule, bind, rules_from
from ckpt_core._layout.regions import region_slices, whole
from ckpt_core._load.derived import under_rules
from ckpt_core._operation import Operation
from ckpt_core._options import MIB, Options, checked_options
from ckpt_core._save.job import RecordFields
from ckpt_core._save.pieces import CheckpointWriter, writer_of
from ckpt_core._save.plan import TreeSignature
from ckpt_core._saved import ExtentItem
from ckpt_core._tree import FlatTree, Path, flatten, format_path
from ckpt_core._tree.leaves import TEXT_KINDS, LeafSpec, describe, to_host_array, to_text
from ckpt_core._tree.match import MatchRules, Renames, match, parse_path, positions_of
from ckpt_core._tree.patterns import read_again, selector, unmatched_patterns
from ckpt_core.arguments import answering
from ckpt_core.convert._opening import FORMATS, format_of, opened
from ckpt_core.convert._source import Array, Slot, arrays_of, each, spec_of

_BATCH_BYTES = 64 * MIB


@answering
def import_weights(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    /,
    *,
    format: str | None = None,
    item: str | None = None,
    only: str | Iterable[str] | None = None,
    rules: Iterable[Rule | Mapping[str, Any]] | None = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    split: str | None = None,
    like: Any = None,
    overwrite: bool = False,
    metadata: Any = None,
    options: Options | None = None,
) -> None:
    """Makes a checkpoint of what another program wrote; no code that a file names is run.

    Streamed: holds a few batches of 128 MiB, or the largest array and, under a rule, what it is made of; of Flax, the
    whole file. A ``.keras`` file is unpacked into the temporary directory. Nothing is at ``target`` before all of it is
    there; an import that was killed begins anew. Files of torch need torch, those of Flax Flax, and those of Keras h5py.

    Args:
        source: a file or folder; safetensors and Orbax also in a bucket.
        target: path or URL of the new checkpoint.
        format: ``safetensors``, ``npz``, ``torch`` (a file of ``torch.save``), ``dcp`` (a folder of
            ``torch.distributed.checkpoint``), ``flax`` (msgpack), ``keras`` (``.keras`` and ``.weights.h5``),
            or ``orbax``; None: by what is in it.
        item: name of the item to make; None: one state, as ``save(path, state)`` makes. From Orbax, the item to take;
            None: all.
        only: patterns of names to take, as for ``load``.
        rules: the rules of a load. Those that cut dimensions need ``like``.
        rename: a mapping of leading parts of names, or a function of the name; slashes in new names make levels.
        split: cuts names at this text into levels of a tree, such as ``"."``.
        like: a tree of arrays, or of shapes, whose structure the checkpoint gets.
        overwrite: as for ``save``.
        metadata: of the new checkpoint; None: that of the source.
        options: ``on_event`` of it is called with the progress.

    Raises:
        CheckpointNotFound: nothing is there, or ``only`` matches nothing.
        CheckpointExists: something is at ``target``.
        CheckpointCorrupt: the source is damaged or cut short.
        UnsupportedLeaf: it holds something that is not a number, text or array; or would need code to be read.
        StructureMismatch: arrays do not fit the rules or ``like``.
        CheckpointError: no known format; a package is missing; or two arrays would be at one path.

    Example:
        >>> import ckpt_core as ckpt, numpy as np, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> np.savez(f"{folder}/a.npz", **{"layer.w": np.ones(3, np.float32)})
        >>> ckpt.convert.import_weights(f"{folder}/a.npz", f"{folder}/a", split=".")
        >>> ckpt.load(f"{folder}/a")
        {'layer': {'w': array([1., 1., 1.], dtype=float32)}}
    """
    chosen = checked_options(options)
    where, _ = resolve(source)
    if format is not None and format not in FORMATS:
        raise CheckpointError(f"format={format!r}: it must be one of {', '.join(FORMATS)}")
    if split == "":
        raise CheckpointError("split= must be a text at which names are cut, such as '.'")
    asked = (only, rules_from(rules or ()) or None, rename, split, like)
    found_format = format or format_of(where)
    with opened(where, found_format, item, chosen) as (items, own_metadata):
        trees = {name: value for name, value in items.items() if isinstance(value, FlatTree)}
        if any(one is not None for one in asked) and len(trees) != 1:
            raise CheckpointError(
                f"{where} has several items: say with item= whose names are changed, of {', '.join(trees) or 'none'}"
            )
        trees = {name: _arranged(tree, where, *asked) for name, tree in trees.items()}
        slots = [leaf for tree in trees.values() for leaf in tree.leaves if isinstance(leaf, Slot)]
        total = sum(slot.spec.stored_bytes for slot in slots)
        operation = Operation("import", str(target), None, None, chosen.on_event, total_bytes=total)
        single = item is None and list(items) == [""]
        fields = RecordFields(single, own_metadata if metadata is None else metadata)
        with writer_of(target, fields, overwrite=overwrite, options=chosen) as writer:
            for name, value in items.items():
                if name in trees:
                    _write(writer, name or item or "state", trees[name], operation)
                else:
                    writer.add(name or item or "state", value)


def _write(writer: CheckpointWriter, name: str, source: FlatTree, operation: Operation) -> None:
    """Writes arrays in batches, as they are read."""
    specs = list(map(spec_of, source.paths, source.leaves))
    slots = {n: leaf for n, leaf in enumerate(source.leaves) if isinstance(leaf, Slot)}
    others = {n: leaf for n, leaf in enumerate(source.leaves) if n not in slots}
    texts = {n: to_text(one, specs[n]) for n, one in others.items() if specs[n].kind in TEXT_KINDS}
    none = (None,) * len(specs)
    signature = TreeSignature(source.root, tuple(source.paths), tuple(specs), none, none)
    put = writer.declare(name, signature, texts)
    put((n, to_host_array(one, specs[n])) for n, one in others.items() if n not in texts)
    batch: list[tuple[int, Array]] = []
    held_bytes = 0
    last = next(reversed(slots), None)
    for n, array in zip(slots, arrays_of(slots.values()), strict=True):
        batch.append((n, array))
        held_bytes += array.nbytes
        del array
        if held_bytes >= _BATCH_BYTES or n == last:
            put(batch)
            operation.done_bytes += held_bytes
            operation.tell_progress(operation.done_bytes)
            batch, held_bytes = [], 0


_Leaves = list[tuple[Path, Any]]


def _arranged(
    source: FlatTree,
    where: str,
    only: str | Iterable[str] | None,
    rules: Sequence[Rule] | None,
    rename: Mapping[str, str] | Callable[[str], str] | None,
    split: str | None,
    like: Any,
) -> FlatTree:
    """The source with the names, rules and tree that the caller of an import asked for."""
    leaves = list(zip(source.paths, source.leaves, strict=True))
    if only is not None:
        leaves = _selected(leaves, only, where)
    for _, leaf in leaves:
        if isinstance(leaf, Slot) and leaf.refused is not None:
            raise leaf.refused
    if all(one is None for one in (only, rules, rename, split, like)):
        return source
    target = None
    if like is not None:
        target = flatten(like, expand=_adapters.expander(stored=True), saving=True)
    if rules is not None:
        leaves = _ruled(leaves, rules, target, where)
    if rename is not None:
        leaves = _renamed(leaves, rename)
    if split is not None:
        leaves = [(_split(path, split, where), leaf) for path, leaf in leaves]
    if target is not None:
        return _as_target(leaves, target, where)
    return flatten(_nested(leaves, where))


@each
def _put_together(slot: Slot) -> Array:
    """What a rule makes of arrays; one row of them is in memory beside the result."""
    recipe, slots = slot.place
    made: Array = np.empty(slot.spec.shape, slot.spec.numpy_dtype)
    leaves = [part.leaf for _, row in recipe.rows for part in row]
    takes = list(recipe.takes(whole(made.shape), made))
    for leaf, array in zip(leaves, arrays_of(slots), strict=True):
        for part, view in takes:
            if part.leaf == leaf:
                view[...] = array[(*region_slices(part.region), ...)]
    return made


def _selected(leaves: _Leaves, only: Any, where: str) -> _Leaves:
    only, paths = read_again(only), [path for path, _ in leaves]
    specs = [spec_of(path, leaf) for path, leaf in leaves]
    found = positions_of(paths, specs, selector(only, item="state"))
    idle = unmatched_patterns(only, [("state", paths)])
    if idle or not found:
        raise CheckpointNotFound(f"{where}: only={idle or only!r} matches nothing in it")
    return [leaves[position] for position in found]


def _ruled(leaves: _Leaves, rules: Sequence[Rule], target: FlatTree | None, where: str) -> _Leaves:
    arrays = _by_name([one for one in leaves if isinstance(one[1], Slot)], where)
    slots: list[Slot] = [slot for _, slot in arrays.values()]
    names, specs = [(name,) for name in arrays], [slot.spec for slot in slots]
    base = ExtentItem("state", "tree", paths=names, specs=specs, shardings=[None] * len(names))
    bound, left = bind(rules, arrays)
    paths: list[Path] = [tuple(path.split("/")) for one in bound for path in one.results]
    wanted: list[LeafSpec | None] = [None] * len(paths)
    if target is not None:
        paths = list(target.paths)
        wanted = [describe(leaf, path) for path, leaf in zip(paths, target.leaves, strict=True)]
    derived, problems = under_rules(base, rules, paths, wanted)
    if problems:
        raise StructureMismatch(problems, where=where)
    unbound = set(left)
    found: _Leaves = [(path, leaf) for path, leaf in leaves if not isinstance(leaf, Slot)]
    for path, spec, recipe in zip(derived.paths, derived.specs, derived.recipes, strict=True):
        parts = [slots[part.leaf] for _, row in recipe.rows for part in row]
        if (name := names[recipe.first][0]) in unbound:
            found.append(arrays[name])
        else:
            found.append((path, Slot(spec, _put_together, (recipe, parts))))
    return found


def _renamed(leaves: _Leaves, rename: Mapping[str, str] | Callable[[str], str]) -> _Leaves:
    """Names of one level may be renamed by leading parts with dots, all others by leading levels."""
    flat = all(len(path) == 1 for path, _ in leaves)
    sign = "." if flat else "/"
    names = [str(path[0]) if flat else format_path(path) for path, _ in leaves]
    if isinstance(rename, Mapping):
        rename = Renames({old.replace("/", sign).strip(sign): rename[old] for old in rename}, sign)
        if idle := rename.idle(names):
            raise StructureMismatch(
                [Mismatch(one.old, "rename", None, one.new, one.nearest) for one in idle],
                advice="An entry of rename= must be a name, or leading parts of one.",
            )
    return [
        (path if (new := rename(old)) == old else parse_path(new), leaf)
        for (path, leaf), old in zip(leaves, names, strict=True)
    ]


def _split(path: Path, sign: str, where: str) -> Path:
    found: list[Any] = []
    for entry in path:
        parts = entry.split(sign) if isinstance(entry, str) else [entry]
        if "" in parts:
            raise CheckpointError(
                f"{where}: {format_path(path)!r} cut at {sign!r} has a level without a name"
            )
        found += parts
    return tuple(found)


def _by_name(leaves: Iterable[tuple[Path, Any]], where: str) -> dict[str, tuple[Path, Any]]:
    """Leaves by their path with dots, by which rules and targets know them."""
    found: dict[str, tuple[Path, Any]] = {}
    for path, leaf in leaves:
        if found.setdefault(".".join(map(str, path)), (path, leaf))[0] != path:
            raise _twice(path, where)
    return found


def _nested(leaves: _Leaves, where: str) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for path, leaf in leaves:
        node: Any = tree
        for entry in path[:-1]:
            node = node.setdefault(entry, {})
            if not isinstance(node, dict):  # a leaf, which is never a dict
                raise _twice(path, where)
        if not path or path[-1] in node:
            raise _twice(path, where)
        node[path[-1]] = leaf
    return tree


def _twice(path: Path, where: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: two values would be at {format_path(path)}, or one inside of the other: rename one of them"
    )


def _as_target(leaves: _Leaves, target: FlatTree, where: str) -> FlatTree:
    """The leaves in the tree of a target; all differences are raised in one error."""
    wanted = [
        (path, describe(leaf, path)) for path, leaf in zip(target.paths, target.leaves, strict=True)
    ]
    places = {".".join(map(str, path)): path for path in target.paths}
    given = _by_name(leaves, where)
    there = [(places.get(name, path), spec_of(path, leaf)) for name, (path, leaf) in given.items()]
    matched = match(there, wanted, MatchRules())
    if matched.mismatches:
        raise StructureMismatch(matched.mismatches, where=where)
    values = [leaf for _, leaf in given.values()]
    found: list[Any] = []
    for position, (_, spec) in zip(matched.source, wanted, strict=True):
        assert position is not None  # or it would be missing
        leaf = values[position]
        if isinstance(leaf, Slot) and spec.kind in ("jax", "numpy") and leaf.spec.kind != "key":
            leaf = Slot(replace(leaf.spec, kind=spec.kind), leaf.read, leaf.place)
        found.append(leaf)
    return FlatTree(target.paths, found, target.root)
