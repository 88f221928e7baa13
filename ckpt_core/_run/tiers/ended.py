"""What runs left in a local directory: listed, and removed once they have ended.

A run that has ended may be started again, and would restore from there. So nothing is removed unless somebody asks for it, or a
writer needs the room (``Options.local_max_bytes``).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_core._directory import (
    PosixBackend,
    StepNames,
    locks_work_in,
    remove_empty,
    walk_files,
)
from ckpt_core._run.lease import is_abandoned

_RUN = re.compile(r"run-[0-9a-f]{16}-[0-9a-f]{8}")
_PROCESS = re.compile(r"process_\d+-of-\d+")


@dataclass(frozen=True)
class LocalRun:
    """What one run left in a local directory of this host.

    Attributes:
        path: its folder.
        processes: how many processes have folders in it.
        steps: numbers of which there are parts, or copies of parts of other hosts.
        size_bytes: of all files.
        used_unix_secs: when the newest of its folders of steps was changed.
        in_use: whether a writer of it may live.
        mine: whether its folder belongs to this user.
    """

    path: str
    processes: int
    steps: tuple[int, ...]
    size_bytes: int
    used_unix_secs: float
    in_use: bool
    mine: bool


def runs_in(root: str) -> list[LocalRun]:
    """The runs in a local directory, the longest unused first; writes a temporary file there to learn whether locks work.

    Raises:
        OSError: the directory cannot be listed.
    """
    locks_work = locks_work_in(root)
    found = (
        _run_at(f"{root}/{name}", locks_work) for name in os.listdir(root) if _RUN.fullmatch(name)
    )
    return sorted((run for run in found if run is not None), key=lambda run: run.used_unix_secs)


def remove_run(run: LocalRun) -> bool:
    """Removes what a run left; returns whether all of it is gone. A folder that a writer has claimed meanwhile stays.

    Each folder of a process is hidden first, so that nobody meets half of a step.
    """
    backend = PosixBackend()
    locks_work = locks_work_in(os.path.dirname(run.path))
    for folder in _folders(run.path):
        if is_abandoned(folder, backend, locks_work):
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                backend.delete(folder)
    remove_empty([run.path])
    return not os.path.lexists(run.path)


@dataclass(frozen=True)
class Room:
    """What ``make_room`` did.

    Attributes:
        removed: the runs that are gone.
        over_bytes: how much more than the limit is needed still; at most 0 if it fits.
    """

    removed: tuple[LocalRun, ...]
    over_bytes: int


def make_room(root: str, max_bytes: int, own: str, needed_bytes: int) -> Room:
    """Removes ended runs of this user, the longest unused first, until so much more fits.

    Args:
        root: of all runs.
        max_bytes: what the runs may have together.
        own: folder of the run that needs the room.
        needed_bytes: how much it is about to write.

    Raises:
        OSError: the directory cannot be listed.
    """
    runs = runs_in(root) if os.path.isdir(root) else []
    over_bytes = sum(run.size_bytes for run in runs) + needed_bytes - max_bytes
    removed: list[LocalRun] = []
    for run in runs:
        if over_bytes <= 0:
            break
        if run.mine and not run.in_use and run.path != own and remove_run(run):
            removed.append(run)
            over_bytes -= run.size_bytes
    return Room(tuple(removed), over_bytes)


def _run_at(path: str, locks_work: bool) -> LocalRun | None:
    """What is in one folder; None if it is gone, or holds something else."""
    backend = PosixBackend()
    try:
        folders = list(_folders(path))
        inside = [f"{folder}/{name}" for folder in folders for name in os.listdir(folder)]
        steps = {number for one in inside for number in _steps_at(one)}
        return LocalRun(
            path,
            len(folders),
            tuple(sorted(steps)),
            _size_of(path),
            max((os.stat(one).st_mtime for one in (path, *folders, *inside)), default=0.0),
            not all(is_abandoned(folder, backend, locks_work) for folder in folders),
            os.stat(path).st_uid == os.getuid() if hasattr(os, "getuid") else True,
        )
    except (FileNotFoundError, NotADirectoryError):  # somebody removes it
        return None


def _size_of(path: str) -> int:
    """Of the files below a folder; steps share unchanged ones by hard links."""
    found: dict[tuple[int, int], int] = {}
    for file in walk_files(path):
        with contextlib.suppress(FileNotFoundError):
            about = os.lstat(file)
            found[about.st_dev, about.st_ino] = about.st_size
    return sum(found.values())


def _folders(path: str) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        yield from (f"{path}/{name}" for name in os.listdir(path) if _PROCESS.fullmatch(name))


def _steps_at(path: str) -> Iterator[int]:
    """The number of a step's directory, or those in a folder of copies."""
    name = os.path.basename(path)
    names = os.listdir(path) if name.startswith("partner-of_") else [name]
    for one in names:
        number = StepNames().parse(one)
        if number is not None:
            yield number
