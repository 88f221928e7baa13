"""Which versions are published, and the way from one to another. Pure.

``.ckpt-published`` holds the chain; replacing it makes a version visible. A version is an *anchor*, a checkpoint of its own; a
*delta* to the version before it in the chain, in one file for each process that has written it; or both.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.untrusted import parse_json
from ckpt_core._options import MIB

CHAIN_FILE = ".ckpt-published"
"""Name of the file in the directory; its content is the CRC-32 of the next line, and that line, the chain as JSON."""
MOST_BYTES = 64 * MIB
"""Maximum size of the file."""
DELTA = ".ckpt-delta-"
"""Begins the name of each file of a delta."""
_MOST_ANCHORS = 64
"""Anchors that the file names; older ones stay in the directory, where nobody needs the chain to load them."""
_TOKEN = re.compile(r"[0-9a-f]{16,32}")


@dataclass(frozen=True)
class Version:
    """One published version."""

    number: int
    token: str  # as in the record of its anchor: of two versions with one number, only one is meant
    anchor: bool
    # Of the delta: size in bytes and CRC-32 of each process's file; None if there is none.
    parts: tuple[tuple[int, int], ...] | None = None

    @property
    def files(self) -> list[str]:
        """Names of the files of the delta."""
        return [name_of(self.number, self.token, index) for index in range(len(self.parts or ()))]


def name_of(number: int, token: str, index: int) -> str:
    """The name of the file in which process ``index`` puts its part of a delta."""
    return f"{DELTA}{number}-{token[:16]}-{index}"


@dataclass(frozen=True)
class Chain:
    """The content of the file."""

    writer: str = ""  # of the Publisher that was opened last
    versions: tuple[Version, ...] = ()  # each but an anchor is a delta to the one before it

    @property
    def newest(self) -> Version | None:
        """The version that was published last."""
        return self.versions[-1] if self.versions else None

    def since_anchor(self) -> int:
        """How many versions there are after the newest anchor."""
        anchors = (at for at, one in enumerate(reversed(self.versions)) if one.anchor)
        return next(anchors, len(self.versions))

    def published(self, version: Version, max_to_keep: int | None) -> Chain:
        """The chain after one more version, without what nobody needs. Versions of its number and beyond are abandoned. Deltas
        stay since the second newest anchor: followers that are further behind take an anchor.
        """
        before = [one for one in self.versions if one.number < version.number]
        versions = [*before, version]
        anchors = [at for at, one in enumerate(versions) if one.anchor]
        first = anchors[-2] if len(anchors) > 1 else anchors[0]
        kept = {*anchors[-(max_to_keep or _MOST_ANCHORS) :]}
        # the version before the first one is not in the chain, or not the base of its delta
        found = [replace(versions[at], parts=None) for at in sorted(kept) if at < first]
        found.append(replace(versions[first], parts=None, anchor=first in kept))
        found += [
            replace(versions[at], anchor=at in kept) for at in range(first + 1, len(versions))
        ]
        return replace(self, versions=tuple(found))

    def dump(self) -> bytes:
        """The content of the file."""
        line = json.dumps(asdict(self), separators=(",", ":")).encode()
        return b"%08x\n%s" % (zlib.crc32(line), line)


def parse_chain(data: bytes | None, directory: str) -> Chain | None:
    """The content of the file in ``directory``; None if there is none, CheckpointCorrupt if it is damaged."""
    if data is None:
        return None
    crc, _, line = data.partition(b"\n")
    try:
        if int(crc, 16) != zlib.crc32(line):
            raise ValueError("its checksum differs")
        value = parse_json(line, CHAIN_FILE)
        versions = tuple(
            Version(
                int(one["number"]),
                str(one["token"]),
                one["anchor"] is True,
                None
                if one["parts"] is None
                else tuple((int(size), int(crc)) for size, crc in one["parts"]),
            )
            for one in value["versions"]
        )
        if not all(_TOKEN.fullmatch(one.token) for one in versions):
            raise ValueError("a token in it is none that ckpt gives")
        return Chain(str(value["writer"]), versions)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointCorrupt(
            f"{directory}/{CHAIN_FILE} is damaged ({error}), so it is not known which versions are published: the next "
            "publish writes it anew",
            file=CHAIN_FILE,
        ) from error


class Form(NamedTuple):
    """How a version is written."""

    anchor: bool
    delta: bool


def form_of(chain: Chain, delta_bytes: int | None, full_bytes: int, anchor_every: int) -> Form:
    """A delta if there is one and it is smaller; an anchor if not, and after ``anchor_every`` versions beside it, so that
    followers which keep up read no anchor. ``delta_bytes`` is None if there is no version to compare with.
    """
    delta = delta_bytes is not None and delta_bytes < full_bytes
    return Form(not delta or chain.since_anchor() + 1 >= anchor_every, delta)


class Route(NamedTuple):
    """What a follower reads to get to a newer version."""

    anchor: Version | None  # None: it goes on from what it holds
    deltas: tuple[Version, ...]


def route(chain: Chain, held: str | None, lost: Collection[str]) -> Route | None:
    """The way from the version with the token ``held`` to the newest one that can be reached; None if it is reached. Versions of
    ``lost`` are missing or damaged: ``anchor_key``, ``delta_key``.
    """
    versions = chain.versions
    tokens = [one.token for one in versions]
    at = tokens.index(held) if held in tokens else -1
    starts = [(None, at)] if at >= 0 else []
    newest_first = reversed([*enumerate(versions)])
    starts += [(one, n) for n, one in newest_first if one.anchor and anchor_key(one) not in lost]
    found, reached = None, at
    for anchor, start in starts:
        end = start
        for one in versions[start + 1 :]:
            if one.parts is None or delta_key(one) in lost:
                break
            end += 1
        if end > reached:
            found, reached = Route(anchor, versions[start + 1 : end + 1]), end
    return found


def anchor_key(version: Version) -> str:
    """Names the anchor of a version among what is lost."""
    return version.token


def delta_key(version: Version) -> str:
    """Names the delta of a version among what is lost."""
    return f"{version.token} delta"
