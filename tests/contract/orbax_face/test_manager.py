"""``CheckpointManager``: when it saves, what it says of its steps; what cannot be looked at now is not taken for absent."""

import errno
import itertools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_orbax as ocp
from ckpt_orbax import flax_checkpoints, v1 as ocp_v1
from tests.support.refusals import refuse
from tests.support.trees import assert_same

Standard = ocp.args.StandardSave


def manager_in(directory, **options):
    return ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(**options))


def save_all(manager, steps, **named):
    return [manager.save(step, args=Standard({"w": np.full(2, step)}), **named) for step in steps]


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
        ({"save_decision_policy": ocp.checkpoint_managers.FixedIntervalPolicy(3)}, [3, 6, 9]),
        ({"read_only": True}, []),
    ],
)
def test_when_it_saves(tmp_path, options, saved):
    with manager_in(tmp_path, **options) as manager:
        assert [step for step in range(1, 10) if save_all(manager, [step])[0]] == saved
        assert manager.all_steps() == saved


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


def test_a_handler_of_a_type_that_is_no_leaf_may_be_registered(tmp_path):
    handler = ocp.type_handlers.TypeHandler()
    ocp.type_handlers.register_type_handler(type(object), handler, override=True)
    with pytest.raises(ValueError, match="Unsupported type"):
        ocp.StandardCheckpointer().save(tmp_path / "a", {"w": object})
    with pytest.raises(ocp.NotOffered, match="one way"):
        ocp.type_handlers.register_type_handler(type(jnp.ones(1)), handler)


TARGET = {"w": np.zeros(2)}


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    flax_checkpoints.save_checkpoint(directory, {"w": np.ones(2)}, 3)
    return directory


@pytest.mark.parametrize(
    ("where", "number"), [("", errno.EACCES), ("checkpoint_3", errno.EIO), ("", errno.ESTALE)]
)
def test_flax_restores_nothing_and_says_so(steps, monkeypatch, number, where):
    refuse(monkeypatch, steps / where, number)
    for call in (
        lambda: flax_checkpoints.restore_checkpoint(steps, TARGET),
        lambda: flax_checkpoints.restore_checkpoint(steps, TARGET, step=3),
        lambda: flax_checkpoints.latest_checkpoint(steps),
        lambda: flax_checkpoints.available_steps(steps),
    ):
        with pytest.raises(OSError) as raised:
            call()
        assert raised.value.errno == number


def test_what_is_absent_stays_absent(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file" / "below", tmp_path / ("long" * 100)):
        assert flax_checkpoints.restore_checkpoint(path, TARGET) is TARGET
        assert ocp.utils.checkpoint_steps(path) == []
        assert not ocp.utils.is_checkpoint_finalized(path)
    assert not ocp_v1.is_orbax_checkpoint(tmp_path / "file")


LOOKS: dict[str, Any] = {
    "checkpoint_steps": ocp.utils.checkpoint_steps,
    "is_checkpoint_finalized": ocp.utils.is_checkpoint_finalized,
    "is_orbax_checkpoint": ocp_v1.is_orbax_checkpoint,
}


@pytest.mark.parametrize(
    ("look", "number"), list(zip(LOOKS, itertools.cycle([errno.EACCES, errno.EIO])))
)
def test_questions_about_a_path(steps, monkeypatch, look, number):
    refuse(monkeypatch, steps, number)
    with pytest.raises(OSError) as raised:
        LOOKS[look](steps)
    assert raised.value.errno == number


def test_the_metadata_of_a_run(tmp_path, monkeypatch):
    with ocp.CheckpointManager(tmp_path, metadata={"a": 1}) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": np.ones(2)}))
    refuse(monkeypatch, tmp_path / "metadata")
    with pytest.raises(PermissionError):
        ocp.CheckpointManager(tmp_path, metadata={"a": 2})
