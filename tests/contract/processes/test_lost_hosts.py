"""A lost host costs no step: parts of local steps travel between real processes; a process may be killed or hang in a save.

What the persistent directory holds of saved steps is destroyed before the restores that must not read it.
"""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.launch import launch, reports
from tests.support.local_tiers import ON_ALL

COMMON = (
    ON_ALL
    + """
import hashlib, logging, shutil, threading, warnings
warnings.simplefilter("ignore", RuntimeWarning)
never = ckpt.when.at_steps([0])

def state(step, by):
    rows = np.arange(24 << 10, dtype=np.float32).reshape(24, -1) / 7 + step
    return {"rows": put(rows, by), "everywhere": put(rows[:2, :9], P()), "host": rows[0, :5], "n": step}

def start(by, local=own, **more):
    partners = None if by == P() else "host"
    options = ckpt.Options(**{"timeout_secs": 30, "persist_policy": never, "partners": partners} | more)
    return ckpt.Checkpointer(persistent, local_directory=local, options=options)

def train(last, by, **more):
    # partners have copies of the last step at the end, which waits for them
    with start(by, **more) as checkpointer:
        found = resume(checkpointer, by)
        for step in range(found.step + 1 if found else 0, last + 1):
            assert checkpointer.save(step, state(step, by)), step
            checkpointer.wait_until_finished()

def restored(by, local=own, **more):
    # the step that comes back and from where; None if there is none
    with start(by, local, **more) as checkpointer:
        found = resume(checkpointer, by)
        return found and [found.step, "persistent" if Path(found.path).parent == persistent else "local"]

def lose():
    shutil.rmtree(own)

def everyone(work):
    for process in range(count):
        on(process, work)

def destroy_persistent():
    # what was saved there cannot be read any more
    for path in persistent.glob("[0-9]*/**/*"):
        if path.is_file():
            path.write_bytes(b"destroyed")

def folder(of=index):
    (found,) = own.glob(f"run-*/process_{of}-of-{count}")
    return found

def part(step):
    return folder() / str(step)

def forget(local, back):
    # what was there is there again
    meet(f"turn{next(turns)}")
    shutil.rmtree(back, ignore_errors=True)
    shutil.copytree(local, back)
    meet(f"turn{next(turns)}")
"""
)

# What is lost of local directories that have step 3.
LOSSES = {
    "all": "lose()",
    "all but the first": "index and lose()",
    "the last one": "on(count - 1, lose)",
    "the first one": "on(0, lose)",
    "a part of the last one": "on(count - 1, lambda: shutil.rmtree(part(3)))",
    "a bit of the last one": "on(count - 1, lambda: damage(3))",
    "a record of the first one": "on(0, lambda: (part(3) / 'ckpt.json').write_bytes(b'{'))",
    "hosts change places": "shift = 1",
    "hosts change places, and one is lost": "on(0, lose); shift = 1",
}

JOURNEY = """
train(3, by)
told["copies"] = len(list(folder().parent.glob("*/partner-of_*/3"))) > 0
for case, code in LOSSES.items():
    forget(own, f"{own}.as-it-was")
    shift = 0
    exec(code)
    there = Path(f"{directory}/local/{(index + shift) % count}")
    meet(f"turn{next(turns)}")
    if not case.startswith("all"):
        on(0, destroy_persistent)
    told[case] = restored(by, there)
    forget(f"{own}.as-it-was", own)
train(5, by)
on(count - 1, lose)
told["went on"] = restored(by)
"""


@pytest.mark.parametrize(
    ("by", "processes"),
    [
        pytest.param('P("data")', 2, marks=pytest.mark.always),
        ("P()", 2),
        ('P("data")', 4),
        ("P()", 4),
    ],
)
def test_what_is_lost_comes_from_the_others(tmp_path, by, processes):
    """Step 0 alone is persistent, and cannot be read where all of step 3 is somewhere."""
    code = f"by, LOSSES = {by}, {LOSSES}\n"
    ended = launch(
        code + COMMON + JOURNEY, tmp_path / "run", processes=processes, devices=1, limit_secs=240
    )
    gone = {"all"} | ({"all but the first"} if by != "P()" and processes > 2 else set())
    for told in reports(ended):
        assert told["copies"] == (by != "P()")
        for name in LOSSES:
            assert told[name] == ([0, "persistent"] if name in gone else [3, "local"]), name
        assert told["went on"] == [5, "local"]
    assert "it was fetched from process" in ended[-1].text


OWN = """
class Data:
    per_process = True
    def __init__(self, at=0):
        self.at = at
    def get_state(self):
        return {"at": self.at}
    def set_state(self, state):
        self.at = state["at"]

by = P()
with start(by) as checkpointer:
    for step in range(3):
        checkpointer.save(step, data=Data(10 * step + index), params=state(step, by))
on(count - 1, lose)
with start(by) as checkpointer:
    data = Data()
    found = checkpointer.restore_latest(data=data, params=state(99, by))
    told["data"] = [found.step, found.path.startswith(str(own)), data.at == 20 + index]
    assert is_at(found["params"], 2, by)
    # values that differ from process to process are nobody else's
    checkpointer.save(3, {"mine": np.arange(3) + index})
on(count - 1, lose)
with start(by) as checkpointer:
    told["values"] = checkpointer.all_steps()
"""


def test_what_belongs_to_one_process_goes_with_the_parts_of_others(tmp_path):
    for told in reports(launch(COMMON + OWN, tmp_path / "run", devices=1)):
        assert told["data"] == [2, True, True] and told["values"] == [0]


