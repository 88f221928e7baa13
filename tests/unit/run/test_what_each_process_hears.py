"""What the coordination service sends for local directories: to each process the same, however many there are.

Process 0 hears about 60 bytes of each at a local save, so that 16,384 of them fit into 1 MiB (``benchmarks/simulate_messages.py``).
"""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import StepNames
from ckpt_core._processes import Processes
from ckpt_core._run.lineage import Lineage
from ckpt_core._run.steps import open_run_directory
from ckpt_core._run.tiers.local import LocalTier
from ckpt_core._run.tiers.save import StepToSave
from ckpt_core._save import RecordFields, take
from tests.support.counted_service import Service, run_all

LINEAGE = "a" * 16
RUN = Lineage("run", LINEAGE)
OPENING_BYTES = 1024
SAVE_BYTES = 128
HEARD_BYTES = {False: 64, True: 400}
"""What process 0 hears of each at a local save; True: where values of the host differ between processes."""


class Counted:
    """The bytes that the service sent, by what the processes did."""

    def __init__(self, count: int) -> None:
        self.service = Service()
        self.sent: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}
        self._count = count
        self._barrier = threading.Barrier(count, action=self._note)
        self._what = ""

    def end(self, what: str) -> None:
        self._what = what
        self._barrier.wait(600)

    def _note(self) -> None:
        self.sent[self._what] = [self.service.sent_bytes[n] for n in range(self._count)]
        self.got[self._what] = [self.service.value_bytes[n] for n in range(self._count)]
        self.service.forget()


def counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, partners: Any, sharded: bool
) -> Counted:
    """Opens local directories, saves three times, and opens them again."""
    found = Counted(count)
    options = ckpt.Options(partners=partners, timeout_secs=300, durable=False)
    directory = open_run_directory(tmp_path / "persistent", StepNames(), options, False)
    (tmp_path / "persistent").mkdir()

    def tier_of(processes: Processes) -> LocalTier:
        run = dataclasses.replace(directory, processes=processes)
        return LocalTier(str(tmp_path / "local" / str(processes.index)), RUN, run)

    def work(processes: Processes) -> None:
        tier = tier_of(processes)
        found.end("opening")
        for step in range(3):
            value = processes.index if sharded else 7
            items = {"state": {"w": np.full(16, value)}}
            what = StepToSave(step, items, RecordFields(True), f"{LINEAGE}{step:016x}")
            snapshot, write = tier.prepare(what)
            take(items, [snapshot])
            write()
            found.end(f"save {step}")
        tier.close(0)
        found.end("close")
        again = tier_of(processes)
        assert 2 in again.complete
        found.end("opening again")
        again.close(0)

    run_all(monkeypatch, found.service, count, work)
    return found


