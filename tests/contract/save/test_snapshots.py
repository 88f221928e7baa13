"""A snapshot is of the moment of the call; and how much memory is held until it is written."""

import gc
import random
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import ckpt_core as ckpt
from tests.support import seams
from tests.support.own import Own
from tests.support.trees import assert_same, meshes
from tests.support.units import MIB

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


LONG_SECS = 60


def state() -> tuple[dict[str, Any], list[Any]]:
    """A state, and weak references to what it is made of."""
    arrays = {"jax": jnp.ones(50_000) * 2, "numpy": np.ones(50_000)}
    small = {"jax": jnp.ones(3) * 3, "numpy": np.ones(3)}
    tree = {"large": arrays, "small": small}
    return tree, [weakref.ref(leaf) for part in tree.values() for leaf in part.values()]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    seams.at(monkeypatch, "record", before=seams.fail(OSError, 28, "the disk is full"))


def assert_gone(references: list[Any]) -> None:
    gc.collect()
    alive = [reference() for reference in references if reference() is not None]
    if alive:  # of what tests/conftest.py froze no referrer is named
        gc.unfreeze()
    assert not alive, [gc.get_referrers(value) for value in alive]


def _begun(tree: Any, checkpointer: ckpt.Checkpointer) -> Callable[[], Any]:
    checkpointer.save(0, tree)
    return checkpointer.wait_until_finished


ON_DEVICE = ckpt.Options(durable=False, snapshot="device")
SAVES: dict[str, Callable[[Path, Any], Callable[[], Any]]] = {
    "save_async": lambda path, tree: ckpt.save_async(path, tree, options=QUICK).result,
    "on the device": lambda path, tree: ckpt.save_async(path, tree, options=ON_DEVICE).result,
    "Checkpointer": lambda path, tree: _begun(tree, ckpt.Checkpointer(path, options=QUICK)),
    "tiers": lambda path, tree: _begun(
        tree, ckpt.Checkpointer(path / "far", local_directory=path / "near", options=QUICK)
    ),
}


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("how", SAVES)
def test_a_save_that_ended_holds_nothing(how, fails, tmp_path, request):
    if fails:
        request.getfixturevalue("full_disk")
    tree, references = state()
    wait = SAVES[how](tmp_path / "a", tree)
    del tree
    with pytest.raises(OSError, match="the disk is full") if fails else nullcontext():
        wait()
    assert_gone(references)  # though whoever waited, and could wait again, is still there
    assert wait


def test_a_failure_that_nobody_asked_about_holds_no_arrays(full_disk, tmp_path):
    tree, references = state()
    pending = ckpt.save_async(tmp_path / "a", tree, options=QUICK)
    del tree
    end = time.monotonic() + LONG_SECS
    while not pending.done():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert_gone(references)
    with pytest.raises(OSError, match="the disk is full") as caught:
        pending.result()
    frames = "".join(str(entry) for entry in caught.traceback)
    assert "ckpt_core" in frames  # where it happened is still known
    with pytest.raises(OSError, match="the disk is full"):
        pending.result()  # and raised again for whoever asks again


def test_what_was_loaded_belongs_to_the_caller(tmp_path):
    """And the target of a load, once it has ended."""
    ckpt.save(tmp_path / "a", {"w": jnp.ones(50_000)}, options=QUICK)
    like = {"w": jnp.zeros(50_000)}
    pending = ckpt.load_async(tmp_path / "a", like)
    loaded = pending.result()
    references = [weakref.ref(like["w"])]
    del like
    assert_gone(references)
    references = [weakref.ref(loaded["w"])]
    del pending, loaded
    assert_gone(references)


def test_a_model_is_not_kept_alive(tmp_path):
    owner = Own(w=jnp.ones(1000))
    references = [weakref.ref(owner)]
    ckpt.save(tmp_path / "one", model=owner)
    del owner
    assert_gone(references)


def test_saves_and_loads_leave_no_objects_behind(tmp_path):
    """TensorStore's own decoding left 8 objects for each leaf of every save and load, for ever."""
    leaves = 300
    state = {f"w{number}": jnp.ones(100) for number in range(leaves)}

    def work(turn: int) -> None:
        ckpt.save(tmp_path / str(turn), state)
        ckpt.load(tmp_path / str(turn))
        gc.collect()

    for turn in range(3):
        work(turn)
    before = sys.getallocatedblocks()
    for turn in range(3, 13):
        work(turn)
    assert sys.getallocatedblocks() - before < leaves


# Runs in an interpreter of its own, whose peak is that of this save alone.
PEAK = """
import json, sys
import jax
import jax.numpy as jnp
import numpy as np
import ckpt_core as ckpt

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))

directory, kind, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
packed = {"compression": "zstd", "chunk_bytes": 4 << 20} if kind == "packed" else {}
options = ckpt.Options(max_host_bytes=limit, **packed)
if kind == "packed":  # of which compression makes little less
    tree = {"w": jax.random.normal(jax.random.key(0), (64, 1024, 1024))}
elif kind == "large":
    tree = {"w": jnp.ones((64, 1024, 1024)), "n": np.ones((32, 1024, 1024), np.float32)}
else:
    tree = {f"leaf{i:05}": jnp.full(2048, i, jnp.float32) for i in range(24000)}
jax.block_until_ready(tree)
# threads, caches and imports; too small to leave freed memory behind that would hide the peak
ckpt.save(directory + "/warm", {"a": jnp.ones(3), "b": np.ones(100_000)}, options=options)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak is counted from here
before = status("VmRSS")
ckpt.save(directory + "/x", tree, options=options)
peak = status("VmHWM")
print(json.dumps({"extra": peak - before}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak")
@pytest.mark.parametrize(
    ("kind", "limit", "most"),
    [
        ("large", 8 * MIB, 64 * MIB),  # smaller than any chunk
        ("small", 16 * MIB, 64 * MIB + 16 * MIB),
        ("packed", 16 * MIB, 64 * MIB + 16 * MIB),  # one array, larger than the limit
    ],
)
def test_saving_takes_little_memory_beyond_the_arrays(run_python, tmp_path, kind, limit, most):
    """The large arrays are 384 MiB, written from their own memory; the others 188 and 256 MiB."""
    found = run_python(PEAK, str(tmp_path), kind, str(limit))
    print(f"{kind}: {found['extra'] / MIB:.0f} MiB beyond the arrays")
    assert found["extra"] < most, f"{found['extra'] / MIB:.0f} MiB"
