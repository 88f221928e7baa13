"""What a report says of a run, as frozen dataclasses, and the same as plain JSON values. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ckpt_core._directory import Trace
from ckpt_core._look.statistics import LeafStatistics
from ckpt_core._results import CheckpointInfo, VerifyReport
from ckpt_core.report._table import Table, shortened

DATA_VERSION = 1
"""Of the JSON; the page's scripts know this one."""
LINKED_FOLDER = "ocdbt.linked"
"""Files of a step below a folder of this name are hard links to those of an earlier step."""
_MOST_TEXT = 4000
_MOST_PROBLEMS = 200
_MOST_BARS = 24


class ItemFacts(NamedTuple):
    """One item of a step: its name and form, and how much it holds."""

    name: str
    form: str
    leaves: int
    bytes: int
    files: int


@dataclass(frozen=True)
class StepFacts:
    """One step, as its metadata describes it."""

    step: int | None  # None for a single checkpoint
    path: str  # or URL
    problem: str | None = None  # why it cannot be read; then only path and step are known
    unread: bool = False  # the problem is no damage: a newer format, or a refusal
    info: CheckpointInfo | None = None  # without items and files
    items: tuple[ItemFacts, ...] = ()
    structure: int | None = None  # position of its leaves in Table.structures
    written_bytes: int | None = None  # see written_and_linked
    linked_bytes: int | None = None
    verified: tuple[VerifyReport, float] | None = None  # the result, and how many seconds it took
    # by the leaf's number in the table; None if no array was read
    numbers: Mapping[int, LeafStatistics] | None = None

    @property
    def array_bytes(self) -> int:
        """Uncompressed bytes of all leaves."""
        return sum(item.bytes for item in self.items if not item.files)

    @property
    def is_damaged(self) -> bool:
        """Whether what can be read of it is wrong, or did not pass the check of its bytes."""
        if self.problem is not None:
            return not self.unread
        if self.verified is None or self.info is None or self.info.layout != "ckpt":
            return False  # other formats have no checksums: nothing is known of them
        return not self.verified[0].ok


