"""Readers and tools beside a run that goes on: readers give what counts now, and tools take only what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._errors import CheckpointNotFound
from ckpt_core._run.steps import Steps
from ckpt_core._run.tiers import Tiers
from tests.support.two_tiers import Starts, starts


def state(value: int) -> dict[str, Any]:
    return {"value": np.full(3, value)}


@pytest.fixture(name="start")
def make_start(tmp_path: Path) -> Starts:
    """Checkpointers of one run, which writes every fourth step to the persistent directory."""
    return starts(tmp_path, persists_every=4, local_max_to_keep=3)


def seen(checkpointer: ckpt.Checkpointer) -> dict[int, int]:
    steps = checkpointer.all_steps()
    assert checkpointer.latest_step() == max(steps, default=None)
    for step in steps:
        assert checkpointer.metrics(step) == {"value": float(checkpointer.load(step)["value"][0])}
    return {step: int(checkpointer.load(step)["value"][0]) for step in steps}


def save(checkpointer: ckpt.Checkpointer, step: int, value: int, **more: Any) -> None:
    assert checkpointer.save(step, state(value), metrics={"value": float(value)}, **more)


def test_a_reader_that_stays_open_sees_local_steps_go_and_come(start: Starts) -> None:
    """It listed the steps that were there when it was opened, and could not read those that had been left."""
    with start() as writer:
        for step in range(7):
            save(writer, step, step)
        with start(read_only=True) as reader:
            assert seen(reader) == {0: 0, 4: 4, 5: 5, 6: 6}
            writer.rollback_to(4)
            assert seen(reader) == {0: 0, 4: 4}
            save(writer, 5, 55)
            assert seen(reader) == {0: 0, 4: 4, 5: 55}
            save(writer, 5, 56, overwrite=True)
            assert seen(reader) == {0: 0, 4: 4, 5: 56}
            writer.delete(5)
            assert seen(reader) == {0: 0, 4: 4}
            for step in range(5, 12):
                save(writer, step, step)
            assert seen(reader) == {0: 0, 4: 4, 8: 8, 9: 9, 10: 10, 11: 11}


@pytest.mark.parametrize("goes_back", [False, True])
def test_local_steps_that_go_while_they_are_read_are_no_damage(
    start: Starts, monkeypatch: pytest.MonkeyPatch, goes_back: bool
) -> None:
    """Three retired local steps, and an evaluator ended with CheckpointCorrupt: none of the steps can be loaded."""
    with start() as writer, start(read_only=True) as reader:
        for step in range(8):
            save(writer, step, step)
        real, opened = Steps.opened, list[str]()

        def opening(self: Steps, name: str) -> Any:
            found = real(self, name)
            if name == "7" and not opened:  # between the look and the read
                opened.append(name)
                if goes_back:
                    writer.rollback_to(5)
                else:
                    for step in (9, 10, 11):
                        save(writer, step, step)
                    writer.delete(4)
            return found

        monkeypatch.setattr(Steps, "opened", opening)
        restored = reader.restore_latest(state=state(0))
        assert restored is not None
        newest = 5 if goes_back else 11
        assert (restored.step, restored["state"]["value"][0]) == (newest, newest)


def test_the_newest_step_is_looked_for_again_where_a_newer_one_took_its_place() -> None:
    """A step that another policy keeps was restored, though two newer ones had been committed."""
    listings = iter([[3, 5], [3, 6], [3, 6]])

    def restore(step: int, local_first: bool | None) -> Any:
        if step == 5:
            raise CheckpointNotFound("deleted")
        return step

    persistent: Any = type("Persistent", (), {"directory": "run"})()
    found = Tiers(persistent, None, True).restore_newest(
        restore, False, lambda: [(step, None) for step in next(listings)], lambda _: None
    )
    assert found == 6


def test_a_tool_that_deletes_the_newest_persistent_step_takes_none_that_the_run_saves_on(
    start: Starts, tmp_path: Path
) -> None:
    """Local steps that the run had saved after it, and all that it saved from then on, did not count any more."""
    with start() as writer:
        for step in (4, 6, 7, 8, 9):
            save(writer, step, step)
        with ckpt.Checkpointer(tmp_path / "steps") as tool:
            tool.delete(8)
        save(writer, 10, 10)
        save(writer, 11, 11)
        assert seen(writer) == {4: 4, 9: 9, 10: 10, 11: 11}
    with start() as again:
        assert seen(again) == {4: 4, 9: 9, 10: 10, 11: 11}
        restored = again.restore_latest(state=state(0))
        assert restored is not None
        assert restored.step == 11


@pytest.mark.parametrize("after", ["3", 3.0])
def test_waiting_for_a_step_after_what_is_no_number(start: Starts, after: Any) -> None:
    with start() as writer:
        save(writer, 4, 4)
        with pytest.raises(TypeError, match="after must be the number of a step"):
            writer.wait_for_new_step(after, 0)
        three: Any = np.int32(3)
        assert writer.wait_for_new_step(-1, 0) == writer.wait_for_new_step(three, 0) == 4
