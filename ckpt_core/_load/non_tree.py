"""Items that are no pytrees: files, a process's pipeline state, JSON, Orbax's single arrays and keys."""

from __future__ import annotations

import functools
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ckpt_core import _processes
from ckpt_core._directory import place, read_pieces
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, StructureMismatch
from ckpt_core._format import process_state
from ckpt_core._format.untrusted import parse_json, refuse_deep, refuse_heavy
from ckpt_core._items import SavedFiles, names_a_form
from ckpt_core._lazy import jax
from ckpt_core._load.plans import ItemPlan, constant
from ckpt_core._load.targets import refuse_narrowing
from ckpt_core._read import read_special
from ckpt_core._saved import (
    Checkpoint,
    NativeCheckpoint,
    NativeItem,
    OrbaxItem,
    SavedItem,
    replaced,
)
from ckpt_core._tree import Node

_FORMS = {"tree": "a tree of arrays", "files": "files", "json": "plain values"}


def plan_non_tree(checkpoint: Checkpoint, saved: SavedItem, adapter: Any, like: Any) -> ItemPlan:
    """The plan of an item that is no pytree. Its value is read here, before any array is read."""
    if saved.form == "process":
        state = _process_state(checkpoint, saved, adapter, like)
        if adapter is None:
            return ItemPlan(saved, constant(state))

        def make(_: list[Any]) -> Any:
            adapter.set_state(like, state)
            return like

        if check_state := getattr(adapter, "check_state", None):
            check_state(like, state)
        return ItemPlan(saved, make, live=[(like, False)], is_pipeline=True)
    if saved.form == "files":
        value = saved_files(checkpoint, saved)
    elif not isinstance(saved, OrbaxItem):  # ckpt itself writes no other form than this
        value = parse_json(checkpoint.read_file(saved.file("data.json")), saved.file("data.json"))
    else:
        special = saved.form in ("array", "jax_key")
        value = _special_value(checkpoint, saved) if special else saved.value
    return ItemPlan(saved, constant(value))


_PLAIN_LEAVES = frozenset({"int", "bigint", "float", "bool", "str"})
_PLAIN_NODES = frozenset({"dict", "list", "tuple", "leaf", "none"})


def wants_json(saved: SavedItem, like: Any) -> bool:
    """Whether the target says ``Json``, and the item is a tree that JSON could hold. A ``Json`` that was loaded is a plain
    value: saved again without ``Json`` around it, it is a tree.
    """
    if names_a_form(like) != "json" or saved.form != "tree" or not isinstance(saved, NativeItem):
        return False
    return all(spec.kind in _PLAIN_LEAVES for spec in saved.specs) and _is_plain(saved.root)


def _is_plain(node: Node) -> bool:
    keys = node.kind != "dict" or all(isinstance(key, str) for key in node.keys)
    return node.kind in _PLAIN_NODES and keys and all(map(_is_plain, node.children))


def refuse_other_form(checkpoint: Checkpoint, saved: SavedItem, like: Any) -> None:
    """Raises StructureMismatch if the target says files or plain values, and the item is something else."""
    form = names_a_form(like)
    if form is not None and form != saved.form:
        raise other_kind(checkpoint, saved, _FORMS.get(saved.form, saved.form), _FORMS[form])


def other_kind(
    checkpoint: Checkpoint, saved: SavedItem, kind: str, wanted: str
) -> StructureMismatch:
    """The error for a target of another kind than the item."""
    return StructureMismatch([saved.differs((), "kind", kind, wanted)], where=checkpoint.path)


def as_json(value: Any) -> Any:
    """A tree of plain values, as JSON would give it back."""
    if isinstance(value, dict):
        return {key: as_json(part) for key, part in value.items()}
    return list(map(as_json, value)) if isinstance(value, list | tuple) else value


def _process_state(checkpoint: Checkpoint, saved: SavedItem, adapter: Any, like: Any) -> Any:
    """The data-pipeline state of this process; of another number of processes only for an adapter with ``check_state``."""
    processes = _processes.this_run()
    name = process_state.file_name(processes.index, processes.count)
    if isinstance(saved, NativeItem):
        # take the names from the record, not from a listing: a missing file is then damage
        count = saved.process_count
        present = [process_state.file_name(index, count) for index in range(count)]
        if name not in present and getattr(adapter, "check_state", None):
            # its check_state decides whether a different number of processes can continue
            name = present[processes.index % len(present)]
    else:
        files = checkpoint.backend.files(f"{checkpoint.path}/{saved.directory}")
        present = [file for file in files if file.startswith("process_")]
    if name not in present:
        counts = sorted({file.rpartition("-of-")[2].removesuffix(".json") for file in present})
        raise CheckpointError(
            f"{checkpoint.path}: item {saved.name!r} was saved by {', '.join(counts) or '?'} process(es), and "
            f"{processes.count} run now: the state of a data pipeline belongs to one process. Start as many "
            "processes as saved it, or restore the other items and begin the data anew"
        )
    if adapter is not None and not getattr(adapter, "per_process", False):
        raise other_kind(checkpoint, saved, "the state of a process", type(like).__name__)
    if isinstance(saved, NativeItem):
        exact = f"{saved.directory}/exact/{name}"
        return process_state.load_exact(checkpoint.read_file(exact), exact)
    file = f"{saved.directory}/{name}"
    try:
        data = checkpoint.read_file(file)
        refuse_heavy(data, file)
        text = data.decode(errors="surrogatepass")
        return _json_or(text, file) if adapter is None else adapter.from_text(like, text)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointCorrupt(
            f"{file}: not the state of a process: {error!r}", file=file
        ) from error


