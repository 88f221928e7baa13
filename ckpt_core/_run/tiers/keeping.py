"""What stays in a process's local directory, and what is deleted: its own parts and its copies.

Also the folders that another number of processes left beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence

from ckpt_core._directory import PosixBackend, is_locked
from ckpt_core._directory.step_names import StepNames
from ckpt_core._events import logger
from ckpt_core._run.lease import OWNER_FILE, Lease, is_abandoned
from ckpt_core._run.steps import Steps
from ckpt_core._run.tiers.places import COPIES, FOLDER, copies_folder, count_of


class Keeping:
    """Deletes in one process's local directory.

    Args:
        directory: of the process.
        backend: of the directory.
        names: names of step directories.
        count: number of processes.
    """

    def __init__(self, directory: str, backend: PosixBackend, names: StepNames, count: int) -> None:
        self.directory = directory
        self._backend = backend
        self._names = names
        self._count = count
        self._claims: list[Lease] = []

    def steps_of_copies(self, source: int) -> Steps:
        """The copies of the parts of another process."""
        path = f"{self.directory}/{copies_folder(source, self._count)}"
        return Steps(path, self._backend, self._names)

    def _copies(self) -> list[Steps]:
        """All copies, also of processes whose partner this one was earlier."""
        if self._count == 1:
            return []
        names = filter(COPIES.fullmatch, self._backend.children(self.directory))
        return [
            Steps(f"{self.directory}/{name}", self._backend, self._names) for name in sorted(names)
        ]

    def clean(self) -> None:
        """Deletes what dead writers left unfinished."""
        for directory in (self.directory, *(copies.directory for copies in self._copies())):
            with contextlib.suppress(OSError):  # a save there raises the same error
                self._backend.clean(directory)

    def delete_where(self, steps: Steps, unwanted: Callable[[int], bool]) -> None:
        """Deletes the unwanted ones of the steps in one folder."""
        for step in sorted(steps.look().names):
            if unwanted(step):
                self.discard(steps, step)

    def delete_copies(self, unwanted: Callable[[int], bool]) -> None:
        """Deletes the copies of the unwanted steps."""
        for copies in self._copies():
            self.delete_where(copies, unwanted)

    def retain_copies(self, kept: Collection[int], sources: Sequence[int]) -> None:
        """Deletes the copies of other steps, and folders of processes that are not among the sources."""
        wanted = {copies_folder(source, self._count) for source in sources}
        for copies in self._copies():
            if copies.directory.rpartition("/")[2] in wanted:
                self.delete_where(copies, lambda step: step not in kept)
            else:
                with contextlib.suppress(OSError):  # another time
                    self._backend.delete(copies.directory)

    def discard(self, steps: Steps, step: int, but: str = "") -> None:
        """Deletes a step in one folder, but not at the path ``but``; a failure is only logged."""
        for name in steps.look().names.get(step, ()):
            path = f"{steps.directory}/{name}"
            if path == but:
                continue
            try:
                self._backend.delete(path)
            except FileNotFoundError:
                pass  # another process of this host deletes it, too
            except BlockingIOError:
                logger.info("%s is being read, and stays for now", path)
            except OSError as error:
                logger.warning("could not delete %s: %s", path, error)

    def _others(self) -> list[str]:
        """Folders beside this one that another number of processes left."""
        root = self.directory.rpartition("/")[0]
        names = (name for name in self._backend.children(root) if FOLDER.fullmatch(name))
        return [f"{root}/{name}" for name in names if count_of(name) != self._count]

    def _delete_in(self, folder: str, unwanted: Callable[[int], bool]) -> None:
        names = ["", *filter(COPIES.fullmatch, self._backend.children(folder))]
        for name in names:
            steps = Steps(f"{folder}/{name}".rstrip("/"), self._backend, self._names)
            self.delete_where(steps, unwanted)

    def delete_in_others(self, unwanted: Callable[[int], bool]) -> None:
        """Deletes the unwanted steps of other numbers of processes."""
        for other in self._others():
            self._delete_in(other, unwanted)

    def claim_others(self) -> None:
        """Claims the folders of other numbers of processes from writers that still live.

        Until ``close``: if such a folder were deleted, its writer would take it for emptied, and go on.
        """
        for other in self._others():
            if is_locked(f"{other}/{OWNER_FILE}"):
                self._claims.append(Lease(other, self._backend))
                self._claims[-1].take()

    def close(self) -> None:
        """Releases the claims."""
        for claim in self._claims:
            claim.close()

    def discard_leftovers(self, *, of_others: bool) -> None:
        """Deletes the directories that dead processes of this run left next to this one's.

        There are such if other processes ran on this host before. Live ones take part in this save and
        hold the locks of their owner files.

        Args:
            of_others: delete those of other numbers of processes, whose steps count until all have
                committed a newer one; otherwise those of this number.
        """
        try:
            self._discard_unowned(of_others)  # first: who deletes steps makes a folder look used
            if of_others:
                self.delete_in_others(lambda _: True)
        except OSError as error:
            logger.warning("could not delete leftovers next to %s: %s", self.directory, error)

    def _discard_unowned(self, of_others: bool) -> None:
        folder, _, mine = self.directory.rpartition("/")
        locks_work = is_locked(f"{self.directory}/{OWNER_FILE}")
        for name in self._backend.children(folder):
            path = f"{folder}/{name}"
            if name == mine or not FOLDER.fullmatch(name):
                continue
            if (count_of(name) != self._count) != of_others:
                continue
            if is_abandoned(path, self._backend, locks_work):
                with contextlib.suppress(OSError):  # other processes of this host may delete it too
                    self._backend.delete(path)
