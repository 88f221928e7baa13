"""The folders below a local directory: which parts of steps lie in them, who may write, and what is deleted.

A process has its own parts in ``process_<i>-of-<n>``. Beside it may be folders of other indices, of this host or of hosts
that have changed places, and of other numbers of processes: those are not restored from. In each may be folders
``partner-of_<j>-of-<n>`` with copies of the parts of process j.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckpt_core._directory import (
    MAX_STEP,
    Backend,
    LockFile,
    PosixBackend,
    is_locked,
    lock_folder,
    refuse_file,
    refuse_lost_link,
    resolve,
)
from ckpt_core._errors import CheckpointError, CheckpointNotFound, NewerFormat
from ckpt_core._exchange import Key
from ckpt_core._format.part import Part, contains
from ckpt_core._format.record import RECORD_FILE
from ckpt_core._operation import Event, logger, tell
from ckpt_core._run.lease import OWNER_FILE, Lease, is_abandoned
from ckpt_core._run.run_file import RunFile
from ckpt_core._run.steps import RunSteps, Steps
from ckpt_core._run.tiers.judge import Seen, State, Unreadable, cause_of
from ckpt_core._saved import Checkpoint, NativeCheckpoint
from ckpt_core._verify import verify

FOLDER = re.compile(r"process_(\d+)-of-(\d+)")
COPIES = re.compile(r"partner-of_(\d+)-of-(\d+)")
_USE_TRIES, _USE_PAUSE_SECS = 50, 0.02
_MOST_TEXT = 500
_MOST_FOLDERS = 64  # maximum number of folders of other processes in which a process looks


def local_root(directory: str | os.PathLike[str], persistent: str | None = None) -> str:
    """Absolute path of a ``local_directory``; raises for a URL, a file, a link to nowhere, the ``persistent`` one itself."""
    root, local = resolve(directory)
    if not local:
        raise ValueError(f"local_directory must be on a file system of this host, got {root}")
    refuse_file(root)
    other = os.path.realpath(persistent or "")
    if persistent and "://" not in persistent and os.path.realpath(root) == other:
        raise ValueError(
            f"local_directory {root} is the directory of the steps: for one directory leave local_directory= out; "
            "else pass one on a fast disk of each host, such as local_directory='/dev/shm/ckpt'"
        )
    refuse_lost_link(root)
    return root


def folder_of(run: RunFile, root: str, persistent: str) -> str:
    """A run's folder: its name, and a hash of the persistent directory's real path, since a copy of that is another run."""
    return f"{root}/{run.name}-{hash_of(persistent)}" if run.name else f"{root}/none"


def hash_of(persistent: str) -> str:
    """What the names of folders of runs end in: the hash of a persistent directory."""
    real = persistent if "://" in persistent else os.path.realpath(persistent)
    return hashlib.sha256(real.encode(errors="surrogateescape")).hexdigest()[:8]


class Target(NamedTuple):
    """Where a part is brought."""

    path: str  # of the step's directory
    backend: Backend
    durable: bool  # whether it is fsynced
    # Called right before the commit; raises if the part is not wanted there any more.
    may_commit: Callable[[], None]
    token: str = ""  # of the save that lies there already


FoundPart = tuple[Seen, NativeCheckpoint]
"""What the other processes get to know of a part, and the part with its ckpt.json read."""


class Folders:
    """The folder of one process, and those that lie beside it in ``root``, the run's folder in the local directory."""

    def __init__(self, root: str, steps: RunSteps) -> None:
        self._index, self._count = steps.processes.index, steps.processes.count
        self.path = f"{root}/process_{self._index}-of-{self._count}"
        self.backend = PosixBackend()
        self.own = Steps(self.path, True, self.backend, steps.names)  # of each a part
        self._persistent = steps.directory
        self.lease = self._lease(self.path)
        self._unread: dict[int, Unreadable] = {}  # what the last look could not read
        # Step and token of own parts that are left out -> whether damaged or unread, and what was found.
        self.left_out: dict[tuple[int, str], tuple[State, str]] = {}
        self.root = root
        self._options = steps.options
        self._leases_of_others: list[Lease] = []
        self._use = _use(root)

    def look(self, run: RunFile) -> tuple[list[FoundPart], list[Unreadable], list[tuple[int, int]]]:
        """The readable parts that count, the own ones first; what is not read, but may be sound; steps of other numbers."""
        unread, counts, found = dict[int, Unreadable](), dict[int, int](), list[FoundPart]()
        for steps, step, opened in self._opened(unread):
            record, alone = opened.record, _part_of(steps)
            part, order = record.part or alone, run.order(step, record.token)
            if order is None or not part.writer < part.count == alone.count:
                continue
            if part.count != self._count:
                counts[step] = part.count
                continue
            mine, continues = steps is self.own, record.parent is not None
            mine = mine and contains(part.serves, self._index)
            if not (mine and (step, record.token) in self.left_out):
                seen = Seen(step, record.token, order, part.writer, part.serves, mine, continues)
                found.append((seen, opened))
        self._unread = unread
        return found, [*unread.values()], [*counts.items()]

    def find(self, key: Key) -> list[str] | None:
        """The files of a part that lies here or beside it, a ``ServedParts``; OSError if some cannot be read now."""
        unread = dict[int, Unreadable]()
        for steps, _, opened in self._opened(unread, key.step):
            record = opened.record
            if record.token != key.token or (steps is self.own and key[:2] in self.left_out):
                continue
            if contains((record.part or _part_of(steps)).serves, key.writer):
                return [f"{opened.path}/{name}" for name in (RECORD_FILE, *record.beside)]
        for one in unread.values():
            if one.errno:
                raise OSError(one.errno, one.why)
        return None

    def state(self, step: int, token: str | None) -> State:
        """Whether the own part is as it was saved; else it is left out: until ``try_again``, or it is replaced."""
        path = self.own.path(step)
        found: State = "damaged"
        if not self.backend.exists(path):
            return found
        try:
            report = verify(path, options=self._options)
            problem = "" if report.ok else str(report.problems[0])
        except Exception as error:  # whatever it is: the other processes wait for the answer
            found, problem = "unread", str(error) or type(error).__name__
        if problem and token is not None:
            self.left_out[step, token] = found, problem
        return found if problem else "whole"

    def try_again(self) -> None:
        """What could not be read may be readable now."""
        self.left_out = {one: why for one, why in self.left_out.items() if why[0] != "unread"}

    @contextlib.contextmanager
    def _noting(
        self,
        unread: dict[int, Unreadable],
        path: str,
        step: int = MAX_STEP,
        *,
        of_others: bool = False,
    ) -> Generator[None]:
        """If the block cannot read a path, it ends; that is logged and, unless something says damage, noted in
        ``unread``. What is ``of_others`` and of another user is not meant for this process.
        """
        try:
            yield
        except CheckpointNotFound:
            pass  # deleted meanwhile
        except (CheckpointError, OSError) as error:
            why = str(error) if path in str(error) else f"{path}: {error}"
            logger.warning("a local step cannot be read: %s", why)
            number = error.errno if isinstance(error, OSError) else None
            forbidden = of_others and number in (errno.EACCES, errno.EPERM)
            sound = step == MAX_STEP or isinstance(error, NewerFormat) or cause_of(error)
            if sound and not forbidden:
                unread.setdefault(
                    step, Unreadable(step, number or 0, why[:_MOST_TEXT], self._index)
                )

    def _opened(
        self, unread: dict[int, Unreadable], only: int | None = None
    ) -> Iterator[tuple[Steps, int, NativeCheckpoint]]:
        """The readable parts of all steps, or ``only`` one, here, then beside it; notes others in ``unread``."""
        beside = list[tuple[str, bool]]()
        with self._noting(unread, self.root):
            beside = self._beside()
        for path, _ in ((self.path, False), *beside[:_MOST_FOLDERS]):
            with self._noting(unread, path, of_others=path != self.path):
                for steps in self._steps_in(path):
                    for step, opened in self._opened_in(steps, unread, only):
                        yield steps, step, opened

    def _opened_in(
        self, steps: Steps, unread: dict[int, Unreadable], only: int | None
    ) -> Iterator[tuple[int, NativeCheckpoint]]:
        listing = steps.look()
        for step, among in listing.names.items():
            if only not in (None, step):
                continue
            found = list[Checkpoint]()
            with self._noting(unread, f"{steps.directory}/{among[0]}", step):
                for name in listing.directories(step):
                    with self._noting(unread, f"{steps.directory}/{name}", step):
                        found.append(steps.opened(name))
            yield from ((step, one) for one in found if isinstance(one, NativeCheckpoint))

    def _beside(self) -> list[tuple[str, bool]]:
        """The folders of other processes, and of each whether another number of them left it; those of this number first."""
        mine, names = os.path.basename(self.path), self.backend.children(self.root)
        others = sorted(name for name in names if FOLDER.fullmatch(name) and name != mine)
        found = [(f"{self.root}/{name}", _numbers(name)[1] != self._count) for name in others]
        return sorted(found, key=lambda one: one[1])

    def _steps_in(self, folder: str) -> list[Steps]:
        """The parts in a folder, and the copies that it has of others."""
        parts = self.own if folder == self.path else self._steps(folder)
        return [parts, *self._copies_in(folder)]

    def _copies_in(self, folder: str) -> list[Steps]:
        names = sorted(filter(COPIES.fullmatch, self.backend.children(folder)))
        return [self._steps(f"{folder}/{name}") for name in names]

    def _copies(self) -> list[Steps]:
        """All copies here to be deleted, also of processes whose partner this one was earlier."""
        with _undeleted(self.path):
            return self._copies_in(self.path) if self._count > 1 else []
        return []

    def _copies_of(self, index: int) -> str:
        """The folder here for copies of the parts of process ``index``."""
        return f"{self.path}/partner-of_{index}-of-{self._count}"

    def _steps(self, folder: str) -> Steps:
        return Steps(folder, True, self.backend, self.own.names)

    def _lease(self, folder: str) -> Lease:
        return Lease(folder, self.backend, self._persistent)

    def claim(self) -> None:
        """Claims the folder: the next commit of an older writer there fails; also, until ``close``, folders of other
        numbers of processes with live writers, which would take a deleted one for emptied, and continue. What cannot be
        written is only logged: a restore still works, and the first save raises the error.
        """
        try:
            self.lease.claim()
            for path, other in self._beside():
                if other and is_locked(f"{path}/{OWNER_FILE}"):
                    self._leases_of_others.append(self._lease(path))
                    self._leases_of_others[-1].claim()
        except OSError as error:
            logger.warning("%s could not be claimed for this run: %s", self.path, error)

    def claim_again_if_emptied(self) -> None:
        """Before a save: a folder that is new or was emptied no other writer has claimed."""
        if not self.backend.exists(f"{self.path}/{OWNER_FILE}"):
            self.lease.close()
            self.lease = self._lease(self.path)

    def is_mine(self) -> bool:
        """Whether this writer still owns the folder; if not, its steps may be another run's."""
        try:
            self.lease.check()
        except (CheckpointError, OSError):
            return False
        return True

    def close(self) -> None:
        """Releases the claims, and the folder of the run."""
        for lease in (*self._leases_of_others, self.lease):
            lease.close()
        if self._use is not None:
            self._use.close()

    def own_target(self, step: int) -> Target:
        """Where a part goes that this process lacks; CheckpointNotFound if another Checkpointer uses the folder."""
        if not self.lease.claimed and is_locked(f"{self.path}/{OWNER_FILE}"):
            raise CheckpointNotFound(
                f"{self.path}: the part of step {step} is not here, and is not fetched while another "
                "Checkpointer uses this directory: restore the step, which takes the directory over"
            )
        may_commit = self.lease.check_if_claimed
        return Target(self.own.path(step), self.backend, self._options.durable, may_commit)

    def copy_target(self, source: int, step: int, wanted: Callable[[], None]) -> Target:
        """Where the copy of another process's part goes."""

        def may_commit() -> None:
            wanted()
            self.lease.check()

        copies = self._steps(self._copies_of(source))
        path = copies.path(step)
        there = copies.saved(os.path.basename(path)).token
        return Target(path, self.backend, self._options.durable, may_commit, there)

    def clean(self) -> None:
        """Deletes what dead writers left unfinished."""
        for steps in (self.own, *self._copies()):
            with contextlib.suppress(OSError):  # a save there raises the same error
                self.backend.clean(steps.directory)

    def delete(self, unwanted: Callable[[int], bool]) -> None:
        """Deletes the unwanted steps: own parts, copies, and those of other numbers of processes."""
        for steps in (self.own, *self._copies()):
            self._delete_in(steps, unwanted)
        self._delete_of_other_numbers(unwanted)

    def _delete_of_other_numbers(self, unwanted: Callable[[int], bool]) -> None:
        with _undeleted(self.root):
            for folder in [path for path, other in self._beside() if other]:
                with _undeleted(folder):
                    for steps in self._steps_in(folder):
                        self._delete_in(steps, unwanted)

    def discard(self, step: int) -> None:
        """Deletes this process's part of a step."""
        if self.is_mine():
            self._delete_in(self.own, lambda other: other == step)

    def retain(self, kept: Collection[int], saved: int, sources: Sequence[int]) -> None:
        """Deletes parts and copies but those ``kept``, and for ``sources``; of the ``saved`` step also other directories."""
        wanted = {*map(self._copies_of, sources)}
        for copies in self._copies():
            if copies.directory in wanted:
                self._delete_in(copies, lambda step: step not in kept)
            else:
                with contextlib.suppress(OSError):  # another time
                    self.backend.delete(copies.directory)
        stays = {*kept, *self._unread} - {saved}
        self._delete_in(self.own, lambda step: step not in stays, self.own.new_path(saved))

    def _delete_in(self, steps: Steps, unwanted: Callable[[int], bool], but: str = "") -> None:
        """Deletes the unwanted steps in one folder, ``but`` one directory; a failure is only logged."""
        found = list[tuple[int, list[str]]]()
        with _undeleted(steps.directory):
            found = sorted(steps.look().names.items())
        for step, names in found:
            for path in (f"{steps.directory}/{name}" for name in names if unwanted(step)):
                if path == but:
                    continue
                event = Event(kind="deleted", path=path, step=step)
                try:
                    self.backend.delete(path)
                except FileNotFoundError:
                    continue  # another process of this host deletes it, too
                except BlockingIOError:
                    logger.info("%s is being read, and stays for now", path)
                    continue
                except OSError as error:
                    logger.warning("could not delete %s: %s", path, error)
                    event = replace(event, kind="delete_failed", error=error)
                tell(event, self._options.on_event)

    def discard_leftovers(self, *, of_others: bool) -> None:
        """Deletes the folders that dead processes left beside this one: of this number, or ``of_others``, with steps that
        count until all have committed a newer one. Live ones hold the locks of their owner files.
        """
        locks_work = is_locked(f"{self.path}/{OWNER_FILE}")
        with _undeleted(self.root):  # first: who deletes steps makes a folder look used
            for path, other in self._beside():
                if other is of_others and is_abandoned(path, self.backend, locks_work):
                    with contextlib.suppress(OSError):  # others of this host may delete it, too
                        self.backend.delete(path)
        if of_others:
            self._delete_of_other_numbers(lambda _: True)


def _use(root: str) -> LockFile | None:
    """A lock that shows ``ended.remove_run`` that the run's folder is in use; None without a folder that stays."""
    with contextlib.suppress(OSError):
        for _ in range(_USE_TRIES):  # who lists the runs excludes others for a moment
            if (held := lock_folder(root, exclusive=False)) is not None:
                return held
            time.sleep(_USE_PAUSE_SECS)
    return None


@contextlib.contextmanager
def _undeleted(where: str) -> Generator[None]:
    """If what is to be deleted cannot be listed, the block ends, and that is logged: one process alone must not raise."""
    try:
        yield
    except OSError as error:
        logger.warning("could not delete what is in %s: %s", where, error)


def _numbers(folder: str) -> tuple[int, int]:
    """Index and number of processes in the name of a folder."""
    _, writer, count = re.split(r"_|-of-(?=\d+$)", folder)
    return int(writer), int(count)


def _part_of(steps: Steps) -> Part:
    """The part that one process alone saved, which notes none in its record."""
    return Part.own(*_numbers(os.path.basename(steps.directory)))
