"""``CheckpointManager``: when it saves, what it keeps, and what it says of its steps."""

from __future__ import annotations

import datetime
import time

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_orbax as ocp
from tests.support.trees import assert_same

STATE = {"w": np.arange(4.0), "step": 3}
Standard = ocp.args.StandardSave


def manager_in(directory, **options):
    return ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(**options))


def save_all(manager, steps, **named):
    return [manager.save(step, args=Standard({"w": np.full(2, step)}), **named) for step in steps]


def test_a_run_resumes_with_its_newest_step(tmp_path):
    with manager_in(tmp_path, max_to_keep=2) as manager:
        assert manager.latest_step() is None
        assert save_all(manager, range(3)) == [True] * 3
    with manager_in(tmp_path, max_to_keep=2) as manager:
        assert manager.all_steps() == [1, 2]
        assert manager.restore(None)["w"].tolist() == [2, 2]
        assert manager.restore(1, args=ocp.args.StandardRestore())["w"].tolist() == [1, 1]
        assert manager.directory.name == tmp_path.name


def test_the_step_that_is_being_saved_is_listed(tmp_path):
    with manager_in(tmp_path) as manager:
        save_all(manager, [7])
        assert (manager.latest_step(), manager.all_steps()) == (7, [7])
        manager.wait_until_finished()
        assert not manager.is_saving_in_progress()
        manager.check_for_errors()


def test_steps_are_looked_for_on_demand(tmp_path):
    with manager_in(tmp_path) as manager, manager_in(tmp_path) as other:
        save_all(other, [0])
        other.wait_until_finished()
        assert (manager.latest_step(), manager.all_steps()) == (None, [])
        assert manager.all_steps(read=True) == [0]
        save_all(other, [1])
        other.wait_until_finished()
        manager.reload()
        assert manager.latest_step() == 1


def test_an_existing_step(tmp_path):
    with manager_in(tmp_path) as manager:
        save_all(manager, [5])
        assert save_all(manager, [5, 3]) == [False, False]
        with pytest.raises(ocp.checkpoint_manager.StepAlreadyExistsError, match="step 5"):
            save_all(manager, [5], force=True)
        with pytest.raises(ValueError, match="step 5"):
            save_all(manager, [5], force=True)


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({"save_interval_steps": 4}, [1, 4, 8]),
        ({"save_interval_steps": 100, "save_on_steps": [3, 5]}, [1, 3, 5]),
        ({"should_save_fn": lambda step, newest: step in (2, 9)}, [2, 9]),
        ({"should_save_fn": lambda step, newest: newest is None or step > newest + 3}, [1, 5, 9]),
        (
            {"save_decision_policy": ocp.checkpoint_managers.FixedIntervalPolicy(3)},
            [3, 6, 9],
        ),
        ({"read_only": True}, []),
    ],
)
def test_when_it_saves(tmp_path, options, saved):
    with manager_in(tmp_path, **options) as manager:
        assert [step for step in range(1, 10) if save_all(manager, [step])[0]] == saved
        assert manager.all_steps() == saved


def test_continuous_policies_know_of_running_saves_unless_turned_off(tmp_path):
    class NoneRunning:
        def should_save(self, step, previous_steps, *, context):
            asked.append(context.is_saving_in_progress)
            return True

    asked = []
    with manager_in(
        tmp_path,
        save_decision_policy=NoneRunning(),
        enable_should_save_is_saving_in_progress_check=False,
    ) as manager:
        save_all(manager, range(3))
    assert asked == [False] * 3


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, list(range(6))),
        ({"max_to_keep": 2}, [4, 5]),
        ({"max_to_keep": 1, "keep_period": 3}, [0, 3, 5]),
        ({"max_to_keep": 1, "keep_time_interval": datetime.timedelta(hours=1)}, [0, 5]),
        ({"preservation_policy": ocp.checkpoint_managers.CustomSteps([1, 2])}, [1, 2, 5]),
        ({"max_to_keep": 0}, [5]),  # Orbax deletes the newest, too
    ],
)
def test_what_stays(tmp_path, options, kept):
    with manager_in(tmp_path, **options) as manager:
        save_all(manager, range(6))
        manager.wait_until_finished()
        assert manager.all_steps() == kept


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(("mode", "best", "kept"), [("min", 1, [1, 3, 4]), ("max", 2, [0, 2, 4])])
def test_the_best_steps_stay(tmp_path, mode, best, kept, restart):
    options = {"best_fn": lambda metrics: metrics["loss"], "best_mode": mode, "max_to_keep": 2}
    manager = manager_in(tmp_path, **options)
    for step, loss in enumerate([7, 1, 9, 2, 5]):
        if restart:
            manager.close()
            manager = manager_in(tmp_path, **options)
        save_all(manager, [step], metrics={"loss": loss})
    assert manager.best_step() == best
    manager.wait_until_finished()
    assert manager.all_steps() == kept
    assert manager.metrics(kept[0]) == {"loss": {"min": 1, "max": 7}[mode]}
    manager.close()


