"""The folders below a local directory: which parts of steps lie in them, who may write, and what is deleted.

A process has its own parts in ``process_<i>-of-<n>``. Beside it may be folders of other indices:
processes of this host, or hosts that have changed places; and of other numbers of processes, if the
run had as many before: those are not restored from. In each may be folders ``partner-of_<j>-of-<n>`` with copies of the parts of
process j.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckpt_core._directory import (
    MAX_STEP,
    LockFile,
    PosixBackend,
    StepNames,
    is_locked,
    lock_folder,
    refuse_file,
    refuse_lost_link,
    resolve,
)
from ckpt_core._errors import CheckpointError, CheckpointNotFound
from ckpt_core._exchange import Key
from ckpt_core._format.part import Part, contains
from ckpt_core._operation import logger
from ckpt_core._run.lease import OWNER_FILE, Lease, is_abandoned
from ckpt_core._run.run_file import RunFile
from ckpt_core._run.steps import Steps
from ckpt_core._run.tiers.fetch import Target
from ckpt_core._run.tiers.judge import Seen, Unread
from ckpt_core._run.tiers.verdict import is_unread
from ckpt_core._saved import NativeCheckpoint

T = TypeVar("T")

_FOLDER = re.compile(r"process_(\d+)-of-(\d+)")
_COPIES = re.compile(r"partner-of_(\d+)-of-(\d+)")
_USE_TRIES, _USE_PAUSE_SECS = 50, 0.02
_MOST_TEXT = 500
_Unread = dict[int, tuple[str, Exception]]
"""Step -> the directory that could not be read, and why."""
_MOST_FOLDERS = 64
"""Maximum number of folders of other processes in which a process looks."""


def local_root(directory: str | os.PathLike[str], persistent: str | None = None) -> str:
    """The absolute path of a ``local_directory``; ValueError if it is a URL, or the ``persistent`` one itself,
    NotADirectoryError if it is a file, CheckpointNotFound below a link that leads nowhere.
    """
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
    """The folder of a run in a local directory: the run's name with a hash of the persistent directory's path. A copy of that
    directory is another run. Another name of it is not: links are followed.
    """
    return f"{root}/{run.name}-{hash_of(persistent)}" if run.name else f"{root}/none"


def hash_of(persistent: str) -> str:
    """What the names of folders of runs end in: the hash of a persistent directory."""
    real = persistent if "://" in persistent else os.path.realpath(persistent)
    return hashlib.sha256(real.encode(errors="surrogateescape")).hexdigest()[:8]


@dataclass(frozen=True)
class Place:
    """A part of a step, and where it is."""

    seen: Seen  # what the other processes get to know of it
    path: str  # its directory
    opened: NativeCheckpoint  # with its ckpt.json read

    @property
    def key(self) -> Key:
        """Identifies its content."""
        return Key(self.seen.step, self.seen.token, self.seen.writer)


class Folders:
    """The folder of one process, and those that lie beside it in ``root``, the run's folder in the local directory."""

    def __init__(
        self,
        root: str,
        persistent: str,
        index: int,
        count: int,
        names: StepNames,
        *,
        durable: bool,
    ) -> None:
        self.path = f"{root}/process_{index}-of-{count}"
        self.backend = PosixBackend()
        self.own = Steps(self.path, True, self.backend, names)  # of each a part
        self._persistent = persistent
        self.lease = self._lease(self.path)
        # Steps that the last look could not read, though nothing says that they are damaged; MAX_STEP if a folder could not be listed.
        self.unread: _Unread = {}
        self.unread_beside: _Unread = {}  # parts and copies in other folders
        self.others: dict[int, int] = {}  # step -> the other number of processes that saved it
        self._root = root
        self._index = index
        self._count = count
        self._durable = durable
        self._leases_of_others: list[Lease] = []
        self._use = _use(root)

    # ------------------------------------------------------------------------------------ look

    def look(self, run: RunFile) -> list[Place]:
        """The readable parts here and beside it, the own ones first; parts of histories that ``run`` has left do not count, and
        those of another number of processes are only noted.
        """
        mine = os.path.basename(self.path)
        found: list[Place] = []
        self.unread, self.unread_beside, self.others = {}, {}, {}
        try:
            beside = self._beside()
        except OSError as error:
            self._note_unread(self.unread, self._root, error)
            beside = []
        others = sorted(beside, key=lambda name: (_numbers(name)[1] != self._count, name))
        for folder in [mine, *others][: 1 + _MOST_FOLDERS]:
            path = f"{self._root}/{folder}"
            unread = self.unread if folder == mine else self.unread_beside
            try:
                for steps in self._steps_in(path):
                    found += self._parts_in(steps, unread, run)
            except OSError as error:
                self._note_unread(unread, path, error)
        return found

    def _note_unread(self, unread: _Unread, path: str, error: OSError) -> None:
        """What lies in a folder is not known; that of another user is not meant for this process."""
        if unread is self.unread or error.errno not in (errno.EACCES, errno.EPERM):
            unread[MAX_STEP] = path, error
        logger.warning("%s cannot be read: %s", path, error)

    def all_unread(self) -> list[Unread]:
        """The steps that the last look could not read, here and beside it."""
        found: list[Unread] = []
        for step, (path, error) in {**self.unread_beside, **self.unread}.items():
            number = error.errno if isinstance(error, OSError) else None
            why = str(error) if path in str(error) else f"{path}: {error}"
            found.append(Unread(step, number or 0, why[:_MOST_TEXT], self._index))
        return found

    def _parts_in(self, steps: Steps, unread: _Unread, run: RunFile) -> Iterator[Place]:
        """The parts in one folder that count; logs the others, and notes those that could not be read."""
        mine = steps is self.own
        alone = Part.own(*_numbers(os.path.basename(steps.directory)))  # one process notes no part
        for step, opened in _opened_in(steps, unread):
            record = opened.record
            part, order = record.part or alone, run.order(step, record.token)
            if order is None or not part.writer < part.count == alone.count:
                continue
            if part.count != self._count:
                self.others[step] = part.count
                continue
            own, continues = mine and contains(part.serves, self._index), record.parent is not None
            seen = Seen(step, record.token, order, part.writer, part.serves, own, continues)
            yield Place(seen, opened.path, opened)

    def _beside(self) -> list[str]:
        """Names of the folders of other processes, also of other numbers of them."""
        mine = os.path.basename(self.path)
        names = self.backend.children(self._root)
        return sorted(name for name in names if _FOLDER.fullmatch(name) and name != mine)

    def _of_other_numbers(self) -> list[str]:
        """Folders beside this one that another number of processes left."""
        names = (name for name in self._beside() if _numbers(name)[1] != self._count)
        return [f"{self._root}/{name}" for name in names]

    def _steps_in(self, folder: str) -> list[Steps]:
        """The parts in a folder, and the copies that it has of others."""
        parts = self.own if folder == self.path else self._steps(folder)
        return [parts, *self._copies_in(folder)]

    def _copies_in(self, folder: str) -> list[Steps]:
        names = sorted(filter(_COPIES.fullmatch, self.backend.children(folder)))
        return [self._steps(f"{folder}/{name}") for name in names]

    def _copies(self) -> list[Steps]:
        """All copies here, also of processes whose partner this one was earlier."""
        if self._count == 1:
            return []
        return [*_if_listed(functools.partial(self._copies_in, self.path), self.path)]

    def _steps(self, folder: str) -> Steps:
        return Steps(folder, True, self.backend, self.own.names)

    # ----------------------------------------------------------------------------------- write

    def _lease(self, folder: str) -> Lease:
        return Lease(folder, self.backend, self._persistent)

    def claim(self) -> None:
        """Claims the folder: the next commit of an older writer there fails. Also claims, until ``close``, folders of other
        numbers of processes with live writers: if one were deleted, its writer would take it for emptied, and continue. If
        they cannot be written, only warns: a restore still works, and the first save will raise the error.
        """
        try:
            self.lease.claim()
            for other in self._of_other_numbers():
                if is_locked(f"{other}/{OWNER_FILE}"):
                    self._leases_of_others.append(self._lease(other))
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

        def may_commit() -> None:
            if self.lease.claimed:
                self.lease.check()

        return Target(self.own.path(step), self.backend, self._durable, may_commit)

    def copy_target(self, source: int, step: int, wanted: Callable[[], None]) -> Target:
        """Where the copy of another process's part goes."""

        def may_commit() -> None:
            wanted()
            self.lease.check()

        path = self._steps(f"{self.path}/{_copies_of(source, self._count)}").path(step)
        return Target(path, self.backend, self._durable, may_commit)

    # ---------------------------------------------------------------------------------- delete

    def clean(self) -> None:
        """Deletes what dead writers left unfinished."""
        for steps in (self.own, *self._copies()):
            with contextlib.suppress(OSError):  # a save there raises the same error
                self.backend.clean(steps.directory)

    def delete(self, unwanted: Callable[[int], bool]) -> None:
        """Deletes the unwanted steps: own parts, copies, and those of other numbers of processes."""
        others = [
            one
            for folder in _if_listed(self._of_other_numbers, self._root)
            for one in _if_listed(functools.partial(self._steps_in, folder), folder)
        ]
        for steps in (self.own, *self._copies(), *others):
            self._delete_in(steps, lambda step, _: unwanted(step))

    def discard(self, step: int) -> None:
        """Deletes this process's part of a step."""
        self._delete_in(self.own, lambda other, _: other == step)

    def retain(self, kept: Collection[int], saved: str, sources: Sequence[int]) -> None:
        """Deletes own parts and copies of other steps than ``kept``, and copies for processes not in ``sources``. What stands
        beside the path ``saved`` of the newest part under another prefix of names goes, too.
        """
        wanted = {f"{self.path}/{_copies_of(source, self._count)}" for source in sources}
        for copies in self._copies():
            if copies.directory in wanted:
                self._delete_in(copies, lambda step, _: step not in kept)
            else:
                with contextlib.suppress(OSError):  # another time
                    self.backend.delete(copies.directory)
        number = self.own.names.parse(os.path.basename(saved))
        stays = {*kept, *self.unread}
        self._delete_in(
            self.own, lambda step, path: step not in stays or (step == number and path != saved)
        )

    def _delete_in(self, steps: Steps, unwanted: Callable[[int, str], bool]) -> None:
        """Deletes the steps in one folder that are unwanted, by number and path; a failure is only logged."""
        try:
            found = sorted(steps.look().names.items())
        except OSError as error:
            _note_undeleted(steps.directory, error)
            return
        for step, names in found:
            for path in (f"{steps.directory}/{name}" for name in names):
                if not unwanted(step, path):
                    continue
                try:
                    self.backend.delete(path)
                except FileNotFoundError:
                    pass  # another process of this host deletes it, too
                except BlockingIOError:
                    logger.info("%s is being read, and stays for now", path)
                except OSError as error:
                    logger.warning("could not delete %s: %s", path, error)

    def discard_leftovers(self, *, of_others: bool) -> None:
        """Deletes the folders that dead processes of this run left beside this one, if others ran on this host before. Live
        ones take part in this save and hold the locks of their owner files. ``of_others``: those of other numbers of
        processes, with steps that count until all have committed a newer one; otherwise those of this number.
        """
        try:
            self._discard_unowned(of_others)  # first: who deletes steps makes a folder look used
            for folder in self._of_other_numbers() if of_others else ():
                for steps in self._steps_in(folder):
                    self._delete_in(steps, lambda _, __: True)
        except OSError as error:
            logger.warning("could not delete leftovers next to %s: %s", self.path, error)

    def _discard_unowned(self, of_others: bool) -> None:
        locks_work = is_locked(f"{self.path}/{OWNER_FILE}")
        for name in self._beside():
            if (_numbers(name)[1] != self._count) != of_others:
                continue
            path = f"{self._root}/{name}"
            if is_abandoned(path, self.backend, locks_work):
                with contextlib.suppress(OSError):  # other processes of this host may delete it too
                    self.backend.delete(path)


