"""Orbax's first API: its items, arguments and handlers; and beside Orbax itself, in one run that goes back and forth."""

import dataclasses
import json
import os
import stat
import sys
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as theirs
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import ckpt_core as ckpt
import ckpt_orbax as ocp
import ckpt_orbax as ours
from ckpt_orbax import v1
from tests.support.orbax import make_quiet_orbax  # noqa: F401 (fixture)
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


def test_several_items(tmp_path):
    config, array = ocp.args.JsonSave({"layers": 3}), ocp.args.ArraySave(np.arange(3))
    own = {"words": WordsSave(["a"]), "late": LateSave(["b"])}
    args = Composite(state=PyTreeSave(STATE), config=config, array=array, **own)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.save(0, args=args)
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
