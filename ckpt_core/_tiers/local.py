"""The local tier: the newest steps in a directory of each process's own, on a fast disk or in memory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ckpt_core import _load
from ckpt_core._directory import Form, LocalForm, refuse_file, resolve
from ckpt_core._directory.locks import is_locked
from ckpt_core._errors import BarrierTimeout, CheckpointCorrupt, CheckpointError
from ckpt_core._events import logger
from ckpt_core._fence import OWNER_FILE, Fence
from ckpt_core._inflight import InFlight
from ckpt_core._options import Options
from ckpt_core._policies.names import StepNames
from ckpt_core._processes import Processes, decided_by_first, next_round
from ckpt_core._results import Restored
from ckpt_core._staging import Copy
from ckpt_core._steps import Steps
from ckpt_core._tiers.agreement import (
    dump_steps,
    judge_failure,
    judge_steps,
    opinion,
    parse_complete,
)
from ckpt_core._tiers.save import StepToSave, prepare_local

RUN_FILE = ".ckpt-run"
"""In the persistent directory: the name of the run, and its lineage."""
LINEAGE_FILE = ".ckpt-lineage"
"""In a local directory: the lineage of the steps that lie there."""
_FOLDER = re.compile(r"process_\d+-of-\d+")


class Run(NamedTuple):
    """Which steps in local directories count.

    Attributes:
        name: of the run, and of its folders in local directories; empty where it has none yet.
        lineage: changes when training goes on from elsewhere than the newest local step.
    """

    name: str
    lineage: str


def find_run(form: Form, directory: str, processes: Processes, options: Options, make: bool) -> Run:
    """The run whose persistent directory this is, as process 0 reads or makes it.

    A local directory outlives the run. Its steps are found again by the run's name alone, so what
    another run left there is never resumed from: not one whose persistent directory was removed to
    start anew, nor one of which this directory is a copy.

    Args:
        make: give the run a name if it has none; else an empty one is given.
    """
    return _told_by_first(
        directory, processes, options, lambda: _read_or_make(form, directory, make)
    )


def next_lineage(
    form: Form,
    directory: str,
    processes: Processes,
    options: Options,
    goes_on: Callable[[], bool],
) -> Run:
    """The run before its first local save, as process 0 decides: with a new lineage where it must be.

    A host that was away keeps local steps of a past that the others have left: its steps lie there
    under the old lineage, and nobody looks for that any more.

    Args:
        goes_on: asked on process 0: whether training goes on from the newest complete local step.
    """

    def decide() -> Run:
        run = _read_or_make(form, directory, make=True)
        return run if goes_on() else _write(form, directory, run.name)

    return _told_by_first(directory, processes, options, decide)


def _told_by_first(
    directory: str, processes: Processes, options: Options, find: Callable[[], Run]
) -> Run:
    run, error = Run("", ""), ""
    if processes.index == 0:
        try:
            run = find()
        except (OSError, CheckpointError) as caught:
            if processes.count == 1:
                raise
            error = f"{type(caught).__name__}: {caught}"
    told = decided_by_first(
        processes, f"{next_round()}/run", "\n".join((*run, error)), options.timeout_secs
    )
    name, lineage, error = told.split("\n", 2)
    if error:
        raise CheckpointError(f"{directory}: process 0 cannot read or write {RUN_FILE}: {error}")
    return Run(name, lineage)


def _read_or_make(form: Form, directory: str, make: bool) -> Run:
    text = (form.read(directory, RUN_FILE) or b"").decode(errors="replace")
    found = re.fullmatch(r"(run-[0-9a-f]{16})\n([0-9a-f]{16})\n", text)
    if found is None:
        return _write(form, directory, "") if make else Run("", "")
    return Run(_placed(found[1], directory), found[2])


def _write(form: Form, directory: str, placed: str) -> Run:
    """A new lineage of a run, or of a new one."""
    name = placed.rpartition("-")[0] or f"run-{secrets.token_hex(8)}"
    lineage = secrets.token_hex(8)
    form.put(directory, RUN_FILE, f"{name}\n{lineage}\n".encode())
    return Run(_placed(name, directory), lineage)


def _placed(name: str, directory: str) -> str:
    """The name of the run together with the place of its directory: a copy is another run."""
    where = hashlib.sha256(directory.encode(errors="surrogateescape")).hexdigest()
    return f"{name}-{where[:8]}"


class LocalTier:
    """The steps of one run in local directories; all processes make the same calls.

    Args:
        directory: of this process, or of all processes of a host.
        run: of which the steps count; without a name where it has none yet, and hence no steps.
        read_only: nothing is written or removed.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        run: Run,
        names: StepNames,
        processes: Processes,
        options: Options,
        read_only: bool,
    ) -> None:
        root, local = resolve(directory)
        if not local:
            raise ValueError(f"local_directory must be on a file system of this host, got {root}")
        refuse_file(root)
        self.directory = (
            f"{root}/{run.name or 'none'}/process_{processes.index}-of-{processes.count}"
        )
        self.in_flight = InFlight(self.directory)
        self._form = LocalForm()
        self._steps = Steps(self.directory, self._form, names)
        self._processes = processes
        self._options = options
        self._fence = Fence(self.directory, self._form)
        self._complete: dict[int, str] = {}
        self._mine: set[int] = set()
        self._lineage = run.lineage
        if not read_only:
            with contextlib.suppress(OSError):  # whoever saves there meets it again
                self._form.clean(self.directory)
        self.look()

    @property
    def complete(self) -> set[int]:
        """The steps that all processes have, as was agreed on last."""
        return set(self._complete)

    @property
    def foreign(self) -> set[int]:
        """Those of them that an earlier run of this job saved."""
        return set(self._complete) - self._mine

    def look(self) -> None:
        """Looks into the directories of all processes, and agrees on the steps that are complete."""
        mine = dump_steps(self._tokens())
        answer = self._processes.agree(
            f"{next_round()}/look", mine, judge_steps, self._options.timeout_secs
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
            lineage = self._form.read(self.directory, LINEAGE_FILE) or b""
            steps = self._steps.all() if lineage == self._lineage.encode() else []
        except OSError as error:
            logger.warning("%s cannot be read: %s", self.directory, error)
            return found
        for step in steps:
            try:
                opened = self._steps.open(step)
            except (CheckpointError, OSError) as error:
                logger.warning("%s: step %d cannot be read: %s", self.directory, step, error)
                continue
            if opened.record is not None:
                found[step] = opened.record.token
        return found

    def opening(self, step: int) -> _load.Opening:
        """What opens this process's part of a step."""
        return self._steps.opening(step)

    def prepare(self, what: StepToSave, copy: Copy | None) -> Callable[[], None]:
        """Takes the snapshot now, and gives the function that saves it and removes older steps."""
        path = self._steps.new_path(what.step)
        if not self._form.exists(f"{self.directory}/{OWNER_FILE}"):
            # the directory was emptied, or never was: that is no other writer
            self._fence.close()
            self._fence = Fence(self.directory, self._form)
            self._mark()
        save = prepare_local(
            self._form,
            path,
            what,
            self._processes,
            self._options,
            self._fence,
            copy,
            self._discard_leftovers,
        )

        def save_and_retain() -> None:
            if what.step not in self._complete:
                self._discard(what.step)  # the rest of a try, or of another past
            # processes replace theirs one by one: between the first and the last it is not whole
            self._complete = {s: old for s, old in self._complete.items() if s != what.step}
            token = save()
            self._mine.add(what.step)
            self._retain(what.step, token)

        return save_and_retain

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
        if not is_locked(f"{self.directory}/{OWNER_FILE}"):
            return  # a file system without locks tells nothing
        for name in self._form.children(folder):
            path = f"{folder}/{name}"
            if name != mine and _FOLDER.fullmatch(name) and not is_locked(f"{path}/{OWNER_FILE}"):
                with contextlib.suppress(OSError):  # others of this host do the same
                    self._form.delete(path)

    def _discard(self, step: int) -> None:
        """Removes this process's part of a step; a failure is reported and not fatal."""
        path = self._steps.path(step)
        if not self._form.exists(path):
            return
        try:
            self._form.delete(path)
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

    def begin_lineage(self, run: Run, *, keep: bool) -> None:
        """Makes the steps here those of the run's lineage; all processes must call it.

        Args:
            keep: whether the complete ones stay, if the lineage is a new one. All else goes.
        """
        if run.lineage == self._lineage:
            return
        if not keep:
            self._complete = {}
        for step in self._steps.all():
            if step not in self._complete:
                self._discard(step)
        self._lineage = run.lineage
        self._mark()

    def _mark(self) -> None:
        """Notes of which lineage the steps in the directory are."""
        try:
            self._form.put(self.directory, LINEAGE_FILE, self._lineage.encode())
        except OSError as error:  # what is saved here will not be looked for, which is safe
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
        except BarrierTimeout:
            raise
        except Exception as error:
            # one of all failed, and so did all: here they go on to another copy, or all raise
            mine = opinion(error, self._form.exists(self._steps.path(step)))
            verdict = self._processes.agree(
                f"{next_round()}/leave", mine, judge_failure, self._options.timeout_secs
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
