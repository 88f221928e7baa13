"""``ckpt_orbax`` with several processes: all save and load the same steps; handlers that write in every process."""

import json
import os
import textwrap

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.launch import launch, reports

RUNS = """
import ckpt_orbax as ocp
from ckpt_orbax import v1

def state_of(step):
    return {"w": put(np.arange(8.0, dtype=np.float32) + step), "step": step}

def known(state):
    return [state["step"], same(state["w"], state_of(state["step"])["w"])]

like, told = state_of(0), []
keep = v1.training.preservation_policies.LatestN(2)
context = v1.Context()
context.asynchronous.timeout_secs = 60
with v1.training.Checkpointer(
    directory + "/v1", context=context, preservation_policy=keep, custom_metadata={"n": count}
) as checkpointer:
    told.append([checkpointer.save(step, state_of(step), metrics={"loss": float(step)}) for step in range(4)])
    told.append([one.step for one in checkpointer.checkpoints])
    target = {"w": jax.ShapeDtypeStruct((8,), np.float32, sharding=like["w"].sharding), "step": 0}
    told += known(checkpointer.load(None, target)), checkpointer.root_metadata().custom_metadata

options = ocp.CheckpointManagerOptions(
    max_to_keep=2, best_fn=lambda m: m["loss"], async_options=ocp.AsyncOptions(timeout_secs=60)
)
args, first = ocp.args, []
with ocp.CheckpointManager(directory + "/v0", options=options, metadata={"n": count}) as manager:
    first.append([
        manager.save(
            step,
            args=args.Composite(state=args.PyTreeSave(state_of(step))),
            metrics={"loss": float(step != 3)},  # the newest is none of the best two
        )
        for step in range(4)
    ])
    first.append([manager.latest_step(), manager.best_step()])
    wanted = args.PyTreeRestore(like, restore_args=ocp.checkpoint_utils.construct_restore_args(like))
    restored = manager.restore(None, args=args.Composite(state=wanted))
    first += known(restored.state), manager.metadata().custom_metadata

assert (v1.multihost.process_index(), v1.multihost.process_count()) == (index, count)
v1.multihost.sync_global_processes("tests")
report(v1=told, v0=first)
"""


def test_two_processes(tmp_path):
    for one in reports(launch(RUNS, tmp_path, devices=4)):
        assert one["v1"] == [[True] * 4, [2, 3], [3, True], {"n": 2}]
        assert one["v0"] == [[True] * 4, [2, 2], [2, True], {"n": 2}]
    assert ckpt.verify(tmp_path / "v1" / "3").ok and ckpt.verify(tmp_path / "v0" / "3").ok


SINGLE = """
import ckpt_orbax as ocp

path = directory + "/one"
ocp.PyTreeCheckpointer().save(path, {"w": put(np.arange(8.0, dtype=np.float32)), "step": 3})
report(ok=ckpt.verify(path).ok)
"""


def test_a_single_checkpoint_of_two_processes_is_read_by_orbax_at_its_path(tmp_path):
    theirs = pytest.importorskip("orbax.checkpoint")
    saved = reports(launch(SINGLE, tmp_path / "run"))
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
