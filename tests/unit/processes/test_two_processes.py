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
    assert told[0]["failed"]["text"].startswith("process 1 cannot load it: CheckpointCorrupt")


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
    assert told[0]["failed"]["text"].startswith("process 1 cannot load it: StructureMismatch")
    assert all(process["unchanged"] and process["restored"] for process in told)


def test_a_late_process_is_named_while_it_is_waited_for(together):
    told = together("""
import logging
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
        if "waited" in lines[-1]:
            open(f"{directory}.told", "w").close()
logging.getLogger("ckpt_core").addHandler(Keep())
deadline = time.monotonic() + 30
while index == 1 and not os.path.exists(f"{directory}.told") and time.monotonic() < deadline:
    time.sleep(0.02)
ckpt.save(f"{directory}/one", state(), options=options)
report(lines=[line for line in lines if "waited" in line])
""")
    assert any(
        "process 0 has waited 5 s for processes [1] at" in line for line in told[0]["lines"]
    ), told
    assert told[1]["lines"] == []


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


def test_two_processes_load_what_one_saved(together, tmp_path):
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    ckpt.save(tmp_path / "run/one", {"sharded": jax.numpy.asarray(values), "n": 5})
    told = together("""
like = {"sharded": state()["columns"], "n": 0}
loaded = ckpt.load(f"{directory}/one", like)
bare = raised(lambda: ckpt.load(f"{directory}/one"))
on_host = ckpt.load(f"{directory}/one", as_numpy=True)
report(
    n=loaded["n"],
    shards=[np.asarray(shard.data).tolist() for shard in loaded["sharded"].addressable_shards],
    bare=bare and bare["text"],
    on_host=on_host["sharded"].tolist(),
)
""")
    for index, answer in enumerate(told):
        columns = [values[:, [2 * index + device]].tolist() for device in range(2)]
        assert answer["n"] == 5 and answer["shards"] == columns
        assert answer["on_host"] == values.tolist()
        # without a target nobody knows where the arrays go
        assert answer["bare"] is None or "sharding=" in answer["bare"]


def test_trees_that_differ_are_refused(together, tmp_path):
    told = together("""
tree = state()
if index == 1:
    tree["more"] = 1
path = f"{directory}/one"
different_tree = raised(lambda: ckpt.save(path, tree, options=options))
different_path = raised(lambda: ckpt.save(f"{path}-{index}", state(), options=options))
left = os.listdir(directory) if os.path.isdir(directory) else []
meet("looked")
ckpt.save(path, state(), options=options)  # both go on
report(tree=different_tree, path=different_path, left=left, verified=ckpt.verify(path).ok)
""")
    for answer in told:
        assert answer["tree"]["type"] == answer["path"]["type"] == "CheckpointError"
        assert "structure of the state on processes [1] differs" in answer["tree"]["text"]
        assert "the path on processes [1] differs" in answer["path"]["text"]
        assert answer["tree"]["secs"] < 30
        assert answer["verified"]
    assert told[0]["left"] == []
    assert os.listdir(tmp_path / "run") == ["one"]


def test_a_process_that_never_comes(together, tmp_path):
    told = together("""
short = ckpt.Options(timeout_secs=3)
path = f"{directory}/steps"
error = None
if index == 0:
    with ckpt.Checkpointer(path, options=short, asynchronous=False) as checkpointer:
        error = raised(lambda: checkpointer.save(0, state()))
    left = checkpointer.all_steps()
    report(error=error, left=left, entries=os.listdir(path))
else:
    report()
""")
    error = told[0]["error"]
    assert error["type"] == "BarrierTimeout" and error["absent"] == [1]
    assert "processes [1]" in error["text"] and 2 < error["secs"] < 30
    assert told[0]["left"] == [] and told[0]["entries"] == []
    assert ckpt.Checkpointer(tmp_path / "run/steps", read_only=True).all_steps() == []


@pytest.mark.slow
def test_a_process_that_leaves_in_the_middle(together, tmp_path):
    """Both agreed and wrote; one is gone before the commit: no step, and nobody waits for ever."""
    told = together("""
from tests.support import seams
short = ckpt.Options(timeout_secs=1.5)
def leaves(self, tag, *_, **__):
    return index == 1 and tag.endswith("/written")
seams.at(None, "agreement", before=lambda *_, **__: report(), where=leaves)
meet("ready")
error = raised(lambda: ckpt.save(f"{directory}/one", state(), options=short))
report(error=error, left=os.listdir(directory) if os.path.isdir(directory) else [])
""")
    assert told[0]["error"]["type"] == "BarrierTimeout" and told[0]["error"]["absent"] == [1]
    assert told[0]["left"] == []


def test_the_agreements_of_a_save_can_be_watched_and_can_fail(together, tmp_path):
    """As `tests.support.seams` has it: the fourth moment, which one process alone never passes."""
    told = together("""
from tests.support import seams
passed = []
def kept(self, tag, *_, **__):
    return index == 1 and tag.endswith("/committed")
def agreed(self, tag, *_, **__):
    passed.append(tag.partition("/")[2])
    return passed[-1] == "written" and shorten(2)
seams.at(None, "agreement", after=agreed)
seams.at(None, "agreement", before=seams.fail(OSError, 5, "gone"), where=kept)
report(error=raised(lambda: ckpt.save(f"{directory}/one", state(), options=options)), passed=passed)
""")
    assert [one["error"]["type"] for one in told] == ["BarrierTimeout", "OSError"]
    assert [one["passed"] for one in told] == [["", "seen", "written"]] * 2


