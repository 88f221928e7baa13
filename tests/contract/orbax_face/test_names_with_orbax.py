"""What the smaller names of Orbax's first API do, beside Orbax itself."""

from __future__ import annotations

import os
import stat
import threading
import unittest
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest

import ckpt_orbax

BOTH = [orbax.checkpoint, ckpt_orbax]


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_pytree_with_keys_class
class Own:
    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b

    def tree_flatten_with_keys(self) -> Any:
        keys = jax.tree_util.GetAttrKey("a"), jax.tree_util.GetAttrKey("b")
        return list(zip(keys, (self.a, self.b), strict=True)), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Own:
        return cls(*children)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and (self.a, self.b) == (other.a, other.b)

    __hash__ = None  # type: ignore[assignment]


TREE = {"a": [1, {"b": 2}], "c": {}, "d": Pair(3, None), "e": Own(4, (5.0, "six"))}


def same(work: Any) -> Any:
    """What a call returns, or which error it raises, with Orbax first; the same for both."""
    found = []
    for ocp in BOTH:
        try:
            found.append(work(ocp))
        except (ValueError, KeyError, TypeError) as error:
            found.append(
                next(kind for kind in (KeyError, TypeError, ValueError) if isinstance(error, kind))
            )
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    "work",
    [
        lambda ocp: ocp.tree.get_param_names(TREE),
        lambda ocp: ocp.tree.get_param_names(TREE, include_empty_nodes=False),
        lambda ocp: ocp.tree.deserialize_tree(ocp.tree.serialize_tree(TREE), TREE),
        lambda ocp: ocp.tree.deserialize_tree(
            ocp.tree.serialize_tree(TREE, keep_empty_nodes=True), TREE, keep_empty_nodes=True
        ),
        lambda ocp: ocp.tree.deserialize_tree({"a": 1}, {"a": 0, "b": 0}),
        lambda ocp: [ocp.tree.is_flat_dict(one) for one in (TREE, {"a": 1}, {"a": {}}, [1], {})],
        lambda ocp: [ocp.tree.str_keypath(path) for path, _ in jax.tree.leaves_with_path(TREE)],
        lambda ocp: ocp.tree.from_flat_dict({(): 3}),
        lambda ocp: ocp.utils.is_empty_node(None) and not ocp.utils.is_empty_node([1]),
        lambda ocp: [ocp.utils.is_empty_or_leaf(one) for one in (None, {}, [1], 1, Pair(1, 2))],
        lambda ocp: [ocp.utils.is_scalar(one) for one in (1, 1.0, np.int8(1), "1", np.ones(1))],
        lambda ocp: [ocp.utils.is_gcs_path(Path("/tmp/a"))],
        lambda ocp: [
            (ocp.utils.is_dict_key(path[0]), ocp.utils.is_sequence_key(path[0]))
            for path, _ in jax.tree.leaves_with_path((TREE, TREE))
        ],
        lambda ocp: ocp.utils.get_key_name("text"),
        lambda ocp: ocp.merge_trees(TREE, {"d": Pair(7, 8), "z": 9}),
        lambda ocp: ocp.merge_trees({"a": [1]}, {"b": 2}, target=Own(0, 0)),
        lambda ocp: ocp.transform_utils.merge_trees(Own(1, 2), {"a": 3}, target=Own(0, 0)),
        lambda ocp: ocp.transform_utils.intersect_trees(TREE, {"a": [7], "d": Pair(8, 9)}),
        lambda ocp: ocp.transform_utils.intersect_trees(
            Own(1, 2), {"a": 3, "b": 4}, target=Own(0, 0)
        ),
        lambda ocp: ocp.tree.merge_trees(),
        lambda ocp: ocp.tree.merge_trees({"a": 1, "b": {"c": 2}}, {"d": 3, "b": {"e": 4}}),
        lambda ocp: ocp.tree.merge_trees({"a": 1}, {"a": 2}),
        lambda ocp: ocp.tree.merge_trees(
            {"a": 1, "b": [1, None]}, {"a": 2, "b": [3, 4]}, overwrite=True
        ),
        lambda ocp: ocp.tree.merge_trees({"b": [1]}, {"b": [3, 4]}, overwrite=True),
        lambda ocp: ocp.tree.merge_trees({"b": [1]}, {"b": {"c": 1}}),
        lambda ocp: ocp.tree.merge_trees(Pair(1, None), Pair(None, 2), overwrite=True),
        lambda ocp: ocp.tree.tree_difference(TREE, TREE),
        lambda ocp: ocp.tree.tree_difference(
            {"x": [1, 2, 3], "y": {"p": 1}}, {"x": [1, 3], "y": {"q": 1}}
        ),
        lambda ocp: ocp.tree.tree_difference({"d": Pair(1, "a")}, {"d": Pair(1, 2)}),
        lambda ocp: ocp.tree.tree_difference(TREE, {**TREE, "e": Own("text", (5.0, "six"))}),
        lambda ocp: ocp.tree.tree_difference([1, 2], [1, 3], leaves_equal=lambda a, b: a == b),
        lambda ocp: ocp.tree.tree_difference([1], (1,)),
        lambda ocp: ocp.path.step.step_prefix_with_underscore("a"),
        lambda ocp: ocp.checkpoint_manager.is_async_checkpointer(ocp.StandardCheckpointer()),
        lambda ocp: ocp.checkpoint_manager.is_async_checkpointer(ocp.PyTreeCheckpointer()),
    ],
)
def test_functions_of_trees(work):
    same(work)


