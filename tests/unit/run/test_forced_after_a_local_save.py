"""save(step, force=True) of a step that only the fast directory has: it goes to the persistent one, with what is given."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import ckpt_core as ckpt
from tests.support import seams

NEVER = ckpt.Options(persist_policy=ckpt.when.every_steps(1000), local_max_to_keep=5, durable=False)


def start(root: Path, **more: Any) -> ckpt.Checkpointer:
    more = {"options": NEVER} | more
    return ckpt.Checkpointer(root / "run", local_directory=root / "fast", **more)


def persistent(root: Path) -> dict[int, int]:
    with ckpt.Checkpointer(root / "run", read_only=True) as tool:
        return {step: tool.load(step)["n"] for step in tool.all_steps()}


def test_it_is_there_when_the_host_is_gone(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        for step in range(6):
            assert run.save(step, {"n": step})
        assert run.save(5, {"n": 5}, force=True)
        run.wait_until_finished()
        assert persistent(tmp_path) == {0: 0, 5: 5}
        assert not run.save(5, {"n": 5}, force=True), "both have it"
        assert run.save(6, {"n": 6})
    shutil.rmtree(tmp_path / "fast")
    with start(tmp_path) as run:
        restored = run.restore_latest(state={"n": 0})
        assert restored is not None and (restored.step, restored["state"]["n"]) == (5, 5)


def test_both_have_what_was_given_last(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        run.save(0, {"n": 0})
        run.save(1, {"n": 1})
        assert run.save(1, {"n": 11}, force=True)
        run.wait_until_finished()
        assert run.load(1)["n"] == 11
        assert run.save(2, {"n": 2})
    assert persistent(tmp_path) == {0: 0, 1: 11}
    with start(tmp_path) as run:
        restored = run.restore_latest(state={"n": 0})
        assert restored is not None and restored.step == 2


def test_if_it_fails_there_the_local_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local one is replaced when the persistent one is there: in between, one of the two is always whole."""
    with start(tmp_path) as run:
        run.save(0, {"n": 0})
        run.save(1, {"n": 1})
        run.wait_until_finished()
        fails = seams.fail(OSError, "the disk is gone")
        seams.at(monkeypatch, "commit", before=fails, where=seams.below(tmp_path / "run"))
        assert run.save(1, {"n": 11}, force=True)
        with pytest.raises(OSError, match="the disk is gone"):
            run.wait_until_finished()
        monkeypatch.undo()
        assert run.load(1)["n"] == 1
        assert run.save(1, {"n": 12}, force=True)
    assert persistent(tmp_path) == {0: 0, 1: 12}


def test_of_a_step_that_was_restored(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        run.save(0, {"n": 0})
        run.save(1, {"n": 1})
    with start(tmp_path) as run:
        restored = run.restore_latest(state={"n": 0})
        assert restored is not None and restored.step == 1
        assert run.save(1, restored["state"], force=True)
    assert persistent(tmp_path) == {0: 0, 1: 1}


def test_a_persistent_copy_that_is_on_its_way_counts(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        assert run.save(0, {"n": 0})
        assert run.save(1, {"n": 1}, force=True)
        assert not run.save(1, {"n": 2}, force=True)
    assert persistent(tmp_path) == {0: 0, 1: 1}


def test_an_older_one_stays_as_it_is(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        for step in range(4):
            run.save(step, {"n": step})
        assert not run.save(2, {"n": 22}, force=True)
    assert persistent(tmp_path) == {0: 0}


def test_the_example_of_the_guide_with_two_tiers(tmp_path: Path) -> None:
    """A signal between the save and the question whether to stop."""
    before = signal.getsignal(signal.SIGTERM)
    policy = ckpt.when.every_steps(2) | ckpt.when.preempted()
    try:
        with start(tmp_path, save_policy=policy) as run:
            assert not run.should_stop
            for step in range(10):
                run.save(step, {"n": step})
                if step == 4:
                    os.kill(os.getpid(), signal.SIGTERM)
                if run.should_stop:
                    assert run.save(step, {"n": step}, force=True)
                    break
    finally:
        signal.signal(signal.SIGTERM, before)
    assert persistent(tmp_path) == {0: 0, 4: 4}


@pytest.mark.parametrize("moves", [False, True])
def test_after_a_rollback(tmp_path: Path, moves: bool) -> None:
    """The number was in the persistent directory before, of a history that was left."""
    with start(tmp_path) as run:
        for step in range(4):
            run.save(step, {"n": step}, force=step == 3)
        if moves:
            run.restore(2, state={"n": 0})["state"]
        else:
            run.rollback_to(2)
        assert run.save(3, {"n": 33})
        assert run.save(3, {"n": 33}, force=True)
    assert persistent(tmp_path) == {0: 0, 3: 33}
