"""``ckpt_orbax`` with several processes: all save and load the same steps; handlers that write in every process."""

from __future__ import annotations

import json
import os
import textwrap

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.launch import launch, reports

RUN = """
from ckpt_orbax import v1 as ocp

spread = NamedSharding(mesh, P("data"))

def state_of(step):
    return {"w": put(np.arange(8.0, dtype=np.float32) + step), "step": step}

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

spread = NamedSharding(mesh, P("data"))

def state_of(step):
    return {"w": put(np.arange(8.0, dtype=np.float32) + step), "step": step}

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

values = np.arange(8.0, dtype=np.float32)
state, path = {"w": put(values), "step": 3}, directory + "/one"
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


OWN = """
    import dataclasses, json
    import jax
    import ckpt_orbax as ocp
    from ckpt_orbax import v1

    class Own(ocp.CheckpointHandler):
        def save(self, directory, args):
            args.item(directory)

        def restore(self, directory, args=None):
            names = sorted(path.name for path in directory.iterdir())
            return {name: (directory / name).read_text() for name in names}

        def finalize(self, directory):
            names = sorted(path.name for path in directory.iterdir())
            (directory / "all").write_text(json.dumps(names))

    @ocp.args.register_with_handler(Own, for_save=True)
    @dataclasses.dataclass
    class OwnSave(ocp.args.CheckpointArgs):
        item: object

    @ocp.args.register_with_handler(Own, for_restore=True)
    class OwnRestore(ocp.args.CheckpointArgs):
        pass

    class Words:
        async def save(self, directory):
            path = await directory.await_creation()
            (path / f"words_{jax.process_index()}").write_text("words")

        async def load(self, directory):
            async def read():
                self.found = sorted(path.name for path in directory.iterdir())
            return read()
"""

BOTH = """
from handlers_of_own import Own, OwnSave, OwnRestore, Words, ocp, v1

def each(path):
    (path / f"process_{index}").write_text(f"of {index}")
    (path / "same").write_text("of all")

def other(path):
    (path / "one").write_text(f"of {index}")

def fails(path):
    if index == 1:
        raise OSError("no words")

w = put(np.arange(8.0))
options = ocp.CheckpointManagerOptions(async_options=ocp.AsyncOptions(timeout_secs=60))

def saved(step, item):
    args = ocp.args.Composite(state=ocp.args.StandardSave({"w": w}), own=OwnSave(item))
    manager.save(step, args=args)

with ocp.CheckpointManager(directory + "/run", options=options) as manager:
    saved(0, each)
    failed = [raised(lambda: saved(1, other)), raised(lambda: saved(1, fails))]
    saved(1, each)
    manager.wait_until_finished()
    found = manager.restore(1, args=ocp.args.Composite(own=OwnRestore())).own
    steps = manager.all_steps()

v1.save_checkpointables(directory + "/second", {"state": {"w": w}, "words": Words()})
words = Words()
v1.load_checkpointables(directory + "/second", {"words": words})
report(found=found, failed=failed, steps=steps, words=words.found)
"""

AGAIN = """
from handlers_of_own import OwnRestore, Words, ocp, v1

with ocp.CheckpointManager(directory + "/run") as manager:
    found = manager.restore(1, args=ocp.args.Composite(own=OwnRestore())).own
words = Words()
v1.load_checkpointables(directory + "/second", {"words": words})
report(found=found, words=words.found)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    place = tmp_path_factory.mktemp("own")
    (place / "handlers_of_own.py").write_text(textwrap.dedent(OWN))
    path = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        patch.setenv("PYTHONPATH", path)
        first = reports(launch(BOTH, place, devices=4))
        return first, reports(launch(AGAIN, place, devices=4))


def test_files_of_all_processes_are_put_together(outcomes):
    names = ["process_0", "process_1", "same"]
    expected = {
        "process_0": "of 0",
        "process_1": "of 1",
        "same": "of all",
        "all": json.dumps(names),
    }
    first, again = outcomes
    for one in (*first, *again):
        assert one["found"] == expected
        assert one["words"] == ["words_0", "words_1"]
    assert [one["steps"] for one in first] == [[0, 1]] * 2


@pytest.mark.parametrize(
    ("which", "kinds", "says"),
    [
        (0, ("NotOffered", "NotOffered"), "name the file by jax.process_index()"),
        (1, ("CheckpointError", "OSError"), "no words"),
    ],
)
def test_a_refusal_is_the_same_in_all_processes_at_once(outcomes, which, kinds, says):
    for kind, one in zip(kinds, outcomes[0], strict=True):
        failed = one["failed"][which]
        assert failed["type"] == kind
        assert says in failed["text"]
        assert failed["secs"] < 30
