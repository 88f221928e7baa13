"""How far a save or a load has come is told now and then, and a bar shows it."""

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._operation import Operation
from tests.contract.run.test_events import Heard, Terminal, event


def test_progress_is_told_now_and_then(monkeypatch):
    heard = Heard(progress=True)
    operation = Operation("save", "/runs/7", 7, None, heard, total_bytes=1000)
    operation.tell_progress(10)
    assert heard.events == []
    monkeypatch.setattr("ckpt_core._operation.PROGRESS_SECS", 0.0)
    operation.tell_progress(20)
    operation.tell_progress(1000)
    assert [(told.bytes, told.total_bytes) for told in heard.events] == [(20, 1000), (1000, 1000)]


def test_progress_of_a_real_save_and_load(tmp_path, monkeypatch):
    monkeypatch.setattr("ckpt_core._operation.PROGRESS_SECS", 0.0)
    heard = Heard(progress=True)
    options = ckpt.Options(on_event=heard)
    state = {f"w{i}": np.ones((512, 1024), np.float32) for i in range(8)}
    ckpt.save(tmp_path / "one", state, options=options)
    first_of_load = sum(one.kind == "progress" for one in heard.events)
    ckpt.load(tmp_path / "one", options=options)
    told = [one for one in heard.events if one.kind == "progress"]
    total = 8 * 2**21
    assert all(0 <= one.bytes <= one.total_bytes == total for one in told)
    of_load = [one.bytes for one in told[first_of_load:]]
    # how far the load reads ahead of the leaves that are done depends on its threads
    assert len(of_load) >= 8
    assert of_load == sorted(of_load)
    assert all(done >= (i + 1) * 2**21 for i, done in enumerate(of_load[-8:]))
    assert of_load[-1] == total


@pytest.mark.parametrize("as_numpy", [False, True])
def test_progress_within_one_large_array(tmp_path, monkeypatch, as_numpy):
    """Its blocks are counted one by one: else the bar of a model of few leaves would stand still."""
    monkeypatch.setattr("ckpt_core._operation.PROGRESS_SECS", 0.0)
    ckpt.save(tmp_path / "one", {"w": np.ones((8, 1024, 1024), np.float32)})
    heard = Heard(progress=True)
    ckpt.load(tmp_path / "one", as_numpy=as_numpy, options=ckpt.Options(on_event=heard))
    told = [one.bytes for one in heard.events if one.kind == "progress"]
    assert told == sorted(told)
    assert len({done for done in told if 0 < done < 2**25}) >= 3
    assert told[-1] == heard.events[-1].bytes == 2**25


def test_the_bar_pulses_while_nothing_is_written():
    pytest.importorskip("rich")
    from rich.console import Console

    bar = ckpt.events.ProgressBar(Console(file=Terminal(), force_terminal=True, width=100))
    totals: list[float | None] = []
    for done in (0, 0, 50):
        bar(event("progress", bytes=done, total_bytes=100, secs=1.0))
        totals += [task.total for task in bar._bars.tasks]
    bar(event("committed", bytes=100))
    assert totals == [None, None, 100]
