"""``save`` and ``load`` of Orbax's second API, on ckpt's engine: what comes back, what is refused."""

from __future__ import annotations

import collections
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt_core as ckpt
from ckpt_orbax import NotOffered, multihost
from ckpt_orbax import v1 as ocp
from ckpt_orbax._plain import plain
from ckpt_orbax._response import Waiting
from tests.support.trees import assert_same

Pair = collections.namedtuple("Pair", ["left", "right"])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint"


@pytest.fixture
def state(mesh):
    sharded = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P(mesh.axis_names[0])))
    return {
        "w": sharded,
        "n": np.arange(6, dtype=np.int16).reshape(2, 3),
        "layers": [{"b": np.ones(2)}, {"b": np.zeros(2)}],
        "step": 7,
        "rate": 0.5,
        "name": "run",
        "nothing": None,
    }


def test_what_was_saved_comes_back(path, state):
    assert ocp.save(path, state) is None
    loaded = ocp.load(path)
    assert_same(loaded, state)
    assert loaded["w"].sharding == state["w"].sharding
    assert (type(loaded["step"]), type(loaded["rate"])) == (int, float)
    assert ckpt.verify(path).ok


def test_containers_come_back_as_orbax_has_them(path):
    tree = {
        "pair": Pair(np.ones(1), (1, 2)),
        "optimizer": (optax.EmptyState(), optax.TraceState({"w": np.ones(2)})),
        "numbers": {3: "by number"},
        "empty": {},
    }
    ocp.save(path, tree)
    loaded = ocp.load(path)
    assert_same(
        loaded,
        {
            "pair": {"left": np.ones(1), "right": [1, 2]},
            "optimizer": [None, {"trace": {"w": np.ones(2)}}],
            "numbers": {"3": "by number"},
            "empty": {},
        },
    )
    assert_same(ocp.load(path, tree), tree)


def test_two_keys_of_one_name_are_refused():
    with pytest.raises(ValueError, match="a/b~1c: two keys are '3'"):
        plain({"a": {"b/c": {3: 1.0, "3": 2.0}}})


def test_a_target_gives_sharding_and_dtype(path, state, mesh):
    ocp.save(path, state)
    spread = NamedSharding(mesh, P())
    target = {
        **state,
        "w": jax.ShapeDtypeStruct((16,), jnp.bfloat16, sharding=spread),
        "n": jax.ShapeDtypeStruct((2, 3), jnp.int32, sharding=spread),
        "step": int,
        "rate": np.float32,
        "name": str,
    }
    loaded = ocp.load(path, target)
    assert (loaded["w"].dtype, loaded["w"].sharding) == (jnp.bfloat16, spread)
    assert isinstance(loaded["n"], jax.Array)
    assert loaded["n"].sharding == spread
    assert (loaded["step"], loaded["rate"], loaded["name"]) == (7, np.float32(0.5), "run")
    assert type(loaded["rate"]) is np.float32


def test_numbers_from_arrays_and_arrays_from_numbers(path):
    ocp.save(path, {"a": jnp.array(3.0), "b": np.ones((1, 1)), "c": 4, "d": jnp.arange(2.0)})
    target = {"a": float, "b": 0, "c": jax.ShapeDtypeStruct((), jnp.float32), "d": np.empty(0)}
    loaded = ocp.load(path, target)
    assert (loaded["a"], loaded["b"], loaded["c"].dtype) == (3.0, 1, jnp.float32)
    assert isinstance(loaded["d"], np.ndarray)
    assert loaded["d"].tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match=r"d: saved float32\[2\], wanted a scalar, int"):
        ocp.load(path, {**target, "d": int})


@pytest.mark.parametrize("saved", [True, 3, 2.5, np.float32(2.5), np.array(2), jnp.array(2.5)])
@pytest.mark.parametrize("wanted", [int, float, bool, np.int8, np.float64, jnp.bfloat16.dtype.type])
def test_any_number_as_any_other(path, saved, wanted):
    ocp.save(path, {"a": saved})
    for target in (wanted, wanted(0)):
        loaded = ocp.load(path, {"a": target})["a"]
        assert type(loaded) is wanted
        assert loaded == wanted(saved.item() if hasattr(saved, "item") else saved)