def test_of_equal_steps_the_newest_is_the_best_and_steps_without_metrics_stay(tmp_path):
    with manager_in(tmp_path, best_fn=lambda m: m["loss"], max_to_keep=1) as manager:
        save_all(manager, [0])
        assert manager.best_step() is None
        save_all(manager, [1, 2], metrics={"loss": 1.0})
        assert manager.best_step() == 2
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 2]
    with manager_in(tmp_path / "other", prevent_write_metrics=True) as manager:
        save_all(manager, [0], metrics={"loss": 1.0})
        assert (manager.metrics(0), manager.best_step()) == (None, 0)


def test_nested_metrics_and_light_starts(tmp_path):
    options = {"best_fn": lambda metrics: metrics["eval"]["loss"]}
    with manager_in(tmp_path, **options) as manager:
        for step, loss in enumerate([1.0, 3.0, 2.0]):
            save_all(manager, [step], metrics={"eval": {"loss": loss}, "note": "text"})
        assert manager.metrics(1) == {"eval": {"loss": 3.0}, "note": "text"}
    with manager_in(tmp_path, lightweight_initialize=True, **options) as manager:
        assert manager.best_step() is None
        manager.reload()
        assert manager.best_step() == 1


def test_deletion(tmp_path):
    with manager_in(tmp_path, todelete_subdir="trash") as manager:
        save_all(manager, range(3))
        manager.delete(1)
        assert manager.all_steps() == [0, 2]
        with pytest.raises(FileNotFoundError):
            manager.delete(1)
    assert (tmp_path / "trash").is_dir()
    with manager_in(tmp_path, read_only=True) as manager:
        manager.delete(0)
        assert manager.all_steps() == [0, 2]
        assert manager.restore(0)["w"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"step_prefix": "run", "step_format_fixed_length": 4}, ["run_0000", "run_0001"]),
        ({"step_name_format": ocp.path.step.standard_name_format(step_prefix="s")}, ["s_0", "s_1"]),
    ],
)
def test_names_of_steps(tmp_path, options, names):
    with manager_in(tmp_path, **options) as manager:
        save_all(manager, range(2))
        manager.wait_until_finished()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == names
    with manager_in(tmp_path, **options) as manager:
        assert manager.restore(1)["w"].tolist() == [1, 1]
    assert sorted(ocp.utils.checkpoint_steps(tmp_path)) == [0, 1]
    with manager_in(tmp_path / "other", **options) as other:
        assert other.restore(None, directory=tmp_path)["w"].tolist() == [1, 1]
        with pytest.raises(FileNotFoundError, match="no step 9"):
            other.restore(9, directory=tmp_path)


def test_metadata_of_the_run_and_of_steps(tmp_path):
    with ocp.CheckpointManager(tmp_path, metadata={"lr": 0.1}) as manager:
        assert manager.metadata().custom_metadata == {"lr": 0.1}
        manager.save(
            3, args=Standard({"w": jnp.ones((2, 3)), "n": 1}), custom_metadata={"note": "x"}
        )
        step = manager.metadata(3)
        assert step.custom_metadata == {"note": "x"}
        assert step.commit_timestamp_nsecs >= step.init_timestamp_nsecs > 0
        tree = manager.item_metadata(3)
        assert (tree["w"].shape, tree["w"].dtype, tree.tree["n"].dtype) == ((2, 3), "f4", "i8")
        assert tree["w"].directory == tmp_path / "3" / "default"
        again = manager.restore(3, args=ocp.args.StandardRestore(tree))
        assert_same(again, {"w": jnp.ones((2, 3)), "n": 1})
        with pytest.raises(ValueError, match="step number"):
            manager.item_metadata(None)
    with ocp.CheckpointManager(tmp_path, metadata={"lr": 0.2}) as manager:
        assert manager.metadata().custom_metadata == {"lr": 0.1}
    options = ocp.CheckpointManagerOptions(read_only=True)
    empty = tmp_path / "empty"
    with ocp.CheckpointManager(empty, options=options, metadata={"lr": 0.3}) as manager:
        assert manager.metadata().custom_metadata == {"lr": 0.3}
    assert not empty.exists()
    options = ocp.CheckpointManagerOptions(save_root_metadata=False)
    with ocp.CheckpointManager(empty, options=options, metadata={"lr": 0.3}) as manager:
        assert manager.metadata().custom_metadata == {}


