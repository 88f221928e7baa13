"""Items of Orbax's first API: their arguments, their handlers, and single checkpoints."""

from __future__ import annotations

import dataclasses
import json
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt_core as ckpt
import ckpt_orbax as ocp
from ckpt_orbax import v1
from tests.support.trees import assert_same

STATE = {"w": np.arange(4.0), "step": 3, "name": "text"}
Composite, PyTreeSave, PyTreeRestore = (
    ocp.args.Composite,
    ocp.args.PyTreeSave,
    ocp.args.PyTreeRestore,
)


class Words(ocp.CheckpointHandler):
    """A handler as clients write them."""

    closed = 0

    def save(self, directory, args):
        (directory / "inner").mkdir()
        (directory / "inner" / "words.json").write_text(json.dumps(args.item))

    def restore(self, directory, args):
        return json.loads((directory / "inner" / "words.json").read_text()) + list(args.more)

    def finalize(self, directory):
        assert (directory / "inner" / "words.json").exists()

    def close(self):
        Words.closed += 1


@ocp.args.register_with_handler(Words, for_save=True)
@dataclasses.dataclass
class WordsSave(ocp.args.CheckpointArgs):
    item: list[str]


@ocp.args.register_with_handler(Words, for_restore=True)
@dataclasses.dataclass
class WordsRestore(ocp.args.CheckpointArgs):
    more: tuple[str, ...] = ()


class Late(Words, ocp.AsyncCheckpointHandler):
    """Writes in the background, with Orbax's futures."""

    async def async_save(self, directory, args):
        async def write():
            Words.save(self, directory, args)

        return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="late")]


@ocp.args.register_with_handler(Late, for_save=True)
class LateSave(WordsSave):
    pass


@ocp.args.register_with_handler(Late, for_restore=True)
class LateRestore(WordsRestore):
    pass


def all_kinds():
    return Composite(
        state=PyTreeSave(STATE),
        config=ocp.args.JsonSave({"layers": 3}),
        array=ocp.args.ArraySave(np.arange(3)),
        words=WordsSave(["a"]),
        late=LateSave(["b"]),
    )


