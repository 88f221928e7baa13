"""Several processes, each with a local directory of its own, over one persistent directory."""

import signal
from pathlib import Path

import pytest

import ckpt_core as ckpt
from tests.support.launch import launch, reports
from tests.support.local_tiers import ON_ALL

COMMON = (
    ON_ALL
    + """
import shutil, warnings
options = ckpt.Options(timeout_secs=30, persist_policy=ckpt.when.every_steps(3))

def state(step, by=P("data")):
    rows = np.arange(8 << 11, dtype=np.float32).reshape(8, -1) / 7 + step
    return {
        "rows": put(rows, by),
        "columns": put(rows, P(None, "data")),
        "half": put(rows.astype(jax.numpy.bfloat16), by),
        "everywhere": put(np.arange(6, dtype=np.int32) + step, P()),
        "host": np.arange(3) + step,
        "n": step,
    }

def start(local=own, options=options):
    return ckpt.Checkpointer(persistent, local_directory=local, options=options)

def train(last, local=own):
    # resumes from the newest step, and goes on to the last one
    with start(local) as checkpointer:
        found = resume(checkpointer)
        for step in range(found.step + 1 if found else 0, last + 1):
            assert checkpointer.save(step, state(step)), step

def restored(by=P("data"), local=own):
    # what there is, and which step comes back from where, with how many warnings
    with start(local) as checkpointer, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = checkpointer.all_steps()
        assert checkpointer.latest_step() == steps[-1]
        found = resume(checkpointer, by)
        tier = "persistent" if Path(found.path).parent == persistent else "local"
        return [steps, found.step, tier, sum("skipped" in str(one.message) for one in caught)]

def part(step):
    (found,) = own.glob(f"run-*/process_{index}-of-{count}/{step}")
    return found

def local_steps():
    return sorted(int(path.name) for path in own.glob(f"run-*/process_{index}-of-{count}/[0-9]*"))

"""
)

JOURNEY = """
train(4)
told["local is newest"] = restored()
told["kept"] = local_steps()
told["bytes"] = sum(file.stat().st_size for file in part(4).rglob("d/*"))

on(1, lambda: shutil.rmtree(own))
told["one host lost its own"] = restored()
train(5)
told["went on"] = restored(), local_steps()

told["hosts changed places"] = restored(local=Path(f"{directory}/local/{count - 1 - index}"))

def lose_others():
    for path in own.glob("run-*/process_*"):
        if path.name != f"process_{index}-of-{count}":
            shutil.rmtree(path)

on(0, lambda: damage(5))
told["mended"] = restored(), part(5).is_dir()
for process in range(count):
    on(process, lose_others)
on(0, lambda: damage(5))
told["damage on one"] = restored()
train(4)
told["went on from before it"] = restored(), local_steps()

# all have a step 5, but of two different pasts
train(5)
place, aside = part(5), own / "aside"
on(0, lambda: place.rename(aside))
told["lost on one"] = restored()
train(5)
on(0, lambda: (shutil.rmtree(place), aside.rename(place)))
told["two pasts"] = restored(), local_steps()

train(6)
told["in both tiers"] = restored()
on(count - 1, lambda: damage(6))
told["the other copy"] = restored()

# one of them cannot write: then none has the step, and the next one is saved
from pytest import MonkeyPatch
from tests.support import seams
patch = MonkeyPatch()

def save(checkpointer, step, tree):
    checkpointer.save(step, tree)
    checkpointer.wait_until_finished()

with start() as checkpointer:
    resume(checkpointer)
    if index == count - 1:
        seams.at(patch, "record", before=seams.fail(), where=seams.below(own))
    told["no room"] = raised(lambda: save(checkpointer, 7, state(7)))
    patch.undo()
    told["without it"] = checkpointer.all_steps(), 7 in local_steps()
    checkpointer.save(8, state(8))
told["room again"] = restored()

with start() as checkpointer:
    resume(checkpointer)
    tree = state(10) | ({"more": 1} if index == 0 else {})
    told["other trees"] = raised(lambda: save(checkpointer, 10, tree))

both = Path(f"{directory}/both")
train(10, both)
told["one directory"] = restored(local=both)
"""


