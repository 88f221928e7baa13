"""The processes of a host share a fast directory, and an ended run leaves it when they need the room."""

from __future__ import annotations

from pathlib import Path

from tests.support.launch import launch, reports

COMMON = """
local, mib = directory + ".local", 2**20
def run(name, **more):
    made = ckpt.Options(timeout_secs=40, persist_policy=ckpt.when.at_steps([0]), **more)
    return ckpt.Checkpointer(directory + name, local_directory=local, options=made, asynchronous=False)

def state(step):
    return {"w": np.full(mib // 4, step, np.float32)}

"""

ENDED = """
with run("a") as old:
    for step in (0, 1):
        old.save(step, state(step))
report()
"""

NEW = """
before = set(os.listdir(local))
with run("b", local_max_bytes=5 * mib + mib // 2) as new:
    new.save(1, state(1))
    kept = before <= set(os.listdir(local))
    meet("looked")
    new.save(2, state(2))
    step = new.restore_latest(state(0)).step
    meet("saved")
report(before=len(before), kept=kept, step=step, after=len(set(os.listdir(local)) - before), gone=not before & set(os.listdir(local)))
"""

AGAIN = """
with run("b") as again:
    found = again.restore_latest(state(0))
report(step=found.step, value=float(found["state"]["w"][0]), local=str(found.path).startswith(local))
"""


def test_what_an_ended_run_left_goes_once_for_all(tmp_path: Path) -> None:
    """Two write 1 MiB each beside 2 MiB that ended and 2 MiB of their own step before: none alone needs more than there is."""
    reports(launch(COMMON + ENDED, tmp_path / "run", processes=2, devices=1))
    for told in reports(launch(COMMON + NEW, tmp_path / "run", processes=2, devices=1)):
        assert told == {"before": 1, "kept": True, "step": 2, "after": 1, "gone": True}
    for told in reports(launch(COMMON + AGAIN, tmp_path / "run", processes=2, devices=1)):
        assert told == {"step": 2, "value": 2.0, "local": True}
