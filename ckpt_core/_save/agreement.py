"""Before anything is written, all processes of a save agree that they save the same.

Each process sends a digest of all that decides what is stored where. The digest of a tree is computed once
per plan and reused for later saves of the same pytree structure. If all digests are equal, one
agreement is enough. If not, up to three more follow: those that differ from process 0 send theirs whole, and where trees
differ, the first such process sends what it is about to save, so that the error can name the first leaf that differs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpt_core._errors import CheckpointError, raised_by_another
from ckpt_core._processes import Processes
from ckpt_core._save.job import PreparedItem
from ckpt_core._save.plan_digest import (
    Fact,
    Layout,
    block_size,
    difference,
    digest_of,
    dump_block,
    dump_digests,
    first_block,
    layout_of,
    parse_block,
)

_NAMED = 5
"""A message lists at most this many of the processes that differ."""
_NOTHING = Layout("", 0)
_KINDS = {
    "tree": "a tree",
    "process": "one state of each process",
    "files": "files",
    "json": "plain values",
}


class Offer(NamedTuple):
    """What one process sends along; the answer to all is made of these."""

    common: Any  # the same on most processes
    own: Any  # most saves take that of process 0: path and token of the attempt


NO_OFFER = Offer(None, None)


def of_process_0(offers: Sequence[Offer]) -> Any:
    """The answer that process 0 makes of its own part alone."""
    return offers[0].own


@dataclass(frozen=True)
class Start:
    """What one process sends to process 0 before it saves."""

    settings: Mapping[str, Any]  # equal on all processes; by the name that a message uses
    layout: Layout = _NOTHING
    offer: Offer = NO_OFFER
    refusal: str = ""  # why this process cannot save; empty if it can

    def dump(self) -> tuple[str, str]:
        """What is the same on most processes, and what is not."""
        common = json.dumps([dict(self.settings), self.layout, self.offer.common, self.refusal])
        return common, json.dumps(self.offer.own, separators=(",", ":"))

    @staticmethod
    def parse(said: tuple[str, str]) -> Start:
        """What ``dump`` gave."""
        settings, layout, common, refusal = json.loads(said[0])
        return Start(settings, Layout(*layout), Offer(common, json.loads(said[1])), refusal)


def agree_to_save(
    processes: Processes,
    tag: str,
    call: str,
    target: str,
    items: Sequence[PreparedItem],
    settings: Mapping[str, Any],
    offer: Offer,
    refusal: Exception | None,
    timeout_secs: float,
    combine: Callable[[list[Offer]], Any] = of_process_0,
) -> Any:
    """The answer that ``combine`` makes of all offers on process 0, after all processes have agreed that they
    save the same. Every process must call it, and it blocks until all have. A ``refusal``, which stopped
    preparation here, is raised after the others know of it. If another process refuses, an error of its class
    is raised here; if it saves something else, CheckpointError names the first leaf or setting that differs.
    """
    layout = _NOTHING
    try:
        if refusal is None and processes.count > 1:  # a single process has nothing to compare
            layout = items_layout(items)
    except Exception as error:
        refusal = error  # the other processes wait for a message from this one: raise after sending
    said = "" if refusal is None else f"{type(refusal).__name__}: {refusal}"
    mine = Start(settings, layout, offer, said)
    judge = functools.partial(judge_start, combine=combine)
    answer = json.loads(processes.gather_alike(tag, *mine.dump(), judge, timeout_secs, call))
    if refusal is not None:
        raise refusal
    if "error" in answer:
        raise raised_by_another(answer.get("kind", ""), f"{target}: {answer['error']}")
    if "differing" in answer:
        text = _how_they_differ(
            processes, tag, items, answer["differing"], answer["size"], timeout_secs
        )
        raise CheckpointError(f"{target}: {text}")
    return answer.get("offer")


def judge_start(
    sent: Sequence[tuple[str, str]], combine: Callable[[list[Offer]], Any] = of_process_0
) -> str:
    """The answer to all processes as JSON, from what they said (``Start``); called on process 0. It holds one thing alone:
    the offer; an error, with the name of its class if a process refuses; or the processes with another layout than process 0.
    """
    everyone = [Start.parse(one) for one in sent]
    first = everyone[0]
    for index, one in enumerate(everyone):
        if one.refusal:
            kind = one.refusal.partition(": ")[0]
            error = f"process {index} cannot save: {one.refusal}"
            return json.dumps({"error": error, "kind": kind})
    for name in dict.fromkeys(name for one in everyone for name in one.settings):
        values = [one.settings.get(name) for one in everyone]
        other = _differing(values)
        if other:
            error = (
                f"{name} on processes {other[:_NAMED]} differs from that on process 0 "
                f"({values[other[0]]!r}, and {values[0]!r}): all processes must save the same"
            )
            return json.dumps({"error": error})
    layouts = [one.layout for one in everyone]
    if differing := _differing(layouts):
        size = block_size(first.layout, layouts[differing[0]])
        return json.dumps({"differing": differing[:_NAMED], "size": size})
    return json.dumps({"offer": combine([one.offer for one in everyone])}, separators=(",", ":"))


def _differing(values: Sequence[Any]) -> list[int]:
    return [index for index, value in enumerate(values) if value != values[0]]


def _how_they_differ(
    processes: Processes,
    tag: str,
    items: Sequence[PreparedItem],
    differing: Sequence[int],
    size: int,
    timeout_secs: float,
) -> str:
    """The message about the first leaf that differs between process 0 and ``differing[0]``; every process calls it. ``differing[0]``
    first sends 256 digests of blocks of leaves, then the leaves of the first block that differs: of 100,000 leaves that is about 400.
    """
    shows = processes.index == differing[0]
    all_facts = list(items_facts(items)) if shows or processes.index == 0 else []
    digests = dump_digests(all_facts, size)

    def judge_blocks(texts: list[str]) -> str:
        return str(first_block(digests, texts[differing[0]]))

    def judge_facts(texts: list[str]) -> str:
        theirs = parse_block(texts[differing[0]])
        found = difference(all_facts, size, block, theirs, differing[0])
        return (
            f"{found.what} on processes {list(differing[:_NAMED])} differs from that on process 0: "
            f"{found.how}: all processes must {found.must}"
        )

    mine = digests if shows else ""
    block = int(processes.gather_decide(f"{tag}/block", mine, judge_blocks, timeout_secs))
    mine = dump_block(all_facts, size, block) if shows else ""
    return processes.gather_decide(f"{tag}/facts", mine, judge_facts, timeout_secs)


def items_layout(items: Sequence[PreparedItem]) -> Layout:
    """Digest of all items; equal on all processes that save the same."""
    ordered = sorted(items, key=lambda item: item.name)
    layouts = [_NOTHING if item.plan is None else item.plan.layout for item in ordered]
    pairs = zip(ordered, layouts, strict=True)
    whole = layout_of(
        _head(item)._replace(chunk=layout.digest, value=digest_of(item.values))
        for item, layout in pairs
    )
    return Layout(whole.digest, len(items) + sum(layout.length for layout in layouts))


def items_facts(items: Sequence[PreparedItem]) -> Iterator[Fact]:
    """All facts that must be equal on all processes, item by item."""
    for item in sorted(items, key=lambda item: item.name):
        yield _head(item)
        for fact in () if item.plan is None else item.plan.facts(item.values):
            path = fact.path if len(items) == 1 else f"{item.name}/{fact.path}"
            yield fact._replace(path=path)


def _head(item: PreparedItem) -> Fact:
    record = item.record
    kind = _KINDS[record.form]
    value = item.values.get("", "")
    return Fact(f"item {item.name}", f"{kind}, of {record.process_count} processes", value=value)