def test_a_timeout_holds_while_another_waits():
    release = threading.Event()

    def wait(timeout):
        if not release.wait(timeout):
            raise TimeoutError
        return True

    response = Waiting(wait)
    called = threading.Event()
    response.on_complete(lambda value: called.set())
    for _ in range(3):  # the thread of on_complete waits without a limit
        with pytest.raises(TimeoutError):
            response.result(timeout=0.05)
    release.set()
    assert response.result(timeout=60)
    assert called.wait(60)


def test_a_placeholder_leaves_a_leaf_out(path, state):
    ocp.save(path, state)
    target = {**state, "w": ocp.PLACEHOLDER, "name": ocp.PLACEHOLDER, "step": ocp.PLACEHOLDER}
    target["layers"] = [ocp.PLACEHOLDER, state["layers"][1]]
    with pytest.raises(ocp.errors.TreeMismatchError, match="layers/0"):
        ocp.load(path, target)  # a subtree is no leaf
    target["layers"] = [{"b": ocp.PLACEHOLDER}, state["layers"][1]]
    read = []
    context = ocp.Context()
    context.engine = ckpt.Options(on_event=read.append)
    with context:
        loaded = ocp.load(path, target)
    assert loaded["w"] is loaded["name"] is loaded["step"] is loaded["layers"][0]["b"] is ...
    assert_same(loaded["n"], state["n"])
    [restored] = [event for event in read if event.kind == "restored"]
    left = [state["n"].nbytes, state["layers"][1]["b"].nbytes, 8]  # and the rate
    assert restored.bytes == sum(left)


def test_trees_that_differ_are_reported_whole(path, state):
    ocp.save(path, state)
    less = {name: leaf for name, leaf in state.items() if name != "n"}
    with pytest.raises(ocp.errors.TreeMismatchError, match="User-provided restore item") as caught:
        ocp.load(path, {**less, "m": np.ones(2), "w": jax.ShapeDtypeStruct((4,), jnp.float32)})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value.__cause__, ckpt.StructureMismatch)
    assert {difference.path for difference in caught.value.__cause__.mismatches} == {"m", "n", "w"}
    with pytest.raises(KeyError) as caught:  # as in Orbax, in this form
        ocp.load_checkpointables(path, {"state": {"m": np.ones(2)}})
    assert str(caught.value).startswith("User-provided restore item")


def test_a_partial_load_names_what_it_wants(path, state):
    ocp.save(path, state)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        assert_same(ocp.load(path, {"n": state["n"]}), {"n": state["n"]})
        with pytest.raises(ocp.errors.TreeMismatchError, match="not in the checkpoint"):
            ocp.load(path, {"absent": state["n"]})


def test_a_target_of_what_was_described(path, state):
    state["empty"] = {}
    ocp.save(path, state, custom_metadata={"rate": 0.1})
    found = ocp.metadata(path)
    assert found.custom_metadata == {"rate": 0.1}
    ocp.save(path, state, overwrite=True)
    assert ocp.metadata(path).custom_metadata == {}
    assert ocp.checkpointables_metadata(path).custom_metadata == {}
    assert found.path.name == "checkpoint"
    assert 0 < found.init_timestamp_nsecs <= found.commit_timestamp_nsecs
    assert found.metadata["w"].sharding == state["w"].sharding
    assert (found.metadata["n"].shape, found.metadata["n"].dtype) == ((2, 3), np.int16)
    assert_same(ocp.load(path, found), state)
    assert_same(ocp.load(path, found.metadata), state)


def test_asynchronous(path, state):
    called = threading.Event()
    context = ocp.Context()
    ended = []
    context.asynchronous.post_finalization_callback = lambda: ended.append(1)
    with context:
        response = ocp.save_async(path, state)
    response.on_complete(lambda value: called.set())
    assert response.result() is None
    assert response.result(timeout=1) is None
    assert called.wait(60)
    assert ended == [1]
    loading = ocp.load_async(path)
    assert_same(loading.result(), state)
    assert_same(ocp.load_checkpointables_async(path).result(), {"state": state})


