"""Processes that load different checkpoints, or other leaves: refused on all, before anything is set.

An array that is spread over processes would be woven of both, each part with a checksum that is right.
"""

from tests.support.launch import launch, reports

CODE = """
import jax.numpy as jnp
from dataclasses import replace
mesh = Mesh(np.array(jax.devices()), ("data",))
spread = NamedSharding(mesh, P("data"))
steps = directory + "/steps"

def put(value, dtype=np.float32):
    array = np.full(8, value, dtype)
    return jax.make_array_from_callback(array.shape, spread, lambda at: array[at])

def like(dtype=jnp.float32):
    return {"w": jax.ShapeDtypeStruct((8,), dtype, sharding=spread)}

def value_of(tree):
    (value,) = {int(shard.data[0]) for shard in tree["w"].addressable_shards}
    return value

with ckpt.Checkpointer(steps, options=options) as c:
    for step in range(3):
        c.save(step, {"w": put(step), "v": put(step)})
meet("saved")
failed = {}
atomic = replace(options, atomic_restore=True)
spreading = replace(options, broadcast=True)
reader = ckpt.Checkpointer(steps, read_only=True, options=options)
failed["restore a step"] = raised(lambda: reader.restore(index, state=like(), unexpected="ignore"))
failed["load a step"] = raised(lambda: reader.load(index))
failed["restore a path"] = raised(
    lambda: ckpt.restore(f"{steps}/{index}", state=like(), unexpected="ignore", options=options))
failed["restore at once"] = raised(
    lambda: ckpt.restore(f"{steps}/{index}", state=like(), unexpected="ignore", options=atomic))
failed["load a path"] = raised(lambda: ckpt.load(f"{steps}/{index}", options=options))
failed["load with broadcast"] = raised(lambda: ckpt.load(f"{steps}/{index}", options=spreading))
failed["other leaves"] = raised(
    lambda: ckpt.load(f"{steps}/0", only="vw"[index], options=options))
failed["other dtypes"] = raised(lambda: ckpt.load(
    f"{steps}/0", like((jnp.float32, jnp.bfloat16)[index]), cast=True, unexpected="ignore", options=options))
def onto(spec, order=1):
    place = NamedSharding(Mesh(np.array(jax.devices()[::order]), ("data",)), spec)
    return {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=place)}
failed["other shardings"] = raised(lambda: ckpt.load(
    f"{steps}/0", onto((P("data"), P())[index]), unexpected="ignore", options=options))
failed["other order of devices"] = raised(lambda: ckpt.load(
    f"{steps}/0", onto(P("data"), (1, -1)[index]), unexpected="ignore", options=options))
at_home = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))}
failed["other places"] = raised(lambda: ckpt.load(
    f"{steps}/0", (like(), at_home)[index], unexpected="ignore", options=options))
failed["other places, seen from the first"] = raised(lambda: ckpt.load(
    f"{steps}/0", (at_home, like())[index], unexpected="ignore", options=options))
# one that each holds on a device of its own is its own
assert ckpt.load(f"{steps}/0", at_home, unexpected="ignore", options=options)["w"].sharding == at_home["w"].sharding
# what is each process's own may differ
own = np.array(ckpt.load(f"{steps}/{index}", as_numpy=True)["w"])
assert own[0] == index
if index == 0:  # alone, and the next call meets the others all the same
    ckpt.load(f"{steps}/0", as_numpy=True)
    reader.load(1, as_numpy=True)
seen = value_of(reader.restore(2, state=like(), unexpected="ignore")["state"])
report(failed=failed, seen=seen)
"""


def test_different_checkpoints_are_refused(tmp_path):
    told = reports(launch(CODE, tmp_path))
    for name, error in told[0]["failed"].items():
        other = told[1]["failed"][name]
        assert error is not None, name
        assert other is not None, name
        assert {error["type"], other["type"]} <= {"CheckpointError", "NotTogether"}, (name, error)
        text = error["text"] + other["text"]
        if name.startswith("other"):
            assert "process 1 loads other leaves, or into other dtypes or onto other" in text, (
                name,
                text,
            )
        else:
            assert "which are different checkpoints" in text, (name, text)
            assert "steps/0" in text, (name, text)
            assert "steps/1" in text, (name, text)
    assert [one["seen"] for one in told] == [2, 2]


EVALUATOR = """
import shutil
run = directory + "/steps"
with ckpt.Checkpointer(run, options=options) as trainer:
    for step in range(3):
        trainer.save(step, {"w": np.full(3, step)})
evaluator = ckpt.Checkpointer(run, read_only=True, options=options)
if index == 1:  # it looks when one step more is there
    meet("looked")
    shutil.copytree(run + "/2", run + "/3")
seen = evaluator.latest_step()
found = evaluator.wait_for_new_step(1)
if index == 0:
    meet("looked")
report(found=found, seen=seen)
"""


def test_all_wait_for_one_new_step(tmp_path):
    """One process looked before a step was committed, the other after it: both go on with the same."""
    told = reports(launch(EVALUATOR, tmp_path))
    assert [one["found"] for one in told] == [2, 2]
    assert [one["seen"] for one in told] == [2, 3]


DIFFERING = """
run = directory + "/steps"
c = ckpt.Checkpointer(run, options=options)
for step in range(3):
    c.save(step, {"w": np.full(3, step)})
c.wait_until_finished()
failed = {
    "delete": raised(lambda: c.delete(index)),
    "rollback": raised(lambda: c.rollback_to(index)),
}
meet("tried")
report(failed=failed, steps=c.all_steps())
"""


def test_steps_that_differ_are_not_deleted(tmp_path):
    told = reports(launch(DIFFERING, tmp_path))
    for one in told:
        assert one["steps"] == [0, 1, 2]
        for name in ("delete", "rollback"):
            error = one["failed"][name]
            assert error is not None, name
            assert error["type"] == "NotTogether", (name, error)
            assert "make different calls" in error["text"], (name, error)
