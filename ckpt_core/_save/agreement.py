"""Agreeing, before anything is written, that all processes are about to save the same.

One agreement where they are: each sends a digest of what decides what lies where, which is worked out
once for trees that are alike. Only where digests differ two more follow, in which the first process
that differs shows what it has, so that the error can name it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_core._errors import CheckpointError
from ckpt_core._processes import Processes
from ckpt_core._save.job import SaveJob
from ckpt_core._save.plan_digest import (
    Fact,
    Layout,
    block_size,
    difference,
    dump_block,
    dump_digests,
    first_block,
    layout_of,
    parse_block,
)
from ckpt_core._save.prepare import PreparedItem

_NAMED = 5
"""So many of the processes that differ are named."""
_NOTHING = Layout("", 0)


@dataclass(frozen=True)
class Start:
    """What one process says before it saves.

    Attributes:
        settings: what all must have alike, by the name that a message uses.
        layout: of its items.
        offer: what process 0 gives to all, such as the token of the attempt.
        refusal: why this process cannot save, or empty.
    """

    settings: Mapping[str, Any]
    layout: Layout = _NOTHING
    offer: Any = None
    refusal: str = ""

    def dump(self) -> str:
        return json.dumps([dict(self.settings), self.layout, self.offer, self.refusal])

    @staticmethod
    def parse(text: str) -> Start:
        settings, layout, offer, refusal = json.loads(text)
        return Start(settings, Layout(*layout), offer, refusal)


def agree_to_save(
    processes: Processes,
    tag: str,
    call: str,
    target: str,
    items: Sequence[PreparedItem],
    settings: Mapping[str, Any],
    offer: Any,
    refusal: Exception | None,
    timeout_secs: float,
) -> Any:
    """What process 0 offers, once all processes are about to save the same.

    Args:
        tag, call, timeout_secs: as for ``Processes.gather_decide``; the tag is that of the round.
        target: what is saved to, for messages.
        items: what is saved.
        settings: what all must have alike, by the name that a message uses.
        offer: of process 0; that of the others does not count.
        refusal: why this process cannot save; it is told to the others, and raised.

    Raises:
        CheckpointError: another process cannot save, or saves something else; the first leaf or
            setting that differs is named, with both sides.
    """
    layout = _NOTHING
    try:
        if refusal is None and processes.count > 1:  # alone nobody is there to differ
            layout = items_layout(items)
    except Exception as error:
        refusal = error  # the others wait to hear from this process
    said = "" if refusal is None else f"{type(refusal).__name__}: {refusal}"
    mine = Start(settings, layout, offer, said)
    answer = json.loads(processes.gather_decide(tag, mine.dump(), judge_start, timeout_secs, call))
    if refusal is not None:
        raise refusal
    if answer["error"]:
        raise CheckpointError(f"{target}: {answer['error']}")
    if answer["differing"]:
        text = _how_they_differ(
            processes, tag, items, answer["differing"], answer["size"], timeout_secs
        )
        raise CheckpointError(f"{target}: {text}")
    return answer["offer"]


def done_by_all(
    job: SaveJob, writers: Processes, tag: str, work: Callable[[], Any], what: str, **telling: Any
) -> None:
    """Does the work and agrees that all did it; a failure of one is a failure of all.

    Args:
        job: of the save.
        writers: who works on it together.
        tag: of this agreement.
        work: of this process.
        what: every process does, for messages.
        **telling: ``tell`` and ``hear`` of ``Processes.run_on_all``.
    """

    def failed(index: int, text: str) -> CheckpointError:
        return CheckpointError(f"{job.target}: process {index} failed to {what}: {text}")

    writers.run_on_all(tag, work, job.options.timeout_secs, failed, **telling)


def judge_start(texts: Sequence[str]) -> str:
    """What process 0 answers, as JSON: its offer, an error, or the processes whose layouts differ."""
    everyone = [Start.parse(text) for text in texts]
    first = everyone[0]
    answer: dict[str, Any] = {"offer": first.offer, "error": "", "differing": [], "size": 0}
    for index, one in enumerate(everyone):
        if one.refusal:
            return json.dumps(answer | {"error": f"process {index} cannot save: {one.refusal}"})
    for name in dict.fromkeys(name for one in everyone for name in one.settings):
        values = [one.settings.get(name) for one in everyone]
        other = _differing(values)
        if other:
            error = (
                f"{name} on processes {other[:_NAMED]} differs from that on process 0 "
                f"({values[other[0]]!r}, and {values[0]!r}): all processes must save alike"
            )
            return json.dumps(answer | {"error": error})
    layouts = [one.layout for one in everyone]
    answer["differing"] = _differing(layouts)
    if answer["differing"]:
        answer["size"] = block_size(first.layout, layouts[answer["differing"][0]])
    return json.dumps(answer)


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
    """The first leaf that differs between process 0 and the first that differs from it, and how.

    Of a hundred thousand leaves that one sends a few hundred digests, and then a few hundred leaves.
    """
    shows = processes.index == differing[0]
    told = list(items_facts(items)) if shows or processes.index == 0 else []
    digests = dump_digests(told, size)

    def judge_blocks(texts: list[str]) -> str:
        return str(first_block(digests, texts[differing[0]]))

    def judge_facts(texts: list[str]) -> str:
        theirs = parse_block(texts[differing[0]])
        found = difference(told, size, block, theirs, differing[0])
        return (
            f"{found.what} on processes {list(differing[:_NAMED])} differs from that on process 0: "
            f"{found.how}: all processes must {found.must}"
        )

    mine = digests if shows else ""
    block = int(processes.gather_decide(f"{tag}/block", mine, judge_blocks, timeout_secs))
    mine = dump_block(told, size, block) if shows else ""
    return processes.gather_decide(f"{tag}/facts", mine, judge_facts, timeout_secs)


def items_layout(items: Sequence[PreparedItem]) -> Layout:
    """Equal on all processes that save the same; of trees that were saved before it is known."""
    ordered = sorted(items, key=lambda item: item.name)
    layouts = [_NOTHING if item.plan is None else item.plan.layout for item in ordered]
    pairs = zip(ordered, layouts, strict=True)
    whole = layout_of(_head(item)._replace(chunk=layout.digest) for item, layout in pairs)
    return Layout(whole.digest, len(items) + sum(layout.length for layout in layouts))


def items_facts(items: Sequence[PreparedItem]) -> Iterator[Fact]:
    """All that must be alike, item by item."""
    for item in sorted(items, key=lambda item: item.name):
        yield _head(item)
        for fact in () if item.plan is None else item.plan.facts():
            path = fact.path if len(items) == 1 else f"{item.name}/{fact.path}"
            yield fact._replace(path=path)


def _head(item: PreparedItem) -> Fact:
    record = item.record
    kind = "one state of each process" if record.form == "process" else "a tree"
    return Fact(f"item {item.name}", f"{kind}, of {record.process_count} processes")
