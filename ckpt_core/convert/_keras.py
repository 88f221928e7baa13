"""``.weights.h5`` and ``.keras``: the weights that Keras writes, by their paths in the file. Keras is not needed; h5py is."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import zipfile
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from ckpt_core._directory import kind_at
from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    UnsupportedLeaf,
)
from ckpt_core._tree.leaves import leaf_spec
from ckpt_core.convert._hdf5 import Window, data_offset, refuse_endless_heaps
from ckpt_core.convert._source import (
    Array,
    Slot,
    Source,
    array_spec,
    library,
    parsing,
    source_of,
)

WEIGHTS = "model.weights.h5"
SHARDS_SUFFIX = ".weights.json"
_MOST_LEVELS = 100
_MOST_OBJECTS = 2**16
_MOST_DIGITS = 18
_MOST_JSON_BYTES = 2**26
_SYSTEM_ERROR = re.compile(r"errno = (\d+), error message")
"""In a KeyError or RuntimeError of h5py for a group that the system did not let it read."""


@contextlib.contextmanager
def opened(path: str) -> Generator[Source]:
    """The variables of a file, in the groups in which Keras stored them; metadata has the version of Keras. A model's own
    files (vocabularies) and its configuration stay behind.
    """
    h5py = library("h5py", path)
    with contextlib.ExitStack() as stack:
        metadata = None
        if path.endswith(SHARDS_SUFFIX):
            shards = _shards(path)
            for one in shards:
                refuse_endless_heaps(one)
            files = [_file(stack, h5py, one, one) for one in shards]
        elif _is_zip(path):
            stream = stack.enter_context(open(path, "rb"))
            with parsing(path):
                archive = stack.enter_context(zipfile.ZipFile(stream))
                metadata = _json_member(archive)
                member = archive.getinfo(WEIGHTS)
                begin = data_offset(stream, member, path)
            refuse_endless_heaps(path, begin)
            window = Window(stream, begin, member.file_size)
            files = [_file(stack, h5py, window, path)]
        else:
            refuse_endless_heaps(path)
            files = [_file(stack, h5py, path, path)]
        tree: dict[str, Any] = {}
        for file, where in files:
            _add(tree, file, where, h5py)
        yield source_of(tree, _read, metadata)


def _file(stack: contextlib.ExitStack, h5py: Any, opening: Any, where: str) -> tuple[Any, str]:
    try:
        return stack.enter_context(h5py.File(opening, "r")), where
    except OSError as error:
        _raise_if_of_the_system(error, where)
        raise CheckpointCorrupt(
            f"{where}: damaged, cut short, or no HDF5: {error}", file=where
        ) from error


def _is_zip(path: str) -> bool:
    """By its first bytes: ``zipfile.is_zipfile`` says no as well if the file cannot be read."""
    with open(path, "rb") as stream:
        return stream.read(2) == b"PK"


def _raise_if_of_the_system(error: Exception, where: str) -> None:
    """Raises what the system refused to h5py, such as EIO or EMFILE: it says nothing of the bytes."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := _SYSTEM_ERROR.search(str(error))):
        number = int(found[1])
    if number in (None, 0, errno.EINVAL):  # a damaged file leads to a position that no file has
        return
    if isinstance(error, OSError):
        raise error
    raise OSError(number, os.strerror(number), where) from error


def _json_member(archive: zipfile.ZipFile) -> Any:
    if "metadata.json" not in archive.namelist():
        return None
    return json.loads(archive.read("metadata.json"))


def _shards(path: str) -> list[str]:
    """The files that an index of ``save_weights(..., max_shard_size=)`` names; each must lie beside it."""
    try:
        with open(path, encoding="utf-8") as stream:
            index = json.loads(stream.read(_MOST_JSON_BYTES))
        named = [
            name
            for one in index["weight_map"].values()
            for name in (one if isinstance(one, list) else [one])
        ]
        if not all(isinstance(name, str) and os.path.basename(name) == name for name in named):
            raise ValueError("it names files elsewhere")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(
            f"{path}: no index as Keras writes it: {error!r}", file=path
        ) from error
    found = [os.path.join(os.path.dirname(path), name) for name in dict.fromkeys(named)]
    missing = next((one for one in found if not kind_at(one)), None)
    if missing is not None:
        raise CheckpointCorrupt(f"{path}: {os.path.basename(missing)} is missing", file=missing)
    return found


