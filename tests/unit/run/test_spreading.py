"""A part that many processes lack reaches all of them: from those that have it, and from those that just got it."""

from __future__ import annotations

import collections
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from ckpt_core._exchange import Coming, Key, Offered, Server
from ckpt_core._run.tiers import fetch
from ckpt_core._run.tiers.fetch import Mender, Target
from ckpt_core._run.tiers.judge import LocalParts, Seen, judge, parse_judgement
from ckpt_core._run.tiers.peers import Offers, Peers
from ckpt_core._saved import NativeCheckpoint, open_checkpoint

SECRET = "s" * 64
STEP = 3
COUNT = 24


@dataclass
class Here:
    """What a process knows of the others: an index, their number, and a service."""

    index: int
    keys: dict[str, str]
    count: int = COUNT

    def get(self, name: str) -> str | None:
        return self.keys.get(name)


@dataclass
class Job:
    """Processes in one: each has its own offers, server and folder."""

    folder: Path
    token: str
    keys: dict[str, str] = field(default_factory=dict)
    served: collections.Counter[int] = field(default_factory=collections.Counter)
    offers: list[Offers] = field(default_factory=list)
    peers: list[Peers] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)

    def begin(self, index: int, has: str | None) -> None:
        offers = Offers()
        if has is not None:
            offers.put(Key(STEP, self.token, index), has)

        def served(key: Key) -> Offered | Coming | None:
            found = offers.find(key)
            self.served[index] += isinstance(found, Offered)
            return found

        server = Server("127.0.0.1", SECRET, served)
        self.keys[f"at/{index}"] = json.dumps([f"host{index}", "127.0.0.1", server.port])
        here: Any = Here(index, self.keys)
        self.offers.append(offers)
        self.peers.append(Peers(here, offers, SECRET, server, "at", 5.0))

    def mender(self, index: int, may_commit: Callable[[], None] = lambda: None) -> Mender:
        path = str(self.folder / f"of{index}" / str(STEP))
        return Mender(self.peers[index], lambda _: Target(path, PosixBackend(), False, may_commit))

    def judged(self, holders: int) -> str:
        """What process 0 answers, where the first processes hold the step."""
        serves = ((0, COUNT - 1),)
        seen = [
            [Seen(STEP, self.token, (0, 1, 0.0), n, serves, True)] if n < holders else []
            for n in range(COUNT)
        ]
        told = [LocalParts(parts, True) for parts in seen]
        found = judge(told, [f"host{n}" for n in range(COUNT)], [True] * COUNT)
        return found.dump(COUNT, self._publish)

    def _publish(self, rows: list[str]) -> str:
        self.rows = rows
        return "table"

    def menders(self, holders: int) -> dict[int, Mender]:
        answer = self.judged(holders)
        found = {n: self.mender(n) for n in range(holders, COUNT)}
        for index, mender in found.items():
            here = parse_judgement(answer, index, lambda _, number: self.rows[number])
            mender.note(here.steps)
        return found

    def whole(self, index: int) -> bool:
        return ckpt.verify(self.folder / f"of{index}" / str(STEP)).ok


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[[int], Job]]:
    """A job of 24 processes, of which the first have the step."""
    begun: list[Job] = []

    def of(holders: int) -> Job:
        ckpt.save(tmp_path / "saved", {"w": np.arange(1 << 16)})
        opened = open_checkpoint(tmp_path / "saved")
        assert isinstance(opened, NativeCheckpoint)
        made = Job(tmp_path, opened.record.token)
        begun.append(made)
        for index in range(COUNT):
            made.begin(index, str(tmp_path / "saved") if index < holders else None)
        return made

    yield of
    for made in begun:
        for one in made.peers:
            one.close()


def test_two_give_it_to_22_others_that_give_it_on(job: Callable[[int], Job]) -> None:
    """Each process that has it takes part in at most four transfers: log2(24 / 2), rounded up."""
    made = job(2)
    menders = made.menders(2)
    with ThreadPoolExecutor(COUNT) as pool:
        list(pool.map(lambda one: one.mend(STEP), menders.values()))
    assert all(made.whole(index) for index in menders)
    assert sum(made.served.values()) == 22
    assert max(made.served.values()) <= 4
    assert sum(count for index, count in made.served.items() if index < 2) <= 8


def test_who_opens_it_alone_does_not_wait_for_others(
    job: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that is to give it fetches nothing itself: this is a call that one makes alone."""
    monkeypatch.setattr(fetch, "_BEGIN_SECS", 0.2)
    made = job(1)
    menders = made.menders(1)
    late = next(
        index
        for index in menders
        if json.loads(made.rows[index])[0][1][0][0] >= 1  # its first source lacks it as well
    )
    menders[late].mend(STEP)
    assert made.whole(late) and +made.served == {0: 1}


def test_one_that_has_it_is_enough(job: Callable[[int], Job]) -> None:
    """All but the last of ten that had it are gone, and so are some that were to give it on."""
    made = job(10)
    menders = made.menders(10)
    for index in [*range(9), 11, 12]:
        made.peers[index].close()
    going = [index for index in menders if index not in (11, 12)]
    with ThreadPoolExecutor(COUNT) as pool:
        list(pool.map(lambda index: menders[index].mend(STEP), going))
    assert all(made.whole(index) for index in going)


def test_who_cannot_get_it_lets_nobody_wait(job: Callable[[int], Job]) -> None:
    """A process whose own directory fails says at once that it gives nothing."""
    made = job(1)
    menders = made.menders(1)
    first = next(n for n in menders if json.loads(made.rows[n])[0][1][0][0] == 0)
    begun = threading.Event()

    def full() -> None:
        begun.set()
        raise OSError(28, "No space left on device")

    broken = made.mender(first, full)
    here = parse_judgement(made.judged(1), first, lambda _, number: made.rows[number])
    broken.note(here.steps)
    with pytest.raises(OSError, match="No space left"):
        broken.mend(STEP)
    assert begun.is_set()
    assert made.offers[first].find(Key(STEP, made.token, first)) is None
    rest = [mender for index, mender in menders.items() if index != first]
    with ThreadPoolExecutor(COUNT) as pool:
        list(pool.map(lambda one: one.mend(STEP), rest))
    assert all(made.whole(index) for index in menders if index != first)


def test_what_a_server_says_of_a_part_that_is_on_its_way(job: Callable[[int], Job]) -> None:
    made = job(1)
    key = Key(STEP, made.token, 5)
    connect = made.peers[0].connect
    made.offers[5].expect([key])
    with pytest.raises(fetch.NotYet) as raised:
        list(connect(5).pieces(*key, 0))
    assert not raised.value.begun
    with made.offers[5].getting(key), pytest.raises(fetch.NotYet) as raised:
        list(connect(5).pieces(*key, 0))
    assert raised.value.begun
    with pytest.raises(ConnectionError, match="404"):
        list(connect(5).pieces(*key, 0))
