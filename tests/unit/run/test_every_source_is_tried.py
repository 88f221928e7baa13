"""A process that lacks a part gets it while one that has it lives, within a time that its Options bound."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._exchange import Coming, Key, Server
from ckpt_core._processes import Table
from ckpt_core._run.tiers import fetch
from ckpt_core._run.tiers.fetch import Target, fetch_first
from ckpt_core._run.tiers.joining import Joining
from ckpt_core._run.tiers.judge import LocalParts, Seen, Source, judge, parse_judgement
from ckpt_core._run.tiers.peers import Offers, Peers
from ckpt_core._saved import NativeCheckpoint, open_checkpoint
from tests.support.counted_service import Keys

SECRET = "s" * 64
TOKEN = "t" * 32
STEP = 3


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[LocalParts], list[str], list[bool]]:
    """What up to 12 processes tell of one save: groups that replace each other, parts in own and other folders."""
    count = draw(st.integers(1, 12))
    groups = [draw(st.integers(0, 2)) for _ in range(count)]
    everyone: list[LocalParts] = []
    for process in range(count):
        parts: list[Seen] = []
        for writer in draw(st.sets(st.integers(0, count - 1), max_size=3)):
            alike = [n for n in range(count) if groups[n] == groups[writer]]
            serves = tuple((n, n) for n in alike)
            own = groups[process] == groups[writer] and not any(one.own for one in parts)
            own = own and draw(st.booleans())
            parts.append(Seen(STEP, TOKEN, (0, 1, 0.0), writer, serves, own))
        everyone.append(LocalParts(parts, True))
    machines = [f"host{draw(st.integers(0, 3))}" for _ in range(count)]
    return everyone, machines, [draw(st.booleans()) for _ in range(count)]


@settings(max_examples=400, deadline=None)
@given(jobs())
def test_all_that_have_a_part_are_among_its_sources(
    job: tuple[list[LocalParts], list[str], list[bool]],
) -> None:
    everyone, machines, serving = job
    found = judge(everyone, machines, serving)
    rows: list[str] = []
    answer = found.dump(len(everyone), lambda made: rows.extend(made) or "table")
    for process in range(len(everyone)):
        has = {
            Source(holder, seen.writer)
            for holder, one in enumerate(everyone)
            if serving[holder] or holder == process
            for seen in one.parts
            if any(first <= process <= last for first, last in seen.serves)
        }
        whole = parse_judgement(answer, process, lambda _, number: rows[number]).steps.get(STEP)
        if whole is None or any(
            seen.own and any(first <= process <= last for first, last in seen.serves)
            for seen in everyone[process].parts
        ):
            continue
        assert has <= {*whole.sources, *whole.rest()}, (process, has)
        # it waits for those alone that get it themselves before: no circle
        seen, at = {process}, whole.sources[0].process
        while at not in {one.process for one in has}:
            assert at not in seen
            seen.add(at)
            next_one = parse_judgement(answer, at, lambda _, number: rows[number]).steps[STEP]
            at = next_one.sources[0].process


@pytest.mark.parametrize("lacking", [0, 1, 5, 16_384])
def test_no_process_reads_long_blocks_of_empty_rows(lacking: int) -> None:
    """Of 16,384 processes few lack a part: all others read that their row is empty."""
    keys = Keys()
    rows = ["[[3,[[17,17],[18,18]],0]]" if n < lacking else "" for n in range(16_384)]
    name = Table(keys, "t").publish(rows)
    assert all(len(text) < 2048 for text in keys.values.values())
    theirs = Table(keys, "t")
    assert [theirs.row(name, n) for n in range(0, 16_384, 97)] == rows[::97]


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Callable[..., Peers]]:
    """Peers of a process that fetches from servers with these shelves; 0 is the one that fetches."""
    servers: list[Server] = []

    def begin(shelves: list[Any], timeout_secs: float) -> Peers:
        keys = Keys()
        for number, served in enumerate(shelves, 1):
            servers.append(Server("127.0.0.1", SECRET, served))
            keys.put(f"at/{number}", json.dumps(["host", "127.0.0.1", servers[-1].port]))
        here: Any = type("Here", (), {"index": 0, "count": 1 + len(shelves), "get": keys.get})()
        peers = Peers(here, Offers(), SECRET, None, "at", 5.0)
        return replace(peers, patience_secs=timeout_secs)

    yield begin
    for server in servers:
        server.close()


def saved(tmp_path: Path) -> tuple[str, str]:
    ckpt.save(tmp_path / "saved", {"w": np.arange(16)})
    opened = open_checkpoint(tmp_path / "saved")
    assert isinstance(opened, NativeCheckpoint)
    return str(tmp_path / "saved"), opened.record.token


def test_sources_that_never_get_it_are_waited_for_once(
    tmp_path: Path, sources: Callable[..., Peers]
) -> None:
    """They all say that they are fetching it, without end; the last one has it."""
    path, token = saved(tmp_path)
    having = Offers()
    having.put(Key(STEP, token, 6), path)
    peers = sources([lambda _: Coming(True)] * 5 + [having.find], 1.0)
    target = Target(str(tmp_path / "here" / "3"), PosixBackend(), False, lambda: None)
    among = [Source(n, n) for n in range(1, 7)]
    began = time.monotonic()
    fetched = fetch_first((STEP, token), among, peers, target, "it")
    assert fetched.source == Source(6, 6) and len(fetched.failures) == 5
    assert time.monotonic() - began < 30  # and not 50 s for each


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock says; it stands still."""
    told = [0.0]
    monkeypatch.setattr(fetch, "time", SimpleNamespace(monotonic=lambda: told[0]))
    return told


