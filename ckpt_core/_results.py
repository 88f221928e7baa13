"""What saves, loads and inspections give back."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RestoreReport:
    """What a load or restore did, leaf by leaf (paths are ``item/path`` where there are items).

    Attributes:
        loaded: leaves that came from the checkpoint.
        missing: leaves that the checkpoint lacks; the target's value was kept.
        unexpected: saved leaves that the target lacks.
        cast: leaves whose dtype was converted.
        resharded: leaves that now lie on another sharding than the saved one.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    resharded: tuple[str, ...] = ()


class Restored(Mapping[str, Any]):
    """The restored items by name; always true, whatever it holds.

    Models, optimizers, iterators and other live objects were set in place and appear here as
    themselves. Immutable values (pytrees, Optax states) are only here: read them, or training goes
    on with the old ones.

    Attributes:
        step: of the Checkpointer's directory; None outside one.
        path: of the checkpoint.
        metadata: what the user saved with it.
        report: what was loaded, kept and converted.
    """

    def __init__(
        self,
        values: dict[str, Any],
        *,
        path: str,
        metadata: Any,
        report: RestoreReport,
        step: int | None = None,
    ) -> None:
        self._values = values
        self._read: set[str] = set()
        self.step = step
        self.path = path
        self.metadata = metadata
        self.report = report

    def __getitem__(self, item: str) -> Any:
        try:
            value = self._values[item]
        except KeyError:
            raise KeyError(f"{item!r}: restored were {', '.join(self._values)}") from None
        self._read.add(item)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, item: str) -> Any:
        if item.startswith("_") or item not in self._values:
            raise AttributeError(item)
        return self[item]

    def __repr__(self) -> str:
        return f"Restored(step={self.step}, items={list(self._values)}, path={self.path!r})"

    @property
    def read_items(self) -> Set[str]:
        """The items whose values were taken out of this object so far; grows as they are."""
        return self._read


@dataclass(frozen=True)
class LeafInfo:
    """One leaf of a checkpoint, as ``inspect`` tells it."""

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    sharding: dict[str, Any] | None
    bytes: int


@dataclass(frozen=True)
class ItemInfo:
    """One item of a checkpoint: its form (``tree``, ``process`` or ``json``) and its leaves."""

    name: str
    form: str
    leaves: tuple[LeafInfo, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all arrays, uncompressed."""
        return sum(leaf.bytes for leaf in self.leaves)


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint without its arrays.

    Attributes:
        path: absolute.
        items: by name.
        metadata: the user's own.
        metrics: of the step.
        versions: of the libraries that wrote it.
        topology: of the run that wrote it.
        format_version: of ckpt's record; None for directories that Orbax wrote.
        created_unix_secs: when it was committed.
        durations: ``snapshot_secs`` that the caller was blocked, ``write_secs`` from then on.
        run_metadata: of the directory of steps that it lies in.
        files: sizes of all files that the record lists.
    """

    path: str
    items: dict[str, ItemInfo]
    metadata: Any = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    versions: dict[str, str] = field(default_factory=dict[str, str])
    topology: dict[str, Any] = field(default_factory=dict[str, Any])
    format_version: int | None = None
    created_unix_secs: float | None = None
    durations: dict[str, float] = field(default_factory=dict[str, float])
    run_metadata: Any = None
    files: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a checkpoint: where, and what."""

    file: str
    what: str
    leaf: str | None = None

    def __str__(self) -> str:
        return f"{self.file}{f' ({self.leaf})' if self.leaf else ''}: {self.what}"


@dataclass(frozen=True)
class VerifyReport:
    """Whether every byte of a checkpoint is as it was saved.

    Attributes:
        ok: no problem was found, and there were checksums to check against.
        problems: every difference.
        checked_bytes: how much was read.
    """

    ok: bool
    problems: tuple[Problem, ...]
    checked_bytes: int


_HEAD_START_SECS = 0.1
"""How long a thread waits for its starter to go on; an interrupt may have kept it from saying so."""


class Pending:
    """Work in a thread of its own that ends before the interpreter does.

    The thread is no daemon: Python waits for it at exit. A failure that nobody asked about is
    printed at exit and ends the process with code 1.
    """

    def __init__(self, path: str, work: Callable[[], Any], name: str) -> None:
        self.path = path
        self._work = work
        self._value: Any = None
        self._error: BaseException | None = None
        self._told = False
        self._caller_left = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)
        _register(self)
        self._thread.start()
        self._caller_left.set()

    def _run(self) -> None:
        # the caller gets the interpreter back at once: otherwise it waits for a switch of threads
        self._caller_left.wait(_HEAD_START_SECS)
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        finally:
            del self._work

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout_secs: float | None = None) -> bool:
        """Whether it ended in time; raises nothing."""
        self._thread.join(timeout_secs)
        return self.done()

    def take_error(self) -> BaseException | None:
        """The failure, if there is one that nobody has been told of; it is told now."""
        if self._told or self._error is None:
            return None
        self._told = True
        return self._error

    def result(self, timeout_secs: float | None = None) -> Any:
        """What the work gave; blocks until it ended.

        Raises:
            TimeoutError: it did not end in time; it goes on.
            Exception: whatever the work raised, with its own type.
        """
        if not self.wait(timeout_secs):
            raise TimeoutError(f"{self.path}: not done after {timeout_secs:g} s; it goes on")
        if self._error is not None:
            self._told = True
            raise self._error
        return self._value


class PendingSave(Pending):
    """A save in the background: ``.result()`` returns when it is durable."""


class PendingLoad(Pending):
    """A load in the background: ``.result()`` gives what ``load`` would have."""


_pending: set[Pending] = set()
_pending_lock = threading.Lock()


def _register(pending: Pending) -> None:
    with _pending_lock:
        for other in [other for other in _pending if other.done() and other._error is None]:  # pyright: ignore
            _pending.discard(other)
        _pending.add(pending)


def _report_at_exit() -> None:
    """Prints failures that nobody was told of, and ends the process with code 1."""
    failed = [
        (pending.path, error) for pending in _pending if (error := pending.take_error()) is not None
    ]
    if not failed:
        return
    for path, error in failed:
        print(f"ckpt: {path} was not saved:", file=sys.stderr)
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(1)  # an exit handler cannot set the exit code in any other way


atexit.register(_report_at_exit)