def _use(root: str) -> LockFile | None:
    """A lock that shows, before this process claims its own folder, that the run's is in use; see ``ended.remove_run``. None
    if there is no such folder yet, or it is being removed.
    """
    with contextlib.suppress(OSError):
        for _ in range(_USE_TRIES):  # who lists the runs excludes others for a moment
            if (held := lock_folder(root, exclusive=False)) is not None:
                return held
            time.sleep(_USE_PAUSE_SECS)
    return None


def _if_listed(what: Callable[[], Sequence[T]], where: str) -> Sequence[T]:
    """What is found in a folder to be deleted; nothing if it cannot be listed, as one process alone must not raise."""
    try:
        return what()
    except OSError as error:
        _note_undeleted(where, error)
        return ()


def _note_undeleted(where: str, error: OSError) -> None:
    logger.warning("could not delete what is in %s: %s", where, error)


def _opened_in(steps: Steps, unread: _Unread) -> Iterator[tuple[int, NativeCheckpoint]]:
    """The readable checkpoints in one folder, by step; logs the others, and adds to ``unread`` what may be sound."""
    listing = steps.look()

    def note(step: int, name: str, error: CheckpointError | OSError) -> None:
        logger.warning("%s: step %d cannot be read: %s", steps.directory, step, error)
        if is_unread(error):
            unread[step] = f"{steps.directory}/{name}", error

    for step, among in listing.names.items():
        names = list[str]()
        try:
            names = listing.directories(step)
        except OSError as error:
            note(step, among[0], error)
        for name in names:
            try:
                opened = steps.opened(name)
            except CheckpointNotFound:
                continue  # deleted meanwhile
            except (CheckpointError, OSError) as error:
                note(step, name, error)
                continue
            if isinstance(opened, NativeCheckpoint):
                yield step, opened


def _copies_of(index: int, count: int) -> str:
    """The folder, in that of its partner, of copies of the parts of process ``index``."""
    return f"partner-of_{index}-of-{count}"


def _numbers(folder: str) -> tuple[int, int]:
    """Index and number of processes in the name of a folder."""
    _, writer, count = re.split(r"_|-of-(?=\d+$)", folder)
    return int(writer), int(count)


def offered_of(places: Iterable[Place], index: int) -> dict[Key, str]:
    """The paths of parts by their keys; of equal parts the first. A process's own part, if another one wrote it, is also
    offered in the place of that which it lost.
    """
    found: dict[Key, str] = {}
    for place in places:
        found.setdefault(place.key, place.path)
        if place.seen.own:
            found.setdefault(place.key._replace(writer=index), place.path)
    return found
