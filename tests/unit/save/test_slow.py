"""A save or load that takes long says where it is."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import _operation
from ckpt_core._load import loading
from ckpt_core._operation import Operation
from ckpt_core._platform import LINUX
from tests.support import seams


def wait_for(condition: Any, secs: float = 30.0) -> None:
    end = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_save_that_hangs_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate, events = seams.Gate(), []
    seams.at(monkeypatch, "record", before=gate)

    def hear(event: ckpt.Event) -> None:
        if event.kind == "slow":  # in the thread that reports: the next one comes when it hangs
            assert gate.entered.wait(30)
            events.append(event)

    options = ckpt.Options(report_secs=0.05, on_event=hear)
    caplog.set_level(logging.WARNING, "ckpt_core")
    with ckpt.Checkpointer(tmp_path, options=options) as run:
        run.save(3, {"w": jnp.ones(1000)})
        wait_for(lambda: len(events) > 6)
        gate.go.set()
        assert "syncing" in events[6].phase and events[6].step == 3
        assert events[6].secs > events[0].secs > 0
        assert (events[6].resident_bytes > 2**20) == LINUX
    text = caplog.text
    assert "save of" in text and "has taken" in text
    assert ("this process uses" in text) == LINUX
    stacks = [line for line in caplog.messages if "its threads are at" in line]
    assert len(stacks) == 1 and "self.go.wait(" in stacks[0]


def test_a_load_counts_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt.save(tmp_path / "a", {"w": np.ones(10_000), "v": np.ones(10_000)})
    events: list[Any] = []
    assemble = loading.value_of

    def slow(*arguments: Any, **named: Any) -> Any:  # what is assembled is counted already
        wait_for(lambda: any(event.kind == "slow" and event.bytes for event in events))
        return assemble(*arguments, **named)

    monkeypatch.setattr(loading, "value_of", slow)
    ckpt.load(tmp_path / "a", options=ckpt.Options(report_secs=0.02, on_event=events.append))
    told = [event for event in events if event.kind == "slow" and event.bytes]
    assert told[0].phase == "reading" and told[0].total_bytes in (0, 160_000)


def test_quick_work_is_not_reported_and_costs_no_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    ckpt.save(tmp_path / "a", {"w": np.ones(3)}, options=ckpt.Options(on_event=events.append))
    assert "slow" not in [event.kind for event in events]
    operation = Operation("save", "x", None, None, None)
    monkeypatch.setattr(_operation, "_watcher", None)  # which nobody asks to watch it
    with operation.watched("nothing"):
        assert not operation.asked


def test_reports_of_several_and_a_listener_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    def bad(_: Any) -> None:
        raise ValueError("listener")

    first = Operation("save", "one", 1, 0.02, bad)
    second = Operation("load", "two", None, 0.02, None)
    with first.watched("a"), second.watched("b"):
        second.total_bytes = 2048
        second.done_bytes = 1024
        wait_for(lambda: "two" in caplog.text and caplog.text.count("one") > 2)
        second.phase = "c"
        wait_for(lambda: "c, 1.0 KiB of 2.0 KiB, none since" in caplog.text)
    assert "1.0 KiB of 2.0 KiB" in caplog.text


def test_the_watching_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []

    def thread(**named: Any) -> threading.Thread:
        started.append(threading.Thread(**named))
        return started[-1]

    named = SimpleNamespace(**{**vars(threading), "Thread": thread})
    monkeypatch.setattr(_operation, "threading", named)
    monkeypatch.setattr(_operation, "_IDLE_SECS", 0.01)
    watcher = _operation._Watcher()
    for count in (1, 2):
        watcher.add(Operation("save", "x", None, 60.0, None))  # nobody holds it: it is over
        wait_for(lambda count=count: len(started) == count and started[-1].ident)
        started[-1].join(30)
        assert started[-1].daemon and not started[-1].is_alive()


def test_impossible_settings() -> None:
    for secs in (0, -1.0):
        with pytest.raises(ValueError, match="report_secs"):
            ckpt.Options(report_secs=secs)


def test_a_process_that_stood_still_reports_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[ckpt.Event] = []
    stopped = Operation("save", "p", None, 1.0, told.append, began=0.0)
    for now, over, count in (
        (0.9, False, 0),
        (1000.5, False, 1),
        (1000.9, False, 1),
        (2e3, True, 1),
    ):
        monkeypatch.setattr(_operation, "time", SimpleNamespace(monotonic=lambda now=now: now))
        stopped.is_over = over  # it ended: no report
        _operation._report_if_late(weakref.ref(stopped))
        assert len(told) == count
    assert stopped.due == 1001  # at a multiple, as ever


def test_a_listener_that_exits_does_not_end_the_reports() -> None:
    asked: list[Any] = []

    def leave(event: ckpt.Event) -> None:
        asked.append(event)
        raise SystemExit

    with Operation("save", "p", None, 0.02, leave).watched("here"):
        wait_for(lambda: len(asked) > 2)