# All processes draw the same numbers.
ROUNDS = """
import random
chance = random.Random(SEED)
by = P("data") if chance.random() < 0.7 else P()
last, shift, told["rounds"] = 2, 0, []

def here():
    return Path(f"{directory}/local/{(index + shift) % count}")

for number in range(ROUND_COUNT):
    own = here()
    train(last, by, local=own)
    if number == 0:
        on(0, destroy_persistent)
    first = chance.randrange(count)
    # no two neighbours: one of them has the only copy of the other's part
    troubled = [first, (first + 2) % count][: chance.randint(1, 2) if count > 3 else 1]
    lost = [process for process in troubled if chance.random() < 0.6]
    for process in troubled:
        on(process, lose if process in lost else lambda: damage(last))
    if chance.random() < 0.3:
        shift = chance.randrange(count)
    own = here()
    found = restored(by, local=own)
    assert found == [last, "local"], (number, found, last, troubled, lost, shift)
    told["rounds"].append([last, troubled, lost, shift])
    last += chance.randint(1, 2)
"""


@pytest.mark.parametrize(
    ("seed", "processes", "rounds"),
    [(0, 2, 4), (1, 4, 4), *(pytest.param(n, 4, 10, marks=pytest.mark.soak) for n in range(10))],
)
def test_rounds_at_random(tmp_path, seed, processes, rounds):
    """No step is lost as long as somebody has each part."""
    code = COMMON + ROUNDS.replace("SEED", str(seed)).replace("ROUND_COUNT", str(rounds))
    ended = launch(
        code, tmp_path / "run", processes=processes, devices=1, limit_secs=60 + 30 * rounds
    )
    assert {len(told["rounds"]) for told in reports(ended)} == {rounds}


GONE_BACK = """
def gone_back(by):
    # the newest persistent step, and what is said of step 3, which is in local directories alone
    with start(by) as checkpointer, warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        strict = raised(lambda: checkpointer.restore_latest(state=state(99, by), strict_latest=True))
        explicit = raised(lambda: checkpointer.restore(3, state=state(99, by)))
        found = resume(checkpointer, by)
        said = [str(one.message) for one in met if one.category is RuntimeWarning]
    return [found.step, said, strict, explicit]

told["back"] = gone_back(by)
told["there"] = sorted({int(path.parent.name) for path in own.glob("run-*/process_*/[0-9]*/ckpt.json")})
"""


def check_gone_back(told: dict[str, Any], advice: str) -> None:
    step, said, *errors = told["back"]
    assert step == 0 and len(said) == 1, told
    assert "step 0 is restored, and not the newest" in said[0]
    for text in (said[0], *(error["text"] for error in errors)):
        assert "step 3" in text and advice in text and "save(..., force=True)" in text, text
    assert {error["type"] for error in errors} <= {"CheckpointError", "Misfit"}


@pytest.mark.parametrize("processes", [1, 3])
def test_local_steps_are_for_as_many_processes_as_saved_them(tmp_path, processes):
    """Another number gets the newest persistent step; the newer one stays until training goes on from there."""
    run, devices = tmp_path / "run", {1: 4, 3: 1}[processes]
    reports(launch(COMMON + "train(3, P('data'))", run, devices=1))
    others = launch(
        "by = P('data')\n" + COMMON + GONE_BACK, run, processes=processes, devices=devices
    )
    for told in reports(others):
        check_gone_back(told, "start once with 2")
        assert "2 processes saved the local step 3" in told["back"][1][0]
    back = COMMON + "report(back=restored(P('data')))"
    for told in reports(launch(back, run, devices=1)):
        assert told["back"] == [3, "local"]
    goes_on = COMMON + "train(1, P('data'))\nreport(back=restored(P('data')))"
    for told in reports(launch(goes_on, run, processes=processes, devices=devices)):
        assert told["back"] == [1, "local"]
    for told in reports(launch(back, run, devices=1)):  # step 3 is of a history that was left
        assert told["back"][0] == 0


def test_local_steps_are_for_the_shardings_of_the_save(tmp_path):
    """Others get the newest persistent step, of a step with both copies the persistent one, and go on from there."""
    run = tmp_path / "run"
    reports(launch(COMMON + "train(3, P('data'))", run, devices=1))
    for told in reports(launch("by = P(None, 'data')\n" + COMMON + GONE_BACK, run, devices=1)):
        check_gone_back(told, "Restore with the shardings of the save")
        assert 3 in told["there"]
    code = """
by = P("data")
told["back"] = restored(by)
with start(by) as checkpointer:
    resume(checkpointer, by)
    checkpointer.save(4, state(4, by), force=True)
told["both"] = restored(P(None, "data"))
with start(by) as checkpointer:
    resume(checkpointer, by)
    checkpointer.save(5, state(5, by))
columns = P(None, "data")
train(5, columns)
told["went on"] = restored(columns)
"""
    for told in reports(launch(COMMON + code, run, devices=1)):
        assert told == {"back": [3, "local"], "both": [4, "persistent"], "went on": [5, "local"]}


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
    ("written", 1, 2, False), ("recording", 0, 2, False), ("agreeing", 1, 3, True),
    ("writing", 0, 3, False), ("writing", 1, 3, True), ("written", 0, 3, True),
    ("agreed", 1, 3, False), ("agreed", 0, 3, True), ("committing", 0, 3, True),
    ("committed", 0, 2, False),
]  # fmt: skip


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
SECRETS = """
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
"""


def test_a_secret_that_one_process_has_not_is_said_on_all(tmp_path):
    """Nobody waits for ever, all hear which process it is, and with the right one the parts of the lost host are fetched."""
    for told in reports(launch(COMMON + SECRETS, tmp_path / "run", devices=1, limit_secs=200)):
        for name, error in told["refused"].items():
            assert error is not None, name
            assert "process 1" in error["text"] and "secret" in error["text"], (name, error)
        assert told["found"] == [0, False]
