"""A lost host costs no step: parts of local steps travel between real processes.

What the persistent directory holds of saved steps is destroyed before the restores that must not read it.
"""

from typing import Any

import pytest

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

JOURNEY = (
    COMMON
    + """
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
report(**told)
"""
)


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
    ended = launch(code + JOURNEY, tmp_path / "run", processes=processes, devices=1, limit_secs=240)
    gone = {"all"} | ({"all but the first"} if by != "P()" and processes > 2 else set())
    for told in reports(ended):
        assert told["copies"] == (by != "P()")
        for name in LOSSES:
            assert told[name] == ([0, "persistent"] if name in gone else [3, "local"]), name
        assert told["went on"] == [5, "local"]
    assert "it was fetched from process" in ended[-1].text


OWN = (
    COMMON
    + """
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
report(**told)
"""
)


def test_what_belongs_to_one_process_goes_with_the_parts_of_others(tmp_path):
    for told in reports(launch(OWN, tmp_path / "run", devices=1)):
        assert told["data"] == [2, True, True] and told["values"] == [0]


# All processes draw the same numbers.
ROUNDS = (
    COMMON
    + """
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
report(**told)
"""
)


@pytest.mark.parametrize(
    ("seed", "processes", "rounds"),
    [(0, 2, 4), (1, 4, 4), *(pytest.param(n, 4, 10, marks=pytest.mark.soak) for n in range(10))],
)
def test_rounds_at_random(tmp_path, seed, processes, rounds):
    """No step is lost as long as somebody has each part."""
    code = ROUNDS.replace("SEED", str(seed)).replace("ROUND_COUNT", str(rounds))
    ended = launch(
        code, tmp_path / "run", processes=processes, devices=1, limit_secs=60 + 30 * rounds
    )
    assert {len(told["rounds"]) for told in reports(ended)} == {rounds}


GONE_BACK = (
    COMMON
    + """
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
report(**told)
"""
)


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
    reports(launch(COMMON + "train(3, P('data'))\nreport()", run, devices=1))
    others = launch("by = P('data')\n" + GONE_BACK, run, processes=processes, devices=devices)
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
    reports(launch(COMMON + "train(3, P('data'))\nreport()", run, devices=1))
    for told in reports(launch("by = P(None, 'data')\n" + GONE_BACK, run, devices=1)):
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
report(**told)
"""
    for told in reports(launch(COMMON + code, run, devices=1)):
        assert told == {"back": [3, "local"], "both": [4, "persistent"], "went on": [5, "local"]}