def test_several_items(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.save(0, args=all_kinds())
        restored = manager.restore(0)
        assert_same(restored.state, STATE)
        assert restored.config == {"layers": 3}
        assert restored["array"].tolist() == [0, 1, 2]
        assert (restored.words, restored.late) == (["a"], ["b"])
        described = manager.item_metadata(0)
        assert described.state["w"].shape == (4,)
        assert described.config is None
        only = manager.restore(0, args=Composite(words=WordsRestore(("c",)), config=None))
        assert dict(only) == {"words": ["a", "c"], "config": {"layers": 3}}
    assert Words.closed == 2
    with ocp.CheckpointManager(tmp_path) as manager:  # which learns from what was saved
        restored = manager.restore(0)
        assert (restored.words, restored.late, restored.config) == (["a"], ["b"], {"layers": 3})
        array = manager.restore(0, args=Composite(array=ocp.args.ArrayRestore())).array
        assert array.tolist() == [0, 1, 2]
    assert ckpt.verify(tmp_path / "0").ok


def test_missing_items_and_unknown_ones(tmp_path):
    with ocp.CheckpointManager(tmp_path, item_names=("state", "more")) as manager:
        manager.save(0, args=Composite(state=PyTreeSave(STATE)))
        with pytest.raises(KeyError, match="Available items: state"):
            manager.restore(0, args=Composite(state=None, more=PyTreeRestore()))
        with pytest.raises(ValueError, match="does not match with any registered handler"):
            manager.save(1, args=Composite(other=PyTreeSave(STATE)))
        assert list(manager.restore(0)) == ["state"]
    with (
        ocp.CheckpointManager(tmp_path) as manager,
        pytest.raises(ValueError, match='item "state" was not configured'),
    ):
        manager.restore(0, args=Composite(state=None))


def test_single_objects_and_composites_are_not_mixed(tmp_path):
    state = ocp.args.StandardSave({"w": np.ones(2)})
    with ocp.CheckpointManager(tmp_path / "single") as manager:
        manager.save(0, args=state)
        with pytest.raises(ValueError, match="Cannot provide `args` of type `Composite`"):
            manager.save(1, args=Composite(state=state))
    with ocp.CheckpointManager(tmp_path / "several") as manager:
        manager.save(0, args=Composite(state=state))
        with pytest.raises(ValueError, match="Must provide `args` of type `Composite`"):
            manager.save(1, args=state)
        with pytest.raises(ValueError, match="by its name"):
            manager.save(1, state)
        with pytest.raises(ValueError, match="Must provide `args`"):
            manager.save(1)


@pytest.mark.parametrize("kind", [ocp.Checkpointer, ocp.AsyncCheckpointer])
def test_the_earlier_form_with_checkpointers(tmp_path, kind):
    with ocp.CheckpointManager(tmp_path / "one", kind(ocp.PyTreeCheckpointHandler())) as manager:
        assert manager.save(0, STATE, save_kwargs={"save_args": {"w": ocp.SaveArgs(dtype="f4")}})
        as_int = {"restore_args": {**jax.tree.map(lambda _: ocp.RestoreArgs(), STATE)}}
        as_int["restore_args"]["w"] = ocp.RestoreArgs(dtype=np.int32)
        assert manager.restore(0)["w"].dtype == np.float32
        assert manager.restore(0, restore_kwargs=as_int)["w"].dtype == np.int32
        assert manager.restore(0, items={"w": 0}, restore_kwargs={"transforms": {}})["w"].size == 4
    handlers = {"a": kind(ocp.PyTreeCheckpointHandler()), "b": kind(ocp.JsonCheckpointHandler())}
    with ocp.CheckpointManager(tmp_path / "two", handlers) as manager:
        manager.save(0, {"a": STATE, "b": [1]})
        assert manager.restore(0, {"b": None})["b"] == [1]
        assert_same(manager.restore(0)["a"], STATE)
        with pytest.raises(ValueError, match="'c'"):
            manager.save(1, {"c": STATE})
    with pytest.raises(ValueError, match="must be ocp"):
        ocp.CheckpointManager(tmp_path, 3)


def test_handlers_of_managers(tmp_path):
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("words", WordsSave, Words())
    registry.add("words", WordsRestore)
    with pytest.raises(ocp.handlers.AlreadyExistsError):
        registry.add("words", WordsSave)
    with pytest.raises(ocp.handlers.NoEntryError):
        registry.get("other", WordsSave)
    with ocp.CheckpointManager(tmp_path / "a", handler_registry=registry) as manager:
        manager.save(0, args=Composite(words=WordsSave(["x"]), state=PyTreeSave(STATE)))
        assert manager.restore(0).words == ["x"]
    with ocp.CheckpointManager(tmp_path / "b", item_handlers=Words()) as manager:
        manager.save(0, args=WordsSave(["x"]))
        assert manager.restore(0) == ["x"]
        with pytest.raises(ValueError, match="does not match with any registered handler"):
            manager.save(1, args=PyTreeSave(STATE))


def test_a_handler_without_registered_arguments(tmp_path):
    class Plain(ocp.CheckpointHandler):
        def save(self, directory, text, end=""):
            (directory / "text").write_text(text + end)

        def restore(self, directory, start=""):
            return start + (directory / "text").read_text()

    with ocp.Checkpointer(Plain()) as checkpointer:
        checkpointer.save(tmp_path / "x", "text", end="!")
        assert checkpointer.restore(tmp_path / "x") == "text!"
        assert checkpointer.restore(tmp_path / "x", start=">") == ">text!"


def test_a_handler_that_only_inherits_is_its_form(tmp_path):
    class Mine(ocp.PyTreeCheckpointHandler):
        pass

    with ocp.CheckpointManager(tmp_path, ocp.Checkpointer(Mine())) as manager:
        manager.save(0, STATE)
        assert_same(manager.restore(0), STATE)
    assert ckpt.inspect(tmp_path / "0").items["default"].form == "tree"
    with pytest.raises(ocp.NotOffered, match="a form of ckpt"):
        Mine().save(tmp_path, STATE)
    with pytest.raises(ocp.NotOffered, match="filename"):
        ocp.JsonCheckpointHandler("other.json")
    with pytest.raises(TypeError, match="no argument 'speed'"):
        ocp.StandardCheckpointHandler(speed=3)


# ------------------------------------------------------------------------------ single checkpoints


def test_single_checkpoints(tmp_path):
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(tmp_path / "x", STATE, custom_metadata={"lr": 1})
    assert_same(checkpointer.restore(tmp_path / "x"), STATE)
    assert checkpointer.metadata(tmp_path / "x").custom_metadata == {"lr": 1}
    assert_same(ckpt.load(tmp_path / "x"), STATE)
    with pytest.raises(ValueError, match="force=True"):
        checkpointer.save(tmp_path / "x", STATE)
    checkpointer.save(tmp_path / "x", {"w": 1}, force=True)
    assert checkpointer.restore(str(tmp_path / "x")) == {"w": 1}
    with pytest.raises(FileNotFoundError):
        checkpointer.restore(tmp_path / "y")


def test_single_checkpoints_in_the_background(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", {"w": jnp.ones(2)})
        checkpointer.save(tmp_path / "y", {"w": jnp.zeros(2)}, force=True)
        checkpointer.check_for_errors()
        target = {"w": jax.ShapeDtypeStruct((2,), jnp.bfloat16)}
        assert checkpointer.restore(tmp_path / "y", target)["w"].dtype == jnp.bfloat16
        assert_same(checkpointer.restore(tmp_path / "x"), {"w": jnp.ones(2)})
        with pytest.raises(ocp.NotOffered, match="wait_until_finished"):
            checkpointer.cancel()


def test_a_checkpointer_of_several_items(tmp_path):
    handler = ocp.CompositeCheckpointHandler("state", config=ocp.JsonCheckpointHandler())
    with ocp.AsyncCheckpointer(handler, timeout_secs=60) as checkpointer:
        both = Composite(state=PyTreeSave(STATE), config=ocp.args.JsonSave([1]))
        checkpointer.save(tmp_path / "x", args=both)
        assert_same(checkpointer.restore(tmp_path / "x").state, STATE)
        one = checkpointer.restore(tmp_path / "x", args=Composite(config=None))
        assert dict(one) == {"config": [1]}
        assert set(checkpointer.metadata(tmp_path / "x").item_metadata) == {"state", "config"}
    step = ocp.PyTreeCheckpointer()
    assert_same(step.restore(tmp_path / "x" / "state"), STATE)
    assert_same(step.restore(tmp_path / "x"), STATE)


# ------------------------------------------------------------------------------------------- trees


class Pair(typing.NamedTuple):
    left: typing.Any
    right: typing.Any


@pytest.fixture
def saved(tmp_path, mesh):
    spread = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("data")))
    tree = {"w": spread, "n": np.arange(3), "i": 3, "pair": Pair(np.ones(2), "text"), "none": None}
    ocp.PyTreeCheckpointer().save(tmp_path / "saved", tree)
    return tree, tmp_path / "saved"


