"""``training.Checkpointer`` of Orbax's second API, on ckpt's engine."""

from __future__ import annotations

import datetime
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_orbax import NotOffered
from ckpt_orbax import v1 as ocp
from ckpt_orbax._run import SaveEnd
from tests.support import seams
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


def writes_that_wait(monkeypatch):
    """Holds all writes from now on until the event is set."""
    gate = seams.Gate()
    seams.at(monkeypatch, "write", before=gate)
    return gate.go


def test_a_run(tmp_path):
    with open_run(tmp_path / "run") as checkpointer:
        assert (tmp_path / "run").is_dir()
        assert checkpointer.latest is None
        assert list(checkpointer.checkpoints) == []
        for step in range(3):
            assert checkpointer.save(step, state_of(step), metrics={"loss": 1.0 / (step + 1)})
        assert steps_of(checkpointer) == [0, 1, 2]
        assert checkpointer.latest.step == 2
        assert checkpointer.latest.metrics == {"loss": 1 / 3}
        assert isinstance(checkpointer.latest, ocp.training.CheckpointMetadata)
        assert_same(checkpointer.load(), state_of(2))
        assert_same(checkpointer.load(checkpointer.checkpoints[0]), state_of(0))
        assert_same(checkpointer.load(1, state_of(1)), state_of(1))
        assert_same(checkpointer.load_async(1).result(), state_of(1))
    with ckpt.Checkpointer(tmp_path / "run", read_only=True) as native:
        assert native.all_steps() == [0, 1, 2]
        assert native.metrics(2) == {"loss": 1 / 3}


def test_several_checkpointables(tmp_path):
    with open_run(tmp_path) as checkpointer:
        assert checkpointer.save_checkpointables(0, {"state": state_of(0), "other": {"a": 1}})
        assert checkpointer.load_checkpointables(0, {"other": None}) == {"other": {"a": 1}}
        loaded = checkpointer.load_checkpointables_async().result()
        assert_same(loaded, {"state": state_of(0), "other": {"a": 1}})
        described = checkpointer.checkpointables_metadata(0)
        assert (described.step, set(described.metadata)) == (0, {"state", "other"})
        assert checkpointer.load(0, checkpointable_name="other") == {"a": 1}


def test_the_policy_decides(tmp_path):
    with open_run(tmp_path, save_decision_policy=saving.FixedIntervalPolicy(2)) as checkpointer:
        for step in range(5):
            assert checkpointer.should_save(step) == (step % 2 == 0)
            assert checkpointer.save(step, state_of(step)) == (step % 2 == 0)
            assert not checkpointer.should_save(step)
        assert checkpointer.save_async(5, state_of(5)) is None
        assert checkpointer.save(5, state_of(5), force=True)
        assert steps_of(checkpointer) == [0, 2, 4, 5]


def test_an_older_step_is_not_saved(tmp_path):
    with open_run(tmp_path) as checkpointer:
        assert checkpointer.save(5, state_of(5))
        assert not checkpointer.should_save(3)
        assert not checkpointer.save(3, state_of(3))
        assert steps_of(checkpointer) == [5]


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


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, range(6)),
        (keeping.LatestN(2), [4, 5]),
        (keeping.EveryNSteps(3), [0, 3, 5]),
        (keeping.AnyPreservationPolicy([keeping.LatestN(1), keeping.CustomSteps([1])]), [1, 5]),
        (
            keeping.BestN(get_metric_fn=lambda metrics: metrics["loss"], n=2, reverse=True),
            [0, 2, 5],
        ),
    ],
)
def test_which_steps_stay_and_always_the_newest(tmp_path, policy, expected):
    losses = [1.0, 5.0, 2.0, 4.0, 3.0, 9.0]
    with open_run(tmp_path, preservation_policy=policy) as checkpointer:
        for step, loss in enumerate(losses):
            checkpointer.save(step, state_of(step), metrics={"loss": loss})
        assert steps_of(checkpointer) == list(expected)


def test_steps_that_a_policy_deletes_are_not_listed(tmp_path):
    with open_run(tmp_path, preservation_policy=keeping.LatestN(1)) as checkpointer:
        seen = []
        for step in range(5):
            response = checkpointer.save_async(step, state_of(step))
            while checkpointer.is_saving_in_progress():
                seen = steps_of(checkpointer)  # also between the commit and the deletion
            assert response.result()
            assert steps_of(checkpointer) == [step]
        assert len(seen) <= 2


