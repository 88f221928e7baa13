"""Jobs for children by which the tests of the shim and of the disks look at something."""

import ctypes
import errno
import itertools
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import child
import numpy as np
import scenarios
from child import cut_power, state, version_of

import ckpt_core as ckpt

# ---- the shim -----------------------------------------------------------------------------------


def write_three(root: str) -> None:
    """Makes three files of six bytes; reports the numbers of those that failed, and why."""
    with child.armed():
        for number in range(3):
            try:
                fd = os.open(f"{root}/{number}", os.O_WRONLY | os.O_CREAT)
                os.write(fd, b"abcdef")
                os.fsync(fd)
            except OSError as error:
                child.report(failed=[number, errno.errorcode[error.errno or 0]])


def marked_save(name: str, root: str, begin: str, end: str) -> None:
    """The disturbed save of a scenario, with a text written before and after it for a tracer."""
    scenario = scenarios.SCENARIOS[name]
    context = scenario.prepare(root)
    child.report(mark=begin)
    with child.armed():
        scenario.save(context)
    child.report(mark=end)
    scenarios.close(context)


# ---- no room, no permission ---------------------------------------------------------------------


def _everything(root: str) -> list[str]:
    return sorted(
        os.path.relpath(os.path.join(parent, name), root)
        for parent, directories, files in os.walk(root)
        for name in (*directories, *files)
    )


def _room_bytes(root: str) -> int:
    room = os.statvfs(root)
    return room.f_bavail * room.f_frsize


@contextmanager
def _expected_failure(root: str) -> Iterator[None]:
    """Reports the error of what is inside, and what stood in `root` before and after it."""
    child.report(before=_everything(root), room_bytes=_room_bytes(root))
    try:
        yield
    except Exception as error:
        child.report(error=child.describe(error))
    child.report(after=_everything(root), room_bytes=_room_bytes(root))


