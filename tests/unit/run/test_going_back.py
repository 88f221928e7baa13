"""Going back in a run, each way in which steps were lost by it or two histories were mixed."""

from __future__ import annotations

import gc
import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from ckpt_core._saved.opening import open_checkpoint
from tests.support import seams

QUICK = ckpt.Options(durable=False)
_numbers = itertools.count()


def state(value: int) -> dict[str, Any]:
    return {"value": np.full(3, value)}


def value_of(tree: Any) -> int:
    return int(tree["value"][0])


@pytest.fixture(name="start", params=["disk", "memory", "tiers"])
def make_start(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    url = f"memory://test-going-back/{next(_numbers)}" if request.param == "memory" else None

    def start(**more: Any) -> ckpt.Checkpointer:
        if request.param == "tiers":
            more["local_directory"] = tmp_path / "local"
        more = {"options": QUICK, "asynchronous": False, **more}
        return ckpt.Checkpointer(url or tmp_path / "steps", **more)

    return start


def check(start: Any, steps: dict[int, int]) -> None:
    """Whoever starts now finds these steps with these values, and goes on from the last one."""
    for prefix in (None, "other"):
        with start(read_only=True, step_prefix=prefix) as reader:
            restored = reader.restore_latest(state(0))
            assert (restored.step, value_of(restored.state)) == max(steps.items())
            assert reader.all_steps() == sorted(steps)
            assert {step: value_of(reader.load(step)) for step in steps} == steps


def test_a_loss_spike_under_retention(start: Any) -> None:
    with start(max_to_keep=2, keep_period=10) as checkpointer:
        for step in range(1, 26):
            checkpointer.save(step, state(step))
        assert value_of(checkpointer.restore(20, state(0)).state) == 20
        saved = [checkpointer.save(step, state(-step)) for step in range(21, 25)]
    assert saved == [True] * 4
    check(start, {10: 10, 20: 20, 23: -23, 24: -24})


def test_rolled_back_beyond_what_retention_left(start: Any) -> None:
    with start(max_to_keep=2, keep_period=1000) as checkpointer:
        for step in range(100, 3901, 100):
            checkpointer.save(step, state(step))
        assert checkpointer.rollback_to(3000) == [3800, 3900]
        again = range(3100, 4000, 100)
        assert all(checkpointer.save(step, state(-step)) for step in again)
    check(start, {1000: 1000, 2000: 2000, 3000: 3000, 3800: -3800, 3900: -3900})


def test_rolled_back_and_on_with_the_same_numbers(start: Any) -> None:
    with start() as checkpointer:
        for step in (100, 110, 120, 130):
            checkpointer.save(step, state(step))
        assert checkpointer.rollback_to(100) == [110, 120, 130]
        assert all(checkpointer.save(step, state(-step)) for step in (110, 120, 130))
    check(start, {100: 100, 110: -110, 120: -120, 130: -130})


def test_numbers_that_are_gone_refuse_nothing(start: Any) -> None:
    """By retention, or by a tool that knows nothing of the run."""
    with start(max_to_keep=1) as checkpointer:
        for step in (5, 6, 7):
            checkpointer.save(step, state(step))
        with start() as other:  # a deletion claims nothing
            other.delete(7)
        checkpointer.wait_until_finished()
        if 7 not in checkpointer.all_steps():  # else it is still among its local ones
            assert checkpointer.save(4, state(4))
            assert checkpointer.all_steps() == [4]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_overwriting_save_that_dies_between_the_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    def start(**more: Any) -> ckpt.Checkpointer:
        local = tmp_path / "local"
        return ckpt.Checkpointer(tmp_path / "steps", local_directory=local, options=QUICK, **more)

    with start() as checkpointer:
        checkpointer.save(3, state(7))
    checkpointer = start(asynchronous=asynchronous)
    assert value_of(checkpointer.restore_latest(state(0)).state) == 7  # pyright: ignore[reportOptionalMemberAccess]
    dies, steps = seams.fail(OSError, "the host is gone"), seams.below(tmp_path / "steps")
    with monkeypatch.context() as patch:
        seams.at(patch, "commit", before=dies, where=steps)
        with pytest.raises(OSError, match="the host is gone"):  # noqa: PT012  # of the one or the other
            checkpointer.save(3, state(8), overwrite=True)
            checkpointer.wait_until_finished()
    check(start, {3: 7})  # it was not acknowledged
    assert value_of(checkpointer.load(3)) == 7
    with ckpt.Checkpointer(tmp_path / "steps", read_only=True) as persistent:
        assert value_of(persistent.load(3)) == 7  # who knows of no local directory sees the same
    with start() as again:  # and the run goes on from it
        restored = again.restore_latest(state(0))
        assert restored is not None and value_of(restored.state) == 7
        assert again.save(4, state(9))
    check(start, {3: 7, 4: 9})


def test_a_start_from_nothing_saves_numbers_that_were_saved_before(start: Any) -> None:
    """restore_latest gave None, so the program begins anew: save must not answer that all is saved already."""
    with start() as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step))
        with start() as other:
            for step in (1, 2, 3):
                if step in other.all_steps():
                    other.delete(step)
        assert checkpointer.restore_latest(state(0)) is None
        assert [checkpointer.save(step, state(-step)) for step in (1, 2)] == [True, True]
        assert checkpointer.all_steps()[-1] == 2


