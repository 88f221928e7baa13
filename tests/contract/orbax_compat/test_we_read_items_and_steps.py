"""Checkpoints of several items and directories of steps that Orbax wrote, Grain's items among them."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt
from tests.contract.orbax_compat.test_orbax_reads_steps import grain_iterators
from tests.support.orbax import put
from tests.support.orbax_layouts import (  # noqa: F401 (fixture)
    abstract,
    assert_same,
    drop_data_files,
    expectation_of,
    make_zoo,
    tree_of,
    v1_context,
)
from tests.support.same_bits import bits


@pytest.fixture(scope="module")
def composite(tmp_path_factory):
    """A v0 manager's step with one item of each of Orbax's handlers, and metrics."""
    root = tmp_path_factory.mktemp("composite") / "root"
    args = ocp.args
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(root, options=options, metadata={"run": "a"}) as manager:
        for step, loss in ((2, 0.5), (4, 0.125), (6, 0.25)):
            manager.save(
                step,
                metrics={"loss": loss},
                custom_metadata={"epoch": step},
                args=args.Composite(
                    state=args.StandardSave({"a": put(jnp.arange(8.0) + step, "x")}),
                    text=args.PyTreeSave({"s": "hi", "n": np.arange(3)}),
                    meta=args.JsonSave({"list": [1, 2.5, {"none": None}], "é": "ü"}),
                    array=args.ArraySave(jnp.arange(5.0)),
                    numpy_array=args.ArraySave(np.arange(5)),
                    key=args.JaxRandomKeySave(jax.random.key(3)),
                    raw_key=args.JaxRandomKeySave(jax.random.PRNGKey(4)),
                    legacy=args.NumpyRandomKeySave(np.random.RandomState(5).get_state()),
                    modern=args.NumpyRandomKeySave(
                        np.random.RandomState(6).get_state(legacy=False)
                    ),
                ),
            )
    return root


def test_composite_loads_each_item(composite):
    got = ckpt.load(composite / "4")
    assert set(got) == {
        "state", "text", "meta", "array", "numpy_array", "key", "raw_key", "legacy", "modern",
    }  # fmt: skip
    assert_same(got["state"], {"a": put(jnp.arange(8.0) + 4, "x")}, sharding=True)
    assert_same(got["text"], {"s": "hi", "n": np.arange(3)})
    assert got["meta"] == {"list": [1, 2.5, {"none": None}], "é": "ü"}
    assert bits(got["array"]) == bits(jnp.arange(5.0))
    assert bits(got["numpy_array"]) == bits(np.arange(5))
    assert bits(got["key"]) == bits(jax.random.key(3))
    assert bits(got["raw_key"]) == bits(jax.random.PRNGKey(4))
    for name, seed in (("legacy", 5), ("modern", 6)):
        state = np.random.RandomState()
        state.set_state(got[name])
        assert state.randint(10**6) == np.random.RandomState(seed).randint(10**6)


def test_root_of_steps_is_no_checkpoint(composite):
    with pytest.raises(ckpt.CheckpointNotFound) as caught:
        ckpt.load(composite)
    assert all(step in str(caught.value) for step in ("2", "4", "6"))


def test_checkpointer_reads_a_v0_directory(composite):
    with ckpt.Checkpointer(composite, read_only=True) as checkpointer:
        assert list(checkpointer.all_steps()) == [2, 4, 6]
        assert checkpointer.latest_step() == 6
        assert checkpointer.metrics(4) == {"loss": 0.125}
        assert checkpointer.metadata(4)["epoch"] == 4
        restored = checkpointer.restore_latest(state={"a": put(jnp.zeros(8), "x")})
        assert restored.step == 6
        assert_same(restored["state"], {"a": put(jnp.arange(8.0) + 6, "x")}, sharding=True)
        assert_same(checkpointer.load(2)["text"], {"s": "hi", "n": np.arange(3)})
    with ckpt.Checkpointer(
        composite, read_only=True, best_metric="loss", best_mode="min"
    ) as checkpointer:
        assert checkpointer.best_step() == 4


def test_orbax_temporary_directories_are_no_steps(zoo, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(zoo["v0_manager"], root / "3")
    shutil.copytree(zoo["v0_manager"], root / "4.orbax-checkpoint-tmp")
    with ckpt.Checkpointer(root, read_only=True) as checkpointer:
        assert list(checkpointer.all_steps()) == [3]
    assert (root / "4.orbax-checkpoint-tmp").exists(), "a reader deletes nothing"


def test_restore_latest_falls_back_from_damage_of_orbax(zoo, tmp_path):
    root = tmp_path / "root"
    for step in ("3", "4"):
        shutil.copytree(zoo["v0_manager"], root / step)
    drop_data_files(root / "4" / "default")
    tree = tree_of("v0_manager")
    with ckpt.Checkpointer(root) as checkpointer:
        with pytest.warns(RuntimeWarning, match="step 4"):
            restored = checkpointer.restore_latest(default=abstract(tree))
        assert restored.step == 3
        assert_same(restored["default"], tree, sharding=True)


def test_v1_checkpointables(tmp_path):
    items = {"state": {"a": put(jnp.arange(8.0), "x")}, "extra": {"x": np.arange(3), "s": "t"}}
    registry = ocp_v1.handlers.local_registry()
    registry.add(ocp_v1.handlers.JsonHandler, checkpointable_name="config")
    context = v1_context(checkpointables__registry=registry)
    with context:
        ocp_v1.save_checkpointables(tmp_path / "c", items | {"config": {"k": [1, None]}})
    got = ckpt.load(tmp_path / "c")
    assert got.pop("config") == {"k": [1, None]}
    assert_same(got, items, sharding=True)


@pytest.mark.parametrize("writer", ["v0", "v1"])
def test_grain_items_of_orbax(tmp_path, writer):
    grain = pytest.importorskip("grain")
    pytest.importorskip("ckpt_grain")
    iterator, loader = grain_iterators(grain)
    for _ in range(3):
        next(iterator), next(loader)
    state = {"a": jnp.ones(2)}
    if writer == "v0":
        with ocp.CheckpointManager(tmp_path) as manager:
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                data=grain.checkpoint.CheckpointSave(iterator),
                loader=grain.checkpoint.CheckpointSave(loader),
            )
            manager.save(0, args=args)
        path = tmp_path / "0"
    else:
        path = tmp_path / "v1"
        ocp_v1.save_checkpointables(path, {"state": state, "data": iterator, "loader": loader})
    want = [next(iterator).tolist() for _ in range(3)], [int(next(loader)) for _ in range(3)]
    other, other_loader = grain_iterators(grain)
    restored = ckpt.restore(path, state=state, data=other, loader=other_loader)
    assert_same(restored["state"], state)
    assert (
        [next(other).tolist() for _ in range(3)],
        [int(next(other_loader)) for _ in range(3)],
    ) == want
    # Whoever wants only the arrays needs no iterator.
    assert_same(ckpt.load(path, item="state"), state)
