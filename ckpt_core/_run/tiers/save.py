"""Saves into local directories: each process writes the shards it holds, and all commit or none."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ckpt_core._errors import CheckpointError
from ckpt_core._exchange import Key
from ckpt_core._format.part import Part, dump_runs, parse_runs, runs_of
from ckpt_core._run.tiers.copying import Copier
from ckpt_core._run.tiers.coverage import Holding, groups_of, holding_of, with_states
from ckpt_core._run.tiers.folders import Folders
from ckpt_core._run.tiers.judge import judge_copies
from ckpt_core._run.tiers.peers import Peers, Table
from ckpt_core._save import RecordFields, SaveJob
from ckpt_core._save.protocol import Save


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


def offer_of(token: str, held: Holding, copied: Sequence[Any]) -> list[Any]:
    """What one of several processes offers in agreement 1, in about 120 bytes. ``copied`` is its report for ``judge_copies``."""
    return [token, held.digest, held.sent, copied]


def combine_offers(offers: Sequence[Sequence[Any]], groups: Table) -> list[Any]:
    """On process 0: the answer to what all offered in agreement 1, the same to all: the token that all have, where each finds
    its group, and what ``judge_copies`` says.
    """
    rows = [""] * len(offers)
    for group in groups_of([(digest, sent) for _, digest, sent, _ in offers]):
        text = dump_runs(runs_of(group))
        for index in group:
            rows[index] = text
    return [offers[0][0], groups.publish(rows), *judge_copies([copied for *_, copied in offers])]


class LocalSave(Save):
    """One save of all processes, each into its own directory: all commit, or none. The processes agree three times: that they save the
    same; that all have made their files durable and still own their directories; and that all have committed.
    """

    def __init__(
        self,
        job: SaveJob,
        folders: Folders,
        peers: Peers,
        copier: Copier,
        groups: Table,  # which processes hold the same; most saves have that of the save before
        # called once the files are written; blocks until another tier has replaced its copy of the step, else raises NotReplaced
        replaced_first: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(job, call="save locally")
        self._folders, self._lease = folders, folders.lease
        self._peers = peers
        self._copier = copier
        self._groups = groups
        self._replaced_first = replaced_first
        self.copies = False  # whether the partners copy the step now, as all agreed
        self.protected: tuple[int, str] | None = None  # that the partners have whole copies of
        self.may_have_replaced = False  # a process may have put the step in an older one's place

    def start(self) -> None:
        if self.job.processes.count > 1:
            self._agree_to_start()

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
        if self.part is not None:  # before any process hears that all have committed
            key = Key(cast(int, self.job.step), self.token, self.part.writer)
            self._peers.offers.put(key, self.job.target)
        # before the last agreement: live processes still hold their claims
        self._folders.discard_leftovers(of_others=False)

    def is_replaced_elsewhere(self) -> bool:
        """After a failure: whether another tier has the new save of the step."""
        try:
            return self._replaced_first is not None and self._replaced_first() is None
        except NotReplaced:
            return False

    def _agree_to_start(self) -> None:
        """All processes agree on token, groups and copies, before anything is written."""
        job, copied, held = self.job, list[Any](), list[Holding]()
        index, processes = job.processes.index, job.processes

        def states_of(process: int) -> str:  # the key at the coordination service
            return f"{self._peers.folder}/{process}/states"

        def offer() -> list[Any]:  # once the arrays are on the host
            copied[:], held[:] = self._copier.report, [holding_of(self.items)]
            if held[0].states:
                processes.put(states_of(index), json.dumps(held[0].states))
            return offer_of(self.token, held[0], copied)

        settings = {
            "the step": job.step,
            "Options(local_max_to_keep=)": job.options.local_max_to_keep,
        }
        answer = self.agree(settings, offer, lambda offers: combine_offers(offers, self._groups))
        self.token, groups, self.copies, protected = answer
        self.protected = (copied[1], copied[2]) if protected else None
        self.part = part = Part(index, processes.count, parse_runs(self._groups.row(groups)))
        if held[0].states:
            group = (n for first, last in part.serves for n in range(first, last + 1))
            texts = [processes.get(states_of(process)) for process in group if process != index]
            if None in texts:
                raise CheckpointError(
                    "states of data pipelines are gone from the coordination service"
                )
            self.items = with_states(self.items, [json.loads(text or "") for text in texts])
