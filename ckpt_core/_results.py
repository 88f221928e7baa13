"""What saves, loads and inspections give back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RestoreReport:
    """What a load or restore did, leaf by leaf (paths are ``item/path`` where there are items).

    Attributes:
        loaded: leaves that came from the checkpoint.
        missing: leaves that the checkpoint lacks; the target's value was kept.
        unexpected: saved leaves that the target lacks.
        cast: leaves whose dtype was converted.
        resharded: leaves that now lie on another sharding than the saved one.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    resharded: tuple[str, ...] = ()


class Restored(Mapping[str, Any]):
    """The restored items by name; always true, whatever it holds.

    Models, optimizers, iterators and other live objects were set in place and appear here as
    themselves. Immutable values (pytrees, Optax states) are only here: read them, or training goes
    on with the old ones.

    Attributes:
        step: of the Checkpointer's directory; None outside one.
        path: of the checkpoint.
        metadata: what the user saved with it.
        report: what was loaded, kept and converted.
    """

    def __init__(
        self,
        values: dict[str, Any],
        *,
        path: str,
        metadata: Any,
        report: RestoreReport,
        step: int | None = None,
        saved_items: Set[str] = frozenset(),
    ) -> None:
        self._values = values
        self._saved_items = saved_items
        self._read: set[str] = set()
        self.step = step
        self.path = path
        self.metadata = metadata
        self.report = report

    def __getitem__(self, item: str) -> Any:
        try:
            value = self._values[item]
        except KeyError:
            raise KeyError(f"{item!r}: restored were {', '.join(self._values)}") from None
        self._read.add(item)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, item: object) -> bool:
        return item in self._values  # to ask for a name takes no value

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, item: str) -> Any:
        if item.startswith("_") or item not in self._values:
            raise AttributeError(item)
        return self[item]

    def __repr__(self) -> str:
        return f"Restored(step={self.step}, items={list(self._values)}, path={self.path!r})"

    @property
    def read_items(self) -> Set[str]:
        """The items whose values were taken out of this object so far; grows as they are."""
        return self._read

    @property
    def saved_items(self) -> Set[str]:
        """The items that the checkpoint holds, restored or not."""
        return self._saved_items


@dataclass(frozen=True)
class LeafInfo:
    """One leaf of a checkpoint, as ``inspect`` tells it."""

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    sharding: dict[str, Any] | None
    bytes: int


@dataclass(frozen=True)
class ItemInfo:
    """One item of a checkpoint: its form (``tree``, ``process`` or ``json``) and its leaves."""

    name: str
    form: str
    leaves: tuple[LeafInfo, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all arrays, uncompressed."""
        return sum(leaf.bytes for leaf in self.leaves)


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint without its arrays.

    Attributes:
        path: absolute.
        items: by name.
        metadata: the user's own.
        metrics: of the step.
        versions: of the libraries that wrote it.
        topology: of the run that wrote it.
        format_version: of ckpt's record; None for directories that Orbax wrote.
        created_unix_secs: when it was committed.
        durations: ``snapshot_secs`` that the caller was blocked, ``write_secs`` from then on.
        run_metadata: of the directory of steps that it lies in.
        files: sizes of all files that the record lists.
    """

    path: str
    items: dict[str, ItemInfo]
    metadata: Any = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    versions: dict[str, str] = field(default_factory=dict[str, str])
    topology: dict[str, Any] = field(default_factory=dict[str, Any])
    format_version: int | None = None
    created_unix_secs: float | None = None
    durations: dict[str, float] = field(default_factory=dict[str, float])
    run_metadata: Any = None
    files: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a checkpoint: where, and what."""

    file: str
    what: str
    leaf: str | None = None

    def __str__(self) -> str:
        return f"{self.file}{f' ({self.leaf})' if self.leaf else ''}: {self.what}"


@dataclass(frozen=True)
class VerifyReport:
    """Whether every byte of a checkpoint is as it was saved.

    Attributes:
        ok: no problem was found, and there were checksums to check against.
        problems: every difference.
        checked_bytes: how much was read.
    """

    ok: bool
    problems: tuple[Problem, ...]
    checked_bytes: int
