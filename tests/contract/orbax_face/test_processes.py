"""``ckpt_orbax`` with several processes: all save and load the same steps."""

from __future__ import annotations

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.launch import launch, reports

RUN = """
from ckpt_orbax import v1 as ocp

mesh = Mesh(np.array(jax.devices()), ("x",))
spread = NamedSharding(mesh, P("x"))

def state_of(step):
    values = np.arange(8.0, dtype=np.float32) + step
    w = jax.make_array_from_callback((8,), spread, lambda index: values[index])
    return {"w": w, "step": step}

def numbers(state):
    shards = {str(shard.index[0].start or 0): shard.data.tolist() for shard in state["w"].addressable_shards}
    return [shards, state["step"]]

target = {"w": jax.ShapeDtypeStruct((8,), np.float32, sharding=spread), "step": 0}
keep = ocp.training.preservation_policies.LatestN(2)
context = ocp.Context()
context.asynchronous.timeout_secs = 60
saved = []
with ocp.training.Checkpointer(
    directory + "/run", context=context, preservation_policy=keep, custom_metadata={"n": count}
) as checkpointer:
    for step in range(4):
        saved.append(checkpointer.save(step, state_of(step), metrics={"loss": float(step)}))
    steps = [one.step for one in checkpointer.checkpoints]
    loaded = numbers(checkpointer.load(None, target))
    of_run = checkpointer.root_metadata().custom_metadata

same = ocp.multihost.process_index() == index and ocp.multihost.process_count() == count
ocp.multihost.sync_global_processes("tests")
report(saved=saved, steps=steps, loaded=loaded, of_run=of_run, same=same)
"""


def test_two_processes(tmp_path):
    processes = reports(launch(RUN, tmp_path, devices=4))
    shards = {}
    for one in processes:
        assert one["saved"] == [True] * 4
        assert one["steps"] == [2, 3]
        assert one["of_run"] == {"n": 2}
        assert one["same"]
        found, step = one["loaded"]
        assert step == 3
        shards |= found
    values = [value for start in sorted(shards, key=int) for value in shards[start]]
    assert values == [3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert ckpt.verify(tmp_path / "run" / "3").ok


FIRST_API = """
import ckpt_orbax as ocp

mesh = Mesh(np.array(jax.devices()), ("x",))
spread = NamedSharding(mesh, P("x"))

def state_of(step):
    values = np.arange(8.0, dtype=np.float32) + step
    w = jax.make_array_from_callback((8,), spread, lambda index: values[index])
    return {"w": w, "step": step}

options = ocp.CheckpointManagerOptions(
    max_to_keep=2, best_fn=lambda m: m["loss"], async_options=ocp.AsyncOptions(timeout_secs=60)
)
args = ocp.args
with ocp.CheckpointManager(directory + "/run", options=options, metadata={"n": count}) as manager:
    saved = [
        manager.save(
            step,
            args=args.Composite(state=args.PyTreeSave(state_of(step))),
            metrics={"loss": float(step != 3)},  # the newest is none of the best two
        )
        for step in range(4)
    ]
    like = state_of(0)
    wanted = args.PyTreeRestore(like, restore_args=ocp.checkpoint_utils.construct_restore_args(like))
    restored = manager.restore(None, args=args.Composite(state=wanted))
    shards = restored.state["w"].addressable_shards
    report(
        saved=saved,
        latest=manager.latest_step(),
        best=manager.best_step(),
        of_run=manager.metadata().custom_metadata,
        step=restored.state["step"],
        loaded={str(shard.index[0].start or 0): shard.data.tolist() for shard in shards},
    )
"""


def test_two_processes_with_the_first_api(tmp_path):
    found = reports(launch(FIRST_API, tmp_path, devices=4))
    loaded = {}
    for one in found:
        assert one["saved"] == [True] * 4
        assert (one["latest"], one["best"], one["step"]) == (2, 2, 2)
        assert one["of_run"] == {"n": 2}
        loaded |= one["loaded"]
    values = [value for start in sorted(loaded, key=int) for value in loaded[start]]
    assert values == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    assert ckpt.verify(tmp_path / "run" / "3").ok


SINGLE = """
import ckpt_orbax as ocp

mesh = Mesh(np.array(jax.devices()), ("x",))
values = np.arange(8.0, dtype=np.float32)
w = jax.make_array_from_callback((8,), NamedSharding(mesh, P("x")), lambda index: values[index])
state, path = {"w": w, "step": 3}, directory + "/one"
"""
SAVE_SINGLE = """
ocp.PyTreeCheckpointer().save(path, state)
report(ok=ckpt.verify(path).ok)
"""


def test_a_single_checkpoint_of_two_processes_is_read_by_orbax_at_its_path(tmp_path):
    theirs = pytest.importorskip("orbax.checkpoint")
    saved = reports(launch(SINGLE + SAVE_SINGLE, tmp_path / "run"))
    assert [one["ok"] for one in saved] == [True, True]
    as_numpy = theirs.RestoreArgs(restore_type=np.ndarray)
    args = {"w": as_numpy, "step": theirs.RestoreArgs()}
    restored = theirs.PyTreeCheckpointer().restore(tmp_path / "run" / "one", restore_args=args)
    assert restored["w"].tolist() == list(range(8))