def test_a_refused_rollback_leaves_the_run_where_it_stands(tmp_path: Path) -> None:
    """Also where retention has deleted some of its steps: the next save must not retire the others."""
    with ckpt.Checkpointer(
        tmp_path, max_to_keep=2, asynchronous=False, options=QUICK
    ) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, state(step))
        path = str(tmp_path / "7")
        with PosixBackend().reading(path, open_checkpoint(path).head):
            with pytest.raises(ckpt.CheckpointError, match="is being read"):
                checkpointer.rollback_to(3)
            assert not checkpointer.save(7, state(0))
            assert checkpointer.save(8, state(8))
        assert checkpointer.all_steps() == [7, 8]
    assert not (tmp_path / "retired").exists()


def test_overwriting_an_earlier_step_leaves_those_in_between(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, options=QUICK) as checkpointer:
        for step in (5, 6, 7):
            checkpointer.save(step, state(step))
    with ckpt.Checkpointer(tmp_path, options=QUICK, asynchronous=False) as checkpointer:
        assert [value_of(checkpointer.restore(step, state(0)).state) for step in (5, 7)] == [5, 7]
        assert checkpointer.save(5, state(50), overwrite=True)
        assert checkpointer.save(8, state(8))
        assert checkpointer.all_steps() == [5, 6, 7, 8]


def test_a_step_saved_beside_and_then_restored_is_stood_on(start: Any) -> None:
    with start() as checkpointer:
        checkpointer.save(5, state(5))
        checkpointer.save(2, state(2), force=True)
        assert value_of(checkpointer.restore(2, state(0)).state) == 2
        assert checkpointer.save(2, state(20), overwrite=True)
        assert checkpointer.save(3, state(3))
        assert checkpointer.load(2) is not None
    check(start, {2: 20, 3: 3})


def test_training_that_goes_on_after_a_step_beside_leaves_the_newer_ones(start: Any) -> None:
    """Also in local directories, though the first save after going back left nothing."""
    with start() as run:
        for step in (0, 5, 8):
            run.save(step, state(step))
    with start() as run:
        assert value_of(run.restore(5, state(0)).state) == 5
        assert run.save(2, state(102), force=True)
        check(start, {0: 0, 2: 102, 5: 5, 8: 8})
        assert run.save(6, state(106))
        run.wait_until_finished()
    check(start, {0: 0, 2: 102, 5: 5, 6: 106})


def test_who_rolled_back_and_was_taken_over_stops_nobody(start: Any) -> None:
    """Its claims of both tiers are made at once: a later call takes none of them from the newer writer."""
    with start() as first:
        first.save(1, state(1))
    older = start()
    older.rollback_to(1)
    with start() as newer:
        restored = newer.restore_latest(state(0))
        assert restored is not None and value_of(restored.state) == 1
        with pytest.raises(ckpt.CheckpointError, match="took this directory over"):
            older.save(2, state(-2), overwrite=True)
        assert newer.save(2, state(2))
    check(start, {1: 1, 2: 2})


# ---- an evaluator -----------------------------------------------------------------------------------


def test_a_step_that_was_waited_for_stays_until_the_next_is_asked_for(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, max_to_keep=1, asynchronous=False, options=QUICK) as trainer:
        trainer.save(1, state(1))
        evaluator = ckpt.Checkpointer(tmp_path, read_only=True)
        assert evaluator.wait_for_new_step(timeout_secs=0) == 1
        for step in (2, 3, 4):
            trainer.save(step, state(step))
        assert trainer.all_steps() == [1, 4]
        assert value_of(evaluator.restore(1, state(0)).state) == 1
        assert evaluator.wait_for_new_step(1, timeout_secs=0) == 4
        trainer.save(5, state(5))
        assert trainer.all_steps() == [4, 5]
        evaluator.close()
        trainer.save(6, state(6))
        assert trainer.all_steps() == [6]


@pytest.mark.parametrize("how", ["asks in vain", "is forgotten"])
def test_a_step_is_kept_no_longer_than_it_is_wanted(tmp_path: Path, how: str) -> None:
    with ckpt.Checkpointer(tmp_path, max_to_keep=1, asynchronous=False, options=QUICK) as trainer:
        trainer.save(1, state(1))
        evaluator = ckpt.Checkpointer(tmp_path, read_only=True)
        assert evaluator.wait_for_new_step(timeout_secs=0) == 1
        if how == "asks in vain":
            assert evaluator.wait_for_new_step(1, timeout_secs=0) is None
        else:
            del evaluator
            gc.collect()
        trainer.save(2, state(2))
        assert trainer.all_steps() == [2]


