"""Handlers that write in every process: their files are put together, or refused in all processes at once."""

from __future__ import annotations

import json
import os
import textwrap

import pytest

from tests.support.launch import launch, reports

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

spread = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
w = jax.make_array_from_callback((8,), spread, lambda at: np.arange(8.0)[at])
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
