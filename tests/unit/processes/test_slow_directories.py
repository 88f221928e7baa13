"""A persistent directory that is slow, or hangs, under local directories: training never waits for it."""

from tests.contract.processes.test_lost_hosts import COMMON
from tests.support.launch import launch, reports

# What Python asks of the persistent directory waits, in whichever thread, and that is noted. What
# TensorStore asks does not pass here; Python asks before and after it.
HANGS = """
by = P("data")
opened, touched = threading.Event(), set()
opened.set()

def hook(event, arguments):
    if not opened.is_set() and (event == "open" or event.startswith("os.")):
        if any(str(one).startswith(str(persistent)) for one in arguments[:2] if one is not None):
            touched.add(threading.current_thread().name)
            opened.wait(60)

sys.addaudithook(hook)

def save(checkpointer, step):
    checkpointer.save(step, state(step, by))
    checkpointer._run.slots[0].wait(lambda: None)  # the local one alone

told = {"local": [], "hung": []}
with start(by, persist_policy=ckpt.when.continuously(), partners=None) as checkpointer:
    save(checkpointer, 0)
    checkpointer.wait_until_finished()
    for turn in range(3):
        meet(f"hangs {turn}")
        opened.clear()
        for step in range(8):
            save(checkpointer, 1 + 8 * turn + step)
        told["local"] += sorted(checkpointer._run.local.complete)
        told["hung"].append(checkpointer._run.slots[1].running)
        meet(f"goes on {turn}")
        opened.set()
        checkpointer._run.slots[1].wait(lambda: None)
    meet("came through")
    save(checkpointer, 25)
    checkpointer.wait_until_finished()
told["touched"] = sorted(touched)
told["uploaded"] = sorted(int(path.name) for path in persistent.glob("[0-9]*"))
"""


def test_training_goes_on_while_the_directory_hangs(tmp_path):
    """Whoever waits there is a thread of the upload; when it is back, the newest step goes there."""
    for index, told in enumerate(reports(launch(COMMON + HANGS, tmp_path / "run", devices=1))):
        assert told["local"] == [8, 16, 24], told
        assert "MainThread" not in told["touched"], told
        assert told["touched"] or index
        assert told["hung"] == [True] * 3
        assert told["uploaded"] == [0, 1, 9, 17, 25]  # none of those between was worth the wait
