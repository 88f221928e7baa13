"""What this process has in flight is waited for by whoever looks: a second Checkpointer, a load of the path that is written."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_orbax as ocp
from ckpt_orbax import v1
from tests.support import seams

QUICK = ckpt.Options(durable=False)
LIMIT_SECS = 60


def state(value: int) -> dict[str, Any]:
    return {"w": np.full(3, value)}


def value_of(tree: Any) -> int:
    return int(tree["w"][0])


@pytest.fixture
def gate() -> Iterator[seams.Gate]:
    made = seams.Gate()
    yield made
    made.go.set()


@pytest.fixture
def saves_1(tmp_path: Path, gate: seams.Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Begins to save step 1 beside step 0; its n-th commit is held until somebody has waited for a moment."""
    made: list[ckpt.Checkpointer] = []

    def save(nth: int = 1, secs: float = 0.05, **how: Any) -> ckpt.Checkpointer:
        ckpt.save(tmp_path / "run/0", state(0), options=QUICK)
        seams.at(monkeypatch, "commit", before=gate, nth=nth)
        how.setdefault("options", QUICK)
        first = ckpt.Checkpointer(tmp_path / "run", **how)
        made.append(first)
        assert first.save(1, state(1), metrics={"loss": 0.0}, metadata="one")
        assert gate.entered.wait(LIMIT_SECS)
        threading.Timer(secs, gate.go.set).start()
        return first

    yield save
    gate.go.set()
    for first in made:
        with contextlib.suppress(
            ckpt.CheckpointError, OSError
        ):  # else this process ends with code 1
            first.close()


Call = tuple[Callable[[ckpt.Checkpointer], Any], Any]
READS: dict[str, Call] = {
    "restore_latest": (lambda run: getattr(run.restore_latest(state(9)), "step", None), 1),
    "restore": (lambda run: value_of(run.restore(1, state(9)).state), 1),
    "load": (lambda run: value_of(run.load(1)), 1),
    "all_steps": (lambda run: run.all_steps(), [0, 1]),
    "latest_step": (lambda run: run.latest_step(), 1),
    "best_step": (lambda run: run.best_step(), 1),
    "metrics": (lambda run: run.metrics(1), {"loss": 0.0}),
    "metadata": (lambda run: run.metadata(1), "one"),
    "inspect": (lambda run: [*run.inspect(1).items], ["state"]),
    "explain": (lambda run: [*run.explain()], [0, 1]),
}
CALLS: dict[str, Call] = {
    **READS,
    "save": (lambda run: (run.save(2, state(2)) and run.close()) or run.all_steps(), [0, 1, 2]),
    "rollback_to": (lambda run: run.rollback_to(0), [1]),
    "delete": (lambda run: run.delete(1) or run.all_steps(), [0]),
}
CASES = [
    *[(call, kind) for call in CALLS for kind in ("made before", "made after")],
    *[(call, "read_only") for call in READS],
]


@pytest.mark.parametrize(("call", "kind"), CASES)
def test_a_second_checkpointer(tmp_path, saves_1, call, kind):
    how: dict[str, Any] = {"best_metric": "loss", "best_mode": "min", "options": QUICK}
    how["read_only"] = kind == "read_only"
    earlier = ckpt.Checkpointer(tmp_path / "run", **how)
    first = saves_1()
    second = earlier if kind == "made before" else ckpt.Checkpointer(tmp_path / "run", **how)
    work, wanted = CALLS[call]
    assert work(second) == wanted
    first.wait_until_finished()
    second.close()


@pytest.mark.parametrize("held", ["local", "persistent"])
@pytest.mark.parametrize("call", ["restore_latest", "load", "all_steps", "save"])
def test_a_second_one_of_two_tiers(tmp_path, saves_1, call, held):
    at = ckpt.when.at_steps([1] if held == "persistent" else [])
    options = ckpt.Options(durable=False, persist_policy=at, local_max_to_keep=2)
    how: dict[str, Any] = {"local_directory": tmp_path / "fast", "options": options}
    first = saves_1(1 if held == "local" else 2, **how)
    second = ckpt.Checkpointer(tmp_path / "run", **how)
    work, wanted = CALLS[call]
    assert work(second) == wanted
    first.wait_until_finished()
    second.close()


