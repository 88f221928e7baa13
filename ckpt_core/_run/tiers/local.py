"""The local tier: the newest steps in a directory of each process's own, on a fast disk or in memory."""

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
"""In a local directory: the lineage of the steps that lie there."""
_FOLDER = re.compile(r"process_\d+-of-\d+")


def local_root(directory: str | os.PathLike[str]) -> str:
    """The absolute path of a ``local_directory``.

    Raises:
        ValueError: it is no path of this host.
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
        root: directory of this process, or of all processes of a host; see ``local_root``.
        run: of which the steps count; without a name where it has none yet, and hence no steps.
        read_only: nothing is written or removed.
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
        self._marked = True  # what lies there says of which lineage it is
        if not read_only:
            with contextlib.suppress(OSError):  # whoever saves there meets it again
                self._backend.clean(self.directory)
        self.look()

    @property
    def complete(self) -> set[int]:
        """The steps that all processes have, as was agreed on last."""
        return set(self._complete)

    @property
    def foreign(self) -> set[int]:
        """Those of them that an earlier run of this job saved."""
        return set(self._complete) - self._mine

    def claim(self) -> None:
        """Takes this process's directory over: the next commit of an older run in it fails.

        What cannot be written can be restored all the same; the first save then meets the error.
        """
        try:
            if not self._backend.exists(f"{self.directory}/{LINEAGE_FILE}"):
                self._mark()  # empty as yet
            self._fence.take()
        except OSError as error:
            if raised_by_a_handler(error) is not None:
                raise
            logger.warning("%s could not be claimed for this run: %s", self.directory, error)

    def follow(self, run: Run) -> None:
        """Makes the steps count that are of the run's lineage as it is now: others may write to it."""
        if run.lineage:
            self._lineage = run.lineage

    def look(self) -> None:
        """Looks into the directories of all processes, and agrees on the steps that are complete."""
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
        """What lies in the directory of this process: step -> token; what cannot be read is not there."""
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
        """What opens this process's part of a step."""
        return self._steps.opening(step)

    def prepare(self, what: StepToSave, copy: Copy | None) -> Callable[[], None]:
        """Takes the snapshot now, and gives the function that saves it and removes older steps."""
        path = self._steps.new_path(what.step)
        if not self._backend.exists(f"{self.directory}/{OWNER_FILE}"):
            # the directory was emptied, or never was: that is no other writer
            self._fence.close()
            self._fence = Fence(self.directory, self._backend)
            self._marked = False
        if not self._marked:
            self._mark()
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
                self._discard(what.step)  # the rest of a try, or of another past
            # processes replace theirs one by one: between the first and the last it is not whole
            self._complete = {s: old for s, old in self._complete.items() if s != what.step}
            token = save.write_and_commit()
            self._mine.add(what.step)
            if self._is_mine():
                self._retain(what.step, token)

        return save_and_retain

    def _is_mine(self) -> bool:
        """Whether nobody took the directory over: what lies there may be another run's by now."""
        try:
            self._fence.check()
        except (CheckpointError, OSError):
            return False
        return True

    def _retain(self, saved: int, token: str) -> None:
        """Keeps the newest complete steps and this one; all else that this process has there goes."""
        complete = {**self._complete, saved: token}
        newest = sorted(complete)[-self._options.local_max_to_keep :]
        self._complete = {step: complete[step] for step in {*newest, saved}}
        for step in self._steps.all():
            if step not in self._complete:
                self._discard(step)

    def _discard_leftovers(self) -> None:
        """Removes what processes that are gone left beside this one's directory.

        The run may have had more of them, or this host others of them. Those that live are in the
        middle of this save too, and hold their owner files.
        """
        try:
            self._discard_unowned()
        except OSError as error:
            logger.warning("could not tidy up beside %s: %s", self.directory, error)

    def _discard_unowned(self) -> None:
        folder, _, mine = self.directory.rpartition("/")
        locks_work = is_locked(f"{self.directory}/{OWNER_FILE}")
        for name in self._backend.children(folder):
            path = f"{folder}/{name}"
            if name == mine or not _FOLDER.fullmatch(name):
                continue
            if is_abandoned(path, self._backend, locks_work):
                with contextlib.suppress(OSError):  # others of this host do the same
                    self._backend.delete(path)

    def _discard(self, step: int) -> None:
        """Removes this process's part of a step; a failure is reported and not fatal."""
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
        """Removes steps, whole or not, on all processes."""
        for step in {*self._complete, *self._steps.all()}:
            if unwanted(step):
                self._discard(step)
        self._complete = {s: token for s, token in self._complete.items() if not unwanted(s)}

    def goes_on_from(self, persistent: int | None) -> bool:
        """Whether the newest complete step here is the newest of all: every save comes here first."""
        return bool(self._complete) and max(self._complete) >= (persistent or 0)

    def begin_lineage(self, run: Run, up_to: int) -> None:
        """Makes the steps here those of the run's lineage; all processes must call it.

        Args:
            up_to: the newest of the complete steps that stay, if the lineage is a new one.
        """
        if run.lineage == self._lineage:
            return
        left = [step for step in sorted(self._complete) if step > up_to]
        if left:
            logger.warning(
                "%s: training does not go on from %s: removed", self.directory, str(left)[1:-1]
            )
        self._complete = {step: token for step, token in self._complete.items() if step <= up_to}
        for step in self._steps.all():
            if step not in self._complete:
                self._discard(step)
        self._lineage, self._marked = run.lineage, False
        self._mark()

    def _mark(self) -> None:
        """Notes of which lineage the steps in the directory are."""
        self._marked = False
        try:
            self._backend.put(self.directory, LINEAGE_FILE, self._lineage.encode())
            self._marked = True
        except OSError as error:  # the next save tries again: until then nothing here is looked for
            if raised_by_a_handler(error) is not None:
                raise
            logger.warning("could not write %s/%s: %s", self.directory, LINEAGE_FILE, error)

    def restore(
        self, step: int, targets: Mapping[str, Any], request: Any
    ) -> Restored | CheckpointCorrupt:
        """A step restored from the local directories; the damage, where all agree to leave it.

        Raises:
            StructureMismatch: the targets do not fit; and whatever else is no matter of the disk.
        """
        try:
            return _load.restore_checkpoint(self._steps.opening(step), targets, request, step)
        except (BarrierTimeout, NotTogether):
            raise  # nobody would come to agree on anything more
        except Exception as error:
            if self._processes.count == 1 and raised_by_a_handler(error) is not None:
                raise
            # one of all failed, and so did all: here they go on to another copy, or all raise
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
        """Lets the directory go."""
        self._fence.close()
