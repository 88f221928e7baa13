"""``save`` and ``load`` of Orbax's second API, on ckpt's engine: what comes back, what is refused."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import ckpt_core as ckpt
from ckpt_orbax import v1 as ocp
from tests.support.trees import Moments, assert_same


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


def test_containers_come_back_as_orbax_has_them(path):
    tree = {
        "pair": Moments(np.ones(1), (1, 2)),
        "optimizer": (optax.EmptyState(), optax.TraceState({"w": np.ones(2)})),
        "numbers": {3: "by number"},
        "empty": {},
    }
    ocp.save(path, tree)
    loaded = ocp.load(path)
    assert_same(
        loaded,
        {
            "pair": {"mu": np.ones(1), "nu": [1, 2]},
            "optimizer": [None, {"trace": {"w": np.ones(2)}}],
            "numbers": {"3": "by number"},
            "empty": {},
        },
    )
    assert_same(ocp.load(path, tree), tree)


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
    loaded = ocp.load_async(path).result()
    assert_same(loaded, state)
    assert loaded["w"].sharding == state["w"].sharding
    assert ckpt.verify(path).ok
    assert_same(ocp.load_checkpointables_async(path).result(), {"state": state})


@pytest.mark.parametrize("empty", [{}, [], (), optax.EmptyState()])
def test_nothing_to_save(path, empty):
    with pytest.raises(ValueError, match="Found empty item"):
        ocp.save(path, empty)
    assert not path.exists()


@pytest.mark.parametrize("name", ["metrics", "AUTO", ""])
def test_names_that_no_load_finds(path, name):
    with pytest.raises(ValueError, match=r"must not be empty|reserved"):
        ocp.save(path, {"w": 1}, checkpointable_name=name)


@pytest.mark.parametrize("leaf", [1j, b"bytes", object()])
def test_leaves_that_orbax_does_not_save(path, leaf):
    with pytest.raises(ValueError, match="Unsupported leaf type for saving"):
        ocp.save(path, {"a": leaf})
    assert not path.exists()


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