ON_THE_PATH: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: value_of(ckpt.load(path)),
    "load of the item": lambda path: value_of(ckpt.load(path / "state")),
    "load_async": lambda path: value_of(ckpt.load_async(path).result()),
    "restore": lambda path: value_of(ckpt.restore(path, state(9))["state"]),
    "inspect": lambda path: int(ckpt.inspect(path).items["state"].leaves[0].shape == (3,)),
    "verify": lambda path: int(ckpt.verify(path).ok),
    "through a link": lambda path: (
        (path.parent / "link").symlink_to(path) or value_of(ckpt.load(path.parent / "link"))
    ),
    "Checkpointer": lambda path: value_of(ckpt.Checkpointer(path.parent).load(1)),
    "CheckpointManager": lambda path: ocp.CheckpointManager(path.parent).latest_step(),
    "StandardCheckpointer": lambda path: value_of(ocp.StandardCheckpointer().restore(path)),
    "v1": lambda path: value_of(v1.load(path)),
    "save": lambda path: ckpt.save(path, state(2), overwrite=True) or value_of(ckpt.load(path)) - 1,
    "save_async": lambda path: (
        ckpt.save_async(path, state(2), overwrite=True).result() or value_of(ckpt.load(path)) - 1
    ),
}


@pytest.mark.parametrize("how", ["Checkpointer", "save_async", "overwrite"])
@pytest.mark.parametrize("call", ON_THE_PATH)
def test_a_path_that_is_written(tmp_path, saves_1, gate, monkeypatch, call, how):
    path, pending = tmp_path / "run/1", None
    if how == "Checkpointer":
        saves_1()
    else:
        if how == "overwrite":
            ckpt.save(path, state(8), options=QUICK)
        seams.at(monkeypatch, "commit", before=gate, nth=1)
        pending = ckpt.save_async(path, state(1), overwrite=how == "overwrite", options=QUICK)
        assert gate.entered.wait(LIMIT_SECS)
        threading.Timer(0.05, gate.go.set).start()
    assert ON_THE_PATH[call](path) == 1
    if pending is not None:
        pending.result()


def test_a_step_that_is_being_saved_is_waited_for(tmp_path, saves_1):
    assert value_of(saves_1(secs=0.3).load(1)) == 1


def test_a_save_that_fails_is_reported_to_who_began_it(tmp_path, saves_1, gate):
    gate.error = OSError(28, "No space left on device")
    first, second = saves_1(), ckpt.Checkpointer(tmp_path / "run", options=QUICK)
    assert second.load(0) and second.all_steps() == [0]
    assert second.save(1, state(7))
    second.close()
    with pytest.raises(OSError, match="No space left"):
        first.close()
    assert value_of(ckpt.load(tmp_path / "run/1")) == 7


def test_ctrl_c_ends_the_wait_and_no_more(tmp_path, saves_1, gate):
    first, second = saves_1(secs=LIMIT_SECS), ckpt.Checkpointer(tmp_path / "run", options=QUICK)
    for wait in (lambda: second.restore_latest(state(9)), lambda: ckpt.load(tmp_path / "run/1")):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            wait()
    gate.go.set()
    assert CALLS["restore_latest"][0](second) == 1
    first.wait_until_finished()
    second.close()


def test_a_listener_of_the_save_looks_without_waiting(tmp_path):
    seen: list[Any] = []

    def look(event: ckpt.Event) -> None:
        if event.kind in ("save_started", "committed"):
            second = ckpt.Checkpointer(tmp_path, read_only=True)
            seen.append(
                [second.all_steps(), event.kind == "committed" and value_of(ckpt.load(event.path))]
            )

    options = ckpt.Options(durable=False, on_event=look)
    with ckpt.Checkpointer(tmp_path, options=options) as run:
        run.save(1, state(1))
    assert seen == [[[], False], [[1], 1]]


def test_the_wait_ends(tmp_path, saves_1, gate):
    """Who keeps the save from ending, and then waits for it, is told after ``timeout_secs``."""
    first, brief = saves_1(secs=LIMIT_SECS), ckpt.Options(timeout_secs=0.1)
    second = ckpt.Checkpointer(tmp_path / "run", options=brief)
    with pytest.raises(ckpt.CheckpointError, match=r"run/1: .* still .*wait_until_finished"):
        second.restore_latest(state(9))
    with pytest.raises(ckpt.CheckpointError, match=r"run/1: .* still .*wait_until_finished"):
        ckpt.load(tmp_path / "run/1", options=brief)
    second.close()
    gate.go.set()
    first.close()
