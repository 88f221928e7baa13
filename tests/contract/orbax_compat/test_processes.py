"""Checkpoints that two processes wrote, between ckpt and Orbax, in both directions."""

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckpt_core as ckpt
from tests.support.launch import launch, reports

STATE = """
import logging
logging.getLogger("absl").setLevel(logging.ERROR)
import orbax.checkpoint as ocp
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
specs = {"rows": P("a"), "blocks": P("a", "b"), "all": P(), "crossed": P("b", "a")}
values = {name: np.arange(96, dtype=np.float32).reshape(8, 12) + n for n, name in enumerate(specs)}
state = {"params": {name: put(values[name], specs[name], mesh) for name in specs}}
def target(turned):
    names = list(specs)
    return {"params": {
        name: jax.ShapeDtypeStruct(
            (8, 12), np.float32, sharding=NamedSharding(mesh, specs[names[n - turned]])
        )
        for n, name in enumerate(names)
    }}
def same(tree):
    return all(
        (np.asarray(shard.data) == values[name][shard.index]).all()
        for name, leaf in tree["params"].items() for shard in leaf.addressable_shards
    ) and tree["params"].keys() == specs.keys()
"""

OURS_TO_ORBAX = """
ckpt.save(f"{directory}/one", state, options=options)
with ocp.StandardCheckpointer() as orbax:
    same_sharding = same(orbax.restore(f"{directory}/one/state", target(0)))
    other_sharding = same(orbax.restore(f"{directory}/one/state", target(1)))
with ckpt.Checkpointer(f"{directory}/steps", options=options) as checkpointer:
    checkpointer.save(3, default=state)
with ocp.CheckpointManager(f"{directory}/steps") as manager:
    step = manager.latest_step()
    from_manager = same(manager.restore(3, args=ocp.args.StandardRestore(target(1))))
report(same=same_sharding, other=other_sharding, step=step, manager=from_manager)
"""

ORBAX_TO_OURS = """
with ocp.StandardCheckpointer() as orbax:
    orbax.save(f"{directory}/one", state)
loaded = [same(ckpt.load(f"{directory}/one", target(turned), options=options)) for turned in (0, 1)]
with ocp.CheckpointManager(f"{directory}/steps") as manager:
    manager.save(3, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()
checkpointer = ckpt.Checkpointer(f"{directory}/steps", read_only=True, options=options)
restored = checkpointer.restore_latest(default=target(1))
report(loaded=loaded, step=restored.step, restored=same(restored["default"]))
"""


def expected(number: int) -> np.ndarray:
    return np.arange(96, dtype=np.float32).reshape(8, 12) + number


def test_orbax_reads_what_two_processes_wrote(tmp_path):
    found = reports(launch(STATE + OURS_TO_ORBAX, tmp_path / "run"))
    assert found == [{"same": True, "other": True, "step": 3, "manager": True}] * 2
    # and in one process, on its own devices
    here = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    one = jax.ShapeDtypeStruct((8, 12), np.float32, sharding=here)
    names = ("rows", "blocks", "all", "crossed")
    with ocp.StandardCheckpointer() as orbax:
        target = {"params": dict.fromkeys(names, one)}
        loaded = orbax.restore(tmp_path / "run/one/state", target)
    for number, name in enumerate(names):
        assert (np.asarray(loaded["params"][name]) == expected(number)).all()


@pytest.mark.parametrize("path", ["one", "steps/3"])
def test_we_read_what_two_processes_of_orbax_wrote(two_of_orbax, path):
    loaded = ckpt.load(two_of_orbax / path, as_numpy=True)
    for number, name in enumerate(("rows", "blocks", "all", "crossed")):
        assert (loaded["params"][name] == expected(number)).all()


@pytest.fixture(scope="module")
def two_of_orbax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by two processes of Orbax, which ckpt has loaded there."""
    directory = tmp_path_factory.mktemp("orbax") / "run"
    found = reports(launch(STATE + ORBAX_TO_OURS, directory))
    assert found == [{"loaded": [True, True], "step": 3, "restored": True}] * 2
    return directory
