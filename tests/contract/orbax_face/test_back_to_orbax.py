"""What is saved here stays readable by the other programs of its users, with Orbax, Flax and Brax."""

import json
import warnings

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as theirs
import pytest
from flax.training import checkpoints as of_flax
from orbax.checkpoint import v1 as theirs_v1

import ckpt_core as ckpt
import ckpt_orbax as ours
from ckpt_orbax import flax_checkpoints
from tests.support.orbax import make_quiet_orbax  # noqa: F401 (fixture)
from tests.support.trees import assert_same

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
TREE = {"a": jnp.arange(4.0), "b": [jnp.ones((600, 600)), np.arange(3)], "step": 3}


def save_pytree(path):
    ours.PyTreeCheckpointer().save(path, TREE)


def save_standard(path):
    with ours.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, TREE)


def save_in_the_background(path):
    with ours.AsyncCheckpointer(ours.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ours.args.PyTreeSave(TREE))


SAVES = [save_pytree, save_standard, save_in_the_background]
LOADS = {
    "PyTreeCheckpointer": lambda path: theirs.PyTreeCheckpointer().restore(path),
    "PyTreeCheckpointer, target": lambda path: theirs.PyTreeCheckpointer().restore(
        path, item=TREE, restore_args=theirs.checkpoint_utils.construct_restore_args(TREE)
    ),
    "StandardCheckpointer": lambda path: theirs.StandardCheckpointer().restore(path),
    "StandardCheckpointer, target": lambda path: theirs.StandardCheckpointer().restore(path, TREE),
    "v1": lambda path: theirs_v1.load(path),
    "the item": lambda path: theirs.StandardCheckpointer().restore(path / "state", TREE),
    "ckpt": lambda path: ckpt.load(path),
    "ckpt_orbax": lambda path: ours.PyTreeCheckpointer().restore(path),
}


@pytest.mark.parametrize("save", SAVES)
def test_a_single_checkpoint_is_read_at_its_path(tmp_path, save):
    path = tmp_path / "one"
    save(path)
    for load in LOADS.values():
        assert_same(load(path), TREE)
    assert ckpt.verify(path).ok
    (data,) = (path / "d").iterdir()
    assert data.stat().st_size < 1000  # an index, and no second copy


def test_flax_reads_what_its_functions_save_here(tmp_path):
    for step in (3, 4, 5):
        flax_checkpoints.save_checkpoint(tmp_path, {"w": jnp.full(3, step)}, step, keep=2)
    assert of_flax.latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint_5")
    target = {"w": jnp.zeros(3, int)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (4, 5):
            restored = of_flax.restore_checkpoint(tmp_path, target, step=step)
            assert restored["w"].tolist() == [step] * 3
        of_flax.save_checkpoint(tmp_path, {"w": jnp.full(3, 6)}, 6, keep=2)
    assert flax_checkpoints.available_steps(tmp_path) == [5, 6]
    assert flax_checkpoints.restore_checkpoint(tmp_path, target)["w"].tolist() == [6] * 3


def test_a_configuration_beside_the_items_stays_and_is_no_damage(tmp_path):
    """As Brax saves: parameters by PyTreeCheckpointer, then the configuration into the same directory."""
    path = tmp_path / "000000000100"
    for library in (ours, theirs):  # the second replaces the first
        params = (TREE["a"], {"policy": TREE["b"]})
        checkpointer = library.PyTreeCheckpointer()
        args = library.checkpoint_utils.construct_restore_args(params)
        checkpointer.save(path, params, force=True)
        (path / "config.json").write_text(json.dumps({"normalize": True}))
        for reader in (theirs, ours):
            restored = reader.PyTreeCheckpointer().restore(path, item=params, restore_args=args)
            assert_same(restored, params)
        if library is ours:
            report = ckpt.verify(path)
            assert report.ok
            assert report.others == ("config.json",)
            assert_same(ckpt.load(path, params), params)


@pytest.mark.parametrize(
    "name",
    ["_METADATA2", "_sharding", "manifest.ocdbt", "checkpoint", "ckpt.json.new", "state/x", "a/x"],
)
def test_a_file_that_readers_look_for_is_a_problem(tmp_path, name):
    ckpt.save(tmp_path / "one", {"w": jnp.ones(3)})
    added = tmp_path / "one" / name
    added.parent.mkdir(exist_ok=True)
    added.write_text("{}")
    report = ckpt.verify(tmp_path / "one")
    assert not report.ok
    assert not report.others
    assert [problem.file for problem in report.problems] == [name]