def test_metrics_may_be_any_json(tmp_path):
    best = keeping.BestN(get_metric_fn=lambda found: found["eval"]["loss"], n=1, reverse=True)
    given = [{"eval": {"loss": loss, "by": "hand"}, "curve": [1, 2]} for loss in (3.0, 1.0, 2.0)]
    with open_run(tmp_path, preservation_policy=best) as checkpointer:
        for step, metrics in enumerate(given):
            checkpointer.save(step, state_of(step), metrics=metrics)
        assert [one.metrics for one in checkpointer.checkpoints] == given[1:]
        assert checkpointer.metadata(1).metrics == given[1]
        assert checkpointer.load_checkpointables(1).keys() == {"state"}
        assert checkpointer.checkpointables_metadata(1).metadata.keys() == {"state"}
        checkpointer.save(3, state_of(3), metrics={"eval/loss": np.float32(0.5), "n": 1})
        assert checkpointer.latest.metrics == {"eval/loss": 0.5, "n": 1}
        assert steps_of(checkpointer) == [3]


def test_a_forced_step_may_be_older(tmp_path):
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(5, state_of(5))
        assert not checkpointer.save(3, state_of(3))
        assert checkpointer.save(3, state_of(3), force=True)
        assert steps_of(checkpointer) == [3, 5]
        assert checkpointer.latest.step == 5
        assert_same(checkpointer.load(3), state_of(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "5"]  # and nothing else


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


def test_metadata_of_the_run(tmp_path):
    with open_run(tmp_path / "none") as checkpointer:
        checkpointer.save(0, state_of(0))
        assert checkpointer.root_metadata().custom_metadata == {}
        assert checkpointer.metadata().custom_metadata == {}
    first = open_run(tmp_path, custom_metadata={"a": 1})
    second = open_run(tmp_path, custom_metadata={"b": 2})
    for checkpointer in (first, second):
        found = checkpointer.root_metadata()
        assert isinstance(found, ocp.training.RootMetadata)
        assert found.custom_metadata == {"a": 1}
        assert str(found.directory) == str(tmp_path)


def test_steps_are_listed_again_on_demand(tmp_path):
    with open_run(tmp_path) as trainer, open_run(tmp_path) as evaluator:
        assert evaluator.latest is None
        trainer.save(0, state_of(0))
        assert evaluator.latest is None
        evaluator.reload()
        assert evaluator.latest.step == 0
        trainer.save(1, state_of(1))
        trainer.delete(0)
        with pytest.raises(ocp.training.errors.StepNotFoundError, match="reload"):
            evaluator.load(0)
        evaluator.reload()
        assert steps_of(evaluator) == [1]
        trainer.save(2, state_of(2))  # a reader takes nothing over


@pytest.mark.parametrize(
    ("named", "name"),
    [
        ({}, "7"),
        ({"step_format_fixed_length": 4}, "0007"),
        ({"step_prefix": "foo"}, "foo_7"),
        ({"step_prefix": "a_0", "step_format_fixed_length": 3}, "a_0_007"),
    ],
)
def test_names_of_steps(tmp_path, named, name):
    names = ocp.path.step.standard_name_format(**named)
    assert names.build_name(7) == name
    with open_run(tmp_path, step_name_format=names) as checkpointer:
        checkpointer.save(7, state_of(7))
        assert (tmp_path / name).is_dir()
        assert [found.step for found in names.find_all(tmp_path)] == [7]
        assert names.find_step(tmp_path, 7).path.name == name
        with pytest.raises(ValueError, match="there is no step 8"):
            names.find_step(tmp_path, 8)


def test_names_of_several_forms(tmp_path):
    old = ocp.path.step.standard_name_format(step_prefix="old")
    new = ocp.path.step.standard_name_format()
    with open_run(tmp_path, step_name_format=old) as checkpointer:
        checkpointer.save(1, state_of(1))
    both = ocp.path.step.composite_name_format(new, [new, old])
    with open_run(tmp_path, step_name_format=both) as checkpointer:
        checkpointer.save(2, state_of(2))
        assert steps_of(checkpointer) == [1, 2]
        assert_same(checkpointer.load(1), state_of(1))
    assert sorted(found.path.name for found in both.find_all(tmp_path)) == ["2", "old_1"]
    assert both.find_step(tmp_path, 1).path.name == "old_1"
    with pytest.raises(ValueError, match="one of read_name_formats"):
        ocp.path.step.composite_name_format(new, [old])


def test_other_names_are_refused(tmp_path):
    class Roman:
        def build_name(self, step):
            return "I" * step

    with pytest.raises(NotOffered, match="standard_name_format"):
        open_run(tmp_path, step_name_format=Roman())


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


def test_an_error_in_the_background_is_raised_at_every_call(tmp_path):
    def get_in_the_way(event):
        if event.kind == "snapshot_taken" and event.step == 1:
            (tmp_path / "1" / "in the way").mkdir(parents=True)

    context = ocp.Context()
    context.engine = ckpt.Options(on_event=get_in_the_way)
    checkpointer = open_run(tmp_path, context=context)
    checkpointer.save(0, state_of(0))
    response = checkpointer.save_async(1, state_of(1))
    for _ in range(2):
        with pytest.raises(FileExistsError):
            response.result()
    assert steps_of(checkpointer) == [0]
    later = checkpointer.save_async(2, state_of(2))
    assert later.result()
    checkpointer.close()


def test_close_ends_what_runs(tmp_path):
    checkpointer = open_run(tmp_path)
    checkpointer.save_async(0, state_of(0))
    checkpointer.close()
    assert ckpt.verify(tmp_path / "0").ok
    with pytest.raises(ckpt.CheckpointError, match="closed"):
        checkpointer.save(1, state_of(1))


def test_what_is_not_offered(tmp_path):
    with pytest.raises(NotOffered, match="on_event"):
        open_run(tmp_path, logger=object())
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(0, state_of(0))
        with pytest.raises(NotOffered, match="wait"):
            checkpointer.cancel()
        with pytest.raises(NotOffered, match="never changed after its commit"):
            checkpointer.delete(0, checkpointable_name="state")
        assert steps_of(checkpointer) == [0]


def test_earlier_names_warn(tmp_path):
    with open_run(tmp_path) as checkpointer:
        with pytest.warns(DeprecationWarning, match="Use `save` instead"):
            assert checkpointer.save_pytree(0, state_of(0))
        with pytest.warns(DeprecationWarning, match="Use `save_async` instead"):
            assert checkpointer.save_pytree_async(1, state_of(1)).result()
        with pytest.warns(DeprecationWarning, match="Use `load` instead"):
            assert_same(checkpointer.load_pytree(1), state_of(1))
        with pytest.warns(DeprecationWarning, match="Use `load_async` instead"):
            assert_same(checkpointer.load_pytree_async(1).result(), state_of(1))
        with pytest.warns(DeprecationWarning, match="Use `metadata` instead"):
            assert checkpointer.pytree_metadata(1).step == 1


def test_a_step_that_is_being_saved_is_the_latest(tmp_path, monkeypatch):
    """Trainers ask it at their end, and save the last step unless it is that one."""
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(6, state_of(6))
        go_on = writes_that_wait(monkeypatch)
        response = checkpointer.save_async(7, state_of(7))
        assert checkpointer.latest.step == 7
        assert steps_of(checkpointer) == [6, 7]
        go_on.set()
        assert_same(checkpointer.load(7), state_of(7))
        assert response.result()


def test_a_step_that_is_being_saved_has_its_metrics_and_time(tmp_path, monkeypatch):
    """Policies and callers see it as Orbax shows it; its time was the beginning of 1970, its metrics None."""
    asked = []

    class Saves(saving.SaveDecisionPolicy):
        def should_save(self, step, previous_steps, *, context):
            asked.append([(one.step, one.metrics) for one in previous_steps])
            return True

    before = datetime.datetime.now(tz=datetime.UTC)
    with open_run(tmp_path, save_decision_policy=Saves()) as checkpointer:
        go_on = writes_that_wait(monkeypatch)
        response = checkpointer.save_async(7, state_of(7), metrics={"loss": 2.0})
        running = checkpointer.latest
        assert running.metrics == {"loss": 2.0}
        assert before <= running.time <= datetime.datetime.now(tz=datetime.UTC)
        assert (running.init_timestamp, running.commit_timestamp) == (running.time, None)
        assert checkpointer.should_save(8)
        assert asked[-1] == [(7, {"loss": 2.0})]
        go_on.set()
        assert response.result()
        assert checkpointer.latest.commit_timestamp is not None


def test_a_step_that_was_asked_for_while_it_was_replaced_shows_the_new_one(tmp_path, monkeypatch):
    """What was known of the old one stayed for good."""
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(7, state_of(7), metrics={"loss": 1.0})
        go_on = writes_that_wait(monkeypatch)
        response = checkpointer.save_async(7, state_of(8), overwrite=True, metrics={"loss": 2.0})
        assert checkpointer.checkpoints[0].metrics == {"loss": 1.0}
        go_on.set()
        assert response.result()
        assert checkpointer.checkpoints[0].metrics == {"loss": 2.0}


def test_a_save_that_ends_during_a_look_is_seen(tmp_path):
    """It was missing among the running ones, asked for after the list, and in the list, made before."""
    with open_run(tmp_path) as checkpointer:
        run = checkpointer._run
        own = run.engine

        class Engine:
            def all_steps(self):
                found = [1] if not ended else [1, 5]
                if not ended:
                    ended.append(5)
                    run._notice(ckpt.Event(kind="committed", path="/nowhere/5", step=5))
                return found

        for look in (run.begun, lambda: [run.newest()]):
            ended = []
            run.engine = Engine()
            run.look()
            run._begin(5, SaveEnd(None))
            assert look()[-1] == 5
            assert look()[-1] == 5
        run.engine = own
