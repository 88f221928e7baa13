"""``ckpt_orbax.flax_checkpoints``: the functions of ``flax.training.checkpoints``, beside Flax's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import checkpoints as flax_own
from flax.training import train_state

import ckpt_core as ckpt
import ckpt_orbax
from ckpt_orbax import flax_checkpoints

BOTH = [flax_own, flax_checkpoints]
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
]


def state(value: float) -> Any:
    """A TrainState of which two are equal if they were trained the same way."""
    params = {"w": jnp.full(3, value), "b": {"x": jnp.full(2, value, jnp.bfloat16)}}
    made = train_state.TrainState.create(apply_fn=len, params=params, tx=TX)
    return made.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))


TX = optax.adam(1e-2)


def assert_same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def msgpack():
    """Flax writes single files."""
    flax.config.update("flax_use_orbax_checkpointing", False)
    yield
    flax.config.update("flax_use_orbax_checkpointing", True)


@pytest.mark.parametrize("checkpoints", BOTH)
def test_a_run(tmp_path, checkpoints):
    assert checkpoints.latest_checkpoint(tmp_path) is None
    target = state(0)
    assert checkpoints.restore_checkpoint(tmp_path, target) is target
    for step in range(4):
        path = checkpoints.save_checkpoint(tmp_path, state(step), step, keep=2)
        assert Path(path) == tmp_path / f"checkpoint_{step}"
    assert checkpoints.available_steps(tmp_path) == [2, 3]
    assert checkpoints.latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint_3")
    restored = checkpoints.restore_checkpoint(tmp_path, state(9))
    assert_same(restored, state(3))
    assert isinstance(restored, train_state.TrainState)
    assert_same(checkpoints.restore_checkpoint(tmp_path, state(9), step=2), state(2))
    assert_same(checkpoints.restore_checkpoint(tmp_path / "checkpoint_2", state(9)), state(2))
    as_dicts = checkpoints.restore_checkpoint(tmp_path, None)
    np.testing.assert_array_equal(as_dicts["params"]["w"], state(3).params["w"])
    with pytest.raises(ValueError, match="Matching checkpoint not found"):
        checkpoints.restore_checkpoint(tmp_path, state(9), step=0)
    checkpoints.save_checkpoint(tmp_path, state(7), 2, keep=2, overwrite=True)
    assert checkpoints.available_steps(tmp_path) == [2]
    assert_same(checkpoints.restore_checkpoint(tmp_path, state(9)), state(7))


@pytest.mark.parametrize("checkpoints", BOTH)
def test_steps_that_stay(tmp_path, checkpoints):
    for step in (10, 20, 30, 40, 50):
        checkpoints.save_checkpoint(
            tmp_path, {"w": np.full(2, step)}, step, prefix="s_", keep=1, keep_every_n_steps=20
        )
    kept = checkpoints.available_steps(tmp_path, prefix="s_")
    assert kept[-1] == 50
    assert kept == (
        [10, 30, 50] if checkpoints is flax_own else [20, 40, 50]
    )  # Flax counts from 10


@pytest.mark.parametrize("checkpoints", BOTH)
def test_saves_in_the_background(tmp_path, checkpoints):
    manager = checkpoints.AsyncManager()
    for step in range(3):
        value = {"w": jnp.full(2, step)}
        checkpoints.save_checkpoint(tmp_path, value, step, keep=2, async_manager=manager)
    manager.wait_previous_save()
    assert checkpoints.available_steps(tmp_path) == [1, 2]
    restored = checkpoints.restore_checkpoint(tmp_path, {"w": jnp.zeros(2, int)})
    assert restored["w"].tolist() == [2, 2]


@pytest.mark.parametrize("checkpoints", BOTH)
def test_several_processes_call_another_function(tmp_path, checkpoints):
    path = checkpoints.save_checkpoint_multiprocess(tmp_path, {"w": jnp.ones(2)}, 3)
    assert Path(path).is_dir()
    assert checkpoints.restore_checkpoint(tmp_path, {"w": jnp.zeros(2)})["w"].tolist() == [1, 1]


def test_directories_that_flax_wrote(tmp_path):
    flax_own.save_checkpoint(tmp_path, state(4), 4)
    assert flax_checkpoints.latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint_4")
    assert_same(flax_checkpoints.restore_checkpoint(tmp_path, state(9)), state(4))
    flax_checkpoints.save_checkpoint(tmp_path, state(5), 5, keep=2)
    assert flax_checkpoints.available_steps(tmp_path) == [4, 5]
    assert_same(flax_checkpoints.restore_checkpoint(tmp_path, state(9)), state(5))


def test_files_of_msgpack_that_flax_wrote(tmp_path, msgpack):
    flax_own.save_checkpoint(tmp_path, state(4), 4)
    assert (tmp_path / "checkpoint_4").is_file()
    assert_same(flax_checkpoints.restore_checkpoint(tmp_path, state(9)), state(4))
    assert_same(flax_checkpoints.restore_checkpoint(tmp_path / "checkpoint_4", state(9)), state(4))
    as_dicts = flax_checkpoints.restore_checkpoint(tmp_path, None)
    np.testing.assert_array_equal(as_dicts["params"]["b"]["x"], state(4).params["b"]["x"])
    flax_checkpoints.save_checkpoint(tmp_path, state(5), 5)
    assert flax_checkpoints.latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint_5")
    assert_same(flax_checkpoints.restore_checkpoint(tmp_path, state(9)), state(5))


def test_what_was_written_is_a_checkpoint_of_the_engine(tmp_path):
    flax_checkpoints.save_checkpoint(tmp_path, state(1), 1)
    assert ckpt.verify(tmp_path / "checkpoint_1").ok
    with ckpt.Checkpointer(tmp_path, step_prefix="checkpoint", read_only=True) as checkpointer:
        assert checkpointer.latest_step() == 1
    assert_same(ckpt.load(tmp_path / "checkpoint_1", state(9)), state(1))


def test_another_shape_is_an_error(tmp_path):
    flax_checkpoints.save_checkpoint(tmp_path, {"w": jnp.ones(3)}, 1)
    with pytest.raises(ValueError, match="shape differs"):
        flax_checkpoints.restore_checkpoint(tmp_path, {"w": jnp.ones(5)})


def test_what_is_refused(tmp_path):
    value = {"w": jnp.ones(3)}
    for step, prefix in ((0.5, "checkpoint_"), (1, "checkpoint")):
        with pytest.raises(ckpt_orbax.NotOffered, match="Instead: "):
            flax_checkpoints.save_checkpoint(tmp_path, value, step, prefix=prefix)
    with pytest.raises(ckpt_orbax.NotOffered, match="rename="):
        flax_checkpoints.restore_checkpoint(tmp_path, value, orbax_transforms={"w": 1})


@pytest.mark.parametrize("saved_by", BOTH)
def test_leaves_that_keep_their_values_are_named(tmp_path, caplog, saved_by):
    """Flax does so in silence; a run that renamed a layer would train on from fresh values."""
    saved_by.save_checkpoint(tmp_path, {"params": {"w": np.ones(3)}, "step": 7}, 1)
    target = {"params": {"v": np.zeros(3)}, "step": 0}
    with caplog.at_level("WARNING", "ckpt_orbax"):
        found = flax_checkpoints.restore_checkpoint(tmp_path, target)
    assert found["step"] == 7 and not found["params"]["v"].any()
    (record,) = caplog.records
    assert "lacks leaves of the target" in record.getMessage()
    assert "params/v" in record.getMessage() and "raises instead" in record.getMessage()
    with pytest.raises(ckpt.StructureMismatch):
        ckpt.load(tmp_path / "checkpoint_1", target)


@pytest.mark.parametrize("saved_by", BOTH)
def test_where_all_is_there_nothing_is_said(tmp_path, caplog, saved_by):
    saved_by.save_checkpoint(tmp_path, state(2), 1)
    with caplog.at_level("WARNING", "ckpt_orbax"):
        assert_same(flax_checkpoints.restore_checkpoint(tmp_path, state(0)), state(2))
    assert not caplog.records


@pytest.mark.parametrize("prefix", ["a/b_", "a/b", "a/"])
def test_a_prefix_with_a_slash(tmp_path: Path, prefix: str) -> None:
    """Flax saves by such a prefix, and finds nothing again."""
    flax_own.save_checkpoint(str(tmp_path), {"w": np.ones(2)}, 3, prefix=prefix)
    assert flax_own.latest_checkpoint(str(tmp_path), prefix) is None
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ckpt_orbax.NotOffered, match="none again") as caught:
        flax_checkpoints.save_checkpoint(str(tmp_path), {"w": np.ones(2)}, 4, prefix=prefix)
    assert sorted(tmp_path.rglob("*")) == before
    if prefix == "a/b_":
        place, _, named = (
            str(caught.value).rpartition("Instead: ")[2].partition(" as ckpt_dir, with ")
        )
        where = eval(place, {"os": os, "ckpt_dir": tmp_path})
        more = eval(f"dict({named})")
        flax_checkpoints.save_checkpoint(where, {"w": np.ones(2)}, 4, **more)
        assert flax_checkpoints.latest_checkpoint(where, **more) == f"{where}/b_4"


def test_another_prefix_is_another_run(tmp_path: Path) -> None:
    """To Flax it is a series of its own; here retention would delete the other one."""
    for step in (1, 2, 3):
        flax_checkpoints.save_checkpoint(str(tmp_path / "a"), {"w": np.ones(2)}, step, keep=3)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    for overwrite in (False, True):
        with pytest.raises(ckpt_orbax.NotOffered, match="a directory for each prefix"):
            flax_checkpoints.save_checkpoint(
                str(tmp_path / "a"), {"w": np.ones(2)}, 4, prefix="best_", overwrite=overwrite
            )
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names
    flax_checkpoints.save_checkpoint(str(tmp_path / "b"), {"w": np.ones(2)}, 4, prefix="best_")
    flax_checkpoints.save_checkpoint(str(tmp_path / "b"), {"w": np.ones(2)}, 5, prefix="best_")
    (tmp_path / "b" / "notes_7").mkdir()  # no step
    flax_checkpoints.save_checkpoint(str(tmp_path / "b"), {"w": np.ones(2)}, 6, prefix="best_")
    assert (tmp_path / "b" / "best_6").exists()


def test_another_prefix_of_a_manager(tmp_path: Path) -> None:
    def manager(prefix: str | None) -> Any:
        options = ckpt_orbax.CheckpointManagerOptions(step_prefix=prefix, max_to_keep=1)
        return ckpt_orbax.CheckpointManager(tmp_path, options=options)

    with manager("train") as one:
        one.save(1, args=ckpt_orbax.args.StandardSave({"w": np.ones(2)}))
    for prefix in ("best", None):
        with pytest.raises(ckpt_orbax.NotOffered, match="beside the step train_1"):
            manager(prefix)
    with manager("train") as one:
        assert one.latest_step() == 1


def test_an_int_beyond_64_bits_comes_back_through_a_target(tmp_path: Path) -> None:
    tree = {"w": np.ones(2), "c": 2**70, "t": "text"}
    checkpointer = ckpt_orbax.PyTreeCheckpointer()
    checkpointer.save(tmp_path / "a", tree)
    found = checkpointer.restore(tmp_path / "a", item=tree)
    assert found["c"] == 2**70 and found["t"] == "text"


def test_another_prefix_of_a_checkpointer_of_v1(tmp_path: Path) -> None:
    def checkpointer(prefix: str) -> Any:
        names = ckpt_orbax.v1.path.step.standard_name_format(step_prefix=prefix)
        return ckpt_orbax.v1.training.Checkpointer(tmp_path, step_name_format=names)

    with checkpointer("train") as one:
        one.save(1, {"w": np.ones(2)})
    with pytest.raises(ckpt_orbax.NotOffered, match="beside the step train_1"):
        checkpointer("best")
    with checkpointer("train") as one:
        assert one.latest.step == 1


@pytest.mark.parametrize("face", ["v0", "v1"])
def test_metadata_beside_that_of_an_early_orbax(tmp_path: Path, face: str) -> None:
    """As in Orbax, the manager's is written; one without any has the earlier."""
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "metadata").write_text('{"seed": 3}')
    if face == "v0":
        made = [ckpt_orbax.CheckpointManager(tmp_path, metadata=more) for more in (None, {"x": 1})]
        found = [one.metadata().custom_metadata for one in made]
        assert found == [{"x": 1}] * 2  # read when it is asked for
    else:
        ckpt_orbax.v1.training.Checkpointer(tmp_path, custom_metadata={"x": 1}).close()
        with ckpt.Checkpointer(tmp_path, read_only=True) as reader:
            assert reader.run_metadata == {"x": 1}


def test_steps_in_a_bucket_are_found() -> None:
    """They were saved and never found again: ``restore_checkpoint`` gave the target itself."""
    where = "memory://flax/found/run"
    for step in (3, 7):
        flax_checkpoints.save_checkpoint(where, {"w": np.full(3, step)}, step, keep=5)
    assert flax_checkpoints.available_steps(where) == [3, 7]
    assert flax_checkpoints.latest_checkpoint(where) == f"{where}/checkpoint_7"
    for step, value in ((None, 7), (3, 3)):
        found = flax_checkpoints.restore_checkpoint(where, {"w": np.zeros(3, int)}, step)
        assert found["w"].tolist() == [value] * 3
    with pytest.raises(ValueError, match="not found"):
        flax_checkpoints.restore_checkpoint(where, None, 4)
    one = flax_checkpoints.restore_checkpoint(f"{where}/checkpoint_3", None)
    assert one["w"].tolist() == [3] * 3
