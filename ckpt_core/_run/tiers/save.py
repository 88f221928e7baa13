"""Saves into local directories: each process writes the shards it holds, and all commit or none."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_core._errors import CheckpointError
from ckpt_core._format.part import Part
from ckpt_core._run.lease import Lease
from ckpt_core._run.tiers.coverage import (
    Holding,
    group_of,
    holding_of,
    serves_of,
    share,
    with_states,
)
from ckpt_core._run.tiers.judge import CopyState, judge_copies
from ckpt_core._run.tiers.tables import Table
from ckpt_core._save import RecordFields, SaveJob
from ckpt_core._save.protocol import Save

_COPY_STATES: tuple[CopyState, ...] = ("off", "idle", "busy", "done")


class NotReplaced(CheckpointError):
    """An overwrite has failed in the persistent directory, so the fast one keeps the old step, too."""


@dataclass(frozen=True)
class StepToSave:
    """The items of one step and the fields of its record; see ``Checkpointer.save``."""

    step: int
    items: Mapping[str, Any]
    fields: RecordFields
    token: str  # in all tiers the same
    parent: tuple[int, str] | None = None  # number and token of the step that it continues from
    # Of an overwrite: set when its persistent copy is committed, or has failed.
    decided: threading.Event = field(default_factory=threading.Event)
    # The save of each tier calls it after its last read of the snapshot.
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Saved:
    """What all processes agreed on in a save."""

    token: str
    part: Part | None = None  # of this process; None if it is the only one
    copies: bool = False  # whether the partners copy the step now
    # Step and token that the partners have whole copies of.
    protected: tuple[int, str] | None = None


class Tables(NamedTuple):
    """What process 0 publishes at a local save, for those that it concerns."""

    groups: Table  # which processes hold the same; most saves have that of the save before
    states: Table  # of the pipelines of each group of processes


def offer_of(token: str, held: Holding, copied: Sequence[Any]) -> list[Any]:
    """What one of several processes offers in agreement 1, in about 100 bytes, besides its pipeline states.
    ``copied`` is its report for ``judge_copies``.
    """
    state, *step = copied
    states = [held.states] if held.states != {} else []
    return [token, step, held.digest, _COPY_STATES.index(state), *states]


def combine_offers(offers: Sequence[Sequence[Any]], tables: Tables) -> dict[str, Any]:
    """On process 0: the answer to what all offered in agreement 1; the same to all, and short."""
    holdings: list[Holding] = []
    copied: list[Any] = []
    for _, step, digest, state, *states in offers:
        holdings.append(Holding(digest, states[0] if states else {}))
        copied.append([_COPY_STATES[state], *step])
    shares = share(holdings)
    tokens = [token for token, *_ in offers]
    answer = {
        "token": tokens[0] if len(set(tokens)) > 1 else "",  # which all have, if they have the same
        "groups": tables.groups.publish(shares.rows()),
        "states": shares.states,
        "blocks": tables.states.publish(
            [json.dumps(block) if block else "" for block in shares.blocks]
        ),
    }
    answer |= judge_copies(copied)
    answer["protected"] = answer["protected"] is not None  # then it is what each process has sent
    return {name: value for name, value in answer.items() if value}


class LocalSave(Save):
    """One save of all processes, each into its own directory: all commit, or none. The processes agree three times: that they save the
    same; that all have made their files durable and still own their directories; and that all have committed.
    """

    def __init__(
        self,
        job: SaveJob,
        lease: Lease,
        # after its commit, before the last agreement: live processes still hold their claims
        committed: Callable[[Saved], None],
        copied: Callable[[], Any],  # its report for ``judge_copies``
        tables: Tables,
        # called once the files are written; blocks until another tier has replaced its copy of the step, else raises NotReplaced
        replaced_first: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(job, call="save locally")
        self._lease = lease
        self._committed = committed
        self._copied = copied
        self._tables = tables
        self._replaced_first = replaced_first
        self.saved = Saved(self.token)  # what all agreed on
        self.may_have_replaced = False  # a process may have put the step in an older one's place

    def start(self) -> None:
        if self.job.processes.count > 1:
            self.saved = self._agree_to_start()
            self.token, self.part = self.saved.token, self.saved.part

    def write_part(self) -> str:
        self._lease.claim()
        self.begin()
        self.write_own()
        self.make_durable()
        if self._replaced_first is not None:
            self._replaced_first()
        self._lease.check()
        return ""

    def commit(self) -> None:
        self.may_have_replaced = True
        self.attempt.commit()
        self._committed(self.saved)

    def _agree_to_start(self) -> Saved:
        """What all processes agree on, before anything is written."""
        job, token, copied = self.job, self.token, list[Any]()

        def offer() -> list[Any]:
            copied[:] = self._copied()  # once the arrays are on the host
            return offer_of(token, holding_of(self.items), copied)

        settings = {
            "the step": job.step,
            "Options(local_max_to_keep=)": job.options.local_max_to_keep,
        }
        tables, index, count = self._tables, job.processes.index, job.processes.count
        answer = self.agree(settings, offer, lambda offers: combine_offers(offers, tables))
        states = answer.get("states", {})
        groups = functools.partial(tables.groups.row, answer["groups"])
        if blocks := answer.get("blocks"):
            states = json.loads(tables.states.row(blocks, group_of(index, count, groups)) or "{}")
        self.items = with_states(self.items, states)
        serves = serves_of(index, groups)
        part = Part(index, count, serves)
        token = answer.get("token", token)
        protected = (copied[1], copied[2]) if "protected" in answer else None
        return Saved(token, part, "copies" in answer, protected)