def restored(path, **named):
    return ocp.PyTreeCheckpointer().restore(path, args=PyTreeRestore(**named))


def test_leaves_come_as_their_arguments_say(saved, mesh):
    tree, path = saved
    whole = NamedSharding(mesh, P())
    args = {
        "w": ocp.ArrayRestoreArgs(mesh=mesh, mesh_axes=P(), dtype=jnp.bfloat16),
        "n": ocp.ArrayRestoreArgs(sharding=whole, dtype=jnp.float32),
        "i": ocp.RestoreArgs(restore_type=float),
        "pair": {"left": ocp.RestoreArgs(dtype=np.float16), "right": ocp.RestoreArgs()},
        "none": None,
    }
    got = restored(path, restore_args=args)
    assert (got["w"].sharding, got["w"].dtype) == (whole, jnp.bfloat16)
    assert (got["n"].sharding, got["n"].dtype) == (whole, jnp.float32)
    assert (got["i"], type(got["i"])) == (3.0, float)
    assert got["pair"]["left"].dtype == np.float16
    args["pair"] = Pair(ocp.RestoreArgs(), ocp.RestoreArgs())
    args["w"] = ocp.RestoreArgs(restore_type=np.ndarray)
    got = restored(path, item=tree, restore_args=args)
    assert type(got["w"]) is np.ndarray
    assert type(got["pair"]) is Pair


def test_without_arguments_leaves_come_as_saved(saved):
    tree, path = saved
    assert_same(restored(path, item=jax.tree.map(lambda _: object(), tree)), tree, sharding=True)
    assert restored(path)["pair"].keys() == {"left", "right"}


