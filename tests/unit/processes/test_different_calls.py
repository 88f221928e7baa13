"""Processes that are far apart, or make different calls at one moment, or of which one fails alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.launch import launch, reports

PRELUDE = """
from ckpt_core import _processes
from ckpt_core._processes import service

def state(step=0):
    return {"n": step, "x": np.arange(4) + step}

def keys():
    return [key for key, _ in _processes.coordination().client.key_value_dir_get("ckpt/")]
"""


def run(code: str, directory: Path, processes: int = 2) -> list[dict[str, Any]]:
    told = launch(PRELUDE + code, directory, processes=processes, devices=1)
    return reports(told)


def test_one_process_is_600_decisions_behind(tmp_path: Path) -> None:
    """A clock policy asks at each step, and nothing else makes the processes meet."""
    told = run(
        """
def mine(step, context):
    return step % 7 == 0

with ckpt.Checkpointer(f"{directory}/steps", save_policy=mine, options=options) as checkpointer:
    wanted = []
    if index == 1:
        meet("ahead")
    for step in range(600):
        wanted.append(checkpointer.should_save(step))
    if index == 0:
        meet("ahead")
    for step in range(700, 703):  # and go on together
        checkpointer.save(step, state(step))
report(wanted=wanted, steps=checkpointer.all_steps())
""",
        tmp_path / "run",
    )
    assert told[0] == told[1]
    assert told[0]["wanted"] == [step % 7 == 0 for step in range(600)]
    assert told[0]["steps"] == [700]


def test_what_stays_at_the_service_is_bounded(tmp_path: Path) -> None:
    told = run(
        """
most = 0
for n in range(60):
    for m in range(20):
        _processes.this_run().broadcast(f"d{n}/{m}", "yes", 40, "try")
    answers = json.loads(_processes.this_run().gather_decide(f"e{n}", f"{index}", json.dumps, 40))
    assert answers == ["0", "1", "2"]
    most = max(most, len(keys()))
meet("done")
report(most=most)
""",
        tmp_path / "run",
        processes=3,
    )
    # answers that somebody has not told of yet, and notes and values that are on their way
    assert max(process["most"] for process in told) <= 3 * 64 + 3 * 4


def test_process_0_waits_for_who_is_too_far_behind(tmp_path: Path) -> None:
    """It forgets no answer and keeps no more than so many."""
    told = run(
        """
service.MOST_KEPT = 200
def decide(n, secs=40):
    return _processes.this_run().broadcast(f"d/{n}", f"{n}", secs, "try")

kept, late, most = [], None, 0
if index == 0:
    for n in range(200):
        decide(n)
    late = raised(lambda: decide(200, 0.5))
    most = len(keys())
    meet("full")
    for n in range(200, 600):
        decide(n)
        most = max(most, len(keys()))
else:
    meet("full")
    kept = [decide(n) for n in range(600)]
report(late=late, kept=kept, most=most)
""",
        tmp_path / "run",
    )
    assert told[1]["kept"] == [str(n) for n in range(600)]
    assert told[0]["late"]["type"] == "BarrierTimeout" and told[0]["late"]["absent"] == [1]
    assert told[0]["most"] <= 200 + 3 * 2


def test_answers_that_nobody_waits_for_go_too(tmp_path: Path) -> None:
    """Who gave up reads no answer, who came too late is told at once, and neither leaves a key."""
    told = run(
        """
processes, short, errors = _processes.this_run(), 0.3, []
for n in range(70):
    if index == 0:
        errors.append(raised(lambda: processes.gather_decide(f"early{n}", "0", json.dumps, 40)))
        meet(f"late{n}")
    else:
        raised(lambda: processes.gather_decide(f"early{n}", "1", json.dumps, 0.001)) if n % 2 else None
        if n % 2 == 0:
            errors.append(raised(lambda: processes.refuse(f"early{n}", "", ValueError("no"))))
        meet(f"late{n}")
for n in range(130):
    processes.gather_decide(f"after{n}", "x", json.dumps, 40)
meet("done")
report(keys=len(keys()), types=sorted({error and error["type"] for error in errors}, key=str),
       secs=max([error["secs"] for error in errors if error], default=0))
""",
        tmp_path / "run",
    )
    assert set(told[0]["types"]) <= {"BarrierTimeout", "NotTogether", None}
    assert told[0]["secs"] < 20
    assert told[0]["keys"] <= 2 * 64 + 4


CALLS = {
    "save and load": ("save", "load"),
    "save and restore": ("save", "restore"),
    "load and save": ("load", "save"),
    "restore and save": ("restore", "save"),
    "load and restore": ("load", "restore"),
    "load and load with broadcast": ("load", "broadcast"),
    "restore as a whole": ("restore", "atomic"),
    "delete and save": ("delete", "save"),
    "save and delete": ("save", "delete"),
    "rollback and save": ("rollback", "save"),
    "restore_latest and save": ("latest", "save"),
    "save and restore_latest": ("save", "latest"),
    "local and not": ("local", "latest"),
}


def test_different_calls_at_one_moment(tmp_path: Path) -> None:
    """A typed error on all that says which call each made; and all go on together afterwards."""
    told = run(
        f"cases = {CALLS!r}"
        """
from dataclasses import replace
base = f"{directory}/base"
ckpt.save(base, state(), options=options)
like = {"n": 0, "x": np.zeros(4, int)}
number = 0
def steps():
    return ckpt.Checkpointer(f"{directory}/steps{number}", options=options, asynchronous=False)

