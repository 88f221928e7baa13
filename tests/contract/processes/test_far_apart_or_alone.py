"""Processes that are far apart, or of which one fails alone: all hear of it, and go on together."""

from pathlib import Path
from typing import Any

from tests.support.launch import launch, reports

PRELUDE = """
def state(step=0):
    return {"n": step, "x": np.arange(4) + step}
"""


def run(code: str, directory: Path) -> list[dict[str, Any]]:
    return reports(launch(PRELUDE + code, directory, devices=1))


def test_one_process_is_600_decisions_behind(tmp_path):
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


ALONE = """
from pytest import MonkeyPatch
from tests.support import seams
failed = {}

def alone(name, who, **more):
    # fails in one process, and then both go on together
    patch = MonkeyPatch()
    if index == who:
        seams.at(patch, "write", before=seams.fail(OSError, 5, "EIO"))
    path = f"{directory}/{name}"
    failed[name] = raised(lambda: ckpt.save(path, state(), options=options, **more))
    patch.undo()
    ckpt.save(path + "-after", state(), options=options)

alone("first", 0)
alone("second", 1)
alone("metadata", None, metadata=object() if index else 1)

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


def test_what_fails_in_one_process_alone_is_told_to_all(tmp_path):
    """The others do not wait for it to the time limit, and the next calls meet again."""
    first, second = run(ALONE, tmp_path / "run")

    def error(process: dict[str, Any], name: str) -> str:
        found = process["failed"][name]
        return f"{found['type']}: {found['text']}"

    assert error(first, "first").startswith("OSError")
    assert "process 0 could not save: OSError" in error(second, "first")
    assert error(second, "second").startswith("OSError")
    assert "process 1 could not save: OSError" in error(first, "second")
    assert error(second, "metadata").startswith("TypeError")
    assert "process 1 could not save: TypeError" in error(first, "metadata")
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
