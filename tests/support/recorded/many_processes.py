"""Counts what the coordination service would carry at openings and saves of thousands of processes.

Runs the code that process 0 decides with, on what each of so many processes would send it, and counts the bytes of values,
answers, tables and states. Nothing is sent. Sizes without those of keys and of the transport.
"""

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from ckpt_core._processes.wire import Said
from ckpt_core._run.tiers import judge as judging
from ckpt_core._run.tiers.peers import Table
from ckpt_core._run.tiers.save import BLOCK, combine_offers

HOST_PROCESSES = 4
TOKEN = "0123456789abcdef" * 2
DIGEST = TOKEN * 2
SHORT = DIGEST[:22]
OPENING, LOOKING, SAVING = "open local steps", "look at the local steps", "save locally"


class Traffic:
    """Bytes of one call of all processes."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self.to_zero = self.from_zero = self.of_one = self.at_once = self.rounds = 0
        self.keys: dict[str, str] = {}
        self.table = Table(SimpleNamespace(put=self.keys.__setitem__), "peers", "rows")

    def agree(self, values: Sequence[str], decide: Callable[[Table], str], call: str) -> None:
        """One agreement of what each process sends; each reads its row, where rows are published."""
        self.rounds += 1
        before = {**self.keys}
        answer = decide(self.table)
        sent = sum(len(Said(call, value).dump()) for value in values)
        rows = [text for name, text in self.keys.items() if before.get(name) != text]
        row = sum(map(len, rows)) // len(rows) if rows else 0
        each = len(Said(call, answer).dump()) + row
        self.to_zero += sent
        self.at_once = max(self.at_once, sent)
        self.of_one = max(self.of_one, each)
        self.from_zero += self._processes * each


def opening(processes: int, moved: bool) -> Traffic:
    """Addresses, partners and a first look at two steps; with ``moved``, each process is on another host than before."""
    traffic = Traffic(processes)
    machines = [f"{n // HOST_PROCESSES:010x}" for n in range(processes)]
    said = [json.dumps([one, one, "10.128.200.1", "host", "", DIGEST, ""]) for one in machines]
    partners: list[judging.ChosenPartner] = ["host"] * processes

    def introduce(table: Table) -> str:
        table.publish(
            [
                json.dumps(some)
                for some in judging.inverted(judging.all_partners(partners, machines))
            ]
        )
        return json.dumps([DIGEST, "10.128.0.1", "", [], True])

    traffic.agree(said, introduce, OPENING)

    def part(step: int, index: int) -> judging.Seen:
        at = (index + HOST_PROCESSES) % processes if moved else index
        return judging.Seen(step, TOKEN, (0, step), at, ((at, at),), not moved)

    seen = [judging.LocalParts([part(step, n) for step in (7, 8)], True) for n in range(processes)]
    texts = [one.dump() for one in seen]

    def look(table: Table) -> str:
        everyone = [judging.LocalParts.parse(text) for text in texts]
        return judging.judge(everyone, machines).dump(processes, table.publish)

    traffic.agree(texts, look, LOOKING)
    return traffic


def saving(processes: int, state_bytes: int) -> tuple[Traffic, Traffic]:
    """The first local save of a mesh (data, fsdp) of 64 columns, and one that follows; each process has a data pipeline of so
    many bytes of state.
    """
    columns = min(64, processes)

    def offers_of(step: int) -> list[Any]:
        offers: list[Any] = []
        for n in range(processes):
            digest = SHORT[:-4] + f"{n % columns:04x}"
            offers.append([TOKEN, digest, bool(state_bytes), ["done", 7, TOKEN]])
        return offers

    first, later = Traffic(processes), Traffic(processes)
    later.keys, later.table = first.keys, first.table  # of the save before
    state = len(json.dumps({"data": {"1000.json": "x" * state_bytes}})) if state_bytes else 0
    for step, traffic in enumerate((first, later)):
        offers = offers_of(step)
        texts = [_start(offer) for offer in offers]
        traffic.agree(texts, lambda table, offers=offers: _started(offers, table), SAVING)
        traffic.to_zero += processes * state
        traffic.of_one += (BLOCK - 1) * state
        traffic.from_zero += processes * (BLOCK - 1) * state
        for _ in ("written", "committed"):
            traffic.agree([""] * processes, lambda _: "", SAVING)
    return first, later


def persistent(processes: int) -> Traffic:
    """A save of all into one directory, of five files each: started, seen, written, committed."""
    traffic = Traffic(processes)
    offers: list[Any] = [["gs://bucket/run/8", TOKEN], *[None] * (processes - 1)]
    traffic.agree([_start(offer) for offer in offers], lambda _: json.dumps(offers[0]), "save")
    traffic.agree([""] * processes, lambda _: "", "save")
    file = ["state/ocdbt.process_0000/d/" + SHORT, 123456789, SHORT]
    traffic.agree([json.dumps([file] * 5, separators=(",", ":"))] * processes, lambda _: "", "save")
    traffic.agree([""] * processes, lambda _: "", "save")
    return traffic


def _start(offer: Any) -> str:
    return json.dumps([DIGEST[:24], 960, offer], separators=(",", ":"))


def _started(offers: list[Any], table: Table) -> str:
    return json.dumps({"offer": combine_offers(offers, table, True)}, separators=(",", ":"))
