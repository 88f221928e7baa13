"""Which processes hold the same, so that the part of a step that one wrote is of use for another.

Two processes hold the same if they hold the same regions of all distributed arrays, and equal values
of all else: numbers, text, numpy arrays, arrays bound to no device. The state of a data pipeline
belongs to one process, but it is small: processes that hold the same form blocks of eight at most, each writes the states of
its whole block, and they make no difference. A block is spread over the job, so that its processes are on as many hosts.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ckpt_core._options import KIB
from ckpt_core._save.job import PreparedItem
from ckpt_core._storage import ArrayToWrite

MOST_STATE_BYTES = 64 * KIB
"""Maximum size of a process's pipeline states that are sent to the other processes of its block."""
BLOCK = 8
"""Maximum number of processes that get each other's pipeline states."""

States = dict[str, dict[str, str]]
"""Of data pipelines: item -> file name -> content."""
Sent = Literal["none", "sent", "large"]
"""A process has no states of data pipelines, sends them to others, or does not, as they are too large."""


@dataclass(frozen=True)
class Holding:
    """What one process holds."""

    digest: str  # 22 letters, equal on processes that hold the same, apart from states
    states: States  # of its data pipelines; empty if it has none, or ``sent`` is ``"large"``
    sent: Sent = "none"


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
    size_bytes = sum(len(text) for files in states.values() for text in files.values())
    same = base64.b64encode(digest.digest()[:16]).decode().rstrip("=")
    if size_bytes > MOST_STATE_BYTES:
        return Holding(same, {}, "large")
    return Holding(same, states, "sent" if states else "none")


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


def groups_of(everyone: Sequence[tuple[str, Sent]]) -> list[list[int]]:
    """On process 0: the groups of processes that hold the same, from the digest of each and what it sends of its states."""
    kinds = {sent for _, sent in everyone}
    if "large" in kinds:
        return [[index] for index in range(len(everyone))]
    same: dict[str, list[int]] = {}
    for index, (digest, _) in enumerate(everyone):
        same.setdefault(digest, []).append(index)
    if "sent" not in kinds:
        return [*same.values()]
    strides = ((some, -(-len(some) // BLOCK)) for some in same.values())
    return [some[first::stride] for some, stride in strides for first in range(stride)]


def with_states(items: Sequence[PreparedItem], states: Sequence[States]) -> list[PreparedItem]:
    """The items of a save, with these pipeline states of other processes."""

    def others_of(item: PreparedItem) -> dict[str, bytes]:
        return {
            name: text.encode(errors="surrogateescape")
            for one in states
            for name, text in one.get(item.name, {}).items()
            if name not in item.state_files
        }

    return [replace(item, others=others_of(item)) for item in items]