def test_a_failure_of_one_is_a_failure_of_all(together, tmp_path):
    told = together("""
from ckpt_core._directory.posix import LocalAttempt
write = LocalAttempt.write
def failing(self, name, data, **more):
    if index == 1 and "checksums" in name:
        raise OSError(28, "the disk is full")
    write(self, name, data, **more)
LocalAttempt.write = failing
error = raised(lambda: ckpt.save(f"{directory}/one", state(), options=options))
left = os.listdir(directory) if index == 0 and os.path.isdir(directory) else []
meet("looked")
LocalAttempt.write = write
ckpt.save(f"{directory}/one", state(), options=options)
report(error=error, left=left, verified=ckpt.verify(f"{directory}/one").ok)
""")
    assert told[1]["error"]["type"] == "OSError"
    assert told[0]["error"]["type"] == "CheckpointError"
    assert "process 1 failed to save: OSError" in told[0]["error"]["text"]
    assert "the disk is full" in told[0]["error"]["text"]
    assert told[0]["left"] == [] and told[0]["verified"]


@pytest.mark.slow
def test_a_refusal_by_one_is_raised_by_all(together, tmp_path):
    """Only the first process looks at the directory, and only the second has the bad leaf."""
    told = together("""
path = f"{directory}/one"
ckpt.save(path, state(), options=options)
short = ckpt.Options(timeout_secs=3)
exists = raised(lambda: ckpt.save(path, state(), options=short))
meet("looked")
bad = state()
if index == 1:
    bad["bad"] = object()
unsupported = raised(lambda: ckpt.save(f"{directory}/two", bad, options=short))
report(exists=exists, unsupported=unsupported)
""")
    assert told[0]["exists"]["type"] == "CheckpointExists"
    assert told[1]["unsupported"]["type"] == "UnsupportedLeaf"
    assert os.listdir(tmp_path / "run") == ["one"]
    for index, what in ((1, "exists"), (0, "unsupported")):
        error = told[index][what]  # told, not waited for
        assert error["type"] == told[1 - index][what]["type"], error


@pytest.mark.parametrize("how", ["policy", "poll", "ask"])
def test_all_stop_at_the_same_step(together, how):
    """SIGTERM to one of two: jax's preemption sync point makes both stop at one later step."""
    told = together(
        f"how = {how!r}"
        + """
import signal
import jax.experimental.multihost_utils
policy = ckpt.when.preempted() if how == "policy" else ckpt.when.at_steps([])
stopped = None
with ckpt.Checkpointer(f"{directory}/steps", save_policy=policy, options=options) as checkpointer:
    for step in range(400):
        meet_step = jax.experimental.multihost_utils.sync_global_devices if step % 20 == 0 else None
        if meet_step:
            meet_step(f"step {step}")
        if index == 1 and step == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        checkpointer.save(step, state(step))
        if checkpointer.reached_preemption(step) if how == "ask" else checkpointer.should_stop:
            stopped = step
            checkpointer.save(step, state(step), force=True)
            break
report(stopped=stopped, steps=checkpointer.all_steps())
"""
    )
    assert told[0]["stopped"] is not None
    assert told[0] == told[1]
    assert told[0]["steps"] == [told[0]["stopped"]]


def test_a_service_that_is_off_is_reported_once(together, monkeypatch):
    """Nothing would make the processes stop together, and nobody would know."""
    monkeypatch.setenv("JAX_ENABLE_PREEMPTION_SERVICE", "0")
    told = together("""
import logging
heard = []
handler = logging.Handler()
handler.emit = lambda record: heard.append(record.getMessage())
logging.getLogger("ckpt_core").addHandler(handler)
with ckpt.Checkpointer(directory, options=options) as checkpointer:
    for step in range(3):
        checkpointer.save(step, state(step))
        assert not checkpointer.should_stop
report(warnings=sum("jax_enable_preemption_service" in text for text in heard))
""")
    assert [process["warnings"] for process in told] == [1, 1]


def test_all_stop_at_one_step_when_one_gets_the_signal(together, monkeypatch):
    """jax's preemption service gets the signal though we listen too, and all agree on a step."""
    monkeypatch.setenv("JAX_ENABLE_PREEMPTION_SERVICE", "1")
    told = together("""
import signal
policy = ckpt.when.every_steps(1000) | ckpt.when.preempted()
with ckpt.Checkpointer(directory, save_policy=policy, options=options) as checkpointer:
    assert not checkpointer.should_stop
    checkpointer.save(0, state())
    meet("begun")
    if index == 1:
        signal.raise_signal(signal.SIGTERM)
    for stopped in range(1, 1000):
        time.sleep(0.05)
        checkpointer.save(stopped, state(stopped))
        if checkpointer.should_stop:
            break
steps = checkpointer.all_steps()
report(step=stopped, steps=steps)
""")
    assert told[0] == told[1]
    step = told[0]["step"]
    assert 0 < step < 999
    assert told[0]["steps"] == [0, step]