def test_training_goes_back_behind_a_step_that_is_evaluated(tmp_path: Path) -> None:
    """An evaluation may take an hour: training must not wait for it, nor fail."""
    with (
        ckpt.Checkpointer(tmp_path, asynchronous=False, options=QUICK) as trainer,
        ckpt.Checkpointer(tmp_path, read_only=True) as evaluator,
    ):
        for step in (1, 2, 3):
            trainer.save(step, state(step))
        assert evaluator.wait_for_new_step(timeout_secs=0) == 3
        assert value_of(trainer.restore(1, state(0)).state) == 1
        assert trainer.save(2, state(-2))
        assert trainer.all_steps() == [1, 2]
        with pytest.raises(ckpt.CheckpointNotFound):
            evaluator.restore(3, state(0))
        assert evaluator.wait_for_new_step(timeout_secs=0) == 2
        assert trainer.rollback_to(1) == [2]


def test_who_deletes_the_only_step_that_it_saved_stands_nowhere(start: Any) -> None:
    """The step beneath is not its own, and is not replaced without a word."""
    with start() as checkpointer:
        for step in range(3):
            checkpointer.save(step, state(step))
    with start() as checkpointer:
        checkpointer.save(2, state(12), overwrite=True, force=True)
        checkpointer.delete(2)
        with pytest.raises(ckpt.CheckpointExists, match="step 1 is there already"):
            checkpointer.save(1, state(-1))


def test_a_refused_delete_changes_nothing(tmp_path: Path) -> None:
    """A save between persistent steps goes on as before, and retires nothing that another program put there."""
    options = ckpt.Options(
        durable=False, persist_policy=ckpt.when.every_steps(2), local_max_to_keep=2
    )
    run = tmp_path / "run"
    with ckpt.Checkpointer(
        run, local_directory=tmp_path / "local", options=options
    ) as checkpointer:
        checkpointer.save(0, state(0))
        with pytest.raises(ckpt.CheckpointNotFound):
            checkpointer.delete(1)
        checkpointer.wait_until_finished()
        ckpt.save(run / "2", state(2), options=QUICK)
        checkpointer.save(1, state(1))
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [0, 1, 2]


# ---- policies by time and by rank -------------------------------------------------------------------


@pytest.mark.parametrize("policy", [ckpt.keep.every_secs(10), ckpt.keep.newer_than(100)])
def test_a_host_whose_clock_ran_ahead(policy: Any) -> None:
    """Its two steps count as made when the next one was: the later ones are kept as if there were none before."""
    times = {1: 100.0, 2: 1e9, 3: 1e9 + 10, 4: 130.0, 5: 140.0, 6: 150.0}
    facts = [ckpt.keep.StepFacts(step, secs) for step, secs in times.items()]
    assert {5, 6} <= policy(facts).keys()


def test_a_metric_that_no_step_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ckpt.Checkpointer(
        tmp_path,
        max_to_keep=2,
        best_metric="losss",
        best_mode="min",
        asynchronous=False,
        options=QUICK,
    ) as checkpointer:
        with caplog.at_level(logging.WARNING, "ckpt_core"):
            for step in range(5):
                checkpointer.save(step, state(step), metrics={"loss": 1.0 / (step + 1)})
        assert checkpointer.all_steps() == [0, 1, 2, 3, 4]
    said = [record.getMessage() for record in caplog.records if "losss" in record.getMessage()]
    assert len(said) == 1 and "'loss'" in said[0]


@pytest.mark.parametrize("call", ["rollback_to", "delete"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_who_was_interrupted_sees_what_a_restart_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: type[BaseException]
) -> None:
    """The steps leave with one file; local copies that it notes as gone are not listed, nor restored, after that."""
    options = ckpt.Options(
        durable=False, persist_policy=ckpt.when.at_steps([1]), local_max_to_keep=4
    )

    def start(**more: Any) -> ckpt.Checkpointer:
        local = tmp_path / "local"
        return ckpt.Checkpointer(tmp_path / "run", local_directory=local, options=options, **more)

    with start() as writer:
        for step in (1, 2, 3):
            assert writer.save(step, state(step))
        writer.wait_until_finished()
        with monkeypatch.context() as patch:
            seams.at(
                patch,
                (PosixBackend, "put"),
                after=seams.fail(error),
                where=seams.names(".ckpt-run"),
            )
            with pytest.raises(error):
                getattr(writer, call)(2 if call == "rollback_to" else 3)
        assert writer.all_steps() == [1, 2]
        with pytest.raises(ckpt.CheckpointNotFound):
            writer.load(3)
        assert writer.save(3, state(30))
        writer.wait_until_finished()
        with start(read_only=True) as reader:
            assert reader.all_steps() == writer.all_steps() == [1, 2, 3]
            assert value_of(reader.load(3)) == value_of(writer.load(3)) == 30
