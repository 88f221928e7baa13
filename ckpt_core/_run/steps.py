"""A directory of steps: their numbers, names and metadata, and waiting for new ones."""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
import operator
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_core import _processes
from ckpt_core._directory import (
    Backend,
    StepNames,
    deleting,
    kind_at,
    make_secret,
    reading,
    refuse_lost_link,
    resolve,
)
from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    NewerFormat,
)
from ckpt_core._format import orbax_files
from ckpt_core._format.record import RECORD_FILE, Record, load_record
from ckpt_core._format.untrusted import SHORT_BYTES
from ckpt_core._options import Options
from ckpt_core._processes import Processes, Round
from ckpt_core._run import history
from ckpt_core._run.history import Identity, Saved
from ckpt_core._run.policies import keep
from ckpt_core._run.run_file import MOST_BYTES, RUN_FILE, RunFile, parse_run_file
from ckpt_core._saved import Checkpoint, NativeCheckpoint, open_in, refuse_file_for_steps
from ckpt_core._storage import backend_of

SAVE_NOW_FILE = ".ckpt-save-now"
"""A request to save now, beside the steps; see ``SaveNow``."""
_LOOK_SECS = 1.0  # interval at which a directory is listed while somebody waits for a new step
_ANCESTORS, _LEAVES = 64, 10_000
"""A restore reads at most so many records of steps before the restored one, or those of so many leaves."""
_DEFAULTS = Options()
_LOOKS = 3  # a directory that two renames replace just now may be in none of two looks


def refuse_no_directory(directory: str, local: bool) -> None:
    """Raises CheckpointNotFound if nothing is there that could hold steps; a bucket always could."""
    if local and kind_at(directory) != "directory":
        refuse_lost_link(directory)
        is_file = kind_at(directory, follow=False)
        what = "a file, not a directory" if is_file else "no such directory"
        raise CheckpointNotFound(f"{directory}: {what}")


def refuse_one_checkpoint(backend: Backend, directory: str, local: bool) -> None:
    """Raises CheckpointExists if ``directory`` is itself a checkpoint (ours or Orbax's), not a directory of steps."""
    for name in (RECORD_FILE, orbax_files.STEP_METADATA, orbax_files.ITEM_METADATA):
        path, found = f"{directory}/{name}", False
        with contextlib.suppress(OSError, CheckpointError):  # a later read or write raises the same
            found = backend.exists(path) if local else backend.read(directory, name) is not None
        if found:
            parent = directory.rpartition("/")[0]
            raise CheckpointExists(
                f"{directory} is one checkpoint (it has {name}), not a directory of them, and steps would be "
                f"written into it: make the Checkpointer on {parent or '/'} if this is one of its steps, or "
                "load it with ckpt.load or ckpt.restore"
            )


@dataclass(frozen=True)
class Listing:
    """What one look at a directory of steps found; of an object store, also what is in each of them."""

    # Step -> names of directories that parse to it, the name that we would write first.
    names: Mapping[int, list[str]]
    # Whether the directory of this name has a committed checkpoint.
    is_checkpoint: Callable[[str], bool]
    # What the record in the directory of this name says of its save.
    saved: Callable[[str], Saved]
    run: RunFile  # the steps that it names as being removed are not among the names

    def directories(self, step: int) -> list[str]:
        """Names of the directories with a committed step of this number; the newest one first, which counts."""
        found = [name for name in self.names.get(step, ()) if self.is_checkpoint(name)]
        if len(found) < 2:
            return found
        return sorted(found, key=lambda name: self.saved(name).created_unix_secs, reverse=True)

    def token(self, step: int) -> str | None:
        """Token of the save of this number that counts, empty if Orbax wrote it; None if there is none."""
        names = self.directories(step)
        return self.saved(names[0]).token if names else None

    def has(self, step: int) -> bool:
        """Whether a step of this number is committed, under any of its possible names."""
        return any(map(self.is_checkpoint, self.names.get(step, ())))

    def latest(self) -> int | None:
        """The newest committed step, or None; usually the first one that it looks at."""
        return next(filter(self.has, sorted(self.names, reverse=True)), None)

    def committed(self) -> list[int]:
        """The committed steps, ascending; looks into each one."""
        return sorted(filter(self.has, self.names))