def test_an_error_in_the_background_is_raised_at_every_call(path, state):
    def fail(event):
        if event.kind == "snapshot_taken":
            (path / "occupied").mkdir(parents=True)

    context = ocp.Context()
    context.engine = ckpt.Options(on_event=fail)
    with context:
        response = ocp.save_async(path, state)
    for _ in range(2):
        with pytest.raises(FileExistsError):
            response.result()


def test_several_checkpointables(path, state):
    ocp.save_checkpointables(path, {"b": {"x": np.ones(1)}, "a": state, "leaf": 3})
    assert ocp.load_checkpointables(path).keys() == {"a", "b", "leaf"}
    loaded = ocp.load_checkpointables(path, {"b": None, "leaf": int})
    assert_same(loaded, {"b": {"x": np.ones(1)}, "leaf": 3})
    assert_same(ocp.load(path), state)  # the first by name
    assert ocp.load(path, checkpointable_name="leaf") == 3
    assert ocp.checkpointables_metadata(path).metadata["b"]["x"].shape == (1,)
    with pytest.raises(KeyError, match="Requested checkpointables: c: not in") as caught:
        ocp.load_checkpointables(path, {"c": None})
    assert isinstance(caught.value, ckpt.CheckpointError)


def test_a_pytree_is_found_by_its_name(path, state):
    ocp.save_checkpointables(path, {"a": {"x": 1}, "state": state})
    assert_same(ocp.load(path), state)
    with pytest.raises(ocp.errors.InvalidLayoutError, match="no pytree 'b'"):
        ocp.load(path, checkpointable_name="b")


@pytest.mark.parametrize("empty", [{}, [], (), optax.EmptyState()])
def test_nothing_to_save(path, empty):
    with pytest.raises(ValueError, match="Found empty item"):
        ocp.save(path, empty)
    assert not path.exists()


@pytest.mark.parametrize("leaf", [1j, b"bytes", object()])
def test_leaves_that_orbax_does_not_save(path, leaf):
    with pytest.raises(ValueError, match="Unsupported leaf type for saving"):
        ocp.save(path, {"a": leaf})
    assert not path.exists()


def test_bad_arguments(path, state):
    with pytest.raises(ValueError, match="must not be None"):
        ocp.save(path, None)
    for bad in ({}, [], "text", None):
        with pytest.raises(ValueError, match="checkpointables must"):
            ocp.save_checkpointables(path, bad)
    for name in ("", "metrics", "AUTO"):
        with pytest.raises(ValueError, match="name"):
            ocp.save_checkpointables(path, {name: state})
    with pytest.raises(TypeError, match="Unsupported abstract leaf type for loading"):
        ocp.load(path, {"a": object()})
    with pytest.raises(ValueError, match="a path is needed"):
        ocp.load("")


def test_there_is_no_checkpoint(tmp_path):
    for call in (ocp.load, ocp.load_checkpointables, ocp.metadata, ocp.checkpointables_metadata):
        with pytest.raises(ocp.errors.InvalidLayoutError) as caught:
            call(tmp_path / "absent")
        assert isinstance(caught.value, FileNotFoundError)
        assert isinstance(caught.value, ValueError)
    assert not ocp.is_orbax_checkpoint(tmp_path)


def test_overwriting_is_said(path, state):
    ocp.save(path, state)
    assert ocp.is_orbax_checkpoint(path)
    with pytest.raises(ocp.errors.DestinationExistsError) as caught:
        ocp.save(path, {"other": 1})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, FileExistsError)
    ocp.save(path, {"other": 1}, overwrite=True)
    assert ocp.load(path) == {"other": 1}


