"""A process that is killed, or hangs, in the middle of a save, and secrets that not all have: what is left, what the others see."""

import signal
from pathlib import Path

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.processes.test_lost_hosts import COMMON
from tests.support.launch import launch, reports

TIMEOUT_SECS = 4

# Where the victim dies: a moment, before or after it, and whether only where all tell that they have written.
PHASES = {
    "agreeing": ("agreement", "before", False),
    "writing": ("write", "before", False),
    "written": ("agreement", "before", True),  # its part is durable, and nobody knows
    "agreed": ("agreement", "after", True),  # all know that all have written
    "recording": ("record", "before", False),
    "committing": ("commit", "before", False),
    "committed": ("commit", "after", False),
}

# The hook is in the victim only. A survivor that the runtime ends with it reports nothing.
LOST = """
from tests.support import seams
VICTIM, (POINT, WHEN, IS_LATE) = {victim}, {phase!r}
leaving = [n for n in range(count) if n != VICTIM]

def state(step):
    return {{"w": put(np.arange(12 << 13, dtype=np.float32).reshape(12, -1) + step)}}

def dies(*_, **__):
    open(f"{{directory}}.dies", "w").close()
    kill()

def written(self, *_, **__):
    return seams.agreed(self) == "written"

def arm():
    seams.at(None, POINT, **{{WHEN: dies}}, **({{"where": written}} if IS_LATE else {{}}))

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

error = raised(save)
while not os.path.exists(f"{{directory}}.dies"):
    time.sleep(0.02)  # the runtime would end it first
report(error=error, steps=checkpointer.all_steps())
"""

AGAIN = """
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


def check_lost(
    tmp_path: Path, phase: str, victim: int, *, processes: int, asynchronous: bool = False
) -> None:
    """Kills the victim in this phase of the second save, looks, and starts again with fewer."""
    code = LOST.format(
        victim=victim, phase=PHASES[phase], timeout=TIMEOUT_SECS, asynchronous=asynchronous
    )
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
        # step 1 was whole, and is there
        committed = phase == "committed" or (phase == "agreed" and victim != 0)
        assert error["type"] == "BarrierTimeout", survivor.text
        assert error["absent"] == [victim] and f"processes [{victim}]" in error["text"]
        assert survivor.told["steps"] in ([0, 1] if committed else [0], [0])

    # whatever step is visible is whole: here, and for fewer processes that go on with it
    with ckpt.Checkpointer(tmp_path / "run/steps", read_only=True) as checkpointer:
        steps = checkpointer.all_steps()
        assert steps in ([0], [0, 1])
        if phase == "committed":
            assert steps == [0, 1]
        elif phase != "agreed" or victim == 0:
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


ROWS = [
    ("written", 1, 2, False),
    ("recording", 0, 2, False),
    ("agreeing", 1, 3, True),
    ("writing", 0, 3, False),
    ("writing", 1, 3, True),
    ("written", 0, 3, True),
    ("agreed", 1, 3, False),
    ("agreed", 0, 3, True),
    ("committing", 0, 3, True),
    ("committed", 0, 2, False),
]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("phase", "victim", "processes", "asynchronous"),
    [pytest.param(*row, marks=pytest.mark.always if row is ROWS[0] else []) for row in ROWS],
)
def test_one_is_killed(tmp_path, phase, victim, processes, asynchronous):
    check_lost(tmp_path, phase, victim, processes=processes, asynchronous=asynchronous)


# What Python asks of the persistent directory waits in one process, until the other has raised.
HANGS = """
import threading
VICTIM = {victim}
opened = threading.Event()
opened.set()

def hook(event, arguments):
    if not opened.is_set() and (event == "open" or event.startswith("os.")):
        if any(str(one).startswith(f"{{directory}}/steps") for one in arguments[:2] if one is not None):
            opened.wait(60)  # until the other has raised

sys.addaudithook(hook)

def state(step):
    return {{"w": put(np.arange(12 << 13, dtype=np.float32).reshape(12, -1) + step)}}

checkpointer = ckpt.Checkpointer(f"{{directory}}/steps", options=options, asynchronous={asynchronous})
checkpointer.save(0, state(0))
checkpointer.wait_until_finished()
shorten(4)
meet("saved")

def save():
    checkpointer.save(1, state(1))
    checkpointer.wait_until_finished()

if index == VICTIM:
    opened.clear()
    def waits():
        while not os.path.exists(f"{{directory}}.raised"):
            time.sleep(0.02)
        opened.set()
    threading.Thread(target=waits, daemon=True).start()
error = raised(save)
if index != VICTIM:
    open(f"{{directory}}.raised", "w").close()
report(error=error, steps=checkpointer.all_steps())
"""


@pytest.mark.faults
@pytest.mark.parametrize(("victim", "asynchronous"), [(0, False), (1, True)])
def test_the_directory_hangs_for_one_of_two(tmp_path, victim, asynchronous):
    code = HANGS.format(victim=victim, asynchronous=asynchronous)
    told = reports(launch(code, tmp_path / "run", devices=1))
    waited, stuck = told[1 - victim]["error"], told[victim]["error"]
    assert waited["type"] == "BarrierTimeout" and waited["absent"] == [victim], told
    assert f"processes [{victim}]" in waited["text"]
    # the one that was stuck comes back, finds nobody, and says that
    assert stuck["type"] == "BarrierTimeout", told
    assert [one["steps"] for one in told] == [[0], [0]]
    assert ckpt.verify(tmp_path / "run/steps/0").ok
    again = reports(launch(AGAIN, tmp_path / "run", devices=2))
    assert again == [{"step": 0, "same": True, "steps": [0, 1]}] * 2


# Each process has a file of its own; that of the last one holds something else, is not there, or can be read by others.
SECRETS = (
    COMMON
    + """
file = Path(f"{directory}/secret.{index}")

def write(data, mode=0o600):
    file.unlink(missing_ok=True)
    file.touch(mode=mode)
    file.chmod(mode)
    file.write_bytes(data)

def open_(**more):
    options = ckpt.Options(timeout_secs=10, partners="host", persist_policy=never, **more)
    return ckpt.Checkpointer(persistent, local_directory=own, options=options)

Path(directory).mkdir(exist_ok=True)
write(b"s" * 32)
last = index == count - 1
with open_(peer_secret_file=file) as c:
    c.save(0, state(0, P("data")))
    c.wait_until_finished()
meet("saved")
told["refused"] = {}
for name, data, mode in (("other", b"x" * 32, 0o600), ("missing", None, 0), ("open", b"s" * 32, 0o644), ("short", b"s", 0o600)):
    if last:
        file.unlink(missing_ok=True) if data is None else write(data, mode)
    meet(name)
    told["refused"][name] = raised(lambda: open_(peer_secret_file=file))
    meet(f"{name} again")
if last:
    write(b"s" * 32)
    lose()
meet("right again")
with open_(peer_secret_file=file) as c:
    found = resume(c)
    told["found"] = [found.step, Path(found.path).parent == persistent]
report(**told)
"""
)


def test_a_secret_that_one_process_has_not_is_said_on_all(tmp_path):
    """Nobody waits for ever, all hear which process it is, and with the right one the parts of the lost host are fetched."""
    for told in reports(launch(SECRETS, tmp_path / "run", processes=2, devices=1, limit_secs=200)):
        for name, error in told["refused"].items():
            assert error is not None, name
            assert "process 1" in error["text"] and "secret" in error["text"], (name, error)
        assert told["found"] == [0, False]
