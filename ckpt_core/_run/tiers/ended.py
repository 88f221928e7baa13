"""What runs left in a local directory: listed, and removed once they have ended.

A run that has ended may be started again, and would restore from there. So nothing is removed unless somebody asks for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_core._directory import (
    PosixBackend,
    StepNames,
    is_locked,
    lock_folder,
    locks_work_in,
    remove_empty,
)
from ckpt_core._errors import CheckpointError
from ckpt_core._operation import logger
from ckpt_core._run.lease import is_abandoned, persistent_of
from ckpt_core._run.run_file import RUN_FILE
from ckpt_core._run.tiers.folders import hash_of

_RUN = re.compile(r"run-[0-9a-f]{16}-[0-9a-f]{8}")
_PROCESS = re.compile(r"process_\d+-of-\d+")
_LEVELS = 3
"""Folders of processes, of steps and copies, and of copied steps."""


@dataclass(frozen=True)
class LocalRun:
    """What one run left in a local directory of this host."""

    path: str  # its folder
    persistent: str  # the run's persistent directory; empty if it is not known
    processes: int  # how many have folders in it
    steps: tuple[int, ...]  # with parts here, or copies of parts of other hosts
    size_bytes: int
    used_unix_secs: float  # when the newest of its folders of steps was changed
    in_use: bool  # a writer or a reader of it may live
    mine: bool  # its folder belongs to this user


def runs_in(root: str) -> list[LocalRun]:
    """The runs in a local directory, the longest unused first; writes a temporary file there to learn whether locks work."""
    locks_work = locks_work_in(root)
    found = (
        _run_at(f"{root}/{name}", locks_work) for name in os.listdir(root) if _RUN.fullmatch(name)
    )
    return sorted((run for run in found if run is not None), key=lambda run: run.used_unix_secs)


def runs_at(root: str, ending: str) -> list[LocalRun]:
    """The runs with steps in a local directory whose folders' names end so; without what cannot be read."""
    found: list[LocalRun] = []
    with contextlib.suppress(OSError):
        for name in sorted(filter(_RUN.fullmatch, os.listdir(root))):
            run = _run_at(f"{root}/{name}", False) if name.rpartition("-")[2] == ending else None
            found += [run] if run is not None and run.steps else []
    return found


def remove_run(run: LocalRun) -> bool:
    """Removes what a run left; returns whether all of it is gone. If somebody uses the run again, nothing is removed. Each
    folder of a process is hidden first, so that nobody meets half of a step.
    """
    backend, path = PosixBackend(), run.path
    locks_work = locks_work_in(os.path.dirname(path))
    try:
        held = lock_folder(path, exclusive=True)
    except FileNotFoundError:
        return True
    if held is None:
        return False
    with held:
        folders = _folders(path)
        if not all(_is_unused(folder, locks_work) for folder in folders):
            return False
        for folder in folders:
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                backend.delete(folder)
        backend.clean(path)  # what a remover hid that was killed
        remove_empty([path])
    return not os.path.lexists(path)


def _run_at(path: str, locks_work: bool) -> LocalRun | None:
    """What is in one folder; None if it is gone, or no folder."""
    try:
        about = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(about.st_mode):  # what a link leads to lies in another directory
        return None
    found = _Found(path, about.st_mtime)
    folders = [] if found.unread else _folders(path)
    return LocalRun(
        path,
        next(filter(None, map(_persistent_of, folders)), ""),
        len(folders),
        tuple(sorted(found.steps)),
        sum(found.files.values()),
        found.used_unix_secs,
        found.unread
        or is_locked(path)
        or not all(_is_unused(folder, locks_work) for folder in folders),
        about.st_uid == os.getuid() if hasattr(os, "getuid") else True,
    )


class _Found:
    """What is below the folder of a run; its writer may live, and change it meanwhile."""

    def __init__(self, path: str, changed_unix_secs: float) -> None:
        # sizes by device and inode: steps share unchanged files by hard links
        self.files: dict[tuple[int, int], int] = {}
        self.steps: set[int] = set()
        # of the newest change of a step's folder, or one above
        self.used_unix_secs = changed_unix_secs
        self.unread = False  # True if something could not be looked at
        for top, directories, files in os.walk(path, onerror=self._missed):
            inside = top[len(path) + 1 :].split("/") if top != path else []
            for name in files:
                if about := self._about(f"{top}/{name}"):
                    self.files[about.st_dev, about.st_ino] = about.st_size
            if len(inside) < _LEVELS:
                changed = (self._about(f"{top}/{name}") for name in directories)
                times = (about.st_mtime for about in changed if about)
                self.used_unix_secs = max(self.used_unix_secs, *times, 0.0)
            if inside and _PROCESS.fullmatch(inside[0]) and _holds_steps(inside):
                numbers = map(StepNames().parse, directories)
                self.steps.update(number for number in numbers if number is not None)

    def _missed(self, error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            self.unread = True

    def _about(self, path: str) -> os.stat_result | None:
        try:
            return os.lstat(path)
        except OSError as error:
            self._missed(error)
            return None


def _holds_steps(inside: Sequence[str]) -> bool:
    return len(inside) == 1 or (len(inside) == 2 and inside[1].startswith("partner-of_"))


def _is_unused(folder: str, locks_work: bool) -> bool:
    """Whether no writer has a process's folder; False if that cannot be known."""
    try:
        return is_abandoned(folder, PosixBackend(), locks_work)
    except (CheckpointError, OSError):
        return False


def _persistent_of(folder: str) -> str:
    try:
        return persistent_of(folder, PosixBackend())
    except (CheckpointError, OSError):
        return ""


def _folders(path: str) -> list[str]:
    """The folders of processes in that of a run."""
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        names = [one.name for one in entries if one.is_dir(follow_symlinks=False)]
        return [f"{path}/{name}" for name in names if _PROCESS.fullmatch(name)]
    return []


def name_other_runs(root: str, run_name: str, directory: str) -> None:
    """Logs the steps in a local directory that do not count, though of this ``directory``: its run file names another run."""
    for run in runs_at(root, hash_of(directory)):
        folder = os.path.basename(run.path)
        if not folder.startswith(f"{run_name}-"):
            logger.warning(
                "%s: steps %s of an earlier run in %s, which do not count: the %s there is gone or new, as when the directory was "
                "begun anew, or restored without hidden files. If training is to go on from them, put that file "
                "back before the first save; else remove them: ckpt rm --local %s --run %s",
                run.path,
                str(list(run.steps))[1:-1],
                directory,
                RUN_FILE,
                shlex.quote(root),
                folder,
            )
