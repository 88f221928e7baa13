"""What a report says of a run, as frozen dataclasses whose fields are the keys of its JSON. Pure.

A table holds once what the leaves of all steps have in common: of five million, most often 5,000 differ. A leaf is (item,
path, type); a type is (kind, dtype, shape, bytes, position of the sharding or None); a structure is the list of a step's
leaves, as ranges of their numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._directory import Trace
from ckpt_core._look.leaves import LeafStatistics
from ckpt_core._results import CheckpointInfo, ItemInfo, VerifyReport

DATA_VERSION = 2
"""Of the JSON; the page's scripts know this one."""
LINKED_FOLDER = "ocdbt.linked"
"""Files of a step below a folder of this name are hard links to those of an earlier step."""
_MOST_TEXT = 4000
_MOST_PROBLEMS = 200
_MOST_BARS = 24
_MOST_DEVICES = 65_536
"""A page lists the ids of no more."""


class Leaf(NamedTuple):
    """A leaf that some steps have: positions of its item and type in the table, and its path."""

    item: int
    path: str
    type: int


class Table:
    """The position of each distinct item, type, leaf, sharding (as JSON) and structure of some steps."""

    def __init__(self) -> None:
        kinds = ("items", "types", "leaves", "shardings", "structures")
        self._known: dict[str, dict[Any, int]] = {kind: {} for kind in kinds}

    def _position(self, kind: str, value: Any) -> int:
        """The position of a value, which is added if it is new."""
        return self._known[kind].setdefault(value, len(self._known[kind]))

    @property
    def leaves(self) -> list[Leaf]:
        """All leaves, by their numbers."""
        return list(self._known["leaves"])

    def add(self, items: Mapping[str, ItemInfo]) -> int:
        """Takes in the leaves of a step; returns the position of their structure."""
        ranges: list[tuple[int, int]] = []
        for name, item in items.items():
            for number in (self._leaf(name, leaf) for leaf in item.leaves):
                first = ranges.pop()[0] if ranges and ranges[-1][1] == number else number
                ranges.append((first, number + 1))  # 0, 1, 2, 7, 8 are (0, 3), (7, 9)
        return self._position("structures", tuple(ranges))

    def _leaf(self, item: str, leaf: Any) -> int:
        sharding = None
        if leaf.sharding:
            key = json.dumps(leaf.sharding, sort_keys=True, default=str)
            sharding = self._position("shardings", key)
        described = (leaf.kind, leaf.dtype, tuple(leaf.shape), leaf.bytes, sharding)
        places = self._position("items", item), leaf.path, self._position("types", described)
        return self._position("leaves", Leaf(*places))

    def numbers_in(self, structure: int | None) -> Iterator[tuple[tuple[str, str], int]]:
        """Item and path, and number, of each leaf of a structure."""
        leaves, items = self.leaves, list(self._known["items"])
        ranges = () if structure is None else list(self._known["structures"])[structure]
        for first, end in ranges:
            for number in range(first, end):
                yield (items[leaves[number].item], leaves[number].path), number

    def as_json(self) -> dict[str, Any]:
        """The same as plain values: positions are those in lists, and leaves are columns."""
        leaves = self.leaves
        return {
            **{kind: list(known) for kind, known in self._known.items()},
            "leaves": {name: [getattr(leaf, name) for leaf in leaves] for name in Leaf._fields},
            "shardings": [drawing_of(json.loads(text)) for text in self._known["shardings"]],
        }


def drawing_of(sharding: Mapping[str, Any]) -> dict[str, Any]:
    """How an array lies over a mesh: name and size of the ``axes``; ``spec``, the axes that split each dimension, and ``parts``,
    into how many; ``devices``, the ids of those that hold each part, in C order. A ``note`` says why there is no drawing.
    """
    kind = str(sharding.get("sharding_type", "")) or "unknown"
    drawing = {"kind": kind, "axes": (), "spec": (), "devices": (), "note": "", "parts": ()}
    if kind != "NamedSharding":
        device = sharding.get("device_str")
        note = f"all of it on {device}" if device else f"{kind}: its parts are not described"
        return drawing | {"note": note}
    try:
        return drawing | _over_a_mesh(sharding)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        return drawing | {"note": f"cannot be drawn: {error}"}


def _over_a_mesh(sharding: Mapping[str, Any]) -> dict[str, Any]:
    names = [str(name) for name in sharding["axis_names"]]
    sizes = [int(size) for size in sharding["shape"]]
    axes = dict(zip(names, sizes, strict=True))
    entries = sharding["partition_spec"]
    each = [one if isinstance(one, list | tuple) else [one] for one in entries]
    spec = [[str(name) for name in split if name is not None] for split in each]
    split = [name for one in spec for name in one]
    if unknown := {*split} - {*names}:
        raise ValueError(f"no axis of the mesh is called {min(unknown)}")
    parts = [math.prod(axes[name] for name in one) for one in spec]
    found = {"axes": list(axes.items()), "spec": spec, "parts": parts}
    if math.prod(sizes) > _MOST_DEVICES:
        return found | {"note": "too many devices to draw"}
    # a part is on the devices whose place on the split axes is its own; the first axis is the slowest
    order = [*split, *(name for name in names if name not in split)]
    # a device whose id was not saved is called by its number in the mesh
    mesh = (sharding.get("device_mesh") or {}).get("mesh")
    flat = range(math.prod(sizes)) if mesh is None else np.array(mesh, dtype=object).reshape(-1)
    ids = np.array([int(one["id"] if isinstance(one, dict) else one) for one in flat])
    placed = ids.reshape(sizes).transpose([names.index(name) for name in order])
    return found | {"devices": placed.reshape(math.prod(parts), -1).tolist()}


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
            # what other libraries write as a metric may be no number
            metrics={
                str(name): value if type(value) in (int, float) else str(value)[:_MOST_TEXT]
                for name, value in info.metrics.items()
            },
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
    """The report as plain values; the table's keys are beside the others."""
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
    """Where the bars begin, how many octaves each has, and pairs of counts, of 24 bars at most."""
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


def as_text(value: Any) -> str | None:
    """A user's metadata as indented JSON, cut where it is too long for a page."""
    if value is None:
        return None
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    if len(text) <= _MOST_TEXT:
        return text
    return f"{text[:_MOST_TEXT]}\n... and {len(text) - _MOST_TEXT} more characters"
