"""What several processes saved comes back in new ones; values of which each has its own: equal ones are saved once, others refused."""

import pytest

from tests.support.launch import launch, reports
from tests.support.same_program import comes_back

CODE = """
import jax.numpy as jnp
from dataclasses import dataclass, field, replace
import ml_dtypes, random
w = put(np.arange(8, dtype=np.float32))
def state(value):
    return {"w": w, "inner": {"v": value, "same": np.arange(3), "step": jnp.int32(3)}}
class Reader:
    def __init__(self): self.position = 0
    def get_state(self): return {"position": self.position}
    def set_state(self, state): self.position = state["position"]
reader = Reader()
reader.position = 5 + index
@jax.tree_util.register_dataclass
@dataclass
class Part:
    w: object
    rank: int = field(metadata={"static": True})
nan = np.array([0x7fc00000 + index], np.uint32).view(np.float32)
values = {
    "an int": index, "a float": 0.5 + index, "a bool": bool(index), "text": f"host {index}",
    "long text": "x" * 10_000 + str(index), "bytes": bytes([index]),
    "a large int": 2**70 + index, "complex": 1j * index,
    "numpy": np.array([1, 2, index]), "a numpy number": np.float32(index), "NaN": nan,
    "int4": np.array([index, 1], ml_dtypes.int4),
    "a Generator": np.random.default_rng(index), "a RandomState": np.random.RandomState(index),
    "random.Random": random.Random(index), "an array": jnp.int32(index), "floats": jnp.ones(1000).at[7].add(index),
    "bfloat16": jnp.bfloat16(index), "a key": jax.random.key(index), "keys": jax.random.split(jax.random.key(index), 3),
    "uint4": jnp.array([index, 2], jnp.uint4), "an object": reader, "minus zero": (0.0, -0.0)[index],
    "a static field": Part(np.arange(2), index),
}
"""

REFUSED = """
failed = {}
for name, value in values.items():
    failed[name] = raised(lambda: ckpt.save(f"{directory}/{name}", state(value), options=options))
snapshots = ("host", "device", "pinned_host")
for kind in snapshots:
    chosen = replace(options, snapshot=kind)
    mine = {"w": w, "inner": {"v": jnp.arange(4) + index}}
    pending = ckpt.save_async(f"{directory}/{kind}", mine, options=chosen)
    mine["inner"]["v"].delete()
    failed[kind] = raised(pending.result)
failed["Json"] = raised(lambda: ckpt.save(directory + "/json", items={"v": ckpt.Json({"a": index})}, options=options))
meet("refused")
left = sorted(os.listdir(directory))
meet("listed")
report(failed=failed, left=left, order=raised(lambda: ckpt.save(directory + "/order", w=w, options=options,
    config=ckpt.Json(dict([("a", 1), ("b", 2)][::1 if index else -1])))))
"""


def test_values_that_differ_are_named_and_refused(tmp_path):
    """Each kind of value that is not an array of all processes: one of two would be lost without a word."""
    (tmp_path / "saved").mkdir()
    told = reports(launch(CODE + REFUSED, tmp_path / "saved"))
    for one in told:
        for name, error in one["failed"].items():
            assert error is not None, name
            assert error["type"] == "CheckpointError", (name, error)
            where = "item v" if name == "Json" else "inner/v"
            assert f"{where}" in error["text"], (name, error)
            assert "on process 0, and " in error["text"], (name, error)
            assert "per_process = True" in error["text"], (name, error)
        assert one["order"] is None, one["order"]
        assert one["left"] == []
    assert "inner/v is 0 on process 0, and 1 on process 1" in told[0]["failed"]["an int"]["text"]


SAME = """
def make(n):
    own = [
        3 + n, 0.1 * n, bool(n), f"text {n}", "y" * 5000 + str(n), bytes([n]), 2**80 + n, 2j * n, np.arange(4) + n,
        np.float32(n), np.array([np.nan, n], np.float32), np.array([1, -(n % 2)], ml_dtypes.int4),
        np.random.default_rng(n), np.random.RandomState(n), random.Random(n), jnp.int32(n), jnp.ones(1000) * n,
        jnp.bfloat16(n), jax.random.key(n), jax.random.split(jax.random.key(n), 3), jnp.array([n % 4, 2], jnp.uint4),
        None, -0.0, np.asfortranarray(np.arange(6.0).reshape(2, 3) + n), np.arange(3, dtype=">i4") + n, jnp.zeros((0, 3)),
    ]
    return {"w": w, "inner": {str(at): value for at, value in enumerate(own)}}
"""


