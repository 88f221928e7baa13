"""Two real processes of jax.distributed, two devices each: they save together, and load together."""

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.launch import launch, reports

_PRELUDE = """
assert count == 2 and len(jax.devices()) == 4 and len(jax.local_devices()) == 2
mesh = Mesh(np.array(jax.devices()), ("data",))

def put(values, spec=P()):
    return jax.make_array_from_callback(
        values.shape, NamedSharding(mesh, spec), lambda where: values[where]
    )

def state(step=0):
    rows = np.arange(32, dtype=np.float32).reshape(8, 4) + step
    return {
        "sharded": put(rows, P("data")),
        "large": put(np.arange(1 << 18, dtype=np.float32).reshape(4, -1) + step, P("data")),
        "columns": put(rows, P(None, "data")),
        "replicated": put(np.arange(6, dtype=np.int32) + step),
        "numpy": np.arange(3) + step,
        "n": step,
    }

def same(tree, step=0):
    wanted = state(step)
    for name, leaf in tree.items():
        if isinstance(leaf, jax.Array):
            pairs = zip(leaf.addressable_shards, wanted[name].addressable_shards, strict=True)
            if not all((np.asarray(a.data) == np.asarray(b.data)).all() for a, b in pairs):
                return False
        elif not np.array_equal(leaf, wanted[name]):
            return False
    return tree.keys() == wanted.keys()
"""


@pytest.fixture
def together(tmp_path: Path) -> Any:
    """Runs code in both processes; gives what each reported."""

    def run(code: str) -> list[dict[str, Any]]:
        return reports(launch(_PRELUDE + code, tmp_path / "run"))

    return run


def test_save_and_load_together(together, tmp_path):
    told = together("""
ckpt.save(f"{directory}/one", state(), options=options)
loaded = ckpt.load(f"{directory}/one", state(9))
with ckpt.Checkpointer(f"{directory}/steps", max_to_keep=2, options=options) as checkpointer:
    for step in range(4):
        assert checkpointer.save(step, state(step), metrics={"loss": step})
    restored = checkpointer.restore_latest(state=state(9))
meet("closed")  # the first process alone deletes, after all have agreed that the step is there
report(
    loaded=same(loaded),
    sharding=loaded["sharded"].sharding == state()["sharded"].sharding,
    step=restored.step,
    restored=same(restored["state"], 3),
    steps=checkpointer.all_steps(),
    verified=ckpt.verify(f"{directory}/one").ok,
)
""")
    expected = {"loaded": True, "sharding": True, "step": 3, "restored": True, "steps": [2, 3]}
    assert told == [expected | {"verified": True}] * 2

    # and in one process, which has eight devices
    for path, step in (("one", 0), ("steps/2", 2), ("steps/3", 3)):
        assert ckpt.verify(tmp_path / "run" / path).ok
        rows = np.arange(32, dtype=np.float32).reshape(8, 4) + step
        loaded = ckpt.load(tmp_path / "run" / path, as_numpy=True)
        assert (loaded["sharded"] == rows).all() and (loaded["columns"] == rows).all()
        assert (loaded["large"].ravel() == np.arange(1 << 18, dtype=np.float32) + step).all()
        assert (loaded["replicated"] == np.arange(6) + step).all()
        assert (loaded["numpy"] == np.arange(3) + step).all() and loaded["n"] == step
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    target = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=where)
    one = ckpt.load(tmp_path / "run/one", {"sharded": target}, unexpected="ignore")["sharded"]
    assert one.sharding == where
    assert (np.asarray(one) == np.arange(32, dtype=np.float32).reshape(8, 4)).all()
    assert sorted(os.listdir(tmp_path / "run")) == ["one", "steps"]


