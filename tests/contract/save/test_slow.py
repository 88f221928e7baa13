"""A save or load that takes long says where it is."""

import logging
import time
from typing import Any

import jax.numpy as jnp
import numpy as np

import ckpt_core as ckpt
from tests.support import seams


def wait_for(condition: Any, secs: float = 60.0) -> None:
    end = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_save_that_hangs_says_where(tmp_path, monkeypatch, caplog):
    gate, told = seams.Gate(), []
    seams.at(monkeypatch, "record", before=gate)

    def listen(event: ckpt.Event) -> None:
        if event.kind == "slow":
            told.append(event)
            raise SystemExit if len(told) % 2 else ValueError("a listener")  # which ends no report

    options = ckpt.Options(report_secs=0.05, on_event=listen)
    caplog.set_level(logging.WARNING, "ckpt_core")
    with ckpt.Checkpointer(tmp_path, options=options) as run:
        run.save(3, {"w": jnp.ones(1000)})
        wait_for(lambda: len(told) > 6)
        gate.go.set()
        run.wait_until_finished()
        count = len(told)
    assert told[-1].step == 3 and told[-1].phase
    assert told[-1].secs > told[0].secs > 0
    assert "save of" in caplog.text and "has taken" in caplog.text
    stacks = [line for line in caplog.messages if "its threads are at" in line]
    assert len(stacks) == 1 and "self.go.wait(" in stacks[0]
    time.sleep(0.2)
    assert len(told) == count, "it has ended"


def test_quick_work_is_not_reported(tmp_path):
    events: list[Any] = []
    options = ckpt.Options(on_event=events.append)
    ckpt.save(tmp_path / "a", {"w": np.ones(3)}, options=options)
    ckpt.load(tmp_path / "a", options=options)
    assert events and "slow" not in [event.kind for event in events]
