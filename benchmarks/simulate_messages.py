"""Counts what the coordination service carries at openings, saves and loads, with 64 to 16,384 processes.

    python benchmarks/simulate_messages.py --plot docs/images/messages.svg

Runs the code that process 0 decides with, on what each of so many processes would send it, and counts the bytes of values,
answers and tables. Nothing is sent; benchmarks/results.md shows the table. Sizes without those of keys and of the transport.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from shared import header, lines_of, options, plot, row  # isort: skip

from ckpt_core._processes import Table
from ckpt_core._processes.messages import digest
from ckpt_core._run.tiers.judge import (
    ChosenPartner,
    LocalParts,
    Seen,
    all_partners,
    inverted,
    judge,
)
from ckpt_core._run.tiers.save import Tables, combine_offers, offer_of
from ckpt_core._save.agreement import NO_OFFER, Offer, Start, judge_start
from ckpt_core._save.coverage import Holding
from ckpt_core._save.plan_digest import Layout

HOST_PROCESSES = 4
TOKEN = "0123456789abcdef" * 2
DIGEST = TOKEN * 2
SHORT = DIGEST[:22]
# The name of the call, which the values and the answer of the first agreement of a call repeat, and two letters.
OPENING_BYTES, LOOKING_BYTES, SAVING_BYTES = (
    2 + len(call) for call in ("open local steps", "look at the local steps", "save locally")
)


class Keys:
    """What is put, and what all processes together read of it."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def put(self, name: str, text: str) -> None:
        self.texts[name] = text

    def get(self, name: str) -> str | None:
        return self.texts.get(name)

    def drop(self, name: str) -> None:
        pass


