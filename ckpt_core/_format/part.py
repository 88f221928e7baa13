"""Which part of a step a local checkpoint holds, and for which processes it is as good as their own.

Runs of process indices are pairs of the first and the last one: ``[[0, 3], [6, 6]]``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_MOST_PROCESSES = 2**24

Runs = tuple[tuple[int, int], ...]
"""Process indices as ascending runs (first, last)."""


@dataclass(frozen=True)
class Part:
    """The part of a step that one process wrote into its local directory."""

    writer: int  # index of the process that wrote it
    count: int  # number of processes of the save
    serves: Runs  # the processes with parts that hold the same, the writer among them

    @staticmethod
    def own(writer: int, count: int) -> Part:
        """A part that is of use for its writer alone."""
        return Part(writer, count, ((writer, writer),))

    def dump(self) -> dict[str, Any]:
        """The part as JSON values."""
        return {"process": self.writer, "of": self.count, "serves": self.serves}

    @staticmethod
    def load(value: Any) -> Part:
        """What ``dump`` gave; raises ValueError, KeyError or TypeError for anything else."""
        writer, count = value["process"], value["of"]
        serves = tuple((first, last) for first, last in value["serves"])
        numbers = [writer, count, *(number for run in serves for number in run)]
        if any(type(number) is not int for number in numbers):
            raise ValueError("a process index that is no whole number")
        if not 0 <= writer < count <= _MOST_PROCESSES or not contains(serves, writer):
            raise ValueError(f"the part of process {writer} of {count}, for {serves}")
        edges = [number for run in serves for number in run]
        if edges != sorted(edges) or edges[0] < 0 or edges[-1] >= count:
            raise ValueError(f"impossible runs of processes {serves}")
        return Part(writer, count, serves)


def contains(runs: Runs, index: int) -> bool:
    """Whether an index is in one of the runs."""
    return any(first <= index <= last for first, last in runs)


def runs_of(indices: Iterable[int]) -> Runs:
    """Ascending indices as runs."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] + 1 == index:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return tuple((first, last) for first, last in runs)


def dump_runs(runs: Runs) -> str:
    """Runs as arguments of ``range``, in JSON: of a mesh, the processes of a group are at equal distances."""
    indices = [index for first, last in runs for index in range(first, last + 1)]
    found: list[tuple[int, int, int]] = []
    at = 0
    while at < len(indices):
        end, step = at + 1, 1
        if end < len(indices):
            step = indices[end] - indices[at]
            while end < len(indices) and indices[end] - indices[end - 1] == step:
                end += 1
        found.append((indices[at], indices[end - 1] + 1, step))
        at = end
    return json.dumps(found, separators=(",", ":"))


@functools.lru_cache
def parse_runs(text: str) -> Runs:
    """What ``dump_runs`` gave."""
    return runs_of(sorted(index for steps in json.loads(text) for index in range(*steps)))
