"""Ctrl-C in a cell of a notebook, which is then run again: it goes on from where it stood, and ends as if never interrupted."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import seams

LAST, STOPPED = 5, 3


def cell(directory: Path, background: bool = False, leaves: bool = True, **acts: Any) -> Any:
    """Trains in place; gives the step from which it went on, and what it trained."""
    state: dict[str, Any] = {"seen": 0, "m": np.zeros(20_000), "w": np.ones(9)}
    run = ckpt.Checkpointer(directory, asynchronous=background)
    with run if leaves else contextlib.nullcontext():
        found = run.restore_latest(state)
        acts.get("begun", id)(run)
        stood = -1 if found is None or found.step is None else found.step
        state = state if found is None else found["state"]
        for step in range(stood + 1, LAST + 1):
            state["seen"] += 1
            state["m"] += np.random.default_rng(state["seen"]).standard_normal(20_000)
            acts.get("halfway", id)(step)
            state["w"] -= 0.1 * state["m"][:9]
            assert run.save(step, state)
        run.wait_until_finished()
    return stood, state["seen"], state["m"].tobytes(), state["w"].tobytes()


def stops(step: int) -> None:
    if step == STOPPED:
        raise KeyboardInterrupt


def goes_on(directory: Path, stood: int, **how: Any) -> None:
    again = cell(directory / "run", **how)
    assert again == (stood, *cell(directory / "straight")[1:])
    assert ckpt.Checkpointer(directory / "run", read_only=True).all_steps() == [*range(LAST + 1)]
    assert all(ckpt.verify(directory / "run" / str(step)).ok for step in range(LAST + 1))


@pytest.mark.parametrize("leaves", [True, False], ids=["with", "without with"])
@pytest.mark.parametrize("point", ["step", "write", "record", "commit", "committed"])
def test_the_cell_again(tmp_path, monkeypatch, point, leaves):
    """What it held is still referred to, as by the traceback that a notebook keeps."""
    with monkeypatch.context() as patch:
        if point != "step":
            moment, when = {"committed": ("commit", "after")}.get(point, (point, "before"))
            seams.at(patch, moment, nth=STOPPED + 1, **{when: seams.fail(KeyboardInterrupt)})
        with pytest.raises(KeyboardInterrupt) as kept:
            cell(tmp_path / "run", leaves=leaves, halfway=stops if point == "step" else id)
    goes_on(tmp_path, STOPPED if point == "committed" else STOPPED - 1, leaves=leaves)
    assert kept


def test_the_cell_again_while_a_save_is_in_flight(tmp_path, monkeypatch):
    """The save of the step before, which nobody has left by ``with``, is waited for or taken over whole."""
    gate, runs, how = seams.Gate(), [], {"background": True, "leaves": False}
    seams.at(monkeypatch, "record", before=gate, nth=STOPPED)
    with pytest.raises(KeyboardInterrupt):
        cell(tmp_path / "run", **how, halfway=stops, begun=runs.append)
    opening = threading.Timer(1, gate.go.set)
    opening.start()
    try:
        goes_on(tmp_path, STOPPED - 1, **how, begun=lambda _: gate.go.set())
    finally:
        opening.cancel()
        with contextlib.suppress(ckpt.CheckpointError):  # or this process ends with code 1
            runs[0].close()
