"""``import_weights``: files of other formats become checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckpt_core._directory import resolve
from ckpt_core._errors import CheckpointError
from ckpt_core._format.rules import Rule, rules_from
from ckpt_core._operation import Operation
from ckpt_core._options import MIB, Options, checked_options
from ckpt_core._save.job import RecordFields
from ckpt_core._save.pieces import CheckpointWriter, writer_of
from ckpt_core._save.plan import TreeSignature
from ckpt_core._tree import FlatTree
from ckpt_core._tree.leaves import TEXT_KINDS, to_host_array, to_text
from ckpt_core.arguments import answering
from ckpt_core.convert._arrange import Arrangement, arranged
from ckpt_core.convert._opening import FORMATS, format_of, opened
from ckpt_core.convert._source import Array, Slot, arrays_of, spec_of

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
    asked = Arrangement(only, rules_from(rules or ()), rename, split, like)
    found_format = format or format_of(where)
    with opened(where, found_format, item, chosen) as (items, own_metadata):
        trees = [name for name, value in items.items() if isinstance(value, FlatTree)]
        if asked.changes and len(trees) != 1:
            raise CheckpointError(
                f"{where} has several items: say with item= whose names are changed, of {', '.join(trees) or 'none'}"
            )
        arranging = {
            name: arranged(value, asked, where) if isinstance(value, FlatTree) else value
            for name, value in items.items()
        }
        single = item is None and list(arranging) == [""]
        fields = RecordFields(single, own_metadata if metadata is None else metadata)
        with writer_of(target, fields, overwrite=overwrite, options=chosen) as writer:
            _write(writer, arranging, item or "state", str(target), chosen)


def _write(
    writer: CheckpointWriter, items: Mapping[str, Any], name: str, target: str, options: Options
) -> None:
    sources = [value for value in items.values() if isinstance(value, FlatTree)]
    slots = [leaf for one in sources for leaf in one.leaves if isinstance(leaf, Slot)]
    total = sum(slot.spec.stored_bytes for slot in slots)
    operation = Operation("import", target, None, None, options.on_event, total_bytes=total)
    for key, value in items.items():
        if isinstance(value, FlatTree):
            _write_tree(writer, key or name, value, operation)
        else:
            writer.add(key or name, value)


def _write_tree(
    writer: CheckpointWriter, name: str, source: FlatTree, operation: Operation
) -> None:
    """Writes arrays in batches, as they are read."""
    specs = list(map(spec_of, source.paths, source.leaves))
    others = [n for n, leaf in enumerate(source.leaves) if not isinstance(leaf, Slot)]
    texts = {n: to_text(source.leaves[n], specs[n]) for n in others if specs[n].kind in TEXT_KINDS}
    none = (None,) * len(specs)
    signature = TreeSignature(source.root, tuple(source.paths), tuple(specs), none, none)
    put = writer.declare(name, signature, texts)
    put((n, to_host_array(source.leaves[n], specs[n])) for n in others if n not in texts)
    slots = {n: leaf for n, leaf in enumerate(source.leaves) if isinstance(leaf, Slot)}
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
