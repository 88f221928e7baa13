"""The local tier: each process keeps the newest steps in its own directory, on disk or tmpfs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_core import _load
from ckpt_core._devices.staging import Copy
from ckpt_core._directory import PosixBackend, is_locked, refuse_file, resolve
from ckpt_core._directory.step_names import StepNames
from ckpt_core._errors import (
    BarrierTimeout,
    CheckpointCorrupt,
    CheckpointError,
    raised_by_a_handler,
)
from ckpt_core._events import logger
from ckpt_core._load.checkpoint import NativeCheckpoint
from ckpt_core._options import Options
from ckpt_core._processes import NotTogether, Processes, next_tag
from ckpt_core._results import Restored
from ckpt_core._run.fence import OWNER_FILE, Fence, is_abandoned
from ckpt_core._run.in_flight import InFlight
from ckpt_core._run.steps import Steps
from ckpt_core._run.tiers.agreement import (
    dump_steps,
    judge_failure,
    judge_steps,
    parse_complete,
    vote,
)
from ckpt_core._run.tiers.lineage import Run
from ckpt_core._run.tiers.save import LocalSave, StepToSave
from ckpt_core._save import SaveJob

LINEAGE_FILE = ".ckpt-lineage"
"""File in a local directory with the lineage of the steps there."""
_FOLDER = re.compile(r"process_\d+-of-\d+")


def local_root(directory: str | os.PathLike[str]) -> str:
    """The absolute path of a ``local_directory``.

    Raises:
        ValueError: it is a URL and not a path on this host.
        NotADirectoryError: it is a file.
    """
    root, local = resolve(directory)
    if not local:
        raise ValueError(f"local_directory must be on a file system of this host, got {root}")
    refuse_file(root)
    return root


class LocalTier:
    """The steps of one run in local directories; all processes make the same calls.

    Args:
        root: ``local_directory`` of this process, possibly shared with others; see ``local_root``.
        run: the run whose steps count; if its name is empty, there are no local steps yet.
        names: names of step directories.
        processes: the processes of this run.
        options: options of the Checkpointer.
        read_only: nothing is written or deleted.
    """

    def __init__(
        self,
        root: str,
        run: Run,
        names: StepNames,
        processes: Processes,
        options: Options,
        read_only: bool,
    ) -> None:
        self.directory = (
            f"{root}/{run.name or 'none'}/process_{processes.index}-of-{processes.count}"
        )
        self.in_flight = InFlight(self.directory)
        self._backend = PosixBackend()
        self._steps = Steps(self.directory, self._backend, names)
        self._processes = processes
        self._options = options
        self._fence = Fence(self.directory, self._backend)
        self._complete: dict[int, str] = {}
        self._mine: set[int] = set()
        self._lineage = run.lineage
        self._lineage_is_written = (
            True  # False: the lineage file must be written before the next save
        )
        if not read_only:
            with contextlib.suppress(OSError):  # a save there raises the same error
                self._backend.clean(self.directory)
        self.look()

    @property
    def complete(self) -> set[int]:
        """The steps that all processes have, as of their last agreement."""
        return set(self._complete)

    @property
    def from_earlier_run(self) -> set[int]:
        """The complete steps that an earlier process of this run saved, not this object."""
        return set(self._complete) - self._mine

    def claim(self) -> None:
        """Claims this process's directory: the next commit of an older writer there fails.

        If the directory cannot be written, only warns: a restore still works, and the first save
        will raise the error.
        """
        try:
            if not self._backend.exists(f"{self.directory}/{LINEAGE_FILE}"):
                self._write_lineage()  # no step was saved there yet
            self._fence.take()
        except OSError as error:
            if raised_by_a_handler(error) is not None:
                raise
            logger.warning("%s could not be claimed for this run: %s", self.directory, error)

    def follow(self, run: Run) -> None:
        """Takes over the run's current lineage, which another writer may have changed."""
        if run.lineage:
            self._lineage = run.lineage

    def look(self) -> None:
        """Lists the local steps of each process; all agree on those that every process has."""
        mine = dump_steps(self._tokens())
        answer = self._processes.gather_decide(
            next_tag(),
            mine,
            judge_steps,
            self._options.timeout_secs,
            "look at the local steps",
        )
        found = parse_complete(answer)
        for step, absent in sorted(found.partial.items()):
            logger.warning(
                "step %d is not whole in the local directories (processes %s do not have it, or "
                "another one of that number), so it is not restored from them",
                step,
                absent,
            )
        self._complete = found.steps

    def _tokens(self) -> dict[int, str]:
        """Step -> token, for the readable steps of this process; logs the unreadable ones."""
        found: dict[int, str] = {}
        try:
            lineage = self._backend.read(self.directory, LINEAGE_FILE) or b""
            steps = self._steps.all() if lineage == self._lineage.encode() else []
        except OSError as error:
            if raised_by_a_handler(error) is not None:
                raise
            logger.warning("%s cannot be read: %s", self.directory, error)
            return found
        for step in steps:
            try:
                opened = self._steps.open(step)
            except (CheckpointError, OSError) as error:
                if raised_by_a_handler(error) is not None:
                    raise
                logger.warning("%s: step %d cannot be read: %s", self.directory, step, error)
                continue
            if isinstance(opened, NativeCheckpoint):
                found[step] = opened.record.token
        return found

    def opening(self, step: int) -> _load.Opening:
        """A function that opens this process's part of a step."""
        return self._steps.opening(step)

    def prepare(self, what: StepToSave, copy: Copy | None) -> Callable[[], None]:
        """Takes the snapshot; returns the function that commits it and deletes old steps."""
        path = self._steps.new_path(what.step)
        if not self._backend.exists(f"{self.directory}/{OWNER_FILE}"):
            # The directory is new or was emptied; no other writer has claimed it. Claim it again.
            self._fence.close()
            self._fence = Fence(self.directory, self._backend)
            self._lineage_is_written = False
        if not self._lineage_is_written:
            self._write_lineage()
        job = SaveJob(
            path,
            True,
            self._backend,
            what.fields,
            self._options,
            self._processes,
            overwrite=True,
            own=True,
            step=what.step,
            copy=copy,
        )
        save = LocalSave(job, self._fence, self._discard_leftovers)
        save.take_snapshot(what.items)

        def save_and_retain() -> None:
            if what.step not in self._complete and self._is_mine():
                self._discard(what.step)  # left by a failed save, or of another lineage
            # The processes replace their parts at different moments: meanwhile the step is
            # incomplete.
            self._complete = {s: old for s, old in self._complete.items() if s != what.step}
            token = save.write_and_commit()
            self._mine.add(what.step)
            if self._is_mine():
                self._retain(what.step, token)

        return save_and_retain

    def _is_mine(self) -> bool:
        """Whether this writer still owns the directory; if not, its steps may be another run's."""
        try:
            self._fence.check()
        except (CheckpointError, OSError):
            return False
        return True

    def _retain(self, saved: int, token: str) -> None:
        """Keeps the newest complete steps and ``saved``; deletes this process's other steps."""
        complete = {**self._complete, saved: token}
        newest = sorted(complete)[-self._options.local_max_to_keep :]
        self._complete = {step: complete[step] for step in {*newest, saved}}
        for step in self._steps.all():
            if step not in self._complete:
                self._discard(step)

    def _discard_leftovers(self) -> None:
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
            if name == mine or not _FOLDER.fullmatch(name):
                continue
            if is_abandoned(path, self._backend, locks_work):
                with contextlib.suppress(OSError):  # other processes of this host may delete it too
                    self._backend.delete(path)

    def _discard(self, step: int) -> None:
        """Deletes this process's part of a step; a failure is only logged."""
        path = self._steps.path(step)
        if not self._backend.exists(path):
            return
        try:
            self._backend.delete(path)
        except BlockingIOError:
            logger.info("%s is being read, and stays for now", path)
        except OSError as error:
            logger.warning("could not delete %s: %s", path, error)

    def delete_where(self, unwanted: Callable[[int], bool]) -> None:
        """Deletes this process's part of the unwanted steps, complete or not; all must call it."""
        for step in {*self._complete, *self._steps.all()}:
            if unwanted(step):
                self._discard(step)
        self._complete = {s: token for s, token in self._complete.items() if not unwanted(s)}

    def goes_on_from(self, persistent: int | None) -> bool:
        """Whether the newest complete local step is at least as new as the persistent one.

        Every save goes to the local tier first, so otherwise local steps were lost.

        Args:
            persistent: newest step of the persistent directory, or None.
        """
        return bool(self._complete) and max(self._complete) >= (persistent or 0)

    def begin_lineage(self, run: Run, up_to: int) -> None:
        """Takes over the run's lineage; all processes must call it.

        Args:
            run: the run, possibly with a new lineage.
            up_to: if the lineage is new, complete steps up to this one stay and all others are
                deleted.
        """
        if run.lineage == self._lineage:
            return
        left = [step for step in sorted(self._complete) if step > up_to]
        if left:
            logger.warning(
                "%s: deleted steps %s: training does not continue from them",
                self.directory,
                str(left)[1:-1],
            )
        self._complete = {step: token for step, token in self._complete.items() if step <= up_to}
        for step in self._steps.all():
            if step not in self._complete:
                self._discard(step)
        self._lineage, self._lineage_is_written = run.lineage, False
        self._write_lineage()

    def _write_lineage(self) -> None:
        """Writes the lineage file."""
        self._lineage_is_written = False
        try:
            self._backend.put(self.directory, LINEAGE_FILE, self._lineage.encode())
            self._lineage_is_written = True
        except OSError as error:  # the next save tries again; until then restores skip it
            if raised_by_a_handler(error) is not None:
                raise
            logger.warning("could not write %s/%s: %s", self.directory, LINEAGE_FILE, error)

    def restore(
        self, step: int, targets: Mapping[str, Any], request: Any
    ) -> Restored | CheckpointCorrupt:
        """Restores a step from the local directories; all processes must call it.

        Returns the error instead if the local copy is damaged and all agreed to try another copy.

        Raises:
            StructureMismatch: the targets do not match the checkpoint.
            Exception: any other error that is not caused by the local files.
        """
        try:
            return _load.restore_checkpoint(self._steps.opening(step), targets, request, step)
        except (BarrierTimeout, NotTogether):
            raise  # the other processes would not take part in another agreement
        except Exception as error:
            if self._processes.count == 1 and raised_by_a_handler(error) is not None:
                raise
            # If one process fails, all fail: agree to try another copy, or to raise.
            mine = vote(error, self._backend.exists(self._steps.path(step)))
            verdict = self._processes.gather_decide(
                next_tag(),
                mine,
                judge_failure,
                self._options.timeout_secs,
                "give up a local step",
            )
            if verdict != "leave":
                raise
            self._complete.pop(step, None)
            logger.warning("step %d is not restored from local directories: %s", step, error)
            return self._damage(step, error)

    def _damage(self, step: int, error: Exception) -> CheckpointCorrupt:
        hint = ""
        if self._processes.count > 1:
            hint = (
                " (from local directories each process restores what its own devices held at the save: "
                "other shardings need a step of the persistent directory)"
            )
        named = error if isinstance(error, CheckpointCorrupt) else None
        damage = CheckpointCorrupt(
            f"{self.directory}: step {step}: {error}{hint}",
            file=named and named.file,
            leaf=named and named.leaf,
        )
        damage.__cause__ = error
        return damage

    def close(self) -> None:
        """Releases the claim on the directory."""
        self._fence.close()