def _json_or(text: str, file: str) -> Any:
    """The parsed JSON, which Grain and some Orbax handlers write; the text if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text
    except RecursionError as error:
        refuse_deep(text.encode(errors="surrogatepass"), file, error)
        raise


def _special_value(checkpoint: Checkpoint, saved: OrbaxItem) -> Any:
    """The value of an Orbax item that is a single array or a single random key."""
    array = read_special(checkpoint, saved)
    if saved.form == "array":
        tree = saved.tree
        if tree is not None and any(leaf.value_type == "np.ndarray" for leaf in tree.leaves):
            return array
        refuse_narrowing(array.dtype.name, saved.name)
        return jax.device_put(array)
    if array.ndim == 0 or array.dtype != np.uint32:
        raise CheckpointCorrupt(
            f"item {saved.name!r}: {array.dtype}{list(array.shape)} is no random key",
            leaf=saved.name,
        )
    said_in = f"{saved.name}/jax_random_key_metadata/metadata"
    said = checkpoint.backend.read(checkpoint.path, said_in) or b""
    if b'"typed":true' in said.replace(b" ", b""):
        # Orbax does not record the PRNG implementation: take it from the number of key words, which
        # tells threefry2x32 (2) from rbg (4), but not rbg from unsafe_rbg
        impl = "threefry2x32" if array.shape[-1] == 2 else "rbg"
        with jax.ensure_compile_time_eval():
            return jax.random.wrap_key_data(jax.device_put(array), impl=impl)
    return jax.device_put(array)


def saved_files(checkpoint: Checkpoint, saved: SavedItem) -> SavedFiles:
    """The item's files, every byte verified except Orbax's, which have no checksums. CheckpointCorrupt if any is bad."""
    sizes = sizes_of(checkpoint, saved)
    pieces = {name: functools.partial(_pieces, checkpoint, saved.file(name)) for name in sizes}
    for verify in pieces.values() if isinstance(checkpoint, NativeCheckpoint) else ():
        for _ in verify():
            pass

    def copy(directory: str) -> None:
        target = os.path.abspath(os.path.expanduser(directory))
        os.makedirs(target, exist_ok=True)
        for name, read in pieces.items():
            place(os.path.join(target, name), read())

    where = f"{checkpoint.path}/{saved.directory}"
    return SavedFiles(where, sizes, lambda name: b"".join(pieces[name]()), copy)


def sizes_of(checkpoint: Checkpoint, saved: SavedItem) -> dict[str, int]:
    """Size of each file of the user, by path relative to the item."""
    if isinstance(checkpoint, NativeCheckpoint):
        assert isinstance(saved, NativeItem)
        found = checkpoint.sizes_in(saved)
        return {name: size for name, size in found.items() if name not in saved.notes}
    return checkpoint.backend.files(f"{checkpoint.path}/{saved.directory}")


def _pieces(checkpoint: Checkpoint, name: str) -> Iterator[bytes]:
    """The content of a file; at the end of it, raises if it was not what was saved. Orbax records nothing to compare."""
    saved = checkpoint.record.files[name] if isinstance(checkpoint, NativeCheckpoint) else None
    try:
        if not checkpoint.location.local:
            yield checkpoint.read_file(name)
            return
        size = os.stat(f"{checkpoint.path}/{name}").st_size if saved is None else saved.size_bytes
        got = crc = 0
        for piece in read_pieces(checkpoint.path, name, size):
            got, crc = got + len(piece), zlib.crc32(piece, crc)
            yield piece
        if saved is not None and (got, crc) != (saved.size_bytes, saved.crc32):
            what = "is damaged: its size or checksum differs from that of the save"
            raise checkpoint.corrupt(name, what)
    except (FileNotFoundError, NotADirectoryError, CheckpointCorrupt) as error:
        if checkpoint.was_replaced():
            raise replaced(checkpoint.path) from error
        if isinstance(error, CheckpointCorrupt):
            raise
        raise checkpoint.corrupt(name, "is missing") from error
