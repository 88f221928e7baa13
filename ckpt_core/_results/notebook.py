"""How results show themselves in a notebook: small tables in HTML, in the notebook's own style. Pure."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_core._words import size, time_of

if TYPE_CHECKING:
    from ckpt_core._results.records import CheckpointInfo, ItemInfo, Restored, RestoreReport

_MOST_ROWS = 200
_MOST_TEXT = 500
_MOST_STEPS = 40


def of_checkpoint(info: CheckpointInfo) -> str:
    """A checkpoint: its facts, and each item with its leaves, folded up."""
    created = info.created_unix_secs
    facts = [
        ("saved", "" if created is None else time_of(created)),
        ("written by", info.layout),
        ("metrics", ", ".join(f"{name} {_number(value)}" for name, value in info.metrics.items())),
        ("metadata", _as_json(info.metadata)),
        ("processes, devices", _topology(info.topology)),
    ]
    total = sum(item.bytes for item in info.items.values())
    title = f"checkpoint <code>{_text(info.path)}</code>, {size(total)}"
    return _block(title, [_facts(facts), *(_item(item) for item in info.items.values())])


def of_restored(restored: Restored) -> str:
    """What a restore returned: items, and what became of the leaves."""
    step = "" if restored.step is None else f"step {restored.step} of "
    facts = [
        ("items", ", ".join(restored)),
        ("metadata", _as_json(restored.metadata)),
    ]
    title = f"restored {step}<code>{_text(restored.path)}</code>"
    return _block(title, [_facts(facts), of_report(restored.report)])


def of_report(report: RestoreReport) -> str:
    """What a restore did with the leaves: a line for each kind, whose paths are folded up."""
    lists = [
        ("loaded", report.loaded),
        ("missing, kept as they were", report.missing),
        ("saved, not wanted", report.unexpected),
        ("of another dtype, converted", report.cast),
        ("with another sharding now", report.resharded),
    ]
    lines = [
        _folded(f"{len(paths)} {what}", _table(("leaf",), [(path,) for path in paths]))
        for what, paths in lists
        if paths
    ]
    return "".join(lines) or "<div>no leaves</div>"


def of_directory(directory: str, state: str, steps: Sequence[int]) -> str:
    """A directory of steps: how many, and the newest."""
    newest = ", ".join(map(str, steps[-_MOST_STEPS:]))
    before = "... " if len(steps) > _MOST_STEPS else ""
    facts = [("steps", f"{len(steps)}: {before}{newest}" if steps else "none"), ("state", state)]
    return _block(f"checkpoints in <code>{_text(directory)}</code>", [_facts(facts)])


def _item(item: ItemInfo) -> str:
    name = _text(item.name) or "(a bare tree)"
    if item.files:
        rows = [(path, size(count)) for path, count in item.files.items()]
        count = f"{len(rows)} files"
        table = _table(("file", "size"), rows)
    else:
        leaves = [
            (leaf.path, leaf.dtype, str(list(leaf.shape)), size(leaf.bytes)) for leaf in item.leaves
        ]
        count = f"{len(leaves)} {'leaf' if len(leaves) == 1 else 'leaves'}"
        table = _table(("leaf", "dtype", "shape", "size"), leaves)
    return _folded(f"{name}: {item.form}, {count}, {size(item.bytes)}", table, escaped=True)


def _block(title: str, parts: Iterable[str]) -> str:
    return f"<div><div><b>{title}</b></div>{''.join(parts)}</div>"


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    lines = [f"{_text(name)}: {_text(value)}" for name, value in facts if value]
    return "".join(f"<div>{line}</div>" for line in lines)


def _folded(title: str, body: str, escaped: bool = False) -> str:
    shown = title if escaped else _text(title)
    return f"<details><summary>{shown}</summary>{body}</details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{_text(cell)}</th>" for cell in head) + "</tr>"]
    for row in rows[:_MOST_ROWS]:
        lines.append("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>")
    more = len(rows) - _MOST_ROWS
    rest = f"<div>and {more} more</div>" if more > 0 else ""
    return f"<table>{''.join(lines)}</table>{rest}"


def _topology(topology: dict[str, Any]) -> str:
    counts = [topology.get(name) for name in ("process_count", "device_count", "platform")]
    return ", ".join(str(one) for one in counts if one is not None)


def _as_json(value: Any) -> str:
    return "" if value is None else json.dumps(value, default=repr)


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _text(value: str) -> str:
    shown = value if len(value) <= _MOST_TEXT else f"{value[:_MOST_TEXT]}..."
    return html.escape(shown)
