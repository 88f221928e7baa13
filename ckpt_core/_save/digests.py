"""Size and CRC32 of every file of a save; each process digests the files that it wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from ckpt_core._directory import Attempt
from ckpt_core._errors import CheckpointError
from ckpt_core._format.checksums import CHECKSUM_DIRECTORY
from ckpt_core._format.record import FileRecord
from ckpt_core._options import MIB
from ckpt_core._save.job import PreparedItem
from ckpt_core._storage import Location, StoreContext, crc32_of, outside_of_blocks, ranges_in_blocks

WHOLE_DIGEST_BYTES = 32 * MIB
"""Data files up to this size are digested whole. Of larger ones, only the bytes that no block
checksum covers are digested: the rest need not be read again."""


def own_data(attempt: Attempt, items: Iterable[PreparedItem], process: int) -> dict[str, int]:
    """Files in the databases of one process, with their present sizes in bytes."""
    return {
        name: size
        for item in items
        if item.record.form == "tree"
        for name, size in attempt.files(_database(item, process)).items()
    }


def digest_own(
    attempt: Attempt,
    items: list[PreparedItem],
    process: int,
    local: bool,
    context: StoreContext,
    uploaded: Mapping[str, FileRecord],
) -> str:
    """Digests of the files that this process wrote, as text for ``digest_all``: about 60 bytes for each file."""
    sizes = own_data(attempt, items, process)
    for item in items:
        names = [f"{item.folder}/{name}" for name in item.state_files]
        if item.record.form == "tree":
            names.append(f"{item.folder}/{CHECKSUM_DIRECTORY}/process_{process}")
        sizes |= {name: len(attempt.read(name)) for name in names}
    databases = {_database(item, process): item for item in items}
    found = _digests(attempt, sizes, databases, local, context) | dict(uploaded)
    return json.dumps(
        [[name, *_numbers(entry)] for name, entry in found.items()], separators=(",", ":")
    )


def digest_all(
    attempt: Attempt,
    items: list[PreparedItem],
    texts: list[str],
    linked: Mapping[str, FileRecord],
    local: bool,
    context: StoreContext,
) -> dict[str, FileRecord]:
    """Size and digest of every file of the save; called on process 0 with the text of ``digest_own`` from
    each process (none if one saves alone), and the digests that are known from linking. CheckpointError
    if process 0 does not see a file that another process wrote, or sees a different size.
    """
    known = dict(linked)
    for text in texts:
        for name, size, crc, data in json.loads(text):
            known[name] = FileRecord(size, crc, data=bool(data))
    present = attempt.files(known_bytes={name: entry.size_bytes for name, entry in known.items()})
    _require_all(attempt, known, present)
    rest = {name: size for name, size in present.items() if name not in known}
    databases = {} if texts else {item.folder: item for item in items}
    return known | _digests(attempt, rest, databases, local, context)


def _require_all(
    attempt: Attempt, known: Mapping[str, FileRecord], present: Mapping[str, int]
) -> None:
    for name, entry in known.items():
        seen = present.get(name)
        if seen != entry.size_bytes:
            what = "does not see it" if seen is None else f"sees {seen} bytes"
            raise CheckpointError(
                f"{attempt.path}: the process that wrote {name} left {entry.size_bytes} bytes there, and "
                f"process 0 {what}: do all processes see the same files at once?"
            )


def _database(item: PreparedItem, process: int) -> str:
    return f"{item.folder}/ocdbt.process_{process}"


def _numbers(entry: FileRecord) -> tuple[int, int, int]:
    return entry.size_bytes, entry.crc32, int(entry.data)


def _digests(
    attempt: Attempt,
    sizes: Mapping[str, int],
    databases: Mapping[str, PreparedItem],
    local: bool,
    context: StoreContext,
) -> dict[str, FileRecord]:
    """Digests of these files, by path in the attempt; the indexes of ``databases`` (by folder) say which bytes block checksums cover."""
    covered: dict[str, list[tuple[int, int]]] = {}
    if local and any(size > WHOLE_DIGEST_BYTES for size in sizes.values()):
        covered = _covered(attempt, databases, context)
    found: dict[str, FileRecord] = {}
    for name, size in sizes.items():
        if size > WHOLE_DIGEST_BYTES and name in covered:
            crc = crc32_of(f"{attempt.path}/{name}", outside_of_blocks(size, covered[name]))
            found[name] = FileRecord(size, crc, data=True)
        else:
            found[name] = FileRecord(size, attempt.crc32(name))
    return found


def _covered(
    attempt: Attempt, databases: Mapping[str, PreparedItem], context: StoreContext
) -> dict[str, list[tuple[int, int]]]:
    """For each data file of these databases, the ranges of bytes that block checksums cover."""
    found: dict[str, list[tuple[int, int]]] = {}
    for folder, item in databases.items():
        # block checksums cover decoded values: digest the stored bytes of compressed chunks here
        if item.record.form != "tree" or item.record.compressed:
            continue
        if len(item.texts) == len(item.record.paths):
            continue  # no array, hence no database
        found |= ranges_in_blocks(Location(attempt.path, True), folder, context)
    return found
