"""Which versions are published, and the way from one to another. Pure.

A version is an *anchor*, a checkpoint of its own, or a *delta* to the version before it, one file from each process; or both.
``.ckpt-published`` holds the chain of versions; replacing that file makes a version visible.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection
from typing import NamedTuple

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.untrusted import file_name, parse_json, token_name
from ckpt_core._options import MIB

CHAIN_FILE = ".ckpt-published"
"""Name of the file in the directory: the CRC-32 of the next line, and that line, the chain as JSON."""
MOST_BYTES = 64 * MIB
DELTA = ".ckpt-delta-"
"""Begins the name of each file of a delta."""


class DeltaFile(NamedTuple):
    """What one process has written of a delta."""

    name: str
    size_bytes: int
    crc: int  # CRC-32


class Version(NamedTuple):
    """One published version."""

    number: int
    token: str  # as in the record of its anchor: tells it from another one of its number
    anchor: bool
    delta: tuple[DeltaFile, ...] = ()  # a file of each process; empty if there is none


class Chain(NamedTuple):
    """The content of the file."""

    writer: str = ""  # of the Publisher that was opened last
    versions: tuple[Version, ...] = ()

    def names(self) -> set[str]:
        """What it needs of the directory: anchors, and files of deltas."""
        anchors = {str(one.number) for one in self.versions if one.anchor}
        return anchors | {file.name for one in self.versions for file in one.delta}

    def wants_anchor(self, anchor_every: int) -> bool:
        """Whether the next version is an anchor even if a delta is smaller. The delta stands beside it, for those who keep up."""
        newest_first = enumerate(reversed(self.versions), 1)
        return next((age for age, one in newest_first if one.anchor), anchor_every) >= anchor_every

    def published(self, version: Version, max_to_keep: int | None) -> Chain:
        """The chain after one more version, without those that it abandons, of its number and beyond, and without what nobody
        needs. Deltas stay since the second newest anchor: who is further behind takes an anchor.
        """
        versions = [*(one for one in self.versions if one.number < version.number), version]
        anchors = [at for at, one in enumerate(versions) if one.anchor]
        oldest, kept = anchors[-2:][0], {*anchors[-max(2, max_to_keep or len(anchors)) :]}
        found = [
            # the base of the first delta, or of one beside an older anchor, is not in the chain
            one if at > oldest else one._replace(delta=())
            for at, one in enumerate(versions)
            if at >= oldest or at in kept
        ]
        return self._replace(versions=tuple(found))

    def dump(self) -> bytes:
        """The content of the file."""
        line = json.dumps(self, separators=(",", ":")).encode()
        return b"%08x\n%s" % (zlib.crc32(line), line)


def parse_chain(data: bytes, directory: str) -> Chain:
    """The content of the file in ``directory``; CheckpointCorrupt if it is damaged."""
    checksum, _, line = data.partition(b"\n")
    try:
        if int(checksum, 16) != zlib.crc32(line):
            raise ValueError("its checksum differs")
        writer, rows = parse_json(line, CHAIN_FILE)
        versions = tuple(
            Version(
                int(number),
                token_name(token),
                anchor,
                tuple(DeltaFile(file_name(name), int(size), int(crc)) for name, size, crc in delta),
            )
            for number, token, anchor, delta in rows
        )
        return Chain(writer, versions)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointCorrupt(
            f"{directory}/{CHAIN_FILE} is damaged ({error}), so it is not known which versions are published: the next "
            "publish writes it anew",
            file=CHAIN_FILE,
        ) from error


def route(
    chain: Chain, token: str, unreadable: Collection[tuple[str, bool]]
) -> list[tuple[Version, bool]]:
    """What to read, as an anchor (True) or a delta, to come from the version with a token to the newest within reach.
    ``unreadable`` are anchors and deltas that are missing or damaged, by token.
    """
    versions, best = chain.versions, (-1, 0, False)
    end = len(versions)  # behind the last version that deltas lead to
    for start, one in reversed([*enumerate(versions)]):
        is_held = one.token == token
        is_start = is_held or (one.anchor and (one.token, True) not in unreadable)
        # deltas from what is held are preferred to an anchor
        if is_start and (best[0] < 0 or (is_held and end == best[1])):
            best = start, end, is_held
        if not one.delta or (one.token, False) in unreadable:
            end = start
    start, end, is_held = best
    if start < 0:
        return []
    anchor = [] if is_held else [(versions[start], True)]
    return anchor + [(one, False) for one in versions[start + 1 : end]]