@pytest.mark.parametrize("count", [8, 48, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("partners", [None, "host"])
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_a_few_hundred_bytes_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, partners: Any, sharded: bool
) -> None:
    found = counted(tmp_path, monkeypatch, count, partners, sharded)
    sent = found.sent
    for what in ("opening", "opening again"):
        # a block of the table of partners is 1 KiB; one may have to be asked for more than once
        assert max(sent[what][1:]) <= OPENING_BYTES + 2 * 1024 * (partners is not None), what
    for step in (1, 2):
        assert max(sent[f"save {step}"][1:]) <= SAVE_BYTES
        heard = found.got[f"save {step}"]
        if partners is None:  # else some may still copy while others have done
            assert max(heard[1:]) <= HEARD_BYTES[sharded], heard


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("differing", [(), (0,), (1,), (1, 5, 8), tuple(range(9))])
def test_what_most_say_alike_is_sent_once(
    monkeypatch: pytest.MonkeyPatch, count: int, differing: tuple[int, ...]
) -> None:
    """A digest of it first; only those where it differs from process 0's send theirs, in a second agreement."""
    service, asked = Service(), list[Any]()
    said = ["x" * 400 if n not in differing else f"{n}" * (n + 1) for n in range(count)]

    def judge(told: list[tuple[str, str]]) -> str:
        asked.append(told)
        return json.dumps([len(told), "?", "="])

    def work(processes: Processes) -> str:
        index = processes.index
        return processes.gather_alike("7", said[index], f"own {index}", judge, 60, "call it")

    answers = run_all(monkeypatch, service, count, work)
    assert asked == [[(said[n], f"own {n}") for n in range(count)]]
    assert {*answers} == {json.dumps([count, "?", "="])}
    for index in range(1, count):
        length = len("=call it\n") + 12 + len(f"own {index}")
        if len({*said}) > 1:
            length += len("=\n") + (len(f"!{said[index]}") if said[index] != said[0] else 0)
        assert service.value_bytes[index] == length


def test_a_judge_that_raises_and_other_calls_of_what_is_said_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(told: list[tuple[str, str]]) -> str:
        raise ValueError(f"of {len(told)}")

    for same in (True, False):

        def work(processes: Processes, same: bool = same) -> str:
            said = "same" if same else f"{processes.index}"
            with pytest.raises(ckpt.CheckpointError if processes.index else ValueError) as failure:
                processes.gather_alike("1", said, "", refuses, 60, "call")
            return str(failure.value)

        first, *others = run_all(monkeypatch, Service(), 3, work)
        assert first == "of 3" and all("ValueError: of 3" in other for other in others), others

    def different(processes: Processes) -> str:
        with pytest.raises(ckpt.CheckpointError) as failure:
            processes.gather_alike("1", "", "", refuses, 60, f"call {min(processes.index, 1)}")
        return str(failure.value)

    for text in run_all(monkeypatch, Service(), 3, different):
        assert "call 0" in text and "call 1" in text


def test_what_closed_directories_had_at_the_service_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation in the same job may open them at each epoch."""
    service, kept, count = Service(), list[int](), 4
    options = ckpt.Options(partners="host", timeout_secs=60, durable=False)
    directory = open_run_directory(tmp_path / "persistent", StepNames(), options, False)
    (tmp_path / "persistent").mkdir()
    barrier = threading.Barrier(count, action=lambda: kept.append(of_peers(service)))

    def work(processes: Processes) -> None:
        run = dataclasses.replace(directory, processes=processes)
        for step in range(5):
            tier = LocalTier(str(tmp_path / "local" / str(processes.index)), RUN, run)
            items = {"state": {"w": np.full(16, processes.index)}}
            what = StepToSave(step, items, RecordFields(True), f"{LINEAGE}{step:016x}")
            snapshot, write = tier.prepare(what)
            take(items, [snapshot])
            write()
            barrier.wait(60)
            tier.close(0)

    run_all(monkeypatch, service, count, work)
    assert len(set(kept[1:])) == 1 and kept[0] > 0, kept


def of_peers(service: Service) -> int:
    """How many keys local directories have at the service."""
    return sum(key.startswith(("ckpt/peers/", "ckpt/retired/")) for key in service.values)


@pytest.mark.parametrize("at", [0, 2])
def test_an_interrupt_between_the_two_agreements(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The others hear of it at once, and not after the timeout, and all go on together."""

    class Interrupted(Processes):
        def gather_decide(self, tag: str, *rest: Any, **more: Any) -> str:
            answer = super().gather_decide(tag, *rest, **more)
            if self.index == at and tag == "1":
                raise KeyboardInterrupt
            return answer

    service = Service()

    def work(processes: Processes) -> str:
        processes = Interrupted(processes.index, processes.count)
        with pytest.raises((KeyboardInterrupt, ckpt.CheckpointError)) as failure:
            processes.gather_alike("1", f"{processes.index}", "", lambda _: "never", 30, "call")
        assert processes.gather_alike("2", "same", "", lambda _: "then", 30, "call") == "then"
        return f"{failure.type.__name__}: {failure.value}"

    told = run_all(monkeypatch, service, 3, work)
    assert told[at].startswith("KeyboardInterrupt")
    for text in told[:at] + told[at + 1 :]:
        assert f"process {at} gave up: KeyboardInterrupt" in text, told
