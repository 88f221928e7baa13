"""``ckpt_orbax.flax_checkpoints``: the functions of ``flax.training.checkpoints``, beside Flax's own."""

from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import checkpoints as flax_own, train_state

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
    jax.tree.map(np.testing.assert_array_equal, one, other)


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


def test_another_prefix_is_another_run(tmp_path):
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


def test_steps_in_a_bucket_are_found():
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
