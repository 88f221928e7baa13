"""Processes that disagree on what they save or load: refused on all, before anything is set, with the leaf or setting named."""

from typing import Any

import numpy as np

import ckpt_core as ckpt
from tests.support.launch import launch, reports

PRELUDE = """
from dataclasses import replace
import jax.numpy as jnp
devices = np.array(jax.devices())
other_order = Mesh(devices[[0, 2, 1, 3]] if index else devices, ("data",))
values = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)

def state(**more):
    return {"a": put(values), "layers": {"b": put(values), "n": 1}, "z": np.arange(3), **more}

def at(first, second):
    # an argument that is not the same in both processes
    return first if index == 0 else second

small, zstd = replace(options, chunk_bytes=1024), replace(options, compression="zstd")
"""

REFUSED = {
    "chunk_bytes": (
        "lambda path: ckpt.save(path, state(), options=at(options, small))",
        ["chunks", "a is (16, 32) on process 0, and (8, 32) on process 1", "chunk_bytes="],
    ),
    "compression": (
        "lambda path: ckpt.save(path, state(), options=at(options, zstd))",
        ["the compression", "a is none on process 0, and zstd on process 1"],
    ),
    "compression patterns": (
        "lambda path: ckpt.save(path, state(), options=replace(options, compression="
        "at({'**/b': 'zstd', '**': None}, {'**/n': 'zstd', '**': None})))",
        ["the compression", "layers/b is zstd on process 0, and none on process 1"],
    ),
    "the order of devices": (
        "lambda path: ckpt.save(path, state(layers={'b': put(values, mesh=other_order)}))",
        [
            "the sharding",
            "layers/b is",
            "devices 0-1 2048-2049 on process 0",
            "devices 0 2048 1 2049 on pro",
        ],
    ),
    "the axis that is cut": (
        "lambda path: ckpt.save(path, state(b=put(values, spec=at(P('data'), P(None, 'data')))))",
        ["b is", "P('data')", "P(None, 'data')"],
    ),
    "arrays of each process's own": (
        "lambda path: ckpt.save(path, state(c=jax.device_put(values, jax.local_devices()[0])))",
        ["c is device 0 of process 0 on process 0, and device 2048 of process 1", "global arrays"],
    ),
    "bound and not": (
        "lambda path: ckpt.save(path, state(c=at(jnp.ones(3), put(np.ones(3), P()))))",
        ["c is not bound to a device on process 0, and P()"],
    ),
    "shape": (
        "lambda path: ckpt.save(path, state(z=np.arange(at(3, 4))))",
        ["the structure", "z is numpy int64[3] on process 0, and numpy int64[4] on process 1"],
    ),
    "dtype": (
        "lambda path: ckpt.save(path, state(z=np.zeros(3, at('f4', 'i4'))))",
        ["z is numpy float32[3] on process 0, and numpy int32[3]"],
    ),
    "weak type": (
        "lambda path: ckpt.save(path, state(z=at(jnp.asarray(1.0), jnp.float32(1.0))))",
        ["z is jax float32[] weak on process 0, and jax float32[] on process 1"],
    ),
    "kind of leaf": (
        "lambda path: ckpt.save(path, state(z=at(1, 1.0)))",
        ["z is int on process 0, and float on process 1"],
    ),
    "implementation of keys": (
        "lambda path: ckpt.save(path, state(z=jax.random.key(0, impl=at('rbg', 'threefry2x32'))))",
        ["z is key<rbg>"],
    ),
    "kind of container": (
        "lambda path: ckpt.save(path, state(c=at([1, 2], (1, 2))))",
        ["c is list on process 0, and tuple on process 1"],
    ),
    "empty containers": (
        "lambda path: ckpt.save(path, state(c=at({}, None)))",
        ["c is dict on process 0, and none on process 1"],
    ),
    "kind of keys": (
        "lambda path: ckpt.save(path, state(c={at(0, '0'): 1}))",
        ["c is dict with the integer keys [0] on process 0, and dict on process 1"],
    ),
    "a leaf too many": (
        "lambda path: ckpt.save(path, state(**at({}, {'m': 1})))",
        ["the structure of the state on processes [1]", "m (int) is on process 1, and not on"],
    ),
    "a leaf too few": (
        "lambda path: ckpt.save(path, state(**at({'m': 1}, {})))",
        ["m (int) is on process 0, and not on process 1"],
    ),
    "another item": (
        "lambda path: ckpt.save(path, model=state(), **at({'d': [1]}, {'e': [1]}))",
        ["item e", "is on process 1, and not on process 0"],
    ),
    "a leaf of an item": (
        "lambda path: ckpt.save(path, model=state(z=at(1, '1')), d=[1])",
        ["model/z is int on process 0, and str"],
    ),
    "durable": (
        "lambda path: ckpt.save(path, state(), options=replace(options, durable=index == 0))",
        ["Options(durable=) on processes [1]", "True on process 0, and False on process 1"],
    ),
    "overwrite": (
        "lambda path: ckpt.save(path, state(), overwrite=index == 0)",
        ["overwrite= on processes [1]"],
    ),
    "a state or items": (
        "lambda path: ckpt.save(path, state()) if index else ckpt.save(path, state=state())",
        ["one state or named items"],
    ),
    "the path": (
        "lambda path: ckpt.save(f'{path}{index}', state())",
        ["the path on processes [1]", "0' on process 0, and '"],
    ),
    "the step": (
        "lambda path: ckpt.Checkpointer(path, asynchronous=False).save(index, state())",
        ["the path on processes [1]", "/0' on process 0, and '"],
    ),
}


