"""Items of Orbax's first API: their arguments, their handlers, and single checkpoints."""

import dataclasses
import json
import sys
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import ckpt_core as ckpt
import ckpt_orbax as ocp
from ckpt_orbax import v1
from tests.support.trees import Moments, assert_same

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


def test_a_handler_without_arguments_in_the_place_of_orbax(tmp_path, monkeypatch):
    """As the page tells programs of others to be run: the registrations of Orbax are then our own."""

    class Plain(ocp.CheckpointHandler):
        def save(self, directory, item):
            (directory / "text").write_text(item)

        def restore(self, directory):
            return (directory / "text").read_text()

    monkeypatch.setitem(sys.modules, "orbax.checkpoint.checkpoint_args", ocp.checkpoint_args)
    ocp.Checkpointer(Plain()).save(tmp_path / "x", "text")
    assert ocp.Checkpointer(Plain()).restore(tmp_path / "x") == "text"


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


@pytest.fixture
def saved(tmp_path, mesh):
    spread = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("data")))
    tree = {
        "w": spread,
        "n": np.arange(3),
        "i": 3,
        "pair": Moments(np.ones(2), "text"),
        "none": None,
    }
    ocp.PyTreeCheckpointer().save(tmp_path / "saved", tree)
    return tree, tmp_path / "saved"


def restored(path, **named):
    return ocp.PyTreeCheckpointer().restore(path, args=PyTreeRestore(**named))


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


def test_two_keys_that_are_one_as_text_are_refused(tmp_path):
    w = np.arange(4.0)
    with pytest.raises(ValueError, match="as text: rename one of them"):
        ocp.PyTreeCheckpointer().save(tmp_path / "a", OrderedDict([(1, w), ("1", w)]))
    ocp.PyTreeCheckpointer().save(tmp_path / "a", OrderedDict([(1, w), ("2", w)]))
    assert set(ocp.PyTreeCheckpointer().restore(tmp_path / "a")) == {"1", "2"}
