"""Which processes hold the same, so that the part of a step that one wrote is of use for another.

Two processes hold the same if they hold the same regions of all distributed arrays, and equal values
of all else: numbers, text, numpy arrays, arrays bound to no device. The state of a data pipeline
belongs to one process, but it is small: if all states together are, every process writes all of
them, as in the persistent directory, and they make no difference. Of many processes each writes those of a block: of eight
that hold the same, taken from all over the job, so that they are on as many hosts. What is sent does not grow with
the square of their number, and a process's part is of use for the seven others.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckpt_core._format.part import Runs, progressions, runs_of
from ckpt_core._options import KIB, MIB
from ckpt_core._save.job import PreparedItem
from ckpt_core._storage import ArrayToWrite

MOST_STATE_BYTES = 64 * KIB
"""Maximum size of a process's pipeline states that are sent to the other processes."""
MOST_STATE_BYTES_IN_ALL = 256 * KIB
"""Maximum size of the states of all processes together, or of a block, since every process there gets them."""
_MOST_SENT_BYTES = 16 * MIB
"""Maximum number of bytes in which all processes get all states."""
BLOCK = 8
"""Number of processes that get each other's states where all would be too much."""

States = dict[str, dict[str, str]]
"""Item -> file name -> content."""


@dataclass(frozen=True)
class Holding:
    """What one process holds, as it tells the others before a save."""

    digest: str  # 22 letters, equal on processes that hold the same, apart from states
    states: States | None  # of its data pipelines; None if they are too large to be sent


def holding_of(items: Sequence[PreparedItem]) -> Holding:
    """What this process holds, from items whose arrays are on the host."""
    digest = hashlib.sha256()
    states: States = {}
    for item in sorted(items, key=lambda item: item.name):
        digest.update(repr((item.name, item.record.form)).encode(errors="surrogatepass"))
        if item.record.form == "process":
            states[item.name] = {
                name: data.decode(errors="surrogateescape")
                for name, data in item.state_files.items()
            }
        else:
            for part in _values(item):
                digest.update(repr(part).encode(errors="surrogatepass"))
            if item.plan is not None:
                digest.update(item.plan.coverage.encode())
    sizes = [len(text) for files in states.values() for text in files.values()]
    sent = None if sum(sizes) > MOST_STATE_BYTES else states
    return Holding(base64.b64encode(digest.digest()[:16]).decode().rstrip("="), sent)


def _values(item: PreparedItem) -> list[Any]:
    """What distinguishes an item here from the same item of another process, apart from regions."""
    found: list[Any] = [sorted(item.texts.items())]
    found += [
        (name, hashlib.sha256(data).hexdigest()) for name, data in sorted(item.state_files.items())
    ]
    found += [(source.name, source.size_bytes) for source in item.sources]
    if item.plan is not None:
        unshared = item.plan.unshared
        found += [(a.name, _digest(a)) for a in item.arrays if a.name in unshared]
    return found


def _digest(array: ArrayToWrite) -> str:
    # not a checksum of 32 bits: values taken for equal by chance would be restored on another process
    found = hashlib.sha256()
    for _, values in array.pieces:
        found.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


@dataclass(frozen=True)
class Shares:
    """What the processes of a save hold, as process 0 finds it."""

    groups: list[int]  # for each process the number of its group, which holds the same
    states: States  # of all processes, to be written by each; empty if each writes its own, or those of its block
    # for each group what its processes write; empty if all write all states, or each its own
    blocks: list[States] = field(default_factory=list[States])

    def rows(self) -> list[str]:
        """For each process the number of a row after these, which has the processes of its group: see ``serves_of``."""
        members: dict[int, list[int]] = {}
        for index, group in enumerate(self.groups):
            members.setdefault(group, []).append(index)
        count = len(self.groups)
        return [str(count + group) for group in self.groups] + [
            json.dumps(progressions(members[group]), separators=(",", ":"))
            for group in sorted(members)
        ]


def group_of(index: int, count: int, row: Callable[[int], str]) -> int:
    """The group of process ``index`` of ``count``, from ``Shares.rows``."""
    return int(row(index)) - count


def serves_of(index: int, row: Callable[[int], str]) -> Runs:
    """The processes that hold what process ``index`` holds, from ``Shares.rows``."""
    found = json.loads(row(int(row(index))))
    return runs_of(sorted(one for steps in found for one in range(*steps)))


def with_states(items: Sequence[PreparedItem], states: States) -> list[PreparedItem]:
    """The items of a save, with these pipeline states of other processes."""
    return [
        replace(item, others=_encoded(states[item.name], item.state_files))
        if item.name in states
        else item
        for item in items
    ]


def _encoded(files: Mapping[str, str], own: Mapping[str, bytes]) -> dict[str, bytes]:
    return {
        name: text.encode(errors="surrogateescape")
        for name, text in files.items()
        if name not in own
    }


def share(everyone: Sequence[Holding]) -> Shares:
    """On process 0: the shares, from what each process holds."""
    known = [one.states for one in everyone if one.states is not None]
    if len(known) < len(everyone):
        return Shares(_numbered([(one.digest, n) for n, one in enumerate(everyone)]), {})
    if not any(known):
        return Shares(_numbered([one.digest for one in everyone]), {})
    sizes = [
        sum(map(len, (text for files in one.values() for text in files.values()))) for one in known
    ]
    if sum(sizes) <= min(MOST_STATE_BYTES_IN_ALL, _MOST_SENT_BYTES // len(sizes)):
        return Shares(_numbered([one.digest for one in everyone]), _merged(known))
    groups = _in_blocks([one.digest for one in everyone])
    members: dict[int, list[int]] = {}
    for n, group in enumerate(groups):
        members.setdefault(group, []).append(n)
    if max(sum(sizes[n] for n in block) for block in members.values()) > MOST_STATE_BYTES_IN_ALL:
        return Shares(_numbered([(one.digest, n) for n, one in enumerate(everyone)]), {})
    blocks = [
        _merged([known[n] for n in block]) if len(block) > 1 else {} for block in members.values()
    ]
    return Shares(groups, {}, blocks)


def _in_blocks(digests: Sequence[str]) -> list[int]:
    """For each process the number of its block: of ``BLOCK`` processes at most that hold the same, spread over the job."""
    holders: dict[str, list[int]] = {}
    for n, digest in enumerate(digests):
        holders.setdefault(digest, []).append(n)
    keys: list[Any] = [None] * len(digests)
    for digest, same in holders.items():
        blocks = -(-len(same) // BLOCK)
        for position, n in enumerate(same):
            keys[n] = digest, position % blocks
    return _numbered(keys)


def _numbered(keys: Sequence[Any]) -> list[int]:
    """For each key the number of those before it that differ: equal keys have the same."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _merged(known: Sequence[States]) -> States:
    states: States = {}
    for one in known:
        for name, files in one.items():
            states.setdefault(name, {}).update(files)
    return states
