"""Two processes: they save and load one checkpoint; are begun again; and read what is replaced meanwhile."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.launch import launch, reports
from tests.support.ports import free_port
from tests.support.replacing import KINDS, replacing

PRELUDE = """
assert count == 2 and len(jax.devices()) == 4 and len(jax.local_devices()) == 2
def state(step=0):
    rows = np.arange(32, dtype=np.float32).reshape(8, 4) + step
    return {
        "sharded": put(rows),
        "large": put(np.arange(1 << 18, dtype=np.float32).reshape(4, -1) + step),
        "columns": put(rows, P(None, "data")),
        "replicated": put(np.arange(6, dtype=np.int32) + step, P()),
        "numpy": np.arange(3) + step,
        "n": step,
    }

def is_at(tree, step=0):
    wanted = state(step)
    return tree.keys() == wanted.keys() and all(
        same(leaf, wanted[name]) if isinstance(leaf, jax.Array) else np.array_equal(leaf, wanted[name])
        for name, leaf in tree.items()
    )
"""


@pytest.fixture
def together(tmp_path: Path) -> Any:
    """Runs code in both processes; gives what each reported."""

    def run(code: str) -> list[dict[str, Any]]:
        return reports(launch(PRELUDE + code, tmp_path / "run"))

    return run


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
    same=is_at(restored["state"], 1), warned=len(caught),
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
    return all(same(getattr(model, name).get_raw_value(), state(step)[name]) for name in ("large", "sharded"))

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


COMMON = """
import threading
def state(step):
    return put(np.arange(8, dtype=np.float32) + step)
"""
SAVES = """
held, meant = threading.Event(), ckpt.Options(timeout_secs=20, on_pending="fail")

from tests.support import seams

def last(self, *_, **__):
    # of step 1, which ends in process 1 and not yet in process 0
    return index == 0 and os.path.isdir(f"{directory}/1") and seams.agreed(self) == "committed"

seams.at(None, "agreement", after=lambda *_, **__: held.wait(60), where=last)
with ckpt.Checkpointer(directory, max_to_keep=1, options=meant) as run:
    run.save(0, state(0))
    run.wait_until_finished()
    run.save(1, state(1))
    if index == 1:
        run.wait_until_finished()
    meet("one has ended")
    told["refused"] = raised(lambda: run.save(2, state(2)))
    held.set()
    run.wait_until_finished()
    told["next"] = run.save(3, state(3))
"""
RESTORES = """
with ckpt.Checkpointer(directory) as run:
    found = run.restore_latest(state=state(0))
    told["back"] = [run.all_steps(), found.step, same(found["state"], state(found.step))]
"""


def test_a_save_is_refused_on_all_processes_or_on_none(tmp_path):
    for told in reports(launch(COMMON + SAVES, tmp_path / "run")):
        error = told["refused"]
        assert error["type"] == "CheckpointError", error
        assert "save of step 1 in process 0 is still running" in error["text"], error
        assert told["next"] is True, told
    for told in reports(launch(COMMON + RESTORES, tmp_path / "run")):
        assert told["back"] == [[3], 3, True]


STOPPING = """
import logging
import jax.experimental.multihost_utils
heard = []
handler = logging.Handler()
handler.emit = lambda record: heard.append(record.getMessage())
logging.getLogger("ckpt_core").addHandler(handler)
import dataclasses
options = dataclasses.replace(options, stop_signals=("SIGTERM", "SIGUSR1"))
def state(step):
    return {"w": put(np.full(8, step, np.float32))}
stopped = None
policy = ckpt.when.preempted() if how == "policy" else ckpt.when.at_steps([])
with ckpt.Checkpointer(f"{directory}/steps", save_policy=policy, options=options) as run:
    assert not run.should_stop
    for step in range(600):
        if step % 20 == 0:
            jax.experimental.multihost_utils.sync_global_devices(f"step {step}")
        if index in who and step in times:
            os.kill(os.getpid(), getattr(signal, number))
        time.sleep(0.01)
        run.save(step, state(step))
        if run.reached_preemption(step) if how == "ask" else run.should_stop:
            stopped = step
            run.save(step, state(step), force=True)
            break
steps = run.all_steps()
default = signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
report(stopped=stopped, steps=steps, heard=heard, default=default)
"""


@pytest.mark.parametrize(
    ("number", "who", "times", "how"),
    [
        ("SIGTERM", [1], [10], "ask"),
        ("SIGTERM", [1], [10], "policy"),
        ("SIGUSR1", [1], [10], "policy"),
        ("SIGUSR1", [0], [10, 12], "poll"),
        ("SIGUSR1", [0, 1], [10, 11], "poll"),
    ],
)
def test_all_stop_at_one_step(tmp_path, number, who, times, how):
    code = f"number, who, times, how = {number!r}, {who}, {times}, {how!r}\n{STOPPING}"
    told = reports(launch(code, tmp_path / "run"))
    assert told[0]["stopped"] is not None
    assert told[0]["stopped"] == told[1]["stopped"]
    assert told[0]["steps"] == told[1]["steps"] == [told[0]["stopped"]]
    assert told[0]["default"] and told[1]["default"]  # given back at the end


def test_without_the_service_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_PREEMPTION_SERVICE", "0")
    code = f"number, who, times, how = '', [], [], 'policy'\n{STOPPING.replace('range(600)', 'range(3)')}"
    for told in reports(launch(code, tmp_path / "run")):
        assert told["default"]
        assert any("SIGTERM, SIGUSR1 will not be noticed" in text for text in told["heard"])


CODE = """
import jax.extend.backend