def test_what_must_be_the_same_is_refused_where_it_is_not(tmp_path):
    cases = ", ".join(f"{name!r}: {code}" for name, (code, _) in REFUSED.items())
    code = f"""
cases = {{{cases}}}
failed = {{}}
for number, (name, call) in enumerate(cases.items()):
    failed[name] = raised(lambda: call(f"{{directory}}/case{{number}}"))
meet("tried")
left = [name for _, _, names in os.walk(directory) for name in names if "owner" not in name]
meet("looked")
ckpt.save(f"{{directory}}/after", state(), options=options)  # both go on together
report(failed=failed, left=left)
"""
    directory = tmp_path / "run"
    told = reports(launch(PRELUDE + code, directory))
    for process in told:
        for name, (_, wanted) in REFUSED.items():
            error = process["failed"][name]
            assert error is not None, f"{name}: saved"
            assert error["type"] == "CheckpointError", (name, error)
            for part in wanted:
                assert part in error["text"], (name, part, error["text"])
            assert error["secs"] < 20, name
        assert process["left"] == [], "something is left of what was refused"
    assert ckpt.verify(directory / "after").ok


HARMLESS = """
def events(event): pass

differing = {
    "target_data_file_bytes": dict(options=replace(options, target_data_file_bytes=at(1 << 20, 1 << 12))),
    "max_host_bytes": dict(options=replace(options, max_host_bytes=at(1 << 30, 1 << 12))),
    "timeout_secs": dict(options=replace(options, timeout_secs=at(40, 30))),
    "snapshot": dict(options=replace(options, snapshot=at("host", "device"))),
    "link_unchanged": dict(options=replace(options, link_unchanged=index == 0)),
    "checksums": dict(options=replace(options, checksums=index == 0)),
    "on_event": dict(options=replace(options, on_event=at(None, events))),
    "empty end of a spec": dict(state=state(b=put(values, spec=at(P("data"), P("data", None))))),
    "metadata": dict(metadata={"host": index}),
    "same codec": dict(options=replace(options, compression=at("zstd", {"**": "zstd"}))),
}
for name, named in differing.items():
    ckpt.save(f"{directory}/{name}", named.pop("state", state()), **named)
one, two = {"a": put(values), "n": 1}, {"b": put(values), "m": 2}
ckpt.save(f"{directory}/order", items=at({"one": one, "two": two}, {"two": two, "one": one}))
with ckpt.Checkpointer(
    f"{directory}/steps", asynchronous=index == 0, max_to_keep=at(2, 1), options=options
) as checkpointer:
    for step in range(3):
        checkpointer.save(step, state(), metrics={"loss": index}, metadata=index)
metrics, metadata = checkpointer.metrics(2), checkpointer.metadata(2)
meet("saved")
report(metrics=metrics, metadata=metadata, steps=checkpointer.all_steps(), names=list(differing))
"""