def test_a_failed_save_is_raised_and_not_listed(tmp_path):
    class Fails(ocp.CheckpointHandler):
        def save(self, directory, item):
            raise OSError("the disk is full")

        def restore(self, directory, item=None):
            raise AssertionError

    with ocp.CheckpointManager(tmp_path, item_handlers=Fails()) as manager:
        with pytest.raises(OSError, match="the disk is full"):
            manager.save(0, "something")
        assert manager.all_steps() == []


@pytest.mark.parametrize("by", ["close", "with"])
def test_handlers_are_closed_after_a_failed_save(tmp_path, by):
    closed = []

    class Closes(ocp.StandardCheckpointHandler):
        def close(self):
            closed.append(1)

    def get_in_the_way(event):
        if event.kind == "snapshot_taken":
            (tmp_path / "0" / "in the way").mkdir(parents=True)

    options = ocp.CheckpointManagerOptions(engine=ckpt.Options(on_event=get_in_the_way))
    manager = ocp.CheckpointManager(tmp_path, options=options, item_handlers=Closes())
    if by == "close":
        manager.save(0, args=Standard(STATE))
        with pytest.raises(FileExistsError):
            manager.close()
    else:
        with pytest.raises(FileExistsError), manager:
            manager.save(0, args=Standard(STATE))
    assert closed == [1]


def test_functions_are_called_after_saves(tmp_path):
    called = []
    chosen = ocp.AsyncOptions(timeout_secs=60, post_finalization_callback=lambda: called.append(1))
    with manager_in(tmp_path, async_options=chosen) as manager:
        save_all(manager, range(2))
    deadline = time.monotonic() + 60  # they are called in threads of their own
    while len(called) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert called == [1, 1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"todelete_full_path": "trash"}, "todelete_subdir="),
        ({"enable_per_process_directory_creation": True}, "local_directory="),
        (
            {"multiprocessing_options": ocp.options.MultiprocessingOptions(primary_host=None)},
            "local_directory=",
        ),
        ({"async_options": ocp.AsyncOptions(barrier_sync_fn=print)}, "leave it at None"),
    ],
)
def test_options_that_ckpt_cannot_honour(tmp_path, options, says):
    with pytest.raises(ocp.NotOffered, match=says):
        manager_in(tmp_path, **options)


def test_options_that_contradict_each_other(tmp_path):
    keep = ocp.checkpoint_managers.LatestN(2)
    with pytest.raises(ValueError, match="best_mode"):
        ocp.CheckpointManagerOptions(best_mode="best")
    with pytest.raises(ValueError, match="max_to_keep"):
        ocp.CheckpointManagerOptions(max_to_keep=-1)
    with pytest.raises(TypeError, match="max_to_keep must be a whole number, got '3'"):
        ocp.CheckpointManagerOptions(max_to_keep="3")
    with pytest.raises(ValueError, match="preservation_policy"):
        manager_in(tmp_path, preservation_policy=keep, max_to_keep=1)
    handler = ocp.StandardCheckpointHandler()
    with pytest.raises(ValueError, match="exclusive"):
        ocp.CheckpointManager(tmp_path, item_names=("a",), item_handlers=handler)
    with pytest.raises(ocp.NotOffered, match="on_event"):
        ocp.CheckpointManager(tmp_path, logger=print)


def test_ckpts_own_options(tmp_path):
    seen = []
    engine = ckpt.Options(on_event=lambda event: seen.append(event.kind), compression="zstd")
    with manager_in(tmp_path, engine=engine, enable_async_checkpointing=False) as manager:
        save_all(manager, [0])
        assert "committed" in seen
    assert ckpt.verify(tmp_path / "0").ok
