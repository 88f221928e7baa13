"""A persistent directory that is slow, or hangs, under local directories: training never waits for it."""

from __future__ import annotations

from pathlib import Path

from tests.support.launch import launch, reports
from tests.unit.processes.test_lost_hosts import COMMON

# What Python asks of the persistent directory waits, in whichever thread, and that is noted. What
# TensorStore asks does not pass here; Python asks before and after it.
HELD = (
    COMMON
    + """
by = P("data")
opened, held_secs, touched = threading.Event(), 0.0, []
opened.set()

def hook(event, arguments):
    if opened.is_set() and not held_secs:
        return
    if event == "open" or event.startswith("os."):
        if any(str(one).startswith(str(persistent)) for one in arguments[:2] if one is not None):
            touched.append(threading.current_thread().name)
            opened.wait(60)
            time.sleep(held_secs)

sys.addaudithook(hook)

def uploading(checkpointer):
    return checkpointer._run.saves[1].running

def save(checkpointer, step):
    began = time.monotonic()
    checkpointer.save(step, state(step, by))
    checkpointer._run.saves[0].wait(lambda: None)  # the local one alone
    return time.monotonic() - began

def uploaded():
    return sorted(int(path.name) for path in persistent.glob("[0-9]*"))

continuously = dict(persist_policy=ckpt.when.continuously(), partners=None)
"""
)

HANGS = (
    HELD
    + """
with start(by, **continuously) as checkpointer:
    save(checkpointer, 0)
    checkpointer.wait_until_finished()
    meet("hangs")
    opened.clear()
    told["secs"] = max(save(checkpointer, step) for step in range(1, 9))
    told["local"] = sorted(checkpointer._run._local.complete)
    told["hung"] = uploading(checkpointer)
    told["during"] = sorted(set(touched))
    meet("goes on")
    opened.set()
    deadline = time.monotonic() + 30
    while uploading(checkpointer) and time.monotonic() < deadline:
        time.sleep(0.05)
    meet("came through")
    save(checkpointer, 9)
    checkpointer.wait_until_finished()
told["uploaded"] = uploaded()
report(**told)
"""
)


def test_training_goes_on_while_the_directory_hangs(tmp_path: Path) -> None:
    """Whoever waits there is a thread of the upload; when it is back, the newest step goes there."""
    for index, told in enumerate(reports(launch(HANGS, tmp_path / "run", devices=1))):
        assert told["local"] == [8], told
        assert "MainThread" not in told["during"], told
        assert told["during"] or index
        assert told["hung"]
        assert told["secs"] < 20
        assert told["uploaded"] == [0, 1, 9]  # none of those between was worth the wait


SLOW = (
    HELD
    + """
with start(by, **continuously) as checkpointer:
    save(checkpointer, 0)
    checkpointer.wait_until_finished()
    meet("slow")
    held_secs = 0.05  # for each thing that is asked
    for step in range(1, 61):
        save(checkpointer, step)
        time.sleep(0.1)
    told["touched"] = sorted(set(touched))
    held_secs = 0.0
told["uploaded"] = uploaded()
report(**told)
"""
)


def test_a_slow_directory_gets_the_newest_steps(tmp_path: Path) -> None:
    for told in reports(launch(SLOW, tmp_path / "run", devices=1, limit_secs=180)):
        assert "MainThread" not in told["touched"], told
        assert told["uploaded"][:2] == [0, 1] and 2 < len(told["uploaded"]) < 50, told