def check_journey(tmp_path: Path, processes: int, devices: int) -> None:
    ended = launch(
        COMMON + JOURNEY, tmp_path / "run", processes=processes, devices=devices, limit_secs=240
    )
    last = processes - 1
    for index, told in enumerate(reports(ended)):
        assert told["local is newest"] == [[0, 3, 4], 4, "local", 0]
        assert told["kept"] == [4]
        sharded_bytes = (8 << 11) * (4 + 4 + 2)
        assert 0 < told["bytes"] - sharded_bytes / processes < 10_000  # what it holds, and no more
        assert told["one host lost its own"] == [[0, 3], 3, "persistent", 0]
        assert told["went on"] == [[[0, 3, 5], 5, "local", 0], [5]]
        assert told["hosts changed places"] == [[0, 3, 5], 5, "local", 0]
        assert told["mended"] == [[[0, 3, 5], 5, "local", 0], True]  # where they had changed places
        assert told["damage on one"] == [[0, 3, 5], 3, "persistent", 1]
        assert told["went on from before it"] == [[[0, 3, 4], 4, "local", 0], [4]]
        assert told["lost on one"] == [[0, 3], 3, "persistent", 0]
        assert told["two pasts"] == [[[0, 3], 3, "persistent", 0], [5]]
        assert told["in both tiers"] == [[0, 3, 6], 6, "local", 0]
        assert told["the other copy"] == [[0, 3, 6], 6, "persistent", 0]
        assert told["no room"]["type"] == ("OSError" if index == last else "CheckpointError")
        if index != last:
            assert f"process {last} could not save locally" in told["no room"]["text"]
        assert told["without it"] == [[0, 3, 6], False]
        assert told["room again"] == [[0, 3, 6, 8], 8, "local", 0]
        assert told["other trees"]["type"] == "CheckpointError"
        assert "the structure of the state on processes" in told["other trees"]["text"]
        assert told["one directory"] == [[0, 3, 6, 9, 10], 10, "local", 0]
    # warned on all: a step that is not whole is named with who lacks it
    assert all("step 5 is not whole" in process.text for process in ended)
    assert not list((tmp_path / "run").rglob(".ckpt-tmp.*"))
    persistent = tmp_path / "run/persistent"
    for step in (0, 3, 6, 9):
        assert ckpt.verify(persistent / str(step)).ok


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])
def test_a_journey(tmp_path, processes, devices):
    check_journey(tmp_path, processes, devices)


KILLED = """
from tests.support import seams
VICTIM, (POINT, WHEN) = {victim}, {phase}
leaving = [n for n in range(count) if n != VICTIM]
checkpointer = start()
for step in range(2):
    checkpointer.save(step, state(step))
checkpointer.wait_until_finished()
shorten(4)
meet("saved")

if index == VICTIM:
    seams.at(None, POINT, **{WHEN: lambda *_, **__: kill()}, where=seams.below(own))

def save():
    checkpointer.save(2, state(2))
    checkpointer.wait_until_finished()

error = raised(save)
report(error=error, steps=checkpointer.all_steps())
"""
AGAIN = COMMON + "told['first'] = restored()\ntrain(4)\ntold['then'] = restored()"
PHASES = {
    "writing": ("write", "before"),
    "written": ("commit", "before"),
    "renamed": ("commit", "after"),
}


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_one_is_killed(tmp_path, phase, victim):
    """Kills one while it saves step 2, which goes to local directories only, and starts again."""
    code = COMMON + KILLED.replace("{victim}", str(victim)).replace("{phase}", repr(PHASES[phase]))
    ended = launch(code, tmp_path / "run", devices=1)
    assert ended[victim].status == -signal.SIGKILL and ended[victim].told is None
    survivor = ended[1 - victim].told
    if survivor is not None:  # where the coordinator went, the runtime ends the others
        assert survivor["error"]["type"] == "BarrierTimeout", survivor
        assert survivor["error"]["absent"] == [victim]
        assert survivor["steps"] == [0, 1]
    elif victim == 1:
        pytest.fail(ended[0].text)
    whole, without = [[0, 1, 2], 2, "local", 0], [[0, 1], 1, "local", 0]
    again = reports(launch(AGAIN, tmp_path / "run", devices=1))
    firsts = [one["first"] for one in again]
    if phase != "renamed":  # the other one has it, or nobody
        assert firsts == [without, without]
    elif victim == 1:  # both have it: all had said that they wrote it
        assert firsts == [whole, whole]
    else:  # the other one had it, or was ended before
        assert firsts in ([whole, whole], [without, without])
    for told in again:
        assert told["then"] == [[0, 3, 4], 4, "local", 0]
    assert not list((tmp_path / "run").rglob(".ckpt-tmp.*"))