def test_when_it_has_become_late_no_more_are_asked(
    tmp_path: Path, sources: Callable[..., Peers], now: list[float]
) -> None:
    """Of thousands that have it, the hosts of most may be out of reach."""
    asked: list[int] = []

    def slow(name: str) -> None:
        asked.append(int(name.rpartition("/")[2]))
        now[0] += 0.25

    peers = sources([], 1.0)
    here: Any = peers.processes
    here.get = slow
    target = Target(str(tmp_path / "here" / "3"), PosixBackend(), False, lambda: None)
    many = [Source(n, n) for n in range(1, 2000)]
    with pytest.raises(OSError, match="more"):
        fetch_first((STEP, TOKEN), many[:3], peers, target, "it", rest=lambda: many)
    assert asked == [1, 2, 3, 4, 5]


def test_those_that_were_not_asked_in_time_may_have_it(
    tmp_path: Path, sources: Callable[..., Peers], now: list[float]
) -> None:
    """All that were asked lack it: nothing says that the part is lost."""

    def lacks_slowly(_: Key) -> None:
        now[0] += 0.3

    peers = sources([lacks_slowly] * 8, 0.5)
    target = Target(str(tmp_path / "here" / "3"), PosixBackend(), False, lambda: None)
    among = [Source(n, n) for n in range(1, 9)]
    with pytest.raises(OSError, match=r"404.*not all were asked within 0\.5 s"):
        fetch_first((STEP, TOKEN), among[:1], peers, target, "it", rest=lambda: among)


def test_a_list_of_others_that_is_gone_hides_no_failure(
    tmp_path: Path, sources: Callable[..., Peers]
) -> None:
    """The error still says that the part cannot be had, so that another copy of the step is tried; and no damage."""

    def gone() -> Any:
        return Table(Keys(), "t").row("nothing.1", 5)

    peers = sources([lambda _: None], 1.0)
    target = Target(str(tmp_path / "here" / "3"), PosixBackend(), False, lambda: None)
    with pytest.raises(OSError, match=r"404.*what process 0 decided is gone"):
        fetch_first((STEP, TOKEN), [Source(1, 1)], peers, target, "it", rest=gone)


@pytest.mark.parametrize(
    ("what", "error"),
    [("lacks it", CheckpointCorrupt), ("cannot read it", OSError), ("is away", OSError)],
)
def test_a_part_that_a_source_may_have_is_not_damaged(
    tmp_path: Path, sources: Callable[..., Peers], what: str, error: type[Exception]
) -> None:
    """One source lacks it; of the other nobody knows, unless it says the same."""

    def second(_: Key) -> None:
        if what == "cannot read it":
            raise OSError(5, "Input/output error")

    peers = sources([lambda _: None, second], 1.0)
    if what == "is away":
        peers.find(2)
        peers._found[2] = peers._found[2]._replace(port=1)
    target = Target(str(tmp_path / "here" / "3"), PosixBackend(), False, lambda: None)
    with pytest.raises(error, match=r"from process 1: .*404.*from process 2: ") as caught:
        fetch_first((STEP, TOKEN), [Source(1, 1), Source(2, 2)], peers, target, "it")
    if what == "cannot read it":
        assert caught.match("500 It cannot read it: Input/output error")
    assert not isinstance(caught.value, ConnectionError)  # one more agreement is to follow


def test_a_part_of_another_number_of_processes_is_asked_of_all_that_have_it(
    tmp_path: Path, sources: Callable[..., Peers]
) -> None:
    path, token = saved(tmp_path)
    having = Offers()
    having.put(Key(STEP, token, 6), path)
    shelves: list[Any] = [lambda _: None] * 6
    shelves[3] = having.find
    peers = sources(shelves, 10.0)
    joining: Any = Joining(peers, str(tmp_path), PosixBackend(), 60.0)
    among = [Source(n, 6) for n in range(1, 7)]
    target = str(tmp_path / "here" / "3")
    record = joining._bring((STEP, token), among[::-1], target, time.monotonic() + 60)
    assert record.token == token