def state(value):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return {"w": jax.make_array_from_callback(
        (8,), NamedSharding(mesh, P("x")), lambda at: np.full(8, value, np.float32)[at])}

def value_of(tree):
    return sorted({int(part.data[0]) for part in tree["w"].addressable_shards})

told, found = [], []
for life, port_of_life in enumerate([None, *ports]):
    if port_of_life is not None:
        jax.distributed.shutdown()
        for alone in range(2 * index + life):  # with another number of calls in each process
            ckpt.save(f"{directory}/alone-{life}-{index}-{alone}", {"n": alone})
            ckpt.load(f"{directory}/alone-{life}-{index}-{alone}")
        jax.extend.backend.clear_backends()
        # the first process of one life need not be that of the next
        me = (index + life) % count
        jax.distributed.initialize(f"127.0.0.1:{port_of_life}", num_processes=count, process_id=me)
        assert jax.process_index() == me
    path = f"{directory}/{life}"
    told.append(raised(lambda: ckpt.save(path, state(life), options=options)))
    found.append(raised(lambda: ckpt.load_async(path, options=options).result()))
    found.append(value_of(ckpt.load(path, options=options)))
    told.append(raised(lambda: ckpt.save(path, state(10 + life), overwrite=True, options=options)))
    found.append(value_of(ckpt.load(path, options=options)))
report(told=told, found=found)
"""


def test_processes_agree_in_every_life(tmp_path):
    """They counted rounds on from the life before, each by its own calls, and waited for each other for ever."""
    (tmp_path / "saved").mkdir()
    code = f"ports = {[free_port() for _ in range(3)]}\n{CODE}"
    for told in reports(launch(code, tmp_path / "saved")):
        assert told["told"] == [None] * 8
        lives = [[None, [life], [10 + life]] for life in range(4)]
        assert told["found"] == [value for life in lives for value in life]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax._src.distributed", None)
    import jax._src

    monkeypatch.delattr(jax._src, "distributed", raising=False)


@pytest.mark.usefixtures("moved")
def test_one_process_needs_no_coordination(tmp_path):
    with ckpt.Checkpointer(tmp_path) as run:
        run.save(1, {"w": jnp.arange(3)})
        assert not run.reached_preemption(1)
        found = run.restore_latest({"w": jnp.zeros(3, int)})
    assert found is not None and np.array_equal(found["state"]["w"], [0, 1, 2])


@pytest.mark.usefixtures("moved")
def test_several_processes_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda *_: 2)
    with pytest.raises(ckpt.CheckpointError, match="no coordination service where ckpt looks"):
        ckpt.save(tmp_path / "a", {"w": jnp.arange(3)})
    assert not (tmp_path / "a").exists()


READERS = """
jax.config.update("jax_enable_x64", True)
mesh = Mesh(jax.devices(), "d")
spread = NamedSharding(mesh, P("d"))
step = os.path.join(directory, "3")

def zeros(size):
    make = jax.jit(lambda: jax.numpy.zeros(size, "int64"), out_shardings=spread)
    return make()

target = {"a": zeros(5000), "b": [zeros(8), ""], "c": zeros(300_000)}

def numbers(state):
    found = set()
    for leaf in (state["a"], state["b"][0], state["c"]):
        for shard in getattr(leaf, "addressable_shards", None) or [leaf]:
            found |= set(np.unique(np.asarray(getattr(shard, "data", shard))).tolist())
    (one,) = found  # of one save
    return one

def checkpointer():
    with ckpt.Checkpointer(directory, read_only=True, options=options) as run:
        return numbers(run.restore(3, state=target)["state"])

def latest():
    with ckpt.Checkpointer(directory, read_only=True, options=options) as run:
        return numbers(run.restore_latest(state=target)["state"])

calls = {
    "load": lambda: numbers(ckpt.load(step, options=options)),
    "like": lambda: numbers(ckpt.load(step, target, options=options)),
    "async": lambda: numbers(ckpt.load_async(step, target, options=options).result()),
    "restore": lambda: numbers(ckpt.restore(step, state=target, options=options)["state"]),
    "atomic": lambda: numbers(ckpt.restore(step, state=target, options=ckpt.Options(timeout_secs=40, atomic_restore=True))["state"]),
    "broadcast": lambda: numbers(ckpt.load(step, target, options=ckpt.Options(timeout_secs=40, broadcast=True))),
    "step": checkpointer,
    "latest": latest,
}
for name, call in calls.items():
    told[name] = []
    for _ in range(8):
        try:
            told[name].append(call())
        except ckpt.CheckpointNotFound:
            told[name].append(None)
        meet(f"{name} {len(told[name])}")
"""


@pytest.mark.parametrize("kind", KINDS)
def test_processes_see_one_save_together(tmp_path, kind):
    run = tmp_path / "run"
    with replacing(run / "3", tmp_path / "told", kind, size=8) as replaced:
        first, second = reports(launch(READERS, run))
        assert replaced() > 3
    assert first == second  # both have the same save