def test_flat_dicts_in_place():
    def emptied(ocp: Any) -> Any:
        flat = ocp.tree.to_flat_dict({"a": {"b": 1}, "c": 2}, sep="/")
        tree = ocp.tree.from_flat_dict(flat, sep="/", inplace=True)
        more = ocp.tree.to_flat_dict({"a": 1, "b": 2})
        return flat, tree, ocp.tree.from_flat_dict(more, target={"a": 0}, inplace=True), more

    assert same(emptied)[2:] == ({"a": 1}, {("b",): 2})


@pytest.mark.parametrize("shape", [(), (3,), (8,), (16, 3), (4, 12), (2, 6, 10), (7, 9)])
def test_maximal_shardings(shape):
    def sharding(ocp: Any) -> Any:
        state = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
        return ocp.arrays.construct_maximal_shardings(state)["w"]

    assert isinstance(same(sharding), jax.sharding.NamedSharding)


def test_names_of_steps(tmp_path):
    for number in (1, 20):
        ckpt_orbax.PyTreeCheckpointer().save(tmp_path / f"s_{number:04}", {"w": np.ones(2)})

    def answers(ocp: Any) -> Any:
        step = ocp.path.step
        names = step.standard_name_format(step_prefix="s", step_format_fixed_length=4)
        newest = step.latest_step_metadata(tmp_path, names)
        return (
            (newest.step, os.fspath(newest.path)),
            os.fspath(step.build_step_path(tmp_path, names, 3)),
            os.fspath(step.find_step_path(tmp_path, names, step=1)),
            step.maybe_find_step_metadata(tmp_path, names, step=7),
            step.step_metadata_of_checkpoint_path(tmp_path / "s_0001", names).step,
            sorted(step.checkpoint_steps(tmp_path)),
            step.is_standard_name_format(names),
            step.is_path_finalized(tmp_path / "s_0001"),
            ocp.path.format_utils.is_orbax_checkpoint(tmp_path / "s_0001"),
        )

    same(answers)
    same(
        lambda ocp: ocp.path.step.step_metadata_of_checkpoint_path(
            tmp_path / "other", ocp.path.step.standard_name_format()
        )
    )


@pytest.mark.parametrize("ocp", BOTH)
def test_a_format_of_names_is_generic(ocp):
    class Names(ocp.path.step.NameFormat[ocp.path.step.Metadata]):
        def build_name(self, step: int) -> str:
            return f"{step:03}"

        def find_all(self, base_path: Any) -> Any:
            return iter(())

        def find_step(self, base_path: Any, step: int) -> Any:
            raise ValueError

    assert Names().build_name(3) == "003"


def test_evaluators_get_each_newest_step_once(tmp_path):
    def waited(ocp: Any) -> Any:
        directory = tmp_path / ocp.__name__
        directory.mkdir()
        begun, seen = threading.Event(), list[int]()

        def train() -> None:
            for step in (3, 8):
                ocp.PyTreeCheckpointer().save(directory / f"step_{step}", {"w": np.ones(2)})
                begun.wait(30)

        thread = threading.Thread(target=train)
        thread.start()
        asked = []
        for step in ocp.checkpoint_utils.checkpoints_iterator(
            ocp.path.step.build_step_path(
                directory, ocp.path.step.standard_name_format(), 0
            ).parent,
            step_prefix="step",
            timeout=1,
            timeout_fn=lambda: asked.append(1) or (begun.is_set() and len(seen) == 2),
        ):
            seen.append(step)
            begun.set()
        thread.join()
        with ocp.checkpoint_utils.wait_for_new_checkpoint(
            ocp.path.step.build_step_path(
                directory, ocp.path.step.standard_name_format(), 0
            ).parent,
            until_step=9,
            timeout=0,
            step_prefix="step",
        ) as step:
            return seen, step

    assert same(waited) == ([3, 8], -1)


@pytest.mark.linux("modes of directories")
@pytest.mark.parametrize("mode", [None, 0o777, 0o750, 0o700])
def test_modes_of_directories(tmp_path, mode):
    def modes(ocp: Any) -> Any:
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
        assert set(same(modes)) == {0o750 & (0o777 if mode is None else mode)}
    finally:
        os.umask(before)


