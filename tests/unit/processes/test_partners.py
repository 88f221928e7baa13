"""Copies that partners make of local parts: when one cannot be made, or its maker is killed."""

import signal

import pytest

from tests.contract.processes.test_lost_hosts import COMMON
from tests.support.launch import launch, reports

MAKES = """
from ckpt_core._run.tiers import save as saving
by = P("data")

def settle(checkpointer):
    checkpointer._run.local._copier.finish(20)
    meet(f"turn{next(turns)}")

def save(checkpointer, step):
    checkpointer.save(step, state(step, by))
    checkpointer.wait_until_finished()
    settle(checkpointer)

def mine():
    return sorted(int(path.name) for path in folder().glob("[0-9]*"))

def copies():
    return sorted(int(path.name) for path in folder().glob("partner-of_*/[0-9]*"))

train(2, by)
"""

FULL = """
def full(*_):
    raise OSError(28, "No space left on device")

with start(by) as checkpointer:
    resume(checkpointer, by)
    settle(checkpointer)
    plain = saving.bring
    if index == 0:
        saving.bring = full
    for step in (3, 4):
        save(checkpointer, step)
    saving.bring = plain
told["kept"] = mine()
on(0, destroy_persistent)
on(count - 1, lose)  # of whose part of step 4 process 0 has no copy
told["back to it"] = restored(by)
train(5, by)
told["went on"] = restored(by), copies()
"""


def test_a_step_with_copies_stays_until_another_has_them(tmp_path):
    ended = launch(COMMON + MAKES + FULL, tmp_path / "run", devices=1)
    for told in reports(ended):
        assert told["kept"] == [2, 4] and told["back to it"] == [2, "local"]
        assert told["went on"] == [[5, "local"], told["went on"][1]] and 5 in told["went on"][1]
    assert "No space left on device" in ended[0].text


KILLED = """
leaving = [0]
checkpointer = start(by)
resume(checkpointer, by)
settle(checkpointer)
plain = saving.bring
def dying(key, pieces, target):
    def some(position):
        for piece in pieces(position):
            yield piece
            if position > 2:
                meet("copied")  # the other one has its copy
                kill()
    return plain(key, some, target)
if index == 1:
    saving.bring = dying
checkpointer.save(3, state(3, by))
checkpointer.wait_until_finished()
if index == 1:
    time.sleep(60)  # its other thread ends it
if index == 0:
    while not 3 in copies():
        time.sleep(0.02)
meet("copied")
report(copies=copies())
"""

AGAIN = """
by = P("data")
told["left"] = len(list(own.rglob(".ckpt-tmp.*")))
on(0, destroy_persistent)
on(1, lose)
told["restored"] = restored(by)
train(4, by)
told["then"] = restored(by)
told["leftovers"] = len(list(own.rglob(".ckpt-tmp.*")))
"""


@pytest.mark.faults
def test_one_is_killed_while_it_copies(tmp_path):
    """Then the step is whole in the own parts, and a lost host can have it from the other copy."""
    ended = launch(COMMON + MAKES + KILLED, tmp_path / "run", devices=1)
    assert ended[1].status == -signal.SIGKILL
    for index, told in enumerate(reports(launch(COMMON + AGAIN, tmp_path / "run", devices=1))):
        assert told["left"] == index  # half a copy, under a hidden name
        assert told["restored"] == [3, "local"]  # process 0 has the copy of the part that was lost
        assert told["then"] == [4, "local"]
        assert told["leftovers"] == 0