def test_damage_that_one_process_meets_is_met_by_all(together, tmp_path):
    """Each reads its own shards only; all must go back to the same older step."""
    told = together("""
class Counter:
    value = 0
    def get_state(self): return {"value": self.value}
    def set_state(self, state): self.value = state["value"]

counter = Counter()
with ckpt.Checkpointer(f"{directory}/steps", options=options, asynchronous=False) as checkpointer:
    for step in range(3):
        counter.value = step
        checkpointer.save(step, state=state(step), counter=counter)
    meet("saved")
    counter.value = -1
    if index == 0:
        folder = f"{directory}/steps/2/state/ocdbt.process_1/d"
        (name,) = [n for n in os.listdir(folder) if os.path.getsize(f"{folder}/{n}") > 1 << 18]
        with open(f"{folder}/{name}", "r+b") as file:
            file.seek(os.path.getsize(f"{folder}/{name}") // 2)
            file.write(b"x" * 64)
    meet("damaged")
    failed = raised(lambda: ckpt.restore(f"{directory}/steps/2", state=state(9), counter=counter))
    unchanged = counter.value
    loaded = raised(lambda: ckpt.load(f"{directory}/steps/2", {"state": state(9), "counter": {"value": 0}}))
    import warnings
    with warnings.catch_warnings(record=True) as caught:
        restored = checkpointer.restore_latest(state=state(9), counter=counter)
report(
    failed=failed, unchanged=unchanged, loaded=loaded, step=restored.step, counter=counter.value,
    same=same(restored["state"], 1), warned=len(caught),
)
""")
    for process in told:
        assert process["failed"]["type"] == process["loaded"]["type"] == "CheckpointCorrupt"
        assert process["unchanged"] == -1
        assert process["step"] == process["counter"] == 1
        assert process["same"]
        assert process["warned"] == 1
    # the one that met it names the leaf; the other one names the process
    assert "leaf large" in told[1]["failed"]["text"]
    assert told[0]["failed"]["text"].startswith("process 1 could not restore: CheckpointCorrupt")


def test_no_object_is_set_before_all_processes_can(together):
    """Objects are set while they are read; what does not fit in one process changes nothing in any."""
    told = together("""
from dataclasses import replace
from flax import nnx

class Model(nnx.Module):
    def __init__(self, step, more=False):
        values = state(step)
        self.large, self.sharded = nnx.Param(values["large"]), nnx.Param(values["sharded"])
        if more:
            self.more = nnx.Param(values["replicated"])

def is_at(model, step):
    expected = state(step)
    return all(
        (np.asarray(here.data) == np.asarray(there.data)).all()
        for name in ("large", "sharded")
        for here, there in zip(
            getattr(model, name).get_raw_value().addressable_shards,
            expected[name].addressable_shards,
        )
    )

parts = replace(options, max_host_bytes=1024)  # the large one is set as it comes
ckpt.save(f"{directory}/one", model=Model(3), options=options)
model = Model(9, more=index == 1)
failed = raised(lambda: ckpt.restore(f"{directory}/one", model=model, options=parts))
unchanged = is_at(model, 9)
model = Model(9)
ckpt.restore(f"{directory}/one", model=model, options=parts)
report(failed=failed, unchanged=unchanged, restored=is_at(model, 3))
""")
    assert told[1]["failed"]["type"] == "StructureMismatch"
    assert told[0]["failed"]["text"].startswith("process 1 could not restore: StructureMismatch")
    assert all(process["unchanged"] and process["restored"] for process in told)


def test_process_0_decides_what_to_save(together, tmp_path):
    """Clocks and functions of the user's may differ between processes; what is saved may not."""
    told = together("""
asked = []

def mine(step, context):
    asked.append(step)
    return index == 1 or step % 3 == 0

slow = ckpt.when.every_secs(1e-9 if index == 0 else 1e9)
with ckpt.Checkpointer(f"{directory}/mine", save_policy=mine, options=options) as checkpointer:
    wanted = [checkpointer.should_save(step) for step in range(6)]
    began = [checkpointer.save(step, state(step)) for step in range(6, 9)]
with ckpt.Checkpointer(f"{directory}/clock", save_policy=slow, options=options) as checkpointer:
    clock = [checkpointer.save(step, state(step)) for step in range(3)]
with ckpt.Checkpointer(f"{directory}/steps", save_interval_steps=2, options=options) as checkpointer:
    # the step alone decides: nobody has to ask process 0
    alone = [checkpointer.should_save(step) for step in range(4)] if index == 1 else None
limit = ckpt.Options(timeout_secs=2)
lonely = ckpt.Checkpointer(f"{directory}/lonely", save_policy=mine, options=limit)
failed = raised(lambda: lonely.should_save(1)) if index == 1 else None
report(wanted=wanted, began=began, clock=clock, alone=alone, failed=failed, asked=asked[:9])
""")
    for process in told:
        assert process["wanted"] == [True, False, False, True, False, False]
        assert process["began"] == [True, False, False]
        assert process["clock"] == [True, True, True]
        assert process["asked"] == list(range(9))
    assert told[1]["alone"] == [True, False, True, False]
    assert told[1]["failed"]["type"] == "BarrierTimeout"
    assert told[1]["failed"]["absent"] == [0]
    assert ckpt.Checkpointer(tmp_path / "run/mine", read_only=True).all_steps() == [6]
    assert ckpt.Checkpointer(tmp_path / "run/clock", read_only=True).all_steps() == [0, 1, 2]