def test_arguments_made_from_a_target(saved, mesh):
    tree, path = saved
    whole = NamedSharding(mesh, P())
    target = {**tree, "w": jax.ShapeDtypeStruct((8,), jnp.float16, sharding=whole)}
    target["n"] = jax.ShapeDtypeStruct((3,), np.int32)
    args = ocp.checkpoint_utils.construct_restore_args(target)
    assert args["w"].shape == args["w"].global_shape == (8,)
    got = restored(path, item=target, restore_args=args)
    assert (got["w"].sharding, got["w"].dtype) == (whole, jnp.float16)
    assert type(got["n"]) is np.ndarray
    assert got["n"].dtype == np.int32
    shardings = jax.tree.map(lambda _: whole, tree)
    args = ocp.checkpoint_utils.construct_restore_args(tree, shardings, set_global_shape=False)
    assert (args["w"].sharding, args["w"].shape) == (whole, None)
    metadata = ocp.PyTreeCheckpointer().metadata(path).item_metadata
    args = ocp.checkpoint_utils.construct_restore_args(metadata)
    like = ocp.utils.to_shape_dtype_struct(metadata["w"])
    assert like.sharding == tree["w"].sharding
    assert_same(restored(path, restore_args=args)["w"], tree["w"], sharding=True)
    with pytest.raises(ValueError, match="Unsupported type"):
        ocp.checkpoint_utils.construct_restore_args({"a": object()})


def test_keys_stay_keys(tmp_path):
    tree = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(4, impl="rbg"), 2)}
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(tmp_path / "x", tree)
    args = ocp.checkpoint_utils.construct_restore_args(tree)
    described = checkpointer.metadata(tmp_path / "x").item_metadata
    assert (described["keys"].shape, described["keys"].dtype) == ((2,), tree["keys"].dtype)
    from_metadata = ocp.checkpoint_utils.construct_restore_args(described)
    for named in ({}, {"item": tree, "restore_args": args}, {"restore_args": from_metadata}):
        assert_same(restored(tmp_path / "x", **named), tree)
    of_one = ocp.metadata.ShardingMetadata({"device_str": str(jax.devices()[1])})
    assert of_one.to_jax_sharding().device_set == {jax.devices()[1]}
    with pytest.raises(ValueError, match="not here"):
        ocp.metadata.ShardingMetadata({"device_str": "tpu:77"}).to_jax_sharding()
    assert v1.metadata(tmp_path / "x").metadata["key"].dtype == tree["key"].dtype


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_saved_sharding_keeps_the_types_of_its_axes(tmp_path, kind):
    """A program that is compiled for other types of axes may round otherwise: a run would not resume exactly."""
    types = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=types)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "b"))
    tree = {"w": jax.device_put(np.ones((4, 8), np.float32), sharding)}
    like = {"w": jax.ShapeDtypeStruct((4, 8), np.float32)}
    manager = ocp.CheckpointManager(
        tmp_path,
        item_handlers={"x": ocp.PyTreeCheckpointHandler(), "y": ocp.PyTreeCheckpointHandler()},
    )
    manager.save(0, {"x": tree, "y": tree})
    manager.wait_until_finished()
    assert manager.restore(0, items={"x": like, "y": like})["x"]["w"].sharding == sharding
    described = ocp.PyTreeCheckpointer().metadata(tmp_path / "0/x").item_metadata
    args = ocp.checkpoint_utils.construct_restore_args(described)
    assert restored(tmp_path / "0/x", restore_args=args)["w"].sharding == sharding
    assert v1.metadata(tmp_path / "0/x").metadata["w"].sharding == sharding


def test_parts_of_a_tree(saved):
    tree, path = saved
    assert_same(restored(path, item={"n": 0}, partial_restore=True), {"n": tree["n"]})
    assert_same(restored(path, item={"n": 0}, transforms={}), {"n": tree["n"]})
    own = restored(path, item={"n": 0, "new": 5}, transforms={})
    assert_same(own, {"n": tree["n"], "new": 5})
    left_out = {**jax.tree.map(lambda _: 0, tree), "w": ocp.PLACEHOLDER}
    assert restored(path, item=left_out)["w"] is ocp.PLACEHOLDER
    own = restored(path, item={"n": 0, "new": 5}, partial_restore=True)
    assert_same(own, {"n": tree["n"], "new": 5})
    with pytest.raises(ValueError, match="new: wanted int"):
        restored(path, item={**tree, "new": 5})
    with pytest.raises(ValueError, match="w"):
        restored(path, item={"n": 0})
    with pytest.raises(ValueError, match="new"):
        restored(path, restore_args={"new": ocp.RestoreArgs()})
    with pytest.raises(ValueError, match="item="):
        restored(path, transforms={})


