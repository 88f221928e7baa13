"""The disk of one process is gone in the middle of a call, or a folder on it: the others hear of it, and later calls work on all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.same_program import comes_back
from tests.unit.processes.test_joined_in_trouble import LATEST, check_unread, run

DYING = """
import errno
def dying(which):
    # the disk of process 1 is gone from the first read of data on
    if index != 1:
        return lambda: None
    real = {name: getattr(os, name) for name in ("preadv", "scandir", "listdir", "open")}
    names = {"os": os, "where": f"{own}/run-", "dead": [], "real": real}
    exec(compile('''
def preadv(descriptor, what, offset, *flags):
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if where in path and "/d/" in path:
        dead.append(path)
        raise OSError(5, os.strerror(5))
    return real["preadv"](descriptor, what, offset, *flags)
def failing(name):
    def fails(path=".", *more, **named):
        if dead and isinstance(path, (str, os.PathLike)) and where in os.fspath(path):
            raise OSError(5, os.strerror(5), str(path))
        return real[name](path, *more, **named)
    return fails
''', "<injected>", "exec"), names)
    os.preadv = names["preadv"]
    for name in which:
        setattr(os, name, names["failing"](name))
    def recover():
        for name, function in real.items():
            setattr(os, name, function)
    return recover
"""


@pytest.mark.linux("/proc/self/fd")
@pytest.mark.parametrize("which", [["scandir"], ["scandir", "listdir", "open"]], ids=str)
def test_in_the_middle_of_a_restore(tmp_path: Path, which: list[str]) -> None:
    """It raised outside of any agreement, and all later calls were one off."""
    run(tmp_path, "train(3, ROWS)")
    check_unread(run(tmp_path, DYING + f"by, recover = ROWS, dying({which!r})\n" + LATEST))


LEFTOVER = """
def scan_fails(where):
    if index != 1:
        return lambda: None
    names = {"os": os, "where": where, "real": os.scandir}
    exec(compile('''
def scan(path="."):
    if where in str(path):
        raise OSError(5, "Input/output error", str(path))
    return real(path)
''', "<injected>", "exec"), names)
    os.scandir = names["scan"]
    return lambda: setattr(os, "scandir", names["real"])

def leave_over():
    if index == 1:
        (root,) = own.glob("run-*")
        (root / "process_0-of-4").mkdir(exist_ok=True)
    meet(f"made{next(turns)}")

def saves(*steps):
    for step in steps:
        checkpointer.save(step, state(step, ROWS))
        checkpointer.wait_until_finished()

leave_over()
with start(ROWS) as checkpointer:
    checkpointer.restore(3, state=state(99, ROWS))["state"]
    recover = scan_fails("process_0-of-4")
    told["errors"] = [raised(lambda: saves(4, 5))]
    recover()
    told["errors"].append(raised(lambda: saves(6)))
    leave_over()
    recover = scan_fails("process_0-of-4")
    told["errors"].append(raised(lambda: checkpointer.rollback_to(5)))
    recover()
    told["errors"].append(raised(lambda: saves(6, 7)))
told["after"] = restored(ROWS)
"""


def test_a_folder_that_another_number_of_processes_left(tmp_path: Path) -> None:
    """It is to be deleted, and cannot be listed: no save of the run worked any more, on that process and the others."""
    run(tmp_path, "train(3, ROWS)")
    for told in run(tmp_path, LEFTOVER):
        assert told["errors"] == [None] * 4 and told["after"] == [7, "local"], told


NO_MEMORY = """
from ckpt_core._run.steps import Steps
names = {"real": Steps.opened}
exec(compile('''
def opened(self, name):
    if name == "3" and "process_1" in self.directory:
        raise MemoryError("no memory")
    return real(self, name)
''', "<injected>", "exec"), names)
Steps.opened = names["opened"]
told["error"] = raised(lambda: start(ROWS))
Steps.opened = names["real"]
told["after"] = restored(ROWS)
"""


def test_no_memory_while_local_steps_are_listed(tmp_path: Path) -> None:
    run(tmp_path, "train(3, ROWS)")
    for index, told in enumerate(run(tmp_path, NO_MEMORY)):
        error = told["error"]
        kind = "MemoryError" if index else "NotTogether"
        assert (error["type"], error["secs"] < 8) == (kind, True), told
        assert "no memory" in error["text"] and told["after"] == [3, "local"], told


OVERWRITES = """
exec(compile('''
def fails(*_, **__):
    raise OSError(5, "Input/output error")
''', "<injected>", "exec"))

def saves(step, **more):
    checkpointer.save(step, state(step, ROWS), **more)
    checkpointer.wait_until_finished()

every = ckpt.Options(timeout_secs=20, persist_policy=ckpt.when.every_steps(1) if tiers else None)
with ckpt.Checkpointer(persistent, local_directory=own if tiers else None, options=every) as checkpointer:
    for step in range(3):
        saves(step)
    backend = checkpointer._run.directory.backend
    if index == 1:
        backend.look = fails
    told["errors"] = [raised(lambda: saves(2, overwrite=True))]
    backend.__dict__.pop("look", None)
    told["errors"] += [raised(lambda: saves(2, overwrite=True)), raised(lambda: saves(3))]
    told["steps"] = checkpointer.all_steps()
"""


@pytest.mark.parametrize("tiers", [False, True])
def test_an_overwrite_where_one_process_cannot_list(tmp_path: Path, tiers: bool) -> None:
    """Each looked for the name of the step; the next saves failed on all."""
    for told in run(tmp_path, f"tiers = {tiers}\n" + OVERWRITES):
        assert told["errors"] == [None] * 3 and told["steps"] == [0, 1, 2, 3], told


def test_what_they_save_comes_back(tmp_path: Path) -> None:
    made = "def make(n): return {'w': np.arange(6.0) + n}\n"
    comes_back(made, tmp_path / "saved")