def _large(size_bytes: int) -> dict[str, Any]:
    """A state of that size that no compression makes smaller, in four leaves."""
    rng = np.random.default_rng(0)
    return {f"w{i}": rng.integers(0, 255, size_bytes // 4, np.uint8) for i in range(4)}


def save_too_much(root: str, how: str, size_bytes: int) -> None:
    """Saves a small state and then one that does not fit, in the way that `how` names."""
    if how in ("save", "overwrite"):
        ckpt.save(f"{root}/first", state(1))
        target = "second" if how == "save" else "first"

        def save(value: Any) -> None:
            ckpt.save(f"{root}/{target}", value, overwrite=how == "overwrite")

        def first() -> Any:
            return ckpt.load(f"{root}/first")
    else:
        checkpointer = ckpt.Checkpointer(f"{root}/steps", asynchronous=how == "async_step")
        checkpointer.save(0, state(1))
        checkpointer.wait_until_finished()

        def save(value: Any) -> None:
            checkpointer.save(1, value)
            checkpointer.wait_until_finished()

        def first() -> Any:
            return checkpointer.load(0)

    with _expected_failure(root):
        save(_large(size_bytes))
    child.report(intact=version_of(first()) == 1)
    save(state(2))
    child.report(retried=True)


def save_too_many_files(root: str) -> None:
    """Saves where only a few more files can be made."""
    ckpt.save(f"{root}/first", state(1))
    for number in itertools.count():
        if os.statvfs(root).f_favail <= 6:
            break
        open(f"{root}/filler-{number}", "x").close()
    with _expected_failure(root):
        ckpt.save(f"{root}/second", state(2))
    child.report(intact=version_of(ckpt.load(f"{root}/first")) == 1)


def save_beyond_limit(root: str, limit_bytes: int) -> None:
    """Saves where a file may not grow beyond a limit; then without the limit."""
    ckpt.save(f"{root}/first", state(1))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    with _expected_failure(root):
        ckpt.save(f"{root}/second", _large(8 * limit_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    child.report(intact=version_of(ckpt.load(f"{root}/first")) == 1)
    ckpt.save(f"{root}/second", _large(8 * limit_bytes))
    child.report(retried=True)


def save_both(root: str) -> None:
    """A checkpoint `first` and a directory of steps with step 0."""
    ckpt.save(f"{root}/first", state(1))
    with ckpt.Checkpointer(f"{root}/steps") as checkpointer:
        checkpointer.save(0, state(0))


def save_where_forbidden(root: str) -> None:
    """Tries to save where nothing can be written; what is there must load all the same."""
    _obey_permissions()
    with _expected_failure(root):
        ckpt.save(f"{root}/second", state(2))
    try:
        with ckpt.Checkpointer(f"{root}/steps") as checkpointer:
            checkpointer.save(1, state(1))
    except OSError as error:
        child.report(step_error=[type(error).__name__, errno.errorcode[error.errno or 0]])
    with ckpt.Checkpointer(f"{root}/steps", read_only=True) as reader:
        restored = reader.restore_latest(state=state(0))
        steps_intact = version_of(restored["state"]) == 0 and reader.all_steps() == [0]
    verified = ckpt.verify(f"{root}/first").ok
    intact = version_of(ckpt.load(f"{root}/first")) == 1
    child.report(intact=intact and verified and steps_intact)


def go_on_beside_unreadable(root: str) -> None:
    """Restores and saves where the directory of an older step, as of another user, cannot be read."""
    _obey_permissions()
    with ckpt.Checkpointer(root, max_to_keep=2) as checkpointer:
        restored = checkpointer.restore_latest(state=state(0))
        checkpointer.save(restored.step + 1, restored["state"])
        checkpointer.wait_until_finished()
        child.report(restored=restored.step, steps=checkpointer.all_steps())


def _obey_permissions() -> None:
    """Gives up, for this thread and those it starts, the rights by which root ignores modes."""
    version_3 = 0x20080522
    header = (ctypes.c_uint32 * 2)(version_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, nothing):
        raise OSError(ctypes.get_errno(), "capset")


# ---- no power -----------------------------------------------------------------------------------


def save_and_cut(name: str, root: str, image: str, copy: str) -> None:
    """A scenario undisturbed, and the power cut as soon as its last save is acknowledged."""
    scenario = scenarios.SCENARIOS[name]
    context = scenario.prepare(root)
    scenario.save(context)
    cut_power(image, copy)
    child.report(acknowledged=[scenario.name, 2])
    scenarios.close(context)


def save_in_new_directory(disk: str, name: str, image: str, copy: str) -> None:
    """Saves below directories that do not exist yet, by both ways, and cuts the power."""
    ckpt.save(f"{disk}/{name}/single", state(1))
    with ckpt.Checkpointer(f"{disk}/{name}/steps") as checkpointer:
        checkpointer.save(0, state(2))
        checkpointer.wait_until_finished()
        cut_power(image, copy)


def save_carelessly(path: str, image: str, copy: str) -> None:
    """Saves without waiting for the disk and cuts the power."""
    ckpt.save(path, state(1), options=ckpt.Options(durable=False))
    assert version_of(ckpt.load(path)) == 1
    cut_power(image, copy)


def read_one(path: str) -> None:
    """Reports the error of loading what should be lost."""
    try:
        ckpt.load(path)
    except ckpt.CheckpointError as error:
        child.report(error=child.describe(error))


def read_both(directory: str) -> None:
    """The versions of what `save_in_new_directory` saved."""
    with ckpt.Checkpointer(f"{directory}/steps", read_only=True) as reader:
        steps = version_of(reader.load(0))
    child.report(versions=[version_of(ckpt.load(f"{directory}/single")), steps])


def train(directory: str) -> None:
    """Saves step after step, without end; says of each when it is acknowledged."""
    checkpointer = ckpt.Checkpointer(directory, max_to_keep=3)
    for step in itertools.count():
        checkpointer.save(step, state(step))
        if step % 3:
            checkpointer.wait_until_finished()
            child.report(step=step)


def read_steps(directory: str) -> None:
    """Every step that a reader lists, each compared bit for bit."""
    found: list[int] = []
    if os.path.exists(directory):
        with ckpt.Checkpointer(directory, read_only=True) as reader:
            found = list(reader.all_steps())
            checks: list[Callable[[], bool]] = [
                lambda step=step: version_of(reader.load(step)) == step for step in found
            ]
            assert all(check() for check in checks)
    child.report(steps=found)
