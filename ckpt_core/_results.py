"""Results of loads, restores, ``inspect`` and ``verify``, and their tables for notebooks."""

from __future__ import annotations

import dis
import html
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from ckpt_core._tree import Node, unflatten
from ckpt_core._words import counted, pairs, size, time_of

_MOST_SHOWN = 20  # a ``repr`` of a model of thousands of leaves names no more of them


def _shown(values: tuple[Any, ...]) -> str:
    """The values, or some of them and how many there are."""
    if len(values) <= _MOST_SHOWN:
        return repr(values)
    return f"({', '.join(map(repr, values[:3]))}, ... {len(values)} in all)"


@dataclass(frozen=True)
class RestoreReport:
    """What a restore did with each leaf; paths are ``item/path``, as in ``state/w``.

    Attributes:
        loaded: leaves read from the checkpoint.
        missing: leaves that the checkpoint does not have; the target's value was kept.
        unexpected: saved leaves that the target does not have.
        cast: leaves whose dtype was converted.
        resharded: leaves that now have another sharding than the saved one.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    resharded: tuple[str, ...] = ()

    def __repr__(self) -> str:
        shown = {name: _shown(getattr(self, name)) for name in self.__dataclass_fields__}
        return f"RestoreReport({', '.join(f'{name}={paths}' for name, paths in shown.items())})"

    def _repr_html_(self) -> str:
        return _of_report(self)


_UNPACKS = frozenset(dis.opmap[name] for name in ("UNPACK_SEQUENCE", "UNPACK_EX"))


def _is_unpacked(caller: FrameType | None) -> bool:
    """Whether the caller stands at ``a, b = restored``, by which it would get names; only its code shows it."""
    if caller is None:
        return False
    code = caller.f_code.co_code
    return 0 <= caller.f_lasti < len(code) and code[caller.f_lasti] in _UNPACKS


class Restored(Mapping[str, Any]):
    """The restored values, by item name; always true, even if empty.

    Models, optimizers, iterators and other live objects were set in place, and are here as themselves. Immutable values
    (pytrees, Optax states) are only here: read them, or training continues with the old ones. Items are also
    attributes: ``restored.state``.

    Attributes:
        step: step number; None outside of a Checkpointer's directory.
        path: path or URL of the checkpoint.
        metadata: the user's metadata of the checkpoint.
        report: what was loaded, kept and converted.

    Example:
        >>> import ckpt_core as ckpt, numpy as np, tempfile
        >>> path = tempfile.mkdtemp() + "/checkpoint"
        >>> ckpt.save(path, {"w": np.ones(2)})
        >>> restored = ckpt.restore(path, {"w": np.zeros(2)})
        >>> restored["state"]["w"].tolist(), restored.report.loaded
        ([1.0, 1.0], ('state/w',))
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
        self.saved_items = saved_items  # in the checkpoint, restored or not
        self.read_items = set[str]()  # whose values were read from this object so far
        self.step, self.path = step, path
        self.metadata, self.report = metadata, report

    def __getitem__(self, item: str) -> Any:
        try:
            value = self._values[item]
        except KeyError:
            raise KeyError(self._lacks(item)) from None
        self.read_items.add(item)
        return value

    def __iter__(self) -> Iterator[str]:
        frame = inspect.currentframe()
        if frame is not None and _is_unpacked(frame.f_back):
            first = next(iter(self._values), "state")
            raise TypeError(
                f"a Restored gives the names of its items, {', '.join(self._values)}, and not their values: write "
                f"{first} = restored[{first!r}] for each of them, or take restored.values()"
            )
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, item: object) -> bool:
        return item in self._values  # does not count as reading the value

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, item: str) -> Any:
        if item.startswith("_") or item not in self._values:
            raise AttributeError(item if item.startswith("_") else self._lacks(item))
        return self[item]

    def _lacks(self, item: object) -> str:
        saved = ", ".join(sorted(self.saved_items))
        hint = f"; {saved} were saved"
        if item in self.saved_items:
            hint = f": pass {item}=... to the restore"
        return f"no item {item!r} was restored, but {', '.join(self._values)}{hint}"

    def __repr__(self) -> str:
        return f"Restored(step={self.step}, items={list(self._values)}, path={self.path!r})"

    def _repr_html_(self) -> str:
        step = "" if self.step is None else f"step {self.step} of "
        facts = [("items", ", ".join(self)), ("metadata", _as_json(self.metadata))]
        title = f"restored {step}<code>{_text(self.path)}</code>"
        return _block(title, facts, [_of_report(self.report)])


class RestoredStep(Restored):
    """What a Checkpointer restores: ``Restored``, whose ``step`` is a number."""

    step: int


@dataclass(frozen=True)
class LeafInfo:
    """One leaf of a checkpoint: path, type, sharding (JSON, or None) and uncompressed bytes."""

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    sharding: dict[str, Any] | None
    bytes: int


