"""Saves into local directories: each process writes the shards it holds, all commit or none; then partners copy their parts.

The part of one process is of use for another if both hold the same regions of all distributed arrays, and equal values of
all else: numbers, text, numpy arrays, arrays bound to no device. The state of a data pipeline belongs to one process, but
it is small: those that hold the same form blocks of at most eight, on different hosts, and each writes the states of its
block.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_core import _processes
from ckpt_core._errors import CheckpointError
from ckpt_core._exchange import Key
from ckpt_core._format.part import Part, dump_runs, parse_runs, runs_of
from ckpt_core._operation import logger
from ckpt_core._options import KIB
from ckpt_core._run.tiers.folders import Folders
from ckpt_core._run.tiers.judge import CopyState, judge_copies
from ckpt_core._run.tiers.peers import Peers, Table, bring
from ckpt_core._save import Save, SaveJob
from ckpt_core._save.job import PreparedItem
from ckpt_core._storage import ArrayToWrite

MOST_STATE_BYTES = 64 * KIB
"""Maximum size of a process's pipeline states that are sent to the other processes of its block."""
BLOCK = 8
"""Maximum number of processes that get each other's pipeline states."""
_LOOK_SECS = 0.2
_STALLED_SECS = 10.0  # ``Copier.finish`` gives up if no partner is connected for this time

States = dict[str, dict[str, str]]
"""Of data pipelines: item -> file name -> content."""


def holding_of(items: Sequence[PreparedItem], index: int) -> tuple[str, States]:
    """What a process holds: a digest, equal where processes can replace each other, and the states of its pipelines."""
    digest = hashlib.sha256()
    states: States = {}
    for item in sorted(items, key=lambda item: item.name):
        digest.update(repr((item.name, item.record.form)).encode(errors="surrogatepass"))
        if item.record.form == "process":
            states[item.name] = {
                name: data.decode(errors="surrogateescape")
                for name, data in item.state_files.items()
            }
        else:
            for part in _values(item):
                digest.update(repr(part).encode(errors="surrogatepass"))
            if item.plan is not None:
                digest.update(item.plan.coverage.encode())
    size_bytes = sum(len(text) for files in states.values() for text in files.values())
    if size_bytes > MOST_STATE_BYTES:  # too large to be sent: they belong to it alone
        states = {}
        digest.update(f"process {index}".encode())
    return base64.b64encode(digest.digest()[:16]).decode().rstrip("="), states


def _values(item: PreparedItem) -> list[Any]:
    """What distinguishes an item here from the same item of another process, apart from regions."""
    found: list[Any] = [sorted(item.texts.items())]
    found += [
        (name, hashlib.sha256(data).hexdigest()) for name, data in sorted(item.state_files.items())
    ]
    found += [(source.name, source.size_bytes) for source in item.sources]
    if item.plan is not None:
        one_per_process = item.plan.one_per_process
        found += [(a.name, _digest(a)) for a in item.arrays if a.name in one_per_process]
    return found


