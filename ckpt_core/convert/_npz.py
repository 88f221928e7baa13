"""``.npz``: a zip archive of arrays as ``numpy.savez`` and ``numpy.savez_compressed`` write it."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Generator
from typing import Any

from ckpt_core._errors import CheckpointCorrupt, UnsupportedLeaf
from ckpt_core.convert._npy import Npy, read_header
from ckpt_core.convert._source import Array, Slot, Source, source_of
from ckpt_core.convert._zips import most_member_bytes, opened_zip

_SUFFIX = ".npy"


@contextlib.contextmanager
def opened(path: str) -> Generator[Source]:
    """The arrays of a file, by name; each is checked against the archive's checksum as it is read."""
    with opened_zip(path, path) as archive:
        tree: dict[str, Slot] = {}
        for member in archive.infolist():
            name, where = member.filename.removesuffix(_SUFFIX), f"{path}: {member.filename}"
            if not member.filename.endswith(_SUFFIX):
                raise UnsupportedLeaf(f"{where} is no array: leave it out of the file", leaf=where)
            with archive.open(member) as stream:
                header = read_header(stream, where)
            tree[name] = Slot(header.spec, (member, header))
        yield source_of(tree, lambda slot: _read(archive, path, *slot.place))


def _read(archive: zipfile.ZipFile, path: str, member: zipfile.ZipInfo, header: Npy) -> Array:
    where = f"{path}: {member.filename}"
    with archive.open(member) as stream:
        read_header(stream, where)
        found = header.read(stream, where, most_member_bytes(member))
        rest: Any = stream.read(1)  # at the end, the checksum is compared
        if rest:
            raise CheckpointCorrupt(f"{where}: more bytes than its array has", file=path)
    return found
