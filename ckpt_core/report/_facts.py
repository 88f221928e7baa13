"""What a report says of a run, as frozen dataclasses whose fields are the keys of its JSON. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpt_core._directory import Trace
from ckpt_core._look.leaves import LeafStatistics
from ckpt_core._results import CheckpointInfo, ItemInfo, VerifyReport
from ckpt_core.report._table import Table

DATA_VERSION = 2
"""Of the JSON; the page's scripts know this one."""
LINKED_FOLDER = "ocdbt.linked"
"""Files of a step below a folder of this name are hard links to those of an earlier step."""
_MOST_TEXT = 4000
_MOST_PROBLEMS = 200
_MOST_BARS = 24


@dataclass(frozen=True)
class Verified:
    """What a check of every byte found, the first problems of many."""

    ok: bool
    checked_bytes: int
    secs: float
    problems: tuple[Mapping[str, Any], ...]
    more_problems: int

    @classmethod
    def of(cls, report: VerifyReport, secs: float) -> Verified:
        problems = tuple(map(asdict, report.problems[:_MOST_PROBLEMS]))
        more = max(0, len(report.problems) - _MOST_PROBLEMS)
        return cls(report.ok, report.checked_bytes, secs, problems, more)


@dataclass(frozen=True)
class StepFacts:
    """One step, as its metadata describes it."""

    step: int | None  # None for a single checkpoint
    path: str  # or URL
    problem: str | None = None  # why it cannot be read; then only path and step are known
    unread: bool = False  # the problem is no damage: a newer format, or a refusal
    verified: Verified | None = None
    structure: int | None = None  # position of its leaves in Table.structures
    created_unix_secs: float | None = None
    layout: str | None = None
    array_bytes: int | None = None  # uncompressed
    # what its save wrote, and shares with an earlier step; None if files are not recorded, as by Orbax
    written_bytes: int | None = None
    linked_bytes: int | None = None
    snapshot_secs: float | None = None
    write_secs: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    metadata: str | None = None
    # of each name, form, bytes, and how many leaves and files it has
    items: tuple[Mapping[str, Any], ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    topology: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, step: int | None, path: str, info: CheckpointInfo, structure: int) -> StepFacts:
        """Without leaves and files, which would fill the memory where there are 1,000 steps."""
        linked = sum(size for name, size in info.files.items() if LINKED_FOLDER in name.split("/"))
        return cls(
            step,
            path,
            structure=structure,
            created_unix_secs=info.created_unix_secs,
            layout=info.layout,
            array_bytes=sum(item.bytes for item in info.items.values() if not item.files),
            written_bytes=sum(info.files.values()) - linked if info.files else None,
            linked_bytes=linked if info.files else None,
            snapshot_secs=info.durations.get("snapshot_secs"),
            write_secs=info.durations.get("write_secs"),
            metrics={str(name): _metric(value) for name, value in info.metrics.items()},
            metadata=as_text(info.metadata),
            items=tuple(map(_item, info.items.values())),
            versions=info.versions,
            topology=info.topology,
        )

    @property
    def state(self) -> str:
        """``damaged``, ``not readable``, ``verified``, ``no checksums`` or ``not verified``."""
        if self.problem is not None:
            return "not readable" if self.unread else "damaged"
        if self.verified is None:
            return "not verified"
        if self.verified.ok:
            return "verified"
        # other formats have no checksums: nothing is known of them
        return "damaged" if self.layout == "ckpt" else "no checksums"


@dataclass(frozen=True)
class Report:
    """All that a page shows."""

    path: str  # of the run or checkpoint
    is_run: bool  # whether it is a directory of steps
    made_unix_secs: float  # when it was read
    made_by: str  # the version of ckpt
    table: Table  # the leaves of all steps
    steps: tuple[StepFacts, ...] = ()  # ascending
    # columns of numbers about the leaves of a step, for each whose arrays were read
    statistics: tuple[Mapping[str, Any], ...] = ()
    beside: tuple[Trace, ...] = ()  # the writer, unfinished saves
    looked_beside: bool = False  # whether these could be seen; not so in object stores
    run_metadata: str | None = None
    without_checkpoint: tuple[int, ...] = ()  # directories with the number of a step
    deleted_meanwhile: tuple[int, ...] = ()  # steps, while the report was made
    notes: tuple[str, ...] = ()  # what went wrong on the way, in words

    @property
    def is_damaged(self) -> bool:
        """Whether a step is damaged, or did not pass a check of its bytes."""
        return any(step.state == "damaged" for step in self.steps)

    @property
    def unread(self) -> int:
        """How many steps cannot be read, though nothing says that they are damaged."""
        return sum(step.unread for step in self.steps)


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain values, for the page and for ``--json``; the table's keys are beside the others."""
    facts = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(report).items()
        if name != "table"
    }
    facts["steps"] = [{**asdict(step), "state": step.state} for step in report.steps]
    facts["beside"] = list(map(asdict, report.beside))
    return {"version": DATA_VERSION, **facts, **report.table.as_json()}


def columns_of(step: int | None, rows: Mapping[int, LeafStatistics]) -> dict[str, Any]:
    """Numbers about leaves, by their number in the table, as columns."""
    leaves = sorted(rows)
    found = [rows[leaf] for leaf in leaves]
    columns: dict[str, Any] = {"step": step, "leaf": leaves}
    columns["count"] = [row.count for row in found]
    for name in ("nan", "inf", "zero"):
        columns[name] = [getattr(row, f"{name}_count") for row in found]
    for name in ("min", "max", "mean", "std", "norm"):
        columns[name] = [_short(getattr(row, name)) for row in found]
    return columns | {"octaves": [_bars(row.octaves) for row in found]}


def _bars(octaves: Sequence[tuple[int, int, int]]) -> list[Any]:
    """Where the bars begin, how many octaves each has, and pairs of counts: 24 bars at most, as a page has room for."""
    if not octaves:
        return []
    width = -(-len(octaves) // _MOST_BARS)
    groups = (octaves[begin : begin + width] for begin in range(0, len(octaves), width))
    counts = [sum(one[sign] for one in group) for group in groups for sign in (1, 2)]
    return [octaves[0][0] - 1, width, *counts]


def _short(value: complex) -> float | None:
    """Six digits: the page shows four. None for NaN, and for the mean of complex numbers."""
    if isinstance(value, complex) or math.isnan(value):
        return None
    return float(f"{value:.6g}")


def _item(item: ItemInfo) -> dict[str, Any]:
    counts = {"leaves": len(item.leaves), "bytes": item.bytes, "files": len(item.files)}
    return {"name": item.name, "form": item.form, **counts}


def _metric(value: Any) -> Any:
    """A number as it is; anything else, which only other libraries write, as text."""
    return value if type(value) in (int, float) else str(value)[:_MOST_TEXT]


def as_text(value: Any) -> str | None:
    """A user's metadata as indented JSON, cut where it is too long for a page."""
    if value is None:
        return None
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    if len(text) <= _MOST_TEXT:
        return text
    return f"{text[:_MOST_TEXT]}\n... and {len(text) - _MOST_TEXT} more characters"