def _add(tree: dict[str, Any], file: Any, where: str, h5py: Any) -> None:
    try:
        for parts, dataset in _datasets(file, where, h5py, (), set()):
            node = tree
            for part in parts[:-1]:
                node = node.setdefault(part, {})
                if not isinstance(node, dict):
                    break
            if not isinstance(node, dict) or parts[-1] in node:
                raise CheckpointCorrupt(f"{where}: {'/'.join(parts)} is in two files", file=where)
            node[parts[-1]] = _slot(dataset, f"{where}: {'/'.join(parts)}", h5py)
    except CheckpointError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        _raise_if_of_the_system(error, where)  # the others are h5py's ways to say damage
        raise CheckpointCorrupt(f"{where}: damaged: {error}", file=where) from error


def _datasets(
    group: Any,
    where: str,
    h5py: Any,
    path: tuple[str, ...],
    seen: set[tuple[str, Any]],
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The datasets below a group; links to other files or groups are refused. ``seen`` collects the groups and counts
    what was looked at: groups that stand in each other have paths without end.
    """
    here = ("group", h5py.h5o.get_info(group.id).addr)
    if here in seen or len(path) > _MOST_LEVELS:
        raise CheckpointCorrupt(
            f"{where}: the group {'/'.join(path)[:200]} holds itself, or stands in the file twice",
            file=where,
        )
    seen.add(here)
    if len(group) + len(seen) > _MOST_OBJECTS:
        raise CheckpointCorrupt(
            f"{where}: it holds more than {_MOST_OBJECTS} groups and arrays", file=where
        )
    for name in sorted(group, key=_by_number):
        below = (*path, name)
        seen.add(("link", len(seen)))
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise UnsupportedLeaf(
                f"{where}: {'/'.join(below)} is a link to elsewhere, which is not followed",
                leaf="/".join(below),
                type_name="link",
            )
        found = group[name]
        if isinstance(found, h5py.Group):
            yield from _datasets(found, where, h5py, below, seen)
        else:
            yield below, found


def _by_number(name: str) -> tuple[int, str]:
    is_number = name.isascii() and name.isdigit() and len(name) <= _MOST_DIGITS
    return (int(name), name) if is_number else (-1, name)


def _slot(dataset: Any, where: str, h5py: Any) -> Slot:
    if not isinstance(dataset, h5py.Dataset):
        raise UnsupportedLeaf(f"{where} is a type, and no array", leaf=where, type_name="type")
    if getattr(dataset, "external", None) or getattr(dataset, "is_virtual", False):
        raise UnsupportedLeaf(
            f"{where}: its values are in another file, which is not followed",
            leaf=where,
            type_name="external",
        )
    said = dataset.attrs.get("dtype")
    dtype = dataset.dtype
    name = "bfloat16" if str(said) == "bfloat16" and dtype == np.dtype("V2") else dtype.name
    if dtype.kind in "OSU" or (dtype.kind == "V" and name != "bfloat16"):
        refused = UnsupportedLeaf(
            f"{where} holds {dtype}: a checkpoint holds numbers; leave it out with only=",
            leaf=where,
            type_name=str(dtype),
        )
        return Slot(leaf_spec("numpy", "uint8", ()), refused=refused)
    if dataset.shape is None:
        raise UnsupportedLeaf(f"{where} holds nothing at all", leaf=where, type_name="empty")
    return Slot(array_spec(name, dataset.shape, where), (dataset, where))


def _read(slot: Slot) -> Array:
    dataset, where = slot.place
    found = np.empty(slot.spec.stored_shape, slot.spec.numpy_dtype)
    if not found.size:
        return found
    target = found.view(np.dtype("V2")) if dataset.dtype.kind == "V" else found
    try:
        dataset.read_direct(target)
    except (OSError, RuntimeError, TypeError) as error:
        _raise_if_of_the_system(error, where)
        raise CheckpointCorrupt(f"{where}: cannot be read: {error}", leaf=where) from error
    return found