def test_what_may_differ_is_each_ones_own_or_that_of_the_first(tmp_path):
    directory = tmp_path / "run"
    told = reports(launch(PRELUDE + HARMLESS, directory))
    assert told[0] == told[1]
    assert told[0]["metrics"] == {"loss": 0} and told[0]["metadata"] == 0
    assert told[0]["steps"] == [1, 2]  # the first one removes what is not kept
    values = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    for name in (*told[0]["names"], "steps/2"):
        assert ckpt.verify(directory / name).ok, name
        loaded: Any = ckpt.load(directory / name, as_numpy=True)
        assert (loaded["a"] == values).all() and (loaded["layers"]["b"] == values).all(), name
    assert ckpt.inspect(directory / "metadata").metadata == {"host": 0}
    assert ckpt.verify(directory / "order").ok
    ordered: Any = ckpt.load(directory / "order", as_numpy=True)
    assert (ordered["one"]["a"] == values).all() and ordered["two"]["m"] == 2


LOCAL = """
def saving(name, step=0, options=options, **more):
    def call():
        with ckpt.Checkpointer(
            f"{directory}/{name}", local_directory=f"{directory}-{name}-local", asynchronous=False,
            options=replace(options, persist_policy=ckpt.when.at_steps([])),
        ) as checkpointer:
            checkpointer.save(step, state(**more))
    return call

cases = {
    "chunk_bytes": saving("1", options=at(options, small)),
    "compression": saving("2", options=at(options, zstd)),
    "order": saving("3", b=put(values, mesh=other_order)),
    "structure": saving("4", **at({}, {"m": 1})),
    "step": saving("5", step=index),
    "durable": saving("6", options=replace(options, durable=index == 0)),
    "kept": saving("7", options=replace(options, local_max_to_keep=at(1, 2))),
}
failed = {name: raised(call) for name, call in cases.items()}
# what a process holds alone is its own matter there, as long as all call it by one name
own = jax.device_put(np.full(3, index), jax.local_devices()[0])
own_error = raised(saving("own", own=own))
with ckpt.Checkpointer(
    f"{directory}/own", local_directory=f"{directory}-own-local", options=options
) as checkpointer:
    restored = checkpointer.restore_latest(state=state(own=own))
report(failed=failed, own_error=own_error, own=np.asarray(restored["state"]["own"]).tolist())
"""


def test_local_directories(tmp_path):
    told = reports(launch(PRELUDE + LOCAL, tmp_path / "run"))
    wanted = {
        "chunk_bytes": "a is (16, 32) on process 0, and (8, 32) on process 1",
        "compression": "a is none on process 0, and zstd on process 1",
        "order": "0 2048 1 2049 on process 1",
        "structure": "m (int) is on process 1, and not on process 0",
        "step": "the step on processes [1] differs from that on process 0: 0 on process 0, and 1 on process 1",
        "durable": "Options(durable=) on processes [1]",
        "kept": "Options(local_max_to_keep=) on processes [1]",
    }
    for index, process in enumerate(told):
        for name, part in wanted.items():
            error = process["failed"][name]
            assert error is not None, f"{name}: saved"
            assert error["type"] == "CheckpointError" and part in error["text"], error
        assert process["own_error"] is None
        assert process["own"] == [index] * 3


CODE = """
import jax.numpy as jnp
from dataclasses import replace
spread = NamedSharding(mesh, P("data"))
steps = directory + "/steps"

def full(value):
    return put(np.full(8, value, np.float32))

def like(dtype=jnp.float32):
    return {"w": jax.ShapeDtypeStruct((8,), dtype, sharding=spread)}

def value_of(tree):
    (value,) = {int(shard.data[0]) for shard in tree["w"].addressable_shards}
    return value

with ckpt.Checkpointer(steps, options=options) as c:
    for step in range(3):
        c.save(step, {"w": full(step), "v": full(step)})
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
        assert error is not None and other is not None, name
        assert {error["type"], other["type"]} <= {"CheckpointError", "NotTogether"}, (name, error)
        text = error["text"] + other["text"]
        if name.startswith("other"):
            assert "process 1 loads other leaves, or into other dtypes or onto other" in text, name
        else:
            assert "which are different checkpoints" in text, (name, text)
            assert "steps/0" in text and "steps/1" in text, (name, text)
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
