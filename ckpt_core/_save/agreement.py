"""Before anything is written, all processes of a save agree that they save the same.

Each process sends a digest of all that decides what is stored where. The digest of a tree is computed once
per plan and reused for later saves of the same pytree structure. If all digests are equal, one agreement is enough. If not,
the first process that differs from process 0 sends what it is about to save, and the error names the first setting or leaf
that differs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ckpt_core._errors import CheckpointError
from ckpt_core._processes import Round
from ckpt_core._save.job import PreparedItem
from ckpt_core._save.plan_digest import (
    SETTING,
    Fact,
    difference,
    digest_of,
    dump_facts,
    layout_of,
    parse_facts,
)

_NAMED = 5
"""A message lists at most this many of the processes that differ."""
_KINDS = {
    "tree": "a tree",
    "process": "one state of each process",
    "files": "files",
    "json": "plain values",
}


def of_process_0(offers: Sequence[Any]) -> Any:
    """The answer that process 0 makes of its own offer alone."""
    return offers[0]


def agree_to_save(
    together: Round,
    items: Sequence[PreparedItem],
    settings: Mapping[str, Any],
    offer: Any,
    refusal: Exception | None,
    combine: Callable[[list[Any]], Any],
) -> Any:
    """The answer that ``combine`` makes of all offers on process 0, after all processes have agreed that they save the same,
    with the same ``settings``, by the names that a message uses. Each of several processes must call it, and it blocks until all
    have. A ``refusal``, which stopped preparation here, is raised after the others know of it, and they raise an error of its
    class. If another process saves something else, CheckpointError names the first leaf or setting that differs.
    """
    text = ""
    try:
        if refusal is None:
            layout = items_layout(items, settings)
            text = json.dumps([layout, offer], separators=(",", ":"))
    except Exception as error:
        refusal = error  # the other processes wait for a message from this one: raise after sending

    def judge(texts: list[str]) -> str:
        layouts, offers = zip(*map(json.loads, texts), strict=True)
        if differing := [n for n, layout in enumerate(layouts) if layout != layouts[0]]:
            return json.dumps({"differing": differing[:_NAMED]})
        return json.dumps({"offer": combine([*offers])}, separators=(",", ":"))

    answer = json.loads(together.decide(text, judge, error=refusal))
    if "differing" in answer:
        text = _how_they_differ(together, items, settings, answer["differing"])
        raise CheckpointError(f"{together.where}: {text}")
    return answer["offer"]


def _how_they_differ(
    together: Round,
    items: Sequence[PreparedItem],
    settings: Mapping[str, Any],
    differing: Sequence[int],
) -> str:
    """The message about the first leaf that differs between process 0 and ``differing[0]``; every process calls it."""
    index, shows = together.processes.index, together.processes.index == differing[0]
    facts = list(items_facts(items, settings)) if shows or index == 0 else []

    def judge(texts: list[str]) -> str:
        found = difference(facts, parse_facts(texts[differing[0]]), differing[0])
        return (
            f"{found.what} on processes {list(differing)} differs from that on process 0: "
            f"{found.how}: all processes must {found.must}"
        )

    return together.decide(dump_facts(facts) if shows else "", judge)


def items_layout(items: Sequence[PreparedItem], settings: Mapping[str, Any]) -> str:
    """Digest of all items; equal on all processes that save the same."""
    ordered = sorted(items, key=lambda item: item.name)
    layouts = ["" if item.plan is None else item.plan.layout for item in ordered]
    heads = [
        _head(item)._replace(chunk=layout, value=digest_of(item.values))
        for item, layout in zip(ordered, layouts, strict=True)
    ]
    return layout_of([*_settings(settings), *heads])[:24]


def items_facts(items: Sequence[PreparedItem], settings: Mapping[str, Any]) -> Iterator[Fact]:
    """All facts that must be equal on all processes, the settings first, then item by item."""
    yield from _settings(settings)
    for item in sorted(items, key=lambda item: item.name):
        yield _head(item)
        for fact in () if item.plan is None else item.plan.facts(item.values):
            path = fact.path if len(items) == 1 else f"{item.name}/{fact.path}"
            yield fact._replace(path=path)


def _settings(settings: Mapping[str, Any]) -> Iterator[Fact]:
    return (Fact(name, SETTING, value=repr(value)) for name, value in settings.items())


def _head(item: PreparedItem) -> Fact:
    record = item.record
    kind = _KINDS[record.form]
    value = item.values.get("", "")
    return Fact(f"item {item.name}", f"{kind}, of {record.process_count} processes", value=value)
