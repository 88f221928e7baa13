"""What several processes saved is restored by the same program, in new processes, in every way there is.

A test gives the code of a program that defines ``make(n)``: the live state after ``n`` steps, with the
same classes, shardings and devices each time. One set of processes saves ``make(7)``; another one, new,
begins with ``make(0)`` as the restarted program would, and restores into it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.launch import Ended, launch, reports

SAVE = """
state = make(7)
told = {"save": raised(lambda: ckpt.save(directory + "/one", state, options=options))}
def steps():
    with ckpt.Checkpointer(directory + "/run", options=options) as run:
        run.save(1, state=state)
told["steps"] = raised(steps)
report(**told)
"""

RESTORE = """
from tests.support.same_state import differences


def latest():
    with ckpt.Checkpointer(directory + "/run", options=options) as run:
        return run.restore_latest(state=make(0))["state"]

def like():
    return ckpt.load(directory + "/one", make(0), options=options)

def in_place():
    return ckpt.restore(directory + "/one", make(0), options=options)["state"]

def as_saved():
    return ckpt.load(directory + "/one", options=options)

told = {}
for way in (latest, like, in_place, as_saved):
    try:
        found = way()
        told[way.__name__] = differences(make(7), found, types_too=way is not as_saved)
    except Exception as error:
        told[way.__name__] = [f"{type(error).__name__}: {error}"]
report(**told)
"""


def saved(program: str, directory: Path, *, processes: int = 2, devices: int = 2) -> list[Ended]:
    """The processes that saved ``make(7)``, as a checkpoint ``one`` and as step 1 of ``run``."""
    directory.mkdir(parents=True, exist_ok=True)
    return launch(program + SAVE, directory, processes=processes, devices=devices)


def comes_back(program: str, directory: Path, *, processes: int = 2, devices: int = 2) -> None:
    """Saves, and restores with the same program in new processes: every way gives what was saved.

    Args:
        program: code that defines ``make(n)``.
        directory: for what is saved.
        processes: how many save, and how many restore.
        devices: of each process.
    """
    for told in reports(saved(program, directory, processes=processes, devices=devices)):
        assert told == {"save": None, "steps": None}, told
    found = launch(program + RESTORE, directory, processes=processes, devices=devices)
    everyone: list[dict[str, Any]] = reports(found)
    for index, told in enumerate(everyone):
        assert told == {way: [] for way in told}, f"process {index}: {told}"