def call(name):
    match name:
        case "save": ckpt.save(f"{directory}/one{number}", state(), options=options)
        case "load": ckpt.load(base, like, options=options)
        case "broadcast": ckpt.load(base, like, options=replace(options, broadcast=True))
        case "restore": ckpt.restore(base, state=like, options=options)
        case "atomic": ckpt.restore(base, state=like, options=replace(options, atomic_restore=True))
        case "delete": checkpointer.delete(0)
        case "rollback": checkpointer.rollback_to(0)
        case "latest": checkpointer.restore_latest(state=like)
        case "local": ckpt.Checkpointer(f"{directory}/l{number}", local_directory=f"{directory}-l")

failed, next_call = {}, {}
for number, (name, both) in enumerate(cases.items()):
    checkpointer = steps()
    checkpointer.save(0, state())
    failed[name] = raised(lambda: call(both[index]))
    # process 0 does not wait for who reads its decisions: it hears of the call that comes after them
    decided = {"latest": 1, "local": 1}.get(both[0], 0)
    for _ in range(max(1, decided) if index else not decided):
        path = f"{directory}/n{number}"
        next_call[name] = raised(lambda: ckpt.save(path, state(), options=options))
    meet(f"tried {number}")
    _processes.service.rounds(_processes.coordination().client).end(number)
    ckpt.save(f"{directory}/after{number}", state(), options=options)
report(failed=failed, next_call=next_call)
""",
        tmp_path / "run",
    )
    for name in CALLS:
        errors = [process["failed"][name] for process in told]
        second = [process["next_call"].get(name) for process in told]
        for error in filter(None, errors + second):
            assert error["type"] == "NotTogether", (name, error)
            assert "the processes make different calls" in error["text"], (name, error)
            assert error["secs"] < 15, (name, error)
        assert all(errors), (name, errors, second)


ALONE = """
from ckpt_core._directory.posix import LocalAttempt
from ckpt_core._save import prepare
failed = {}

def interrupted(call):
    # as raised(), for what is no Exception
    try:
        return raised(call)
    except KeyboardInterrupt:
        return {"type": "KeyboardInterrupt", "text": "", "secs": 0}

def failing(owner, name, error):
    plain = getattr(owner, name)
    def hooked(*arguments, **named):
        raise error
    setattr(owner, name, hooked)
    return lambda: setattr(owner, name, plain)

def alone(name, who, break_it, call=None):
    # breaks something in one process, calls, mends it, and both go on together
    mend = break_it() if index == who else None
    path = f"{directory}/{name}".replace(" ", "-")
    failed[name] = interrupted(call or (lambda: ckpt.save(path, state(), options=options)))
    if mend is not None:
        mend()
    ckpt.save(path + "-after", state(), options=options)

alone("token", 0, lambda: failing(LocalAttempt, "write", OSError(28, "full")))
alone("snapshot", 1, lambda: failing(prepare, "_take", KeyboardInterrupt()))
alone("first snapshot", 0, lambda: failing(prepare, "_take", KeyboardInterrupt()))
alone("landing", 0, lambda: failing(prepare, "_landed", OSError(5, "EIO")))
alone("metadata", 1, lambda: None, lambda: ckpt.save(
    f"{directory}/m", state(), metadata=object() if index else 1, options=options
))

broken = None
def policy(step, context):
    if index == broken:
        raise ValueError(f"no step {step}")
    return False
with ckpt.Checkpointer(f"{directory}/steps", save_policy=policy, options=options) as checkpointer:
    for broken in (0, 1):
        failed[f"policy {broken}"] = raised(lambda: checkpointer.should_save(broken))
    broken = None
    failed["other step"] = raised(lambda: checkpointer.should_save(10 + index))
    assert checkpointer.should_save(20) is False
    # refused before anything was said: the next call is told at once, and then both go on
    if index == 0:
        failed["refused"] = raised(lambda: checkpointer.save(20, state(), force=True))
    else:
        failed["refused"] = raised(lambda: checkpointer.save(-20, state(), force=True))
        failed["after"] = raised(lambda: (
            checkpointer.save(21, state(), force=True), checkpointer.wait_until_finished()
        ))
    if index == 0:
        failed["after"] = raised(checkpointer.wait_until_finished)
    checkpointer.save(22, state(), force=True)
report(failed=failed, steps=checkpointer.all_steps())
"""


def test_what_fails_in_one_process_alone_is_told_to_all(tmp_path: Path) -> None:
    """The others do not wait for it to the time limit, and the next calls meet again."""
    first, second = run(ALONE, tmp_path / "run")

    def error(process: dict[str, Any], name: str) -> str:
        found = process["failed"][name]
        assert found["secs"] < 15, (name, found)
        return f"{found['type']}: {found['text']}"

    assert error(first, "token").startswith("OSError")
    assert "process 0 cannot save: OSError" in error(second, "token")
    assert error(second, "snapshot") == "KeyboardInterrupt: "
    assert "process 1 gave up: KeyboardInterrupt" in error(first, "snapshot")
    assert error(first, "first snapshot") == "KeyboardInterrupt: "
    assert "process 0 gave up: KeyboardInterrupt" in error(second, "first snapshot")
    assert "process 0 cannot save: OSError" in error(second, "landing")
    assert error(second, "metadata").startswith("TypeError")
    assert "process 1 cannot save: TypeError" in error(first, "metadata")
    assert error(first, "policy 0") == "ValueError: no step 0"
    assert "process 0 could not decide" in error(second, "policy 0")
    assert "ValueError: no step 0" in error(second, "policy 0")
    assert first["failed"]["policy 1"] is None
    assert error(second, "policy 1") == "ValueError: no step 1"
    assert first["failed"]["other step"] is None
    assert "asks whether to save step 10, and process 1 step 11" in error(second, "other step")
    assert first["failed"]["refused"] is None and second["failed"]["refused"] is not None
    for process in (first, second):
        assert "the path on processes [1] differs" in error(process, "after")
        assert process["steps"] == [22]
