"""``training.Checkpointer`` of Orbax's second API, on ckpt's engine."""

import datetime
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_orbax import v1 as ocp
from tests.support.trees import assert_same

keeping = ocp.training.preservation_policies
saving = ocp.training.save_decision_policies
EVERY = saving.FixedIntervalPolicy(1)


def state_of(step):
    return {"w": jnp.full(3, step), "n": np.arange(step + 1), "step": step}


def open_run(directory, **named):
    return ocp.training.Checkpointer(directory, **{"save_decision_policy": EVERY, **named})


def steps_of(checkpointer):
    return [one.step for one in checkpointer.checkpoints]


def test_a_run(tmp_path):
    with open_run(tmp_path / "run") as checkpointer:
        assert (tmp_path / "run").is_dir()
        assert checkpointer.latest is None
        assert list(checkpointer.checkpoints) == []
        for step in range(3):
            assert checkpointer.save(step, state_of(step), metrics={"loss": 1.0 / (step + 1)})
        assert isinstance(checkpointer.latest, ocp.training.CheckpointMetadata)
        assert_same(checkpointer.load(), state_of(2))
        assert_same(checkpointer.load(checkpointer.checkpoints[0]), state_of(0))
        assert_same(checkpointer.load_async(1).result(), state_of(1))
    with ckpt.Checkpointer(tmp_path / "run", read_only=True) as native:
        assert native.all_steps() == [0, 1, 2]
        assert native.metrics(2) == {"loss": 1 / 3}


def test_a_policy_of_ones_own(tmp_path):
    asked = []

    class Mine:
        def should_save(self, step, previous_steps, *, context):
            asked.append((step.step, [one.step for one in previous_steps]))
            assert isinstance(step.time, datetime.datetime)
            assert context.multiprocessing_options.primary_host == 0
            assert not context.reached_preemption
            return step.step in (0, 3)

    class Last:
        def should_preserve(self, checkpoints, *, context):
            assert all(one.metrics == {"at": float(one.step)} for one in checkpoints)
            return [one is checkpoints[-1] for one in checkpoints]

    run = open_run(tmp_path, save_decision_policy=Mine(), preservation_policy=Last())
    with run as checkpointer:
        for step in range(4):
            checkpointer.save(step, state_of(step), metrics={"at": step})
        assert steps_of(checkpointer) == [3]
    assert asked == [(0, []), (1, [0]), (2, [0]), (3, [0])]


def test_orbaxs_default_skips_while_a_save_runs(tmp_path):
    release = threading.Event()
    context = ocp.Context()
    context.engine = ckpt.Options(
        on_event=lambda event: release.wait(60) if event.kind == "committed" else None
    )
    with ocp.training.Checkpointer(tmp_path, context=context) as checkpointer:
        first = checkpointer.save_async(0, state_of(0))
        assert checkpointer.is_saving_in_progress()
        assert not checkpointer.should_save(1)
        assert checkpointer.save_async(1, state_of(1)) is None
        with pytest.raises(TimeoutError, match="step 0 is not saved"):
            first.result(timeout=0.01)
        with pytest.raises(ocp.training.errors.StepAlreadyExistsError):
            checkpointer.save(0, state_of(0))
        release.set()
        assert first.result()
        assert not checkpointer.is_saving_in_progress()
        assert checkpointer.save(2, state_of(2))
        assert steps_of(checkpointer) == [0, 2]


def test_a_step_exists(tmp_path):
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(0, state_of(0))
        with pytest.raises(
            ocp.training.errors.StepAlreadyExistsError, match="Step 0 already exists"
        ) as caught:
            checkpointer.save(0, state_of(1))
        assert isinstance(caught.value, FileExistsError)
        assert checkpointer.save(0, state_of(1), overwrite=True)
        assert_same(checkpointer.load(0), state_of(1))
    with open_run(tmp_path) as again, pytest.raises(ocp.training.errors.StepAlreadyExistsError):
        again.save(0, state_of(2))


def test_a_step_does_not_exist(tmp_path):
    with open_run(tmp_path) as checkpointer:
        for call in (
            checkpointer.load,
            checkpointer.metadata,
            checkpointer.checkpointables_metadata,
        ):
            with pytest.raises(
                ocp.training.errors.StepNotFoundError, match="no step; there are: none"
            ):
                call()
        checkpointer.save(3, state_of(3))
        with pytest.raises(FileNotFoundError, match="no step 4; there are: 3"):
            checkpointer.load(4)
        with pytest.raises(ocp.training.errors.StepNotFoundError):
            checkpointer.delete(4)
        assert not checkpointer.delete(4, missing_ok=True)
        assert checkpointer.delete(checkpointer.latest)
        assert checkpointer.latest is None
        assert checkpointer.delete_async(3, missing_ok=True).result() is False


def test_what_is_known_of_a_step(tmp_path):
    before = datetime.datetime.now(datetime.UTC)
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(0, state_of(0), metrics={"loss": 0.5}, custom_metadata={"note": "x"})
        found = checkpointer.metadata(0)
        assert (found.step, found.metrics, found.custom_metadata) == (
            0,
            {"loss": 0.5},
            {"note": "x"},
        )
        assert set(found.metadata) == {"w", "n", "step"}
        assert before <= found.commit_timestamp == found.time
        assert found.init_timestamp <= found.commit_timestamp
        assert checkpointer.latest.time == found.time
        assert found.path == checkpointer.latest.path
        assert str(found.path) == str(tmp_path / "0")
    light = open_run(tmp_path, lightweight_initialize=True)
    assert (light.latest.metrics, light.latest.commit_timestamp) == (None, None)


def test_a_failed_save_is_loud_and_the_next_one_works(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "in the way").touch()
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(0, state_of(0))
        for _ in range(2):
            with pytest.raises(ckpt.CheckpointError):  # by the call or by result(): never silent
                checkpointer.save(1, state_of(1))
        assert steps_of(checkpointer) == [0]
        assert checkpointer.save(2, state_of(2))
        assert steps_of(checkpointer) == [0, 2]