@dataclass(frozen=True)
class Report:
    """All that a page shows.

    Attributes:
        path: the run or checkpoint.
        is_run: whether it is a directory of steps.
        made_unix_secs: when it was read.
        version: of ckpt.
        table: the leaves of all steps.
        steps: ascending.
        beside: what is beside the steps: the writer, unfinished saves.
        looked_beside: whether that could be seen; not so in object stores.
        run_metadata: of the run.
        empty: directories with the number of a step, but no checkpoint.
        gone: steps that were deleted while the report was made.
        notes: what went wrong on the way, in words.
    """

    path: str
    is_run: bool
    made_unix_secs: float
    version: str
    table: Table
    steps: tuple[StepFacts, ...] = ()
    beside: tuple[Trace, ...] = ()
    looked_beside: bool = False
    run_metadata: Any = None
    empty: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_damaged(self) -> bool:
        """Whether a step is damaged, or did not pass a check of its bytes."""
        return any(step.is_damaged for step in self.steps)

    @property
    def unread(self) -> int:
        """How many steps cannot be read, though nothing says that they are damaged."""
        return sum(step.unread for step in self.steps)


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain values, for the page and for ``--json``.

    Leaves are columns, with paths shortened by what they share with the path before; see ``_table``.
    """
    table = report.table
    return {
        "version": DATA_VERSION,
        "made_by": report.version,
        "made_unix_secs": report.made_unix_secs,
        "path": report.path,
        "is_run": report.is_run,
        "run_metadata": _text(report.run_metadata),
        "items": table.items,
        "types": [list(type_) for type_ in table.types],
        "leaves": {
            "item": [leaf.item for leaf in table.leaves],
            "path": shortened([leaf.path for leaf in table.leaves]),
            "type": [leaf.type for leaf in table.leaves],
        },
        "shardings": [{**asdict(one), "parts": one.parts} for one in table.shardings],
        "structures": table.structures,
        "steps": [_step(step) for step in report.steps],
        "statistics": [_columns(step) for step in report.steps if step.numbers is not None],
        "beside": [asdict(trace) for trace in report.beside],
        "looked_beside": report.looked_beside,
        "without_checkpoint": list(report.empty),
        "deleted_meanwhile": list(report.gone),
        "notes": list(report.notes),
    }


def _step(step: StepFacts) -> dict[str, Any]:
    found: dict[str, Any] = {"step": step.step, "path": step.path, "problem": step.problem}
    found["unread"] = step.unread
    if step.verified is not None:
        found["verified"] = _verified(*step.verified)
    info = step.info
    if info is None:
        return found
    return {
        **found,
        "structure": step.structure,
        "created_unix_secs": info.created_unix_secs,
        "layout": info.layout,
        "array_bytes": step.array_bytes,
        "written_bytes": step.written_bytes,
        "linked_bytes": step.linked_bytes,
        "snapshot_secs": info.durations.get("snapshot_secs"),
        "write_secs": info.durations.get("write_secs"),
        "metrics": {str(name): _metric(value) for name, value in info.metrics.items()},
        "metadata": _text(info.metadata),
        "items": [item._asdict() for item in step.items],
        "versions": info.versions,
        "topology": info.topology,
    }


def _columns(step: StepFacts) -> dict[str, Any]:
    rows = sorted((step.numbers or {}).items())
    return {
        "step": step.step,
        "leaf": [leaf for leaf, _ in rows],
        "count": [row.count for _, row in rows],
        "nan": [row.nan_count for _, row in rows],
        "inf": [row.inf_count for _, row in rows],
        "zero": [row.zero_count for _, row in rows],
        "min": [_short(row.min) for _, row in rows],
        "max": [_short(row.max) for _, row in rows],
        "mean": [_short(row.mean) for _, row in rows],
        "std": [_short(row.std) for _, row in rows],
        "norm": [_short(row.norm) for _, row in rows],
        "octaves": [_bars(row.octaves) for _, row in rows],
    }


def _bars(octaves: Sequence[tuple[int, int, int]]) -> list[Any]:
    """Where the bars begin, how many octaves each has, and pairs of counts: 24 bars at most, as a page has room for."""
    if not octaves:
        return []
    width = -(-len(octaves) // _MOST_BARS)
    counts: list[int] = []
    for begin in range(0, len(octaves), width):
        group = octaves[begin : begin + width]
        counts += [sum(one[1] for one in group), sum(one[2] for one in group)]
    return [octaves[0][0] - 1, width, *counts]


def _short(value: complex) -> float | None:
    """Six digits: the page shows four. None for NaN, and for the mean of complex numbers."""
    if isinstance(value, complex) or math.isnan(value):
        return None
    return float(f"{value:.6g}")


def written_and_linked(files: Mapping[str, int]) -> tuple[int | None, int | None]:
    """Bytes of a step's files that its save wrote, and that it shares with an earlier step; None if the files are not
    recorded, as in a directory of Orbax.
    """
    if not files:
        return None, None
    linked = sum(size for name, size in files.items() if LINKED_FOLDER in name.split("/"))
    return sum(files.values()) - linked, linked


def _verified(report: VerifyReport, seconds: float) -> dict[str, Any]:
    problems = [asdict(problem) for problem in report.problems]
    return {
        "ok": report.ok,
        "checked_bytes": report.checked_bytes,
        "secs": seconds,
        "problems": problems[:_MOST_PROBLEMS],
        "more_problems": max(0, len(problems) - _MOST_PROBLEMS),
    }


def _metric(value: Any) -> Any:
    """A number as it is; anything else, which only other libraries write, as text."""
    return value if type(value) in (int, float) else str(value)[:_MOST_TEXT]


def _text(value: Any) -> str | None:
    """A user's metadata as indented JSON, cut where it is too long for a page."""
    if value is None:
        return None
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    if len(text) <= _MOST_TEXT:
        return text
    return f"{text[:_MOST_TEXT]}\n... and {len(text) - _MOST_TEXT} more characters"
