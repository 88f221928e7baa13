"""Orbax's first API beside Orbax itself: results, and one run that goes back and forth."""

import os
import stat

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as theirs
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import ckpt_orbax as ours
from tests.support.orbax import make_quiet_orbax  # noqa: F401 (fixture)
from tests.support.trees import Moments, assert_same

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


@pytest.fixture(scope="module")
def trees(tmp_path_factory, mesh):
    """A tree, and where each of the two libraries has saved it."""
    spread = NamedSharding(mesh, P("data"))
    tree = {
        "w": jax.device_put(jnp.arange(8.0), spread),
        "n": np.arange(3),
        "i": 3,
        "f": 2.5,
        "list": [1, 2.0],
        "none": None,
        "empty": {},
        "pair": Moments(np.ones(2, np.float32), 4),
    }
    paths = []
    for library in (theirs, ours):
        paths.append(tmp_path_factory.mktemp("trees") / "saved")
        with library.StandardCheckpointer() as checkpointer:
            checkpointer.save(paths[-1], tree)
    return tree, paths


def cases(ocp, tree, mesh):
    """Restores by name, each a function of the path, in the words of one library."""
    whole = NamedSharding(mesh, P())
    restored, standard = ocp.PyTreeCheckpointer().restore, ocp.StandardCheckpointer().restore
    target = {**tree, "w": jax.device_put(jnp.zeros(8, jnp.bfloat16), whole), "n": jnp.zeros(3)}
    args = ocp.checkpoint_utils.construct_restore_args(target)
    stored = {**args, "pair": args["pair"]._asdict()}

    def described(sharding):
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), np.float32, sharding=sharding), tree
        )

    def with_leaf(**leaves):
        return lambda path: restored(path, restore_args={**stored, **leaves})

    def asked(**named):
        return lambda path: restored(path, args=ocp.args.PyTreeRestore(**named))

    leaf = ocp.RestoreArgs
    return {
        "as saved": restored,
        "structure": lambda path: restored(path, item=jax.tree.map(lambda _: 0, tree)),
        "structure of others": lambda path: restored(path, item=target),
        "arguments": lambda path: restored(path, restore_args=stored),
        "both": asked(item=target, restore_args=args),
        "numpy": with_leaf(w=leaf(restore_type=np.ndarray, dtype=np.float16)),
        "dtypes": with_leaf(w=leaf(dtype=jnp.int32), n=leaf(dtype=np.float16)),
        "open sharding": with_leaf(w=ocp.ArrayRestoreArgs()),
        "mesh": with_leaf(w=ocp.ArrayRestoreArgs(mesh=mesh, mesh_axes=P(None, "model"))),
        "numbers": with_leaf(i=leaf(restore_type=float), f=leaf(restore_type=int)),
        "part": asked(item={"w": 0, "pair": {"mu": 0}}, partial_restore=True),
        "left out": asked(item={**jax.tree.map(lambda _: 0, tree), "w": ocp.PLACEHOLDER}),
        "transforms": asked(
            item={"w": 0, "new": 5}, transforms={}, restore_args={"w": leaf(), "new": leaf()}
        ),
        "standard": standard,
        "standard described": lambda path: standard(path, described(None)),
        "standard on devices": lambda path: standard(path, described(whole)),
        "standard like": lambda path: standard(path, target),
        "metadata": lambda path: restored(
            path,
            restore_args=ocp.checkpoint_utils.construct_restore_args(
                ocp.PyTreeCheckpointer().metadata(path).item_metadata.tree
            ),
        ),
    }


NAMES = """
    as saved, structure, structure of others, arguments, both, numpy, dtypes, open sharding, numbers, part,
    left out, transforms, standard, standard described, standard on devices, standard like, metadata
""".replace("\n", " ").split(",")


@pytest.mark.parametrize("name", [name.strip() for name in NAMES])
def test_restores_give_what_orbax_gives(trees, mesh, name):
    tree, (by_them, by_us) = trees
    expected = cases(theirs, tree, mesh)[name](by_them)
    for path in (by_them, by_us):
        got = cases(ours, tree, mesh)[name](path)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        assert [type(leaf) for leaf in jax.tree.leaves(got)] == [
            type(leaf) for leaf in jax.tree.leaves(expected)
        ]
        assert_same(got, expected, sharding=True)