def test_modes_through_the_second_api(tmp_path):
    ocp = ckpt_orbax.v1
    with ocp.Context(file_options=ocp.options.FileOptions(path_permission_mode=0o700)):
        ocp.save(tmp_path / "a", {"w": np.ones(2)})
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_handlers_of_types_that_change_nothing(tmp_path):
    def restored(ocp: Any) -> Any:
        types = ocp.type_handlers
        before = types.get_type_handler(jax.Array)
        handler = types.SingleReplicaArrayHandler(replica_axis_index=0, use_replica_parallel=False)
        types.register_type_handler(jax.Array, handler, override=True)
        try:
            mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
            state = {"w": jax.device_put(jnp.arange(32.0).reshape(4, 8), sharding)}
            path = tmp_path / ocp.__name__
            ocp.PyTreeCheckpointer().save(path, state)
            args = (
                ocp.SingleReplicaArrayRestoreArgs
                if ocp is ckpt_orbax
                else types.SingleReplicaArrayRestoreArgs
            )
            wanted = args(sharding=sharding, global_shape=(4, 8), dtype=jnp.float32)
            found = ocp.PyTreeCheckpointer().restore(path, restore_args={"w": wanted})["w"]
            return np.asarray(found).tolist(), found.sharding == sharding
        finally:
            types.register_type_handler(jax.Array, before, override=True)

    assert same(restored)[1]


def test_handlers_of_types_of_your_own_are_refused():
    types = ckpt_orbax.type_handlers

    class Mine(types.TypeHandler):
        pass

    for kind, handler in ((Own, Mine()), (jax.Array, Mine()), (int, types.ArrayHandler())):
        with pytest.raises(ckpt_orbax.NotOffered, match=r"get_state\(\) and set_state\(\)"):
            types.register_type_handler(kind, handler, override=True)
    with pytest.raises(ckpt_orbax.NotOffered, match="leave it at True"):
        types.register_standard_handlers_with_options(use_ocdbt=False)
    types.register_standard_handlers_with_options(use_zarr3=True)
    assert same(lambda ocp: ocp.type_handlers.has_type_handler(np.ndarray))
    assert not same(lambda ocp: ocp.type_handlers.has_type_handler(Own))
    same(lambda ocp: ocp.type_handlers.get_type_handler(Own))


@pytest.mark.parametrize("ocp", BOTH)
def test_bases_of_managers_and_checkpointers(ocp, tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        if ocp is ckpt_orbax:  # Orbax's cannot be asked
            assert isinstance(manager, ocp.AbstractCheckpointManager)
    assert isinstance(ocp.PyTreeCheckpointer(), ocp.AbstractCheckpointer)
    assert issubclass(ocp.PyTreeCheckpointHandler, ocp.CheckpointHandler)

    class Logger(ocp.logging.AbstractLogger):
        def log_entry(self, msg: Any, *args: Any, **kwargs: Any) -> None:
            pass

    assert isinstance(Logger(), ocp.logging.AbstractLogger)


@pytest.mark.filterwarnings("ignore:jax.experimental.pjit:DeprecationWarning")  # in Orbax
@pytest.mark.parametrize("ocp", BOTH)
def test_helpers_of_tests(ocp, tmp_path):
    helpers, case = ocp.test_utils, unittest.TestCase()
    place = helpers.erase_and_create_empty(tmp_path / "a")
    (place / "b").mkdir()
    (place / "c").write_text("c")
    assert list(helpers.erase_and_create_empty(place).iterdir()) == []
    (place / "b").mkdir()
    assert helpers.empty_directory(place) and not list(place.iterdir())
    assert not helpers.empty_directory(tmp_path / "none")
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("x",))
    array = helpers.create_sharded_array(np.arange(8), mesh, jax.sharding.PartitionSpec("x"))
    assert helpers.replicate_sharded_array(array).is_fully_replicated
    helpers.assert_array_equal(case, array, helpers.apply_function([array], lambda x: x)[0])
    helpers.assert_array_equal(case, jax.random.key(0), jax.random.key(0))
    for other in (array + 1, np.arange(8), array.astype(jnp.float32)):
        with pytest.raises(AssertionError):
            helpers.assert_array_equal(case, array, other)


@pytest.mark.parametrize("ocp", BOTH)
def test_handlers_under_the_names_of_their_bases(ocp, tmp_path):
    handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions())
    args = ocp.handlers.CompositeArgs(a=ocp.handlers.StandardSaveArgs({"w": np.ones(2)}))
    ocp.Checkpointer(handler).save(tmp_path / "a", args=args)
    back = ocp.Checkpointer(handler).restore(tmp_path / "a")
    assert np.array_equal(back["a"]["w"], np.ones(2))