def test_what_would_change_trees_silently_is_refused(saved):
    tree, path = saved
    for named in (
        {"transforms": {"a": 1}},
        {"legacy_transform_fn": print},
        {"transforms": {}, "transforms_default_to_original": False},
    ):
        with pytest.raises(ocp.NotOffered):
            restored(path, item={"n": 0}, **named)
    longer = {"w": jax.ShapeDtypeStruct((16,), jnp.float32)}
    args = ocp.checkpoint_utils.construct_restore_args(longer, strict=False)
    args["w"] = ocp.ArrayRestoreArgs(global_shape=(16,), strict=False)
    with pytest.raises(ocp.NotOffered, match=r"jnp\.pad"):
        restored(path, item=longer, restore_args=args, partial_restore=True)
    with pytest.raises(ocp.NotOffered, match=r"jnp\.pad"):
        ocp.StandardCheckpointer().restore(path, {**tree, **longer}, strict=False)
    with pytest.raises(ValueError, match="shape differs"):
        ocp.StandardCheckpointer().restore(path, {**tree, **longer})
    fits = {**tree, "w": jax.ShapeDtypeStruct((8,), jnp.float32)}
    assert ocp.StandardCheckpointer().restore(path, fits, strict=False)["i"] == 3


@pytest.mark.parametrize(
    ("args", "error", "says"),
    [
        (ocp.args.StandardSave(None), ValueError, "Must provide item"),
        (ocp.args.StandardSave(jnp.ones(2)), ValueError, "ArraySave"),
        (ocp.args.StandardSave({}), ValueError, "empty"),
        (PyTreeSave({"a": {"b": object()}}), ValueError, "a/b"),
        (PyTreeSave({"a": 1}, custom_metadata={"x": 1}), ocp.NotOffered, "custom_metadata"),
        (ocp.args.ArraySave("text"), TypeError, "array"),
    ],
)
def test_what_is_not_saved(tmp_path, args, error, says):
    with ocp.CheckpointManager(tmp_path) as manager:
        with pytest.raises(error, match=says):
            manager.save(0, args=args)
        assert manager.all_steps() == []


def test_names_that_are_refused_say_why():
    for name, says in {
        "_src": "private",
        "Transform": "rename=",
    }.items():
        with pytest.raises(AttributeError, match=says):
            getattr(ocp, name)
    with pytest.raises(AttributeError, match="CheckpointHandler of your own"):
        ocp.type_handlers.check_input_arguments  # noqa: B018
    with pytest.raises(AttributeError, match="StandardSave"):
        ocp.args.JaxRandomKeySave  # noqa: B018
    with pytest.raises(AttributeError, match="moving_from_orbax"):
        ocp.handlers.Something  # noqa: B018


def test_trees_as_flat_dicts():
    tree = {"a": [1, {"b": 2}], "c": {}, "d": Pair(3, None)}
    flat = ocp.tree.to_flat_dict(tree)
    assert flat == {("a", "0"): 1, ("a", "1", "b"): 2, ("d", "left"): 3}
    kept = ocp.tree.to_flat_dict(tree, sep="/", keep_empty_nodes=True)
    assert kept == {"a/0": 1, "a/1/b": 2, "c": {}, "d/left": 3, "d/right": None}
    assert ocp.tree.from_flat_dict(flat, target=tree) == tree
    assert ocp.tree.from_flat_dict({"a/b": 1}, sep="/") == {"a": {"b": 1}}
    assert ocp.tree.serialize_tree(tree) == {"a": [1, {"b": 2}], "d": {"left": 3}}
    assert ocp.utils.to_shape_dtype_struct(np.ones(2)).shape == (2,)
    assert ocp.utils.to_shape_dtype_struct(1, scalar_dtype=float) == 1.0