@dataclass(frozen=True)
class ItemInfo:
    """One item of a checkpoint.

    Attributes:
        name: its name.
        form: ``tree``, ``process`` (a state of each process), ``files`` or ``json``.
        leaves: of a tree.
        files: of ``files``, path -> size in bytes.
        root: the structure, from which ``tree`` is made.
    """

    name: str
    form: str
    leaves: tuple[LeafInfo, ...]
    files: Mapping[str, int] = field(default_factory=dict[str, int])
    root: Node | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        leaves, files = _shown(self.leaves), ""
        if self.files:
            files = f", files={dict(self.files)!r}"
        return f"ItemInfo(name={self.name!r}, form={self.form!r}, leaves={leaves}{files})"

    @property
    def tree(self) -> Any:
        """The saved pytree, with a ``LeafInfo`` in place of each leaf; None if it is no tree.

        Its containers are those that ``load`` without a target gives, None and empty ones included: a NamedTuple or
        dataclass of a class that this program has not imported becomes one of the same name or a dict. Made anew at
        each access, so it may be changed.
        """
        return None if self.root is None else unflatten(self.root, self.leaves)

    @property
    def bytes(self) -> int:
        """Uncompressed bytes of all leaves, or of all files."""
        return sum(leaf.bytes for leaf in self.leaves) + sum(self.files.values())


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint without its arrays; the result of ``inspect``.

    Attributes:
        path: absolute path or URL.
        items: by name.
        metadata: the user's metadata.
        metrics: metrics of the step.
        versions: versions of the libraries that wrote it.
        topology: process count, device count and platform of the run that wrote it.
        format_version: version of ckpt's record; None for directories that Orbax wrote, and for safetensors.
        created_unix_secs: time of the commit, in Unix seconds; None if unknown.
        durations: ``snapshot_secs``, for which the caller was blocked, and ``write_secs`` after that.
        run_metadata: metadata of the run, if the checkpoint is a step in its directory.
        files: relative path -> size in bytes, for all files in the record.
        layout: whose format it has: ``ckpt``, ``orbax`` or ``safetensors``.
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
    layout: str = "ckpt"

    def _repr_html_(self) -> str:
        counts = map(self.topology.get, ("process_count", "device_count", "platform"))
        facts = [
            ("saved", time_of(self.created_unix_secs)),
            ("written by", self.layout),
            ("metrics", pairs(self.metrics)),
            ("metadata", _as_json(self.metadata)),
            ("processes, devices", ", ".join(str(one) for one in counts if one is not None)),
        ]
        total = sum(item.bytes for item in self.items.values())
        title = f"checkpoint <code>{_text(self.path)}</code>, {size(total)}"
        return _block(title, facts, map(_of_item, self.items.values()))


@dataclass(frozen=True)
class Problem:
    """One defect of a checkpoint: the file, what is wrong, and the leaf if known."""

    file: str
    what: str
    leaf: str | None = None

    def __str__(self) -> str:
        return f"{self.file}{f' ({self.leaf})' if self.leaf else ''}: {self.what}"


@dataclass(frozen=True)
class VerifyReport:
    """The result of ``verify``: whether every byte of a checkpoint is as it was saved.

    Attributes:
        ok: True if checksums exist and no problem was found.
        problems: all defects.
        checked_bytes: total size of the checked files.
        others: files that somebody else has put into the directory; no load reads them, so they are no problem.
        has_checksums: False of what Orbax wrote and of safetensors: then it is not ``ok``, and ``problems`` says why.
    """

    ok: bool
    problems: tuple[Problem, ...]
    checked_bytes: int
    others: tuple[str, ...] = ()
    has_checksums: bool = True


_MOST_ROWS = 200
_MOST_TEXT = 500
_MOST_STEPS = 40


def _of_report(report: RestoreReport) -> str:
    """What a restore did with the leaves: a line for each kind, whose paths are folded up."""
    lists = [
        ("loaded", report.loaded),
        ("missing, kept as they were", report.missing),
        ("saved, not wanted", report.unexpected),
        ("of another dtype, converted", report.cast),
        ("with another sharding now", report.resharded),
    ]
    tables = ((what, [(path,) for path in paths]) for what, paths in lists if paths)
    lines = (_folded(f"{len(rows)} {what}", _table(("leaf",), rows)) for what, rows in tables)
    return "".join(lines) or "<div>no leaves</div>"


def html_of_directory(directory: str, state: str, steps: Sequence[int]) -> str:
    """A directory of steps: how many, and the newest."""
    newest = ", ".join(map(str, steps[-_MOST_STEPS:]))
    before = "... " if len(steps) > _MOST_STEPS else ""
    facts = [("steps", f"{len(steps)}: {before}{newest}" if steps else "none"), ("state", state)]
    return _block(f"checkpoints in <code>{_text(directory)}</code>", facts)


def _of_item(item: ItemInfo) -> str:
    """The leaves of an item, or its files, folded up."""
    head, count = ("file", "size"), counted(len(item.files), "file")
    rows = [(path, size(size_bytes)) for path, size_bytes in item.files.items()]
    if not item.files:
        head = ("leaf", "dtype", "shape", "size")
        count = counted(len(item.leaves), "leaf", "leaves")
        leaves = item.leaves
        rows = [(one.path, one.dtype, str(list(one.shape)), size(one.bytes)) for one in leaves]
    title = f"{item.name or '(a bare tree)'}: {item.form}, {count}, {size(item.bytes)}"
    return _folded(title, _table(head, rows))


def _block(title: str, facts: Iterable[tuple[str, str]], parts: Iterable[str] = ()) -> str:
    """A title, a line for each fact that is known, and parts; the title and the parts are HTML."""
    known = (f"{_text(name)}: {_text(value)}" for name, value in facts if value)
    lines = (f"<div>{line}</div>" for line in (f"<b>{title}</b>", *known))
    return f"<div>{''.join([*lines, *parts])}</div>"


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{_text(title)}</summary>{body}</details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    tagged = [("th", head), *(("td", row) for row in rows[:_MOST_ROWS])]
    lines = ("".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in row) for tag, row in tagged)
    more = len(rows) - _MOST_ROWS
    rest = f"<div>and {more} more</div>" if more > 0 else ""
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>{rest}"


def _as_json(value: Any) -> str:
    return "" if value is None else json.dumps(value, default=repr)


def _text(value: str) -> str:
    shown = value if len(value) <= _MOST_TEXT else f"{value[:_MOST_TEXT]}..."
    return html.escape(shown)
