"""Two processes: what both hold is written once, each gets its own state back, and nobody waits without end."""

from typing import Any

import pytest

from tests.support.launch import launch, reports

CODE = """
import shutil
from pathlib import Path
def full(value, spec=P("data")):
    return put(np.full((512, 64), value, np.float32), spec)

def values(array):
    return sorted({float(value) for shard in array.addressable_shards for value in np.ravel(shard.data)})

class Position:
    per_process = True

    def __init__(self, at):
        self.at = at

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]

def start():
    policy = ckpt.when.at_steps([0])
    tiers = ckpt.Options(timeout_secs=40, persist_policy=policy)
    return ckpt.Checkpointer(directory + "/steps", local_directory=f"{directory}/{index}", options=tiers, asynchronous=False)

told = {}
copied = directory + "/copied"
ckpt.save(copied, {str(n): full(n, P()) for n in range(4)}, options=options)
told["mebibytes"] = sum(file.stat().st_size for file in Path(copied).rglob("d/*")) / 2**20
told["loaded"] = raised(lambda: ckpt.load(copied, options=options))

position = Position(10 + index)
ckpt.save(directory + "/own", position=position, options=options)
position.at = 0
ckpt.restore(directory + "/own", position=position, options=options)
told["position"] = position.at

with start() as run:
    for step in (0, 1):
        run.save(step, {"w": full(step)})
    told["no step"] = raised(lambda: run.delete(99))
meet("saved")
if index:
    shutil.rmtree(f"{directory}/1")  # this host is lost, and another one takes its place
meet("lost")
with start() as run:
    told["whole"] = run.all_steps()
    found = run.restore_latest({"w": full(9)})
    told["after a loss"] = [found.step, values(found["state"]["w"])]

meet("alone")
if index == 0:
    short = ckpt.Options(timeout_secs=2)
    told["late"] = raised(lambda: ckpt.save(directory + "/late", {"w": full(1)}, options=short))
report(**told)
"""


@pytest.fixture(name="told", scope="module")
def make_told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("together") / "run"
    return reports(launch(CODE, directory, devices=1, limit_secs=45))


def test_what_both_hold_is_written_once(told):
    for one in told:
        assert one["loaded"] is None
        assert 0.5 <= one["mebibytes"] < 0.6


def test_each_gets_its_own_state_back(told):
    assert [one["position"] for one in told] == [10, 11]


def test_a_step_that_a_lost_host_held_is_not_whole(told):
    assert [one["whole"] for one in told] == [[0]] * 2
    assert [one["after a loss"] for one in told] == [[0, [0.0]]] * 2


def test_what_the_first_cannot_do_fails_on_all(told):
    assert [one["no step"]["type"] for one in told] == ["CheckpointNotFound"] * 2


def test_who_does_not_come_is_named(told):
    assert told[0]["late"]["type"] == "BarrierTimeout" and told[0]["late"]["absent"] == [1]
