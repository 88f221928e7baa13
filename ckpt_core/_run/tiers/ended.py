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
from ckpt_core._run.tiers.folders import COPIES, FOLDER, hash_of

_RUN = re.compile(r"run-[0-9a-f]{16}-[0-9a-f]{8}")
_OF_STEPS = re.compile(rf"{FOLDER.pattern}(/{COPIES.pattern})?")


@dataclass(frozen=True)
class LocalRun:
    """What one run left in a local directory of this host."""

    path: str  # its folder
    persistent: str  # the run's persistent directory; empty if it is not known
    processes: int  # how many have folders in it
    steps: tuple[int, ...]  # with parts here, or copies of parts of other hosts
    size_bytes: int
    used_unix_secs: float  # when the newest of its folders was changed
    in_use: bool  # a writer or a reader of it may live
    mine: bool  # its folder belongs to this user


def runs_in(root: str) -> list[LocalRun]:
    """The runs in a local directory, the longest unused first; writes a temporary file there to learn whether locks work."""
    locks_work, names = locks_work_in(root), filter(_RUN.fullmatch, os.listdir(root))
    found = filter(None, (_run_at(f"{root}/{name}", locks_work) for name in names))
    return sorted(found, key=lambda run: run.used_unix_secs)


def remove_run(run: LocalRun) -> bool:
    """Removes what a run left, unless it is used; whether all is gone. Folders are hidden first: nobody meets half a step."""
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
        if not _are_unused(folders, locks_work):
            return False
        for folder in folders:
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                backend.delete(folder)
        backend.clean(path)  # what a remover hid that was killed
        remove_empty([path])
    return not os.path.lexists(path)


def _run_at(path: str, locks_work: bool) -> LocalRun | None:
    """What is in one folder; None if it is gone, or no folder. Its writer may live, and change it meanwhile."""
    try:
        top = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(top.st_mode):  # what a link leads to lies in another directory
        return None
    sizes = dict[tuple[int, int], int]()  # steps share unchanged files by hard links
    steps, used_unix_secs, missed = set[int | None](), top.st_mtime, list[OSError]()
    for above, directories, files in os.walk(path, onerror=missed.append):
        of_steps = _OF_STEPS.fullmatch(above[len(path) + 1 :])
        for name in (*directories, *files):
            try:
                about = os.lstat(f"{above}/{name}")
            except OSError as error:
                missed.append(error)
                continue
            if stat.S_ISDIR(about.st_mode):
                used_unix_secs = max(used_unix_secs, about.st_mtime)
                steps.add(StepNames().parse(name) if of_steps else None)
            else:
                sizes[about.st_dev, about.st_ino] = about.st_size
    unread = any(not isinstance(error, FileNotFoundError) for error in missed)
    folders, persistent = [] if unread else _folders(path), ""
    for folder in folders:
        with contextlib.suppress(CheckpointError, OSError):
            persistent = persistent or persistent_of(folder, PosixBackend())
    return LocalRun(
        path,
        persistent,
        len(folders),
        tuple(sorted(step for step in steps if step is not None)),
        sum(sizes.values()),
        used_unix_secs,
        unread or is_locked(path) or not _are_unused(folders, locks_work),
        top.st_uid == os.getuid() if hasattr(os, "getuid") else True,
    )


def _are_unused(folders: Sequence[str], locks_work: bool) -> bool:
    """Whether no writer has one of these folders of processes; False if that cannot be known."""
    with contextlib.suppress(CheckpointError, OSError):
        return all(is_abandoned(folder, PosixBackend(), locks_work) for folder in folders)
    return False


def _folders(path: str) -> list[str]:
    """The folders of processes in that of a run."""
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        names = [one.name for one in entries if one.is_dir(follow_symlinks=False)]
        return [f"{path}/{name}" for name in names if FOLDER.fullmatch(name)]
    return []


def name_other_runs(root: str, run_name: str, directory: str) -> None:
    """Logs the steps here that do not count, though of this ``directory``: its run file names another run."""
    ending = f"-{hash_of(directory)}"
    with contextlib.suppress(OSError):
        for name in sorted(filter(_RUN.fullmatch, os.listdir(root))):
            if not name.endswith(ending) or name == f"{run_name}{ending}":
                continue
            if (run := _run_at(f"{root}/{name}", False)) and run.steps:
                logger.warning(
                    "%s: steps %s of an earlier run in %s, which do not count: the %s there is gone or new, as when the directory was "
                    "begun anew, or restored without hidden files. If training is to go on from them, put that file "
                    "back before the first save; else remove them: ckpt rm --local %s --run %s",
                    run.path,
                    str(list(run.steps))[1:-1],
                    directory,
                    RUN_FILE,
                    shlex.quote(root),
                    os.path.basename(run.path),
                )