@dataclass(frozen=True)
class Steps:
    """The committed steps below a directory; every call lists the directory again."""

    directory: str  # absolute, or a URL
    local: bool  # in a file system, which can rename
    backend: Backend
    names: StepNames
    options: Options = _DEFAULTS

    def look(self) -> Listing:
        """Lists the directory."""
        found: dict[int, list[str]] = {}
        inside = self.backend.look(self.directory)
        run = self.run_file() if RUN_FILE in inside.hidden else RunFile()
        removals = [one for one in run.removals if one.name in inside.children]
        gone = {one.name for one in removals if one.token == self.saved(one.name).token}
        for name in inside.children:
            step = self.names.parse(name)
            if step is None or name in gone:
                continue
            names = found.setdefault(step, [])
            names.insert(0 if name == self.names.name(step) else len(names), name)
        return Listing(found, inside.is_checkpoint, self.saved, run)

    def run_file(self) -> RunFile:
        """Which saves of the run count."""
        data = self.backend.read(self.directory, RUN_FILE, MOST_BYTES)
        return parse_run_file(data, self.directory)

    def saved(self, name: str) -> Saved:
        """What the record in a directory of this name says of its save."""
        try:
            data = self.backend.read(f"{self.directory}/{name}", RECORD_FILE)
            return Saved("") if data is None else saved_by(load_record(data))
        except CheckpointCorrupt:
            return Saved("?")

    def saves(self) -> history.Saves:
        """What is known of each committed step; reads every record."""
        listing, found = self.look(), dict[int, Saved]()
        for step in listing.committed():
            for name in listing.directories(step)[:1]:
                found[step] = Saved("?")
                with contextlib.suppress(NewerFormat, PermissionError):
                    found[step] = self.saved(name)
        return found

    def strays(self) -> dict[int, int]:
        """See ``history.strays``."""
        return history.strays(self.saves())

    def left_by(self, source: Steps) -> list[int]:
        """The steps of a copy that are not of the history of what it was copied from."""
        return history.strays_of_copy(source.saves(), self.saves())

    def not_continued(
        self, step: int, record: Record, listing: Listing, local: history.Saves
    ) -> int | None:
        """What ``history.strays`` gives for this step, from its nearest ancestors and what lies between."""
        leaves = sum(len(item.paths) for item in record.items.values())
        saves = {one: save for one, save in local.items() if one < step}
        saves[step] = saved_by(record)
        numbers, at = sorted(listing.names), step
        for _ in range(min(_ANCESTORS, 1 + _LEAVES // (1 + leaves)) if self.local else 1):
            if at not in saves or (parent := saves[at].parent) is None:
                break
            first, last = (bisect.bisect_left(numbers, one) for one in (parent.step, at))
            for one in numbers[first:last]:
                for name in listing.directories(one)[:1]:
                    with contextlib.suppress(OSError, NewerFormat):
                        saves[one] = self.saved(name)
            at = parent.step
        return history.strays(saves).get(step)

    def all(self) -> list[int]:
        """Every committed step, ascending."""
        return self.look().committed()

    def latest(self) -> int | None:
        """The newest committed step, or None."""
        return self.look().latest()

    def new_path(self, step: int) -> str:
        """The path to which a new step of this number is written."""
        return f"{self.directory}/{self.names.name(step)}"

    def path(self, step: int, listing: Listing | None = None) -> str:
        """Path of an existing step, whatever its directory name; else where a new one would be."""
        found = (listing or self.look()).directories(step)
        return f"{self.directory}/{found[0] if found else self.names.name(step)}"

    def open(
        self, step: int, listing: Listing | None = None, beside: Collection[int] = ()
    ) -> Checkpoint:
        """A step with its metadata read; CheckpointNotFound lists up to 10 that exist, here and ``beside`` in another tier."""
        for _ in range(_LOOKS if self.local else 1):
            found = (listing or self.look()).directories(step)
            listing = None
            if found:
                with contextlib.suppress(CheckpointNotFound):  # deleted meanwhile, or replaced
                    return self.opened(found[0])
        if self.local:
            refuse_lost_link(self.path(step))
        raise self._absent(step, beside)

    def opened(self, name: str) -> Checkpoint:
        """The step in a directory of this name, with its metadata read."""
        return open_in(self.backend, f"{self.directory}/{name}", self.local, self.options)

    def refuse_absent(self, step: int, beside: Collection[int] = ()) -> None:
        """Raises CheckpointNotFound, which names ``beside``, too, if there is no such step; damaged steps exist."""
        if not self.look().has(step):
            raise self._absent(step, beside)

    def _absent(self, step: int, beside: Collection[int] = ()) -> CheckpointNotFound:
        here, there = (", ".join(map(str, sorted(steps)[-10:])) for steps in (self.all(), beside))
        text = f"{self.directory} has no step {step}; it has: {here or 'none'}"
        return CheckpointNotFound(f"{text}; local directories have: {there}" if there else text)

    def facts(self, step: int, listing: Listing) -> keep.StepFacts | None:
        """The keep policy's input for a step; None if it is damaged, or gone. An OSError says nothing about the step."""
        try:
            return facts_of(step, self.open(step, listing))
        except (CheckpointCorrupt, CheckpointNotFound):
            return None


def stray_text(parent: int, verb: str = "continues") -> str:
    """What is said of steps that do not continue a step which was saved later, beneath them."""
    return f"{verb} another save than step {parent} here, as in a copy of a run that went back, made without deletion"


def saved_by(record: Record) -> Saved:
    """What a record says of its save."""
    parent = Identity(*record.parent) if record.parent else None
    return Saved(record.token, parent, record.created_unix_secs)


def facts_of(step: int, opened: Checkpoint) -> keep.StepFacts:
    """The keep policy's input for a step whose record was read."""
    created = opened.record.created_unix_secs if isinstance(opened, NativeCheckpoint) else 0.0
    return keep.StepFacts(step, created, opened.metrics)


def note_deleted(directory: str, step: int) -> None:
    """Of a step that a tool has deleted, no copy in the local directories of a run's hosts counts from here on."""
    backend = backend_of(resolve(directory)[1])
    run = parse_run_file(backend.read(directory, RUN_FILE, MOST_BYTES), directory)
    if run.name:
        backend.put(directory, RUN_FILE, run.without(step).dump())


def request_save(backend: Backend, directory: str) -> tuple[bytes, bool]:
    """Asks whoever saves in a directory for a step, unless somebody has; gives the request, and whether it is new."""
    if (there := backend.read(directory, SAVE_NOW_FILE, SHORT_BYTES)) is not None:
        return there, False
    data = secrets.token_hex(16).encode()
    backend.put(directory, SAVE_NOW_FILE, data)
    return data, True


@dataclass(frozen=True, kw_only=True)
class RunSteps(Steps):
    """The steps of a run, as one Checkpointer uses them."""

    processes: Processes
    read_only: bool  # nothing is written or claimed

    def round(self, call: str) -> Round:
        """An agreement of all processes, see ``Processes.round``, within the time that the options give."""
        return self.processes.round(call, self.options.timeout_secs)

    def on_first(self, call: str, work: Callable[[], Any]) -> Any:
        """The result of ``work``, plain JSON values, which process 0 runs; if it fails, every process raises."""
        return self.processes.round(call, self.options.timeout_secs).first(work)


def open_run(
    directory: str | os.PathLike[str], names: StepNames, options: Options, read_only: bool
) -> RunSteps:
    """The directory of a run, which need not exist yet; raises for a file, or a single checkpoint."""
    path, local = resolve(directory)
    refuse_file_for_steps(path)
    backend = backend_of(local, options)
    refuse_one_checkpoint(backend, path, local)
    processes = _processes.this_run()
    return RunSteps(path, local, backend, names, options, processes=processes, read_only=read_only)


def agree_on_run_file(steps: RunSteps, *, make: bool) -> RunFile:
    """The run file, as process 0 sees it; all processes must call it. With ``make`` a run gets a name, and several
    processes the file of their secret. Local steps are found by that name alone, so those of another run in the same
    local directory are never restored: of one whose persistent directory was deleted, or of which this one is a copy.
    """

    def text() -> str:
        run = steps.run_file()
        if make and not run.name:
            name = f"run-{secrets.token_hex(8)}"
            run = replace(run, name=name, current=secrets.token_hex(8))
            steps.backend.put(steps.directory, RUN_FILE, run.dump())
        several = steps.local and steps.processes.count > 1
        if make and several and steps.options.peer_secret_file is None:
            with contextlib.suppress(OSError):  # it is met again where all meet
                make_secret(steps.directory)
        return run.dump().decode()

    return parse_run_file(
        steps.on_first("find the run of local steps", text).encode(), steps.directory
    )


@dataclass
class Following:
    """The steps of a directory, one after the other. It locks another file than readers do: retention does not delete the
    step, but training that goes back need not wait for whoever evaluates a step that it leaves.
    """

    steps: RunSteps
    _wanted: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def wait(self, after: int | None, timeout_secs: float | None) -> int | None:
        """Blocks until the newest step, as process 0 sees it, is newer than ``after``, and keeps it; None at the timeout."""
        try:
            least = -1 if after is None else operator.index(after)
        except TypeError:
            raise TypeError(
                f"after must be the number of a step, or None, got {after!r}: pass what the last call gave"
            ) from None
        if timeout_secs is not None and math.isnan(timeout_secs):
            raise ValueError(
                "timeout_secs must be a number of seconds, or None for no limit, got nan"
            )
        wait_secs = math.inf if timeout_secs is None else max(0.0, float(timeout_secs))
        limit_secs = self.steps.options.timeout_secs + wait_secs
        work = functools.partial(self._wait, least, wait_secs)
        return self.steps.processes.round("wait for a new step", limit_secs).first(work)

    def _wait(self, after: int, timeout_secs: float) -> int | None:
        """The same in one process."""
        self.end()
        deadline = time.monotonic() + timeout_secs
        while True:
            listing = self.steps.look()
            newest = listing.latest()
            if newest is not None and newest > after and self._want(newest, listing):
                return newest
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(_LOOK_SECS, left))

    def _want(self, step: int, listing: Listing) -> bool:
        """Keeps a step; whether it is still there."""
        try:
            if self.steps.local:
                path = f"{self.steps.path(step, listing)}/{orbax_files.STEP_METADATA}"
                self._wanted.enter_context(reading(path, b""))
        except FileNotFoundError:  # deleted meanwhile, or a step of Orbax without that file
            return self.steps.look().has(step)
        return True

    def end(self) -> None:
        """No step is wanted any more."""
        self._wanted.close()


def unless_wanted(path: str, locks: bool) -> contextlib.AbstractContextManager[None]:
    """A block in which nobody can begin to want the step at ``path``; BlockingIOError if somebody wants it."""
    return deleting(f"{path}/{orbax_files.STEP_METADATA}") if locks else contextlib.nullcontext()