def test_one_run_goes_back_and_forth(tmp_path, mesh):
    def state_of(step):
        spread = NamedSharding(mesh, P("data"))
        return {"w": jax.device_put(jnp.arange(8.0) + step, spread), "step": step}

    for step, library in enumerate([theirs, ours, theirs, ours, ours, theirs]):
        options = library.CheckpointManagerOptions(
            max_to_keep=3, best_fn=lambda metrics: metrics["loss"], best_mode="min"
        )
        with library.CheckpointManager(tmp_path, options=options, metadata={"run": 1}) as manager:
            if step:
                assert (manager.latest_step(), manager.best_step()) == (step - 1, step - 1)
                assert manager.metrics(step - 1) == {"loss": 1 / step}
                before = state_of(step - 1)
                assert_same(manager.restore(None), before, sharding=True)
                target = jax.tree.map(library.utils.to_shape_dtype_struct, before)
                args = library.args.StandardRestore(target)
                assert_same(manager.restore(step - 1, args=args), before, sharding=True)
                assert manager.item_metadata(step - 1)["w"].shape == (8,)
                assert manager.metadata(step - 1).custom_metadata["of"] == step - 1
                assert manager.metadata().custom_metadata == {"run": 1}
            assert manager.save(
                step,
                args=library.args.StandardSave(state_of(step)),
                metrics={"loss": 1 / (step + 1)},
                custom_metadata={"of": step},
            )
            manager.wait_until_finished()
            assert manager.all_steps() == list(range(max(0, step - 2), step + 1))


@pytest.mark.parametrize(("writer", "reader"), [(theirs, ours), (ours, theirs)])
def test_items_go_both_ways(tmp_path, writer, reader):
    with writer.CheckpointManager(tmp_path) as manager:
        args = writer.args
        items = {
            "state": args.PyTreeSave({"w": np.arange(3.0), "name": "text"}),
            "config": args.JsonSave({"n": [1]}),
            "array": args.ArraySave(np.arange(4)),
            "metadata": args.JsonSave({"a": "b"}),
        }
        manager.save(0, args=args.Composite(**items))
    with reader.CheckpointManager(tmp_path) as manager:
        args = reader.args
        restored = manager.restore(
            0,
            args=args.Composite(
                state=args.PyTreeRestore(),
                config=args.JsonRestore(),
                array=args.ArrayRestore(),
                metadata=args.JsonRestore(),
            ),
        )
        assert_same(restored.state, {"w": np.arange(3.0), "name": "text"})
        assert (restored.config, restored.metadata) == ({"n": [1]}, {"a": "b"})
        assert restored.array.tolist() == [0, 1, 2, 3]
        assert_same(manager.restore(0)["state"], restored.state)


@pytest.mark.linux("modes of directories")
@pytest.mark.parametrize("mode", [None, 0o777, 0o750, 0o700])
def test_modes_of_directories(tmp_path, mode):
    def modes(ocp):
        files = ocp.options.FileOptions(path_permission_mode=mode)
        options = ocp.CheckpointManagerOptions(file_options=files)
        place = tmp_path / ocp.__name__
        with ocp.CheckpointManager(place, options=options) as manager:
            save = ocp.args.Composite(state=ocp.args.StandardSave({"w": jnp.ones(2)}))
            manager.save(0, args=save)
            manager.wait_until_finished()
        handler = ocp.StandardCheckpointHandler()
        ocp.Checkpointer(handler, file_options=files).save(place / "one", {"w": jnp.ones(2)})
        found = [place, place / "0", place / "0" / "state", place / "one"]
        return [stat.S_IMODE(path.stat().st_mode) for path in found]

    before = os.umask(0o027)
    try:
        assert set(modes(theirs)) == set(modes(ours)) == {0o750 & (mode or 0o777)}
    finally:
        os.umask(before)


@pytest.mark.parametrize("ocp", [theirs, ours])
def test_evaluators_get_the_newest_step(ocp, tmp_path):
    for step in (3, 8):
        ocp.PyTreeCheckpointer().save(tmp_path / f"step_{step}", {"w": jnp.ones(2)})
    place = type(ocp.path.step.build_step_path(tmp_path, ocp.path.step.standard_name_format(), 0))
    how = {"step_prefix": "step", "timeout": 0, "timeout_fn": lambda: True}
    assert list(ocp.checkpoint_utils.checkpoints_iterator(place(tmp_path), **how)) == [8]
