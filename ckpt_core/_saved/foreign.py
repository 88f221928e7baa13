"""Opens safetensors: one file, or a folder with the files of a model and the index of them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_core._background import run_each
from ckpt_core._directory import Backend, kind_at
from ckpt_core._errors import CheckpointCorrupt, CheckpointNotFound
from ckpt_core._format import safetensors
from ckpt_core._operation import logger
from ckpt_core._options import KIB
from ckpt_core._saved.checkpoint import Checkpoint, ExtentItem
from ckpt_core._storage import DataFiles, Location, StoreFiles, new_context, open_keys
from ckpt_core._tree import LEAF, Node
from ckpt_core._tree.leaves import leaf_spec
from ckpt_core._words import some

SUFFIXES = (safetensors.SUFFIX, safetensors.INDEX_SUFFIX)
_MODEL = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PART = re.compile(r"-\d+-of-(\d{1,9})\.safetensors$")
"""How hubs and exports call the files of a model, of which the index is written last."""
_FIRST_READ_BYTES = 256 * KIB
"""Holds the header of most files, so that opening one takes one request."""


def open_file(location: Location, backend: Backend) -> Checkpoint | None:
    """The checkpoint of a safetensors file, or of an index of several; None if no file with one of ``SUFFIXES`` is there."""
    folder, _, name = location.path.rpartition("/")
    inside = replace(location, path=folder)
    if location.local:
        there = kind_at(location.path) == "file"
    else:  # a bucket's name alone is no file
        byte, there = np.empty(1, np.uint8), False
        if not folder.endswith(":/"):
            there = StoreFiles(inside, new_context()).read(name, 0, byte) == 1
    return _opened(location.path, inside, backend, name) if there else None


def open_folder(location: Location, backend: Backend) -> Checkpoint | None:
    """The checkpoint of the safetensors files in a folder, or None; CheckpointNotFound for several files that no index lists."""
    names: list[str] = []
    if location.local:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = sorted(os.listdir(location.path))
    else:
        names = [name for name in open_keys(location).list() if "/" not in name]
    name = _chosen(names, location.path)
    return None if name is None else _opened(location.path, location, backend, name)


def _chosen(names: Iterable[str], folder: str) -> str | None:
    """The file or index to open, of the files in a folder."""
    found = [name for name in names if name.endswith(SUFFIXES)]
    for usual in (_MODEL, _INDEX):
        if usual in found:
            return usual
    indices = [name for name in found if name.endswith(safetensors.INDEX_SUFFIX)]
    candidates = indices or found
    if len(candidates) > 1:
        raise CheckpointNotFound(
            f"{folder} holds {len(candidates)} safetensors files ({some(candidates)}) and no {_INDEX} that says what belongs "
            f"together: load one of them by its path, such as {folder}/{candidates[0]}"
        )
    if candidates and (part := _PART.search(candidates[0])) and int(part[1]) > 1:
        raise CheckpointNotFound(
            f"{folder} holds {candidates[0]}, one of {int(part[1])} files of a model, and no {_INDEX}: what wrote or "
            "fetched them has not ended. Do that anew, or load this file by its own path"
        )
    return candidates[0] if candidates else None


def _opened(path: str, folder: Location, backend: Backend, name: str) -> Checkpoint:
    """A file, or the files that an index names."""
    metadata: dict[str, Any] = {}
    if name.endswith(safetensors.INDEX_SUFFIX):
        data = backend.read(folder.path, name, safetensors.MOST_HEADER_BYTES)
        if data is None:
            raise CheckpointCorrupt(f"{folder.path}: {name} is missing", file=name)
        places, metadata = safetensors.parse_index(data, name)
        headers = _headers(folder, backend, sorted(set(places.values())))
        placed = _listed(places, headers, name)
    else:
        headers = _headers(folder, backend, [name])
        placed = [(name, tensor) for tensor in headers[name].tensors]
    logger.info("%s: safetensors, without checksums: loading unchecked", path)
    texts = itertools.chain.from_iterable(header.metadata.items() for header in headers.values())
    names = tuple(tensor.name for _, tensor in placed)
    item = ExtentItem(
        name="state",
        form="tree",
        root=Node("dict", names, (LEAF,) * len(names)),
        paths=[(name,) for name in names],
        specs=[leaf_spec("jax", tensor.dtype, tensor.shape) for _, tensor in placed],
        shardings=[None] * len(names),
        files=[file for file, _ in placed],
        offsets=[tensor.offset for _, tensor in placed],
        sizes_bytes={file: header.file_bytes for file, header in headers.items()},
    )
    return Checkpoint(
        path, folder, backend, {item.name: item}, True, {**dict(texts), **metadata} or None
    )


def _listed(
    places: Mapping[str, str], headers: Mapping[str, safetensors.Header], index: str
) -> list[tuple[str, safetensors.Tensor]]:
    """The tensors that an index lists, each in the file that it names."""
    found = {
        (file, tensor.name): tensor for file, header in headers.items() for tensor in header.tensors
    }
    for name, file in places.items():
        if (file, name) not in found:
            raise CheckpointCorrupt(
                f"{index}: tensor {name!r} should be in {file}, which has none of that name",
                file=file,
                leaf=name,
            )
    if len(found) > len(places):
        extra = next(name for file, name in found if places.get(name) != file)
        logger.warning("%s leaves out tensors of its files, such as %r", index, extra)
    return [(file, found[file, name]) for name, file in places.items()]


def _headers(
    folder: Location, backend: Backend, names: Sequence[str]
) -> dict[str, safetensors.Header]:
    """The headers of files, by name; read in parallel."""
    opened = DataFiles(folder) if folder.local else StoreFiles(folder, new_context())
    with contextlib.closing(opened) as files:
        read = functools.partial(_header, files, folder, backend)
        return dict(zip(names, run_each(read, list(names), 8, "ckpt-open"), strict=True))


def _header(
    files: DataFiles | StoreFiles, folder: Location, backend: Backend, name: str
) -> safetensors.Header:
    size = None  # a store would read all of an object to find its size
    if folder.local:
        size = backend.size(folder.path, name)
        if size is None or size < 0:
            what = "is missing" if size is None else "is no regular file"
            raise CheckpointCorrupt(f"{folder.path}: file {name} {what}", file=name)
    first = _read(files, name, 0, min(_FIRST_READ_BYTES, size or _FIRST_READ_BYTES))
    if not first and size is None:
        raise CheckpointCorrupt(f"{folder.path}: file {name} is missing", file=name)
    length = safetensors.header_length(first, name, size)
    data = first[safetensors.LENGTH_BYTES :][:length]
    if len(data) < length:
        data += _read(files, name, len(first), length - len(data))
    if len(data) < length:
        what = f"has {len(data)} of the {length} bytes of its header"
        raise CheckpointCorrupt(f"{name} {what}: it is truncated", file=name)
    header = safetensors.parse_header(data, name, size)
    # one request for two bytes says whether an object ends where its last tensor does
    if size is None and (got := len(_read(files, name, header.file_bytes - 1, 2))) != 1:
        what = "is truncated" if got == 0 else "has bytes that belong to no tensor"
        raise CheckpointCorrupt(
            f"{name} {what}: its tensors end at byte {header.file_bytes}", file=name
        )
    return header


def _read(files: DataFiles | StoreFiles, name: str, offset: int, size_bytes: int) -> bytes:
    buffer = np.empty(size_bytes, np.uint8)
    return buffer[: files.read(name, offset, buffer)].tobytes()
