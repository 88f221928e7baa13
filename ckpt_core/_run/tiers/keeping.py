"""What stays in a process's local directory, and what is deleted: its own parts and its copies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence

from ckpt_core._directory import PosixBackend, is_locked
from ckpt_core._directory.step_names import StepNames
from ckpt_core._errors import raised_by_a_handler
from ckpt_core._events import logger
from ckpt_core._run.fence import OWNER_FILE, is_abandoned
from ckpt_core._run.steps import Steps
from ckpt_core._run.tiers.places import COPIES, FOLDER, LINEAGE_FILE, copies_folder


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
        for step in steps.all():
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

    def discard(self, steps: Steps, step: int) -> None:
        """Deletes a step in one folder; a failure is only logged."""
        path = steps.path(step)
        if not self._backend.exists(path):
            return
        try:
            self._backend.delete(path)
        except BlockingIOError:
            logger.info("%s is being read, and stays for now", path)
        except OSError as error:
            logger.warning("could not delete %s: %s", path, error)

    @property
    def lineage(self) -> str:
        """The lineage of the steps in the directory; empty if it has none yet."""
        return (self._backend.read(self.directory, LINEAGE_FILE) or b"").decode(errors="replace")

    def write_lineage(self, lineage: str) -> bool:
        """Writes the lineage file; whether it succeeded."""
        try:
            self._backend.put(self.directory, LINEAGE_FILE, lineage.encode())
            return True
        except OSError as error:  # the next save tries again; until then restores skip it
            if raised_by_a_handler(error) is not None:
                raise
            logger.warning("could not write %s/%s: %s", self.directory, LINEAGE_FILE, error)
            return False

    def discard_leftovers(self) -> None:
        """Deletes the directories that dead processes of this run left next to this one's.

        There are such if the run had more processes before, or if other ones ran on this host. Live
        processes take part in this save and hold the locks of their owner files.
        """
        try:
            self._discard_unowned()
        except OSError as error:
            logger.warning("could not delete leftovers next to %s: %s", self.directory, error)

    def _discard_unowned(self) -> None:
        folder, _, mine = self.directory.rpartition("/")
        locks_work = is_locked(f"{self.directory}/{OWNER_FILE}")
        for name in self._backend.children(folder):
            path = f"{folder}/{name}"
            if name == mine or not FOLDER.fullmatch(name):
                continue
            if is_abandoned(path, self._backend, locks_work):
                with contextlib.suppress(OSError):  # other processes of this host may delete it too
                    self._backend.delete(path)