def test_storage_dtypes(path, state):
    context = ocp.Context()
    context.array.saving.storage_options.dtype = jnp.bfloat16
    asked = []

    def choose(key, leaf):
        asked.append(jax.tree_util.keystr(key))
        wide = ocp.options.ArrayOptions.Saving.StorageOptions(dtype=np.float64)
        return wide if "layers" in asked[-1] else None

    context.array.saving.scoped_storage_options_creator = choose
    with context:
        ocp.save(path, state)
    loaded = ocp.load(path)
    assert (loaded["w"].dtype, loaded["layers"][0]["b"].dtype) == (jnp.bfloat16, np.float64)
    assert (loaded["step"], loaded["name"]) == (7, "run")
    assert "['layers'][0]['b']" in asked


def test_earlier_names_warn(path, state):
    with pytest.warns(DeprecationWarning, match="Use `save` instead"):
        ocp.save_pytree(path, state)
    with pytest.warns(DeprecationWarning, match="Use `load` instead"):
        assert_same(ocp.load_pytree(path), state)
    with pytest.warns(DeprecationWarning, match="Use `metadata` instead"):
        assert "w" in ocp.pytree_metadata(path, checkpointable_name="state").metadata
    with pytest.warns(DeprecationWarning, match="Use `save_async` instead"):
        ocp.save_pytree_async(path, state, overwrite=True).result()
    with pytest.warns(DeprecationWarning, match="Use `load_async` instead"):
        assert_same(ocp.load_pytree_async(path).result(), state)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("ocp.delete()", lambda: ocp.delete("x")),
        ("ocp.delete()", lambda: ocp.delete_async("x")),
        ("ProtoHandler", lambda: ocp.handlers.ProtoHandler()),
        ("PyTreeHandler(use_ocdbt)", lambda: ocp.handlers.PyTreeHandler(use_ocdbt=False)),
        ("training.pathways.Snapshotter", lambda: ocp.training.pathways.Snapshotter()),
    ],
)
def test_what_is_not_offered_says_what_to_write(name, call):
    with pytest.raises(NotOffered) as caught:
        call()
    assert str(caught.value).startswith(f"{name} is not offered by ckpt_orbax: ")
    assert "Instead: " in str(caught.value)
    assert isinstance(caught.value, NotImplementedError)


def test_targets_made_of_a_state(path, state):
    state |= {"key": jax.random.key(3), "layers": [np.ones(2, np.float32)]}
    target = jax.tree.map(ocp.arrays.to_shape_dtype_struct, {**state, "name": 0})
    target["name"] = ocp.PLACEHOLDER
    assert target["step"] == state["step"]  # a number stays one
    ocp.save(path, state)
    loaded = ocp.load(path, target)
    assert loaded["name"] is ...
    assert loaded["step"] == state["step"]
    assert isinstance(loaded["step"], int)
    assert (loaded["key"] == state["key"]).all()
    assert loaded["w"].sharding == state["w"].sharding
    assert ocp.arrays.to_shape_dtype_struct(1, scalar_dtype=float) == 1.0
    assert ocp.arrays.to_shape_dtype_struct(np.ones(2), jnp.bfloat16).dtype == jnp.bfloat16


def test_arrays_of_one_process_become_arrays_of_all_devices():
    local = jax.device_put(jnp.arange(3.0), jax.devices()[0])
    found = multihost.fully_replicated_host_local_array_to_global_array(local)
    assert len(found.devices()) == jax.device_count()
    assert found.sharding.is_fully_replicated
    np.testing.assert_array_equal(found, local)


def test_merging_trees():
    assert ocp.tree.merge({"a": {"x": 1}}, {"a": {"y": 2}}, {"b": 3}) == {
        "a": {"x": 1, "y": 2},
        "b": 3,
    }
    with pytest.raises(ValueError, match="/a/x: two trees"):
        ocp.tree.merge({"a": {"x": 1}}, {"a": {"x": 2}})
    assert ocp.tree.merge({"a": 1}, {"a": 2}, overwrite=True) == {"a": 2}


def test_the_names_on_disk_are_those_of_orbax(path):
    ocp.save(path, {"pair": Pair(np.ones(1), 2.0)}, checkpointable_name="mine")
    described = json.loads((path / "mine" / "_METADATA").read_text())["tree_metadata"]
    assert set(described) == {"('pair', 'left')", "('pair', 'right')"}