def _digest(array: ArrayToWrite) -> str:
    # not a checksum of 32 bits: values taken for equal by chance would be restored on another process
    found = hashlib.sha256()
    for _, values in array.pieces:
        found.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def groups_of(digests: Sequence[str], with_states: bool) -> list[list[int]]:
    """On process 0: the groups of processes that hold the same; of those that send each other states, blocks."""
    same: dict[str, list[int]] = {}
    for index, digest in enumerate(digests):
        same.setdefault(digest, []).append(index)
    if not with_states:
        return [*same.values()]
    strides = ((some, -(-len(some) // BLOCK)) for some in same.values())
    return [some[first::stride] for some, stride in strides for first in range(stride)]


def combine_offers(offers: Sequence[Sequence[Any]], groups: Table, partners: bool) -> list[Any]:
    """On process 0: the answer to what all offered (token, digest, whether it sends states, and the report for
    ``judge_copies``): the token that all have, where each finds its group, and what ``judge_copies`` says.
    """
    rows, digests = [""] * len(offers), [digest for _, digest, *_ in offers]
    for group in groups_of(digests, any(sends for _, _, sends, _ in offers)):
        text = dump_runs(runs_of(group))
        for index in group:
            rows[index] = text
    copies = judge_copies([copied for *_, copied in offers]) if partners else (False, False)
    return [offers[0][0], groups.publish(rows), *copies]


class LocalSave(Save):
    """One save into each process's own directory: all agree on what is saved, that it is durable, and that it is committed."""

    def __init__(
        self,
        job: SaveJob,
        folders: Folders,
        peers: Peers,
        copier: Copier,
        groups: Table,  # which processes hold the same; most saves have that of the save before
    ) -> None:
        super().__init__(job, call="save locally")
        self._folders, self._lease = folders, folders.lease
        self._peers = peers
        self._copier = copier
        self._groups = groups
        self.copies = False  # whether the partners copy the step now, as all agreed
        self.protected: tuple[int, str] | None = None  # that the partners have whole copies of
        self.may_have_replaced = False  # a process may have put the step in an older one's place

    def write_part(self) -> str:
        self._lease.claim()
        self.begin()
        self.write_own()
        self.make_durable()
        self._lease.check()
        return ""

    def commit(self) -> None:
        self.may_have_replaced = True
        self.attempt.commit()
        # before the last agreement: live processes still hold their claims
        self._folders.discard_leftovers(of_others=False)

    def start(self) -> None:
        """All processes agree on token, groups and copies, before anything is written."""
        if self.job.processes.count == 1:
            return
        job, copied, states = self.job, self._copier.report, States()
        index, processes = job.processes.index, job.processes

        def states_of(process: int) -> str:  # the key at the coordination service
            return f"{self._peers.folder}/{process}/states"

        def offer() -> list[Any]:  # once the arrays are on the host
            digest, held = holding_of(self.items, index)
            states.update(held)
            if states:
                processes.put(states_of(index), json.dumps(states))
            return [self.token, digest, bool(states), copied]

        settings = {
            "the step": job.step,
            "Options(local_max_to_keep=)": job.options.local_max_to_keep,
        }
        self.token, groups, self.copies, protected = self.agree(
            settings, offer, lambda offers: combine_offers(offers, self._groups, self._peers.copies)
        )
        self.protected = copied[1:] if protected else None
        self.part = part = Part(index, processes.count, parse_runs(self._groups.row(groups)))
        if states:
            group = (n for first, last in part.serves for n in range(first, last + 1))
            texts = [processes.get(states_of(process)) for process in group if process != index]
            if None in texts:
                raise CheckpointError(
                    "states of data pipelines are gone from the coordination service"
                )
            received = [json.loads(text or "") for text in texts]
            for at, item in enumerate(self.items):
                others = {
                    name: text.encode(errors="surrogateescape")
                    for one in received
                    for name, text in one.get(item.name, {}).items()
                    if name not in item.state_files
                }
                self.items[at] = replace(item, others=others)


class Copier:
    """Fetches the parts of the processes that have this one as partner, one step at a time; others can fetch them here."""

    def __init__(self, peers: Peers, folders: Folders) -> None:
        self._peers = peers
        self._folders = folders
        self._state: CopyState = "idle"
        self._now: tuple[int, str] = (-1, "")
        # of each source the tokens of the last steps of which copies ended: it must not miss one for the next
        self._ended = {source: collections.deque[str](maxlen=4) for source in peers.sources}
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def report(self) -> tuple[CopyState, int, str]:
        """What ``judge_copies`` gets of this process: the state, and of which step and token."""
        return (self._state, *self._now)

    def copy(self, step: int, token: str) -> None:
        """Begins to copy a committed step; ends copying another."""
        self._cancelled.set()
        self._now, self._state = (step, token), "busy"
        self._cancelled = cancelled = threading.Event()
        try:
            work, given = self._work, (step, token, cancelled)
            self._thread = threading.Thread(None, work, "ckpt-partner", given, daemon=True)
            self._thread.start()
        except RuntimeError:  # the interpreter is about to end
            self._thread, self._state = None, "idle"

    def _work(self, step: int, token: str, cancelled: threading.Event) -> None:
        done = True
        for source in self._peers.sources:
            try:
                self._copy(Key(step, token, source), cancelled)
            except Exception as error:
                done = False
                if not cancelled.is_set():
                    text = "step %d: no copy of the part of process %d was made here: %s"
                    logger.warning(text, step, source, error)
        if not cancelled.is_set():  # else another step may be copied already
            self._state = "done" if done else "idle"

    def _copy(self, key: Key, cancelled: threading.Event) -> None:
        def may_go_on() -> None:
            if cancelled.is_set():
                raise CheckpointError(f"the copy of step {key.step} is not wanted any more")

        connection = self._peers.connect(key.writer)

        def pieces(position: int) -> Iterator[bytes]:
            for piece in connection.pieces(key, position):
                may_go_on()
                yield piece

        try:
            target = self._folders.copy_target(key.writer, key.step, may_go_on)
            if target.token != key.token:  # else it was copied before the last restart
                bring(key, pieces, target)
        finally:
            connection.close()
            ended = self._ended[key.writer]
            if key.token not in ended:
                ended.append(key.token)
            copied = f"{self._peers.folder}/{key.writer}/copied"  # or given up: it may end
            with contextlib.suppress(OSError, RuntimeError):  # of the service
                self._peers.processes.put(copied, " ".join(ended))

    def cancel(self) -> None:
        """Stops copying; returns when nothing more is committed, or after 20 s."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join(2 * _STALLED_SECS)
        self._state = "idle"

    def finish(self, timeout_secs: float) -> None:
        """Blocks until the copies of the last step are made, here and of this part, or time is up, or no partner is there."""
        server, moved = self._peers.server, time.monotonic()
        deadline = moved + timeout_secs
        while self._state in ("busy", "done") and (now := time.monotonic()) < deadline:
            fetched = server is None or self._is_copied()
            busy = self._state == "busy"
            moved = now if busy else max(moved, 0.0 if server is None else server.last_used)
            if not busy and (fetched or now - moved > _STALLED_SECS):
                return
            time.sleep(_LOOK_SECS)

    def _is_copied(self) -> bool:
        """Whether a partner has the step."""
        with contextlib.suppress(OSError, RuntimeError):  # of the service
            key = f"{self._peers.folder}/{self._peers.processes.index}/copied"
            told = self._peers.processes.get(key) or ""
            return _processes.coordination().client is None or self._now[1] in told.split(" ")
        return True

    def close(self, steps: Mapping[int, str], timeout_secs: float) -> None:
        """Finishes, in that time; also copies the newest of ``steps``, with tokens, if an earlier one was being copied."""
        if not self._peers.copies:
            return
        try:
            deadline = time.monotonic() + timeout_secs
            self.finish(timeout_secs)
            newest = max(steps.items(), default=self._now)
            if self._state in ("busy", "done") and newest != self._now:
                self.copy(*newest)
                self.finish(deadline - time.monotonic())
        except BaseException:  # an interrupt: its thread must not go on
            self._cancelled.set()
            raise
        self.cancel()