class Traffic:
    """Bytes of one call of all processes."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self.to_zero = self.from_zero = self.of_one = self.at_once = self.rounds = 0
        self.secs = 0.0
        self.keys = Keys()
        self.tables = Tables(Table(self.keys, "groups"), Table(self.keys, "states"))

    def agree(
        self, values: Sequence[str], decide: Callable[[Tables], str], head_bytes: int = 2
    ) -> None:
        """One agreement; each process reads one block of the rows that are published.

        Args:
            values: what each process sends.
            head_bytes: of the name of the call, which stands before each value and the answer.
        """
        self.rounds += 1
        began = time.process_time()
        before = len(self.keys.texts)
        answer = decide(self.tables)
        self.secs += time.process_time() - began
        sent = sum(map(len, values)) + head_bytes * len(values)
        blocks = list(self.keys.texts.values())[before:]
        block = sum(map(len, blocks)) // len(blocks) if blocks else 0
        each = len(answer) + head_bytes + block
        self.to_zero += sent
        self.at_once = max(self.at_once, sent)
        self.of_one = max(self.of_one, each)
        self.from_zero += self._processes * each

    def agree_digested(
        self,
        sent: Sequence[tuple[str, str]],
        decide: Callable[[Tables], str],
        head_bytes: int = 2,
    ) -> None:
        """As ``Processes.gather_alike``: what is the same on all is sent as a digest, or in a second agreement."""
        mine = digest(sent[0][0])
        digests = [digest(common) for common, _ in sent]
        first = [one + own for one, (_, own) in zip(digests, sent, strict=True)]
        if all(one == mine for one in digests):
            self.agree(first, lambda tables: "=" + decide(tables), head_bytes)
            return
        self.agree(first, lambda _: f"?{mine}", head_bytes)
        whole = [
            "" if one == mine else f"!{common}"
            for one, (common, _) in zip(digests, sent, strict=True)
        ]
        self.agree(whole, decide)

    def print(self, what: str) -> None:
        """As a row of the table."""
        mib = (f"{count / 1024**2:.2f}" for count in (self.to_zero, self.from_zero))
        most = f"{self.at_once / 1024**2:.2f}"
        row(self._processes, what, self.rounds, *mib, self.of_one, most, f"{self.secs:.2f}")


def opening(processes: int, moved: bool) -> Traffic:
    """Addresses, partners and a first look at two steps; with ``moved``, each process is on another host than before."""
    traffic = Traffic(processes)
    machines = [f"{n // HOST_PROCESSES:010x}" for n in range(processes)]
    network = [f"{machine} {machine} 10.128.200.1" for machine in machines]
    traffic.agree(
        network,
        lambda _: json.dumps([DIGEST, True, False, [[machines[0], "10.128.0.1"]] * 2]),
        OPENING_BYTES,
    )
    serving = [(json.dumps([True, "host", "", DIGEST, ""]), "")] * processes

    partners: list[ChosenPartner] = ["host"] * processes

    def introduce(tables: Tables) -> str:
        rows = [json.dumps(some) for some in inverted(all_partners(partners, machines))]
        return json.dumps(["", [], tables.groups.publish(rows)])

    traffic.agree_digested(serving, introduce)

    def part(step: int, index: int) -> Seen:
        at = (index + HOST_PROCESSES) % processes if moved else index
        return Seen(step, TOKEN, (0, step), at, ((at, at),), not moved)

    seen = [LocalParts([part(step, n) for step in (7, 8)], True) for n in range(processes)]
    texts = [(one.dump(n), "") for n, one in enumerate(seen)]

    def look(tables: Tables) -> str:
        everyone = [LocalParts.parse(text, n) for n, (text, _) in enumerate(texts)]
        return judge(everyone, machines, [True] * processes).dump(processes, tables.groups.publish)

    traffic.agree_digested(texts, look, LOOKING_BYTES)
    return traffic


def saving(processes: int, state_bytes: int) -> tuple[Traffic, Traffic]:
    """The first local save of a mesh (data, fsdp) of 64 columns, and one that follows.

    Args:
        processes: their number.
        state_bytes: of each process's data pipeline.
    """
    columns = min(64, processes)

    def texts_of(step: int) -> list[tuple[str, str]]:
        texts: list[tuple[str, str]] = []
        for n in range(processes):
            state = {"data": {f"{n}.json": f"{step:0{state_bytes}d}"}} if state_bytes else {}
            held = Holding(SHORT[:-4] + f"{n % columns:04x}", state)
            offer = offer_of(TOKEN, held, ["done", 7, TOKEN])
            texts.append(Start({"the step": 8}, Layout(DIGEST, 960), offer).dump())
        return texts

    first, later = Traffic(processes), Traffic(processes)
    later.keys, later.tables = first.keys, first.tables  # of the save before
    for step, traffic in enumerate((first, later)):
        texts = texts_of(step)
        traffic.agree_digested(
            texts, lambda tables, texts=texts: _started(texts, tables), SAVING_BYTES
        )
        for _ in ("written", "committed"):
            traffic.agree(["="] * processes, lambda _: "=")
    return first, later


def draw(found: dict[str, list[tuple[int, Traffic]]], path: str) -> None:
    """What process 0 receives and what the service sends to all, over the number of processes."""
    title = "What processes send each other, over their number"
    names = ("to_zero", "process 0 receives"), ("from_zero", "all others get")
    with plot(path, title, nrows=1, ncols=2, figsize=(9, 4), sharey=True) as sides:
        for axes, (field, name) in zip(sides, names, strict=True):
            lines = {
                what: [(count, getattr(one, field) / 1024**2) for count, one in points]
                for what, points in found.items()
            }
            lines_of(lines, axes)
            axes.set(xscale="log", yscale="log", xlabel="processes", title=f"{name}, MiB")
            counts = [count for count, _ in next(iter(lines.values()))]
            axes.set_xticks(counts, [f"{count:,}" for count in counts])
            axes.minorticks_off()
        sides[0].legend()


def persistent(processes: int) -> Traffic:
    """A save of all into one directory, of five files each: started, seen, written, committed."""
    traffic = Traffic(processes)
    settings = {"the path": "gs://bucket/run/8", "overwrite=": False}
    offers = [NO_OFFER] * processes
    offers[0] = Offer(None, ["gs://bucket/run/8", TOKEN])
    starts = [Start(settings, Layout(DIGEST, 960), offer).dump() for offer in offers]
    traffic.agree_digested(starts, lambda _: judge_start(starts), 2 + len("save"))
    traffic.agree(["="] * processes, lambda _: "=")
    file = ["state/ocdbt.process_0000/d/" + SHORT, 123456789, SHORT]
    traffic.agree(["=" + json.dumps([file] * 5, separators=(",", ":"))] * processes, lambda _: "=")
    traffic.agree(["="] * processes, lambda _: "=")
    return traffic


def _started(texts: list[tuple[str, str]], tables: Tables) -> str:
    return judge_start(texts, lambda offers: combine_offers(offers, tables))


def main() -> None:
    """Prints the table."""
    given = options(
        __doc__,
        directory=False,
        processes=[64, 256, 1024, 4096, 16384],
        plot=("", "a .png or .svg"),
    )
    sizes = ("rounds", "to 0, MiB", "sent, MiB", "bytes to one", "most at once, MiB", "s at 0")
    header("processes", "call", *sizes, words=2)
    found: dict[str, list[tuple[int, Traffic]]] = {}
    for processes in given.processes:
        calls = {
            "opening": opening(processes, moved=False),
            "opening, all hosts moved": opening(processes, moved=True),
        }
        for state_bytes, what in ((0, "local save"), (250, "local save, 250 B state")):
            calls[f"first {what}"], calls[f"later {what}"] = saving(processes, state_bytes)
        calls["persistent save"] = persistent(processes)
        for what, traffic in calls.items():
            found.setdefault(what, []).append((processes, traffic))
            traffic.print(what)
    if given.plot:
        shown = {
            "opening of fast directories": "opening, all hosts moved",
            "save into fast directories": "later local save",
            "the same, 250 B of pipeline state each": "later local save, 250 B state",
            "save into one directory, five files each": "persistent save",
        }
        draw({label: found[what] for label, what in shown.items()}, given.plot)


if __name__ == "__main__":
    main()
