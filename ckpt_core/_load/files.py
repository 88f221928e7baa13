"""What a load gives for an item of the form ``files``: its files, verified now and at each read."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterator

from ckpt_core._directory import place, read_pieces
from ckpt_core._errors import CheckpointCorrupt, CheckpointNotFound
from ckpt_core._items import SavedFiles
from ckpt_core._load.checkpoint import Checkpoint, NativeCheckpoint, NativeItem, SavedItem, replaced


def saved_files(checkpoint: Checkpoint, saved: SavedItem) -> SavedFiles:
    """The item's files, after every byte was verified; those that Orbax wrote have no checksums.

    Raises:
        CheckpointCorrupt: a file is missing or damaged.
    """
    sizes = sizes_of(checkpoint, saved)
    if isinstance(checkpoint, NativeCheckpoint):
        for name in sizes:
            for _ in _pieces(checkpoint, saved.file(name)):
                pass
    where = f"{checkpoint.path}/{saved.directory}"
    read = functools.partial(_read, checkpoint, saved)
    return SavedFiles(where, sizes, read, functools.partial(_copy, checkpoint, saved, list(sizes)))


def sizes_of(checkpoint: Checkpoint, saved: SavedItem) -> dict[str, int]:
    """Size of each file of the user, by path relative to the item."""
    if isinstance(checkpoint, NativeCheckpoint):
        assert isinstance(saved, NativeItem)
        found = checkpoint.sizes_in(saved)
        return {name: size for name, size in found.items() if name not in saved.notes}
    return checkpoint.backend.files(f"{checkpoint.path}/{saved.directory}")


def _pieces(checkpoint: Checkpoint, name: str) -> Iterator[bytes]:
    """The content of a file; at the end of it, raises if it was not what was saved."""
    if not isinstance(checkpoint, NativeCheckpoint):
        if checkpoint.location.local:
            most = os.stat(f"{checkpoint.path}/{name}").st_size
            yield from read_pieces(checkpoint.path, name, most)
        else:
            yield checkpoint.read_file(name)
        return
    expected = checkpoint.record.files[name]
    size = crc = 0
    try:
        for piece in _unverified(checkpoint, name, expected.size_bytes):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
            yield piece
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(checkpoint, name) from error
    if (size, crc) != (expected.size_bytes, expected.crc32):
        if checkpoint.was_replaced():
            raise replaced(checkpoint.path)
        raise CheckpointCorrupt(
            f"{checkpoint.path}: file {name} is damaged: its size or checksum differs from that of the save",
            file=name,
        )


def _unverified(checkpoint: NativeCheckpoint, name: str, size_bytes: int) -> Iterator[bytes]:
    if checkpoint.location.local:
        return read_pieces(checkpoint.path, name, size_bytes)
    data = checkpoint.read_unverified(name, size_bytes)
    if data is None:
        raise FileNotFoundError(name)
    return iter([data])


def _missing(checkpoint: NativeCheckpoint, name: str) -> CheckpointCorrupt | CheckpointNotFound:
    if checkpoint.was_replaced():
        return replaced(checkpoint.path)
    return CheckpointCorrupt(f"{checkpoint.path}: file {name} is missing", file=name)


def _read(checkpoint: Checkpoint, saved: SavedItem, name: str) -> bytes:
    try:
        return b"".join(_pieces(checkpoint, saved.file(name)))
    except CheckpointCorrupt:
        if checkpoint.was_replaced():
            raise replaced(checkpoint.path) from None
        raise


def _copy(checkpoint: Checkpoint, saved: SavedItem, names: list[str], directory: str) -> None:
    target = os.path.abspath(os.path.expanduser(directory))
    os.makedirs(target, exist_ok=True)
    for name in names:
        try:
            place(os.path.join(target, name), _pieces(checkpoint, saved.file(name)))
        except CheckpointCorrupt:
            if checkpoint.was_replaced():
                raise replaced(checkpoint.path) from None
            raise
