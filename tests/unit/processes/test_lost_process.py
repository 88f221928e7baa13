"""One of the processes is killed in the middle of a save: what is left on disk, and what the others see."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._processes import Processes
from tests.support import seams
from tests.support.launch import launch, reports

TIMEOUT_SECS = 4

# The hooks are in the victim only. A survivor that the runtime ends with it reports nothing.
LOST = """
from ckpt_core._save import write
from tests.support import seams
VICTIM, PHASE = {victim}, {phase!r}
leaving = [n for n in range(count) if n != VICTIM]
mesh = Mesh(np.array(jax.devices()), ("data",))

def state(step):
    values = np.arange(12 << 13, dtype=np.float32).reshape(12, -1) + step
    sharding = NamedSharding(mesh, P("data"))
    return {{"w": jax.make_array_from_callback(values.shape, sharding, lambda w: values[w])}}

def dies(*_, **__):
    kill()

def written(self, tag, *_, **__):
    return tag.endswith("/written")

def arm():
    if PHASE == "agreeing":
        seams.at(None, "agreement", before=dies)
    elif PHASE == "writing":
        write.ArrayWriter.finish = dies
    elif PHASE == "written":  # its part is durable, and nobody knows
        seams.at(None, "agreement", before=dies, where=written)
    elif PHASE == "committing":  # all know that all have written
        seams.at(None, "agreement", after=dies, where=written)
    elif PHASE == "merging":
        write.merge = dies
    elif PHASE == "merged":
        seams.at(None, "record", before=dies)

checkpointer = ckpt.Checkpointer(f"{{directory}}/steps", options=options, asynchronous={asynchronous})
checkpointer.save(0, state(0))
checkpointer.wait_until_finished()
shorten({timeout})
meet("saved")
if index == VICTIM:
    arm()

def save():
    checkpointer.save(1, state(1))
    checkpointer.wait_until_finished()

report(error=raised(save), steps=checkpointer.all_steps())
"""

AGAIN = """
mesh = Mesh(np.array(jax.devices()), ("data",))
where = NamedSharding(mesh, P("data"))
like = {"w": jax.ShapeDtypeStruct((12, 1 << 13), np.float32, sharding=where)}
values = np.arange(12 << 13, dtype=np.float32).reshape(12, -1)
with ckpt.Checkpointer(f"{directory}/steps", options=options) as checkpointer:
    restored = checkpointer.restore_latest(state=like)
    same = all(
        (np.asarray(s.data) == values[s.index] + restored.step).all()
        for s in restored["state"]["w"].addressable_shards
    )
    checkpointer.save(restored.step + 1, restored["state"])
    checkpointer.wait_until_finished()
    meet("saved")
    report(step=restored.step, same=same, steps=checkpointer.all_steps())
"""

PHASES = ("agreeing", "writing", "written", "committing", "merging", "merged")
ONLY_THE_FIRST = ("merging", "merged")


def check_lost(
    tmp_path: Path, phase: str, victim: int, *, processes: int, asynchronous: bool = False
) -> None:
    """Kills the victim in this phase of the second save, looks, and starts again with fewer."""
    code = LOST.format(victim=victim, phase=phase, timeout=TIMEOUT_SECS, asynchronous=asynchronous)
    ended = launch(code, tmp_path / "run", processes=processes, devices=1)
    assert ended[victim].status == -signal.SIGKILL and ended[victim].told is None
    for index, survivor in enumerate(ended):
        if index == victim:
            continue
        if survivor.told is None:
            # the coordinator went with process 0, and the runtime ends whoever was connected
            assert victim == 0 and survivor.status != 0
            continue
        error = survivor.told["error"]
        committed_late = phase == "committing" and victim != 0  # step 1 was whole, and is there
        assert error["type"] == "BarrierTimeout", survivor.text
        assert error["absent"] == [victim] and f"processes [{victim}]" in error["text"]
        # a lost coordinator is noticed at once
        assert (0 if victim == 0 else TIMEOUT_SECS - 1) <= error["secs"] < TIMEOUT_SECS + 20
        assert survivor.told["steps"] in ([0, 1] if committed_late else [0], [0])

    # whatever step is visible is whole: here, and for fewer processes that go on with it
    with ckpt.Checkpointer(tmp_path / "run/steps", read_only=True) as checkpointer:
        steps = checkpointer.all_steps()
        assert steps in ([0], [0, 1])
        if phase != "committing" or victim == 0:
            assert steps == [0]
        for step in steps:
            assert ckpt.verify(tmp_path / "run/steps" / str(step)).ok
            loaded = checkpointer.load(step, as_numpy=True)["w"]
            assert (loaded.ravel() == np.arange(12 << 13, dtype=np.float32) + step).all()
    told = reports(launch(AGAIN, tmp_path / "run", processes=processes - 1, devices=2))
    assert told == [{"step": steps[-1], "same": True, "steps": [*steps, steps[-1] + 1]}] * (
        processes - 1
    )
    # what the dead try left is gone
    left = [path.name for path in (tmp_path / "run/steps").glob(".ckpt-tmp.*")]
    assert left == []


@pytest.mark.faults
@pytest.mark.parametrize(("phase", "victim"), [("written", 1), ("merging", 0)])
def test_one_of_two_is_killed(tmp_path: Path, phase: str, victim: int) -> None:
    check_lost(tmp_path, phase, victim, processes=2)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_one_of_three_is_killed(
    tmp_path: Path, phase: str, victim: int, asynchronous: bool
) -> None:
    if phase in ONLY_THE_FIRST and victim != 0:
        pytest.skip("process 0 alone merges")
    check_lost(tmp_path, phase, victim, processes=3, asynchronous=asynchronous)


def test_what_failed_here_is_raised_where_the_others_do_not_come(monkeypatch: pytest.MonkeyPatch):
    full = OSError(28, "no space")

    def work() -> None:
        raise full

    nobody_comes = seams.fail(ckpt.BarrierTimeout, "nobody", absent=[1])
    seams.at(monkeypatch, "agreement", before=nobody_comes)
    with pytest.raises(ckpt.BarrierTimeout) as raised:
        Processes(0, 2).run_on_all("save", work, 1.0, lambda _, text: RuntimeError(text))
    assert raised.value.__cause__ is full