def test_equal_values_are_saved_and_every_process_gets_them_back(tmp_path):
    comes_back(CODE + SAME, tmp_path / "saved")


READER = """
class Reader:
    def __init__(self, seen=0, order=()): self.seen, self.order = seen, list(order)
    def get_state(self): return {"seen": self.seen, "order": self.order, "noise": np.arange(self.seen), 3: (1, b"x")}
    def set_state(self, state): self.seen, self.order, self.got = state["seen"], state["order"], state
class Own(Reader):
    per_process = True
class Says(Reader):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.per_process = True
"""

PER_PROCESS = """
failed = {}
failed["equal"] = raised(lambda: ckpt.save(directory + "/equal", w=w, data=Reader(4, [1]), options=options))
failed["differ"] = raised(lambda: ckpt.save(directory + "/differ", w=w, data=Reader(4 + index), options=options))
failed["own"] = raised(lambda: ckpt.save(
    directory + "/own", w=w, data=Own(4 + index, [index]), more=Says(8 + index), options=options))
with ckpt.Checkpointer(directory + "/run", options=options) as run:
    run.save(1, w=w, data=Own(4 + index, [index]))
class Device(Own):
    def get_state(self): return {"inner": [jnp.ones(2)]}
class Key(Own):
    def get_state(self): return {"inner": [jax.random.key(0)]}
failed["a jax array"] = raised(lambda: ckpt.save(directory + "/no", w=w, data=Device(), options=options))
failed["a key"] = raised(lambda: ckpt.save(directory + "/no", w=w, data=Key(), options=options))
failed["inside"] = raised(lambda: ckpt.save(directory + "/no", {"w": w, "data": Own()}, options=options))
report(failed=failed)
"""

PER_PROCESS_BACK = """
data, more, same = Own(), Says(), Reader()
ckpt.restore(directory + "/own", w=w, data=data, more=more, options=options)
ckpt.restore(directory + "/equal", w=w, data=same, options=options)
in_run = Own()
with ckpt.Checkpointer(directory + "/run", options=options) as run:
    run.restore_latest(w=w, data=in_run)
got = data.got
assert got[3] == (1, b"x") and got["noise"].tolist() == list(range(4 + index)), got
state_of = ckpt.load(directory + "/own", item="data", options=options)
report(seen=[data.seen, more.seen, in_run.seen, same.seen, state_of["seen"]], order=[data.order, same.order])
"""


ALONE = """
data = Own()
other = raised(lambda: ckpt.restore(directory + "/own", data=data, unexpected="ignore"))
report(other=other)
"""


def test_the_state_of_an_object_is_that_of_all_or_of_each(tmp_path):
    """Without per_process every process would read the data of process 0; with it, each gets its own back, and no other number
    of processes does.
    """
    (tmp_path / "saved").mkdir()
    for one in reports(launch(CODE + READER + PER_PROCESS, tmp_path / "saved")):
        failed = one["failed"]
        assert failed["equal"] is None
        assert failed["own"] is None
        assert "data/seen is 4 on process 0, and 5 on process 1" in failed["differ"]["text"]
        assert "per_process = True" in failed["differ"]["text"]
        for name in ("a jax array", "a key"):
            assert failed[name]["type"] in ("UnsupportedLeaf", "CheckpointError"), failed[name]
            assert "inner/0" in failed[name]["text"], failed[name]
        assert "item of its own" in failed["inside"]["text"]
    told = reports(launch(CODE + READER + PER_PROCESS_BACK, tmp_path / "saved"))
    for index, one in enumerate(told):
        assert one["seen"] == [4 + index, 8 + index, 4 + index, 4, 4 + index]
        assert one["order"] == [[index], [1]]
    (one,) = reports(launch(CODE + READER + ALONE, tmp_path / "saved", processes=1, devices=4))
    assert "Start as many processes as saved it" in one["other"]["text"]


ELASTIC = """
class Elastic(Own):
    def check_state(self, state):
        if len(state["order"]) > 1:
            raise ValueError("two readers cannot become one")
"""

TAKEN = """
data, refused = Elastic(), Elastic()
ckpt.restore(directory + "/own", data=data, unexpected="ignore", options=options)
error = raised(lambda: ckpt.restore(directory + "/two", data=refused, options=options))
report(seen=data.seen, order=data.order, refused=refused.seen, error=error)
"""


