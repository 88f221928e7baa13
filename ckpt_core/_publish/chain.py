"""Which versions are published, and the way from one to another. Pure.

``.ckpt-published`` holds the chain; replacing it makes a version visible. A version is an *anchor*, a checkpoint of its own, or a
*delta* to the version before it in the chain, one file for each process that has written it; or both.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.untrusted import parse_json
from ckpt_core._options import MIB

CHAIN_FILE = ".ckpt-published"
"""Name of the file in the directory: the CRC-32 of the next line, and that line, the chain as JSON."""
MOST_BYTES = 64 * MIB
DELTA = ".ckpt-delta-"
_MOST_ANCHORS = 64
"""Anchors that the file names; older ones stay in the directory, and are loaded without it."""
_TOKEN = re.compile(r"[0-9a-f]{32}")


class Version(NamedTuple):
    """One published version."""

    number: int
    token: str  # as in the record of its anchor: tells it from another one of its number
    anchor: bool
    # Of the delta: size in bytes and CRC-32 of each process's file; None if there is none.
    parts: tuple[tuple[int, int], ...] | None = None

    @property
    def files(self) -> list[str]:
        """Names of the files of the delta."""
        rows = enumerate(self.parts or ())
        return [file_of(self.number, index, crc) for index, (_, crc) in rows]


def file_of(number: int, index: int, crc: int) -> str:
    """Name of the file of process ``index`` in the delta to a version."""
    return f"{DELTA}{number}-{index}-{crc:08x}"


@dataclass(frozen=True)
class Chain:
    """The content of the file."""

    writer: str = ""  # of the Publisher that was opened last
    versions: tuple[Version, ...] = ()

    def names(self) -> set[str]:
        """What it needs of the directory: anchors, and files of deltas."""
        anchors = {str(one.number) for one in self.versions if one.anchor}
        return anchors.union(*(one.files for one in self.versions))

    def wants_anchor(self, anchor_every: int) -> bool:
        """Whether the next version is an anchor even if a delta is smaller. The delta stands beside it, for those who keep up."""
        recent = self.versions[1 - anchor_every or len(self.versions) :]
        return not any(one.anchor for one in recent)

    def published(self, version: Version, max_to_keep: int | None) -> Chain:
        """The chain after one more version, without those that it abandons, of its number and beyond, and without what nobody
        needs. Deltas stay since the second newest anchor: who is further behind takes an anchor.
        """
        versions = [*(one for one in self.versions if one.number < version.number), version]
        anchors = [at for at, one in enumerate(versions) if one.anchor]
        first, kept = anchors[-2:][0], {*anchors[-max(2, max_to_keep or _MOST_ANCHORS) :]}
        found = [
            # the base of the first delta, or of one beside an older anchor, is not in the chain
            one if at > first else one._replace(parts=None)
            for at, one in enumerate(versions)
            if at >= first or at in kept
        ]
        return replace(self, versions=tuple(found))

    def dump(self) -> bytes:
        """The content of the file."""
        line = json.dumps([self.writer, self.versions], separators=(",", ":")).encode()
        return b"%08x\n%s" % (zlib.crc32(line), line)


def parse_chain(data: bytes | None, directory: str) -> Chain | None:
    """The content of the file in ``directory``; None if there is none, CheckpointCorrupt if it is damaged."""
    if not data:
        return None
    crc, _, line = data.partition(b"\n")
    try:
        if int(crc, 16) != zlib.crc32(line):
            raise ValueError("its checksum differs")
        writer, rows = parse_json(line, CHAIN_FILE)
        versions = tuple(
            Version(int(number), token, anchor, parts and tuple((int(a), int(b)) for a, b in parts))
            for number, token, anchor, parts in rows
        )
        if not all(_TOKEN.fullmatch(one.token) for one in versions):
            raise ValueError("it has a token that ckpt does not give")
        return Chain(writer, versions)
    except (ValueError, TypeError) as error:
        raise CheckpointCorrupt(
            f"{directory}/{CHAIN_FILE} is damaged ({error}), so it is not known which versions are published: the next "
            "publish writes it anew",
            file=CHAIN_FILE,
        ) from error


class Route(NamedTuple):
    """What a follower reads to get to a newer version."""

    anchor: Version | None  # None: it starts from what it holds
    deltas: tuple[Version, ...]


def route(chain: Chain, held: str, lost: Collection[tuple[str, bool]]) -> Route | None:
    """The way from the version with the token ``held`` to the newest one within reach; None if that is held. Of ``lost`` versions,
    by token, the anchor (True) or the delta is missing or damaged.
    """
    versions, best, reached = chain.versions, None, -1
    for start, one in reversed([*enumerate(versions)]):
        is_held = one.token == held
        if not is_held and (not one.anchor or (one.token, True) in lost):
            continue
        end = start + 1
        while (
            end < len(versions) and versions[end].parts and (versions[end].token, False) not in lost
        ):
            end += 1
        # deltas from what is held are preferred to an anchor
        if end > reached or (is_held and end == reached):
            best, reached = Route(None if is_held else one, versions[start + 1 : end]), end
    return best if best is not None and (best.anchor or best.deltas) else None
