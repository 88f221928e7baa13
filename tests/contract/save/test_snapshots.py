"""A save is of the moment of the call, whatever is changed, donated, deleted or drawn from after it."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import ckpt_core as ckpt
from tests.support import seams
from tests.support.trees import assert_same, meshes

QUICK = ckpt.Options(durable=False)
SHAPES = [(), (7,), (300, 400)]  # the last is above the limit of small leaves


@pytest.fixture
def gate(monkeypatch):
    """Holds every save before it writes."""
    made = seams.Gate()
    seams.at(monkeypatch, "write", before=made)
    yield made
    made.go.set()


def of_numpy():
    whole = np.ones((300, 400, 2), np.float32)
    arrays = {str(shape): np.full(shape, 1.5) for shape in SHAPES}
    return arrays | {"view": whole[..., 0], "strided": whole[::3, ::7], "list": [np.array(3)]}


def change(state):
    for name, value in state.items():
        if name != "list":
            value[...] = 9
    state["list"].append(np.array(4))
    state["new"] = 1


def of_jax():
    mesh = meshes()["4x2"]
    rows, everywhere = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    arrays = {str(shape): jnp.full(shape, 1.5) for shape in SHAPES}
    many = {f"on all {shape}": jax.device_put(jnp.full(shape, 2.5), everywhere) for shape in SHAPES}
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), rows)
    sharded = jax.device_put(jnp.ones((1024, 512)), NamedSharding(mesh, P("x", "y")))
    return arrays | many | {"keys": keys, "sharded": sharded, "key": jax.random.key(3)}


def donate(state):
    turn = jax.jit(lambda keys: keys[::-1], donate_argnums=0)
    update = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    for name in [*state][:-1]:
        state[name] = jax.block_until_ready((turn if name == "keys" else update)(state[name]))


def delete(state):
    for leaf in state.values():
        leaf.delete()


def generators():
    kinds = (np.random.default_rng(0), random.Random(0), np.random.RandomState(0))
    return dict(zip("grs", kinds, strict=True))


def draw(state):
    for one in state.values():
        one.random()


CHANGES = {
    "changed": (of_numpy, change),
    "donated": (of_jax, donate),
    "deleted": (of_jax, delete),
    "drawn": (generators, draw),
}
HOW = ["host", "device", "pinned_host", "Checkpointer", "tiers"]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CHANGES)
def test_what_comes_right_after_the_call_is_not_saved(tmp_path, gate, name, how):
    make, meanwhile = CHANGES[name]
    state, want = make(), make()
    if how in ("Checkpointer", "tiers"):
        local = tmp_path / "near" if how == "tiers" else None
        checkpointer = ckpt.Checkpointer(tmp_path, local_directory=local, options=QUICK)
        checkpointer.save(0, state)
        wait = checkpointer.close
    else:
        options = ckpt.Options(durable=False, snapshot=how)
        wait = ckpt.save_async(tmp_path / "0", state, options=options).result
    meanwhile(state)
    gate.go.set()
    wait()
    assert_same(ckpt.load(tmp_path / "0"), want)


@pytest.mark.parametrize("how", ["save_async", "Checkpointer", "tiers"])
def test_metadata_metrics_and_items_changed_right_after(tmp_path, gate, how):
    metadata = {"epoch": 1, "nested": {"list": [1, {"a": 2}]}}
    metrics, tree = {"loss": 0.5}, {"n": 1, "list": [1, 2], "text": "a"}
    items = {"tree": tree}
    if how == "save_async":
        wait = ckpt.save_async(tmp_path / "0", items=items, metadata=metadata, options=QUICK).result
    else:
        local = tmp_path / "near" if how == "tiers" else None
        checkpointer = ckpt.Checkpointer(tmp_path, local_directory=local, options=QUICK)
        checkpointer.save(0, items=items, metadata=metadata, metrics=metrics)
        wait = checkpointer.close
    metadata["epoch"] = object()  # what JSON cannot hold: it must not even be looked at any more
    metadata["nested"]["list"][1]["a"] = 9
    metrics["loss"] = 9.0
    tree["n"], tree["new"] = 9, 9
    tree["list"].append(9)
    items["more"] = 9
    gate.go.set()
    wait()
    info = ckpt.inspect(tmp_path / "0")
    assert info.metadata == {"epoch": 1, "nested": {"list": [1, {"a": 2}]}}
    assert info.metrics == ({} if how == "save_async" else {"loss": 0.5})
    assert ckpt.load(tmp_path / "0") == {"tree": {"n": 1, "list": [1, 2], "text": "a"}}


def test_options_and_policies_are_of_the_call(tmp_path, gate):
    compression = {"w": "zstd"}
    options = ckpt.Options(durable=False, compression=compression)
    pending = ckpt.save_async(tmp_path / "0", {"w": np.zeros(100_000)}, options=options)
    compression["w"] = "no such codec"
    gate.go.set()
    pending.result()
    files = (tmp_path / "0").rglob("*")
    assert sum(file.stat().st_size for file in files if file.is_file()) < 100_000
    at, kept = [0, 2, 4], [0]
    policy, keep = ckpt.when.at_steps(at), ckpt.keep.steps(kept) | ckpt.keep.latest(1)
    at.append(3)
    kept.append(2)
    with ckpt.Checkpointer(tmp_path / "run", save_policy=policy, keep_policy=keep) as checkpointer:
        began = [step for step in range(5) if checkpointer.save(step, {"n": step})]
    assert began == [0, 2, 4] and checkpointer.all_steps() == [0, 4]


@pytest.mark.parametrize("tier", [False, True])
def test_saves_in_a_row_are_each_of_their_moment(tmp_path, tier):
    state = {"a": np.zeros((64, 1024)), "b": np.zeros(7, np.int8)}
    local = tmp_path / "local" if tier else None
    with ckpt.Checkpointer(tmp_path / "run", local_directory=local) as checkpointer:
        for step in range(6):
            state["a"][:], state["b"][:] = step, step
            checkpointer.save(step, state)
            state["a"][:], state["b"][:] = -1, -1
    for step in range(6):
        loaded = ckpt.load(tmp_path / "run" / str(step))
        assert (loaded["a"] == step).all() and (loaded["b"] == step).all(), step


def test_a_failed_save_takes_no_memory_from_the_next(tmp_path, monkeypatch):
    seams.at(monkeypatch, "write", after=seams.fail(), nth=1)
    state = np.zeros(1000)
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state)
        with pytest.raises(OSError, match="No space"):
            checkpointer.wait_until_finished()
        for step in (1, 2):
            state[:] = step
            checkpointer.save(step, state)
            state[:] = -1
    assert [float(np.sum(ckpt.load(tmp_path / str(step)))) for step in (1, 2)] == [1000.0, 2000.0]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
def test_memory_that_torch_writes_to_right_after_an_asynchronous_save(tmp_path, monkeypatch):
    nets = pytest.importorskip("tests.support.torchax_nets")
    array, gate = jnp.zeros(1000), seams.Gate()
    seams.at(monkeypatch, "write", before=gate)
    with nets.torchax_enabled():
        shared = nets.torch_view(array).cpu()
        options = ckpt.Options(snapshot="host")
        pending = ckpt.save_async(tmp_path / "c", {"t": nets.torch_view(array)}, options=options)
        shared.fill_(7)
        gate.go.set()
        pending.result()
    assert array[0] == 7, "torch has its own memory: this tests nothing"
    np.testing.assert_array_equal(ckpt.load(tmp_path / "c", as_numpy=True)["t"], np.zeros(1000))