def test_an_object_may_say_that_another_number_of_processes_can_go_on(tmp_path):
    """Process i of another number gets the state of process i modulo the saved number, after its check_state."""
    (tmp_path / "saved").mkdir()
    more = 'ckpt.save(directory + "/two", data=Elastic(index, [1, 2]), options=options)'
    both = PER_PROCESS.replace("report(failed=failed)", more)
    reports(launch(CODE + READER + ELASTIC + both, tmp_path / "saved"))
    told = reports(launch(READER + ELASTIC + TAKEN, tmp_path / "saved", processes=4, devices=1))
    assert [(one["seen"], one["order"]) for one in told] == [(4, [0]), (5, [1])] * 2
    for one in told:
        assert one["refused"] == 0
        assert "two readers cannot become one" in one["error"]["text"]


MESH = """
import jax.numpy as jnp
def sharded(values, *spec):
    return put(values, P(*spec))
def params(n):
    return {"w": sharded(np.arange(32, dtype=np.float32).reshape(8, 4) + n, "data"), "b": sharded(np.ones(4) + n)}
"""

STAGES = """
def of(process): return [device for device in jax.devices() if device.process_index == process]
def on(place, values):
    parts = [jax.device_put(values[at], device)
        for device, at in place.addressable_devices_indices_map(values.shape).items()]
    return jax.make_array_from_single_device_arrays(values.shape, place, parts, dtype=values.dtype)
def make(n):
    found = {"params": params(n), "step": jnp.int32(n)}
    for process in range(count):
        submesh = Mesh(np.array(of(process)), ("y",))
        values = np.arange(8, dtype=np.float32) + n + process
        found[f"stage{process}"] = on(NamedSharding(submesh, P("y")), values)
        found[f"whole{process}"] = on(NamedSharding(submesh, P()), values)
        found[f"single{process}"] = on(jax.sharding.SingleDeviceSharding(of(process)[1]), values)
    return found
"""

STATES = {
    "a step and a key": """
def make(n):
    return {"params": params(n), "step": jnp.int32(n), "key": jax.random.key(n), "weak": jnp.asarray(n * 1.0)}
""",
    "only a step": """
def make(n):
    return {"step": jnp.int32(n), "host": n, "text": "seven", "array": np.arange(3)}
""",
    "optax": """
import optax
def make(n):
    p = params(n)
    tx = optax.adamw(1e-3)
    return {"params": p, "opt": jax.tree.map(lambda leaf: leaf + n, tx.init(p))}
""",
    "a TrainState": """
import optax
from flax.training.train_state import TrainState
tx = optax.adam(1e-3)
def apply(*arguments): return None
def make(n):
    return TrainState.create(apply_fn=apply, params=params(n), tx=tx).replace(step=jnp.int32(n))
""",
    "an Equinox module": """
import equinox as eqx
class Model(eqx.Module):
    w: jax.Array
    scale: jax.Array
    inner: eqx.nn.Linear
def make(n):
    return Model(params(n)["w"], jnp.float32(n), eqx.nn.Linear(2, 3, key=jax.random.key(n)))
""",
    "an NNX model": """
from flax import nnx
class Model(nnx.Module):
    def __init__(self, n):
        self.w = nnx.Param(params(n)["w"])
        self.small = nnx.Param(jnp.arange(3.0) + n)
        self.step = nnx.Variable(jnp.int32(n))
        self.rngs = nnx.Rngs(n, dropout=n + 1)
def make(n):
    return Model(n)
def view(model):
    return nnx.to_pure_dict(nnx.state(model)) if isinstance(model, nnx.Module) else None
""",
    "one stage": """
def make(n):
    place = NamedSharding(Mesh(np.array([d for d in jax.devices() if d.process_index == 1]), ("y",)), P("y"))
    values = np.arange(8, dtype=np.float32) + n
    parts = [jax.device_put(values[at], device)
        for device, at in place.addressable_devices_indices_map(values.shape).items()]
    return {"stage": jax.make_array_from_single_device_arrays(values.shape, place, parts, dtype=values.dtype)}
""",
}


@pytest.mark.parametrize("name", [*STATES, pytest.param("stages", marks=pytest.mark.always)])
def test_what_was_acknowledged_comes_back(tmp_path, name):
    """Sharded arrays beside those that no mesh holds, and arrays of one process alone."""
    comes_back(MESH + STATES.get(name, STAGES), tmp_path / "saved")


def test_four_processes(tmp_path):
    comes_back(MESH + STAGES, tmp_path / "saved", processes=4)
