"""All exceptions of ckpt.

::

    CheckpointError
    ├── CheckpointNotFound    (FileNotFoundError)   no checkpoint, step or item of that name
    ├── CheckpointExists      (FileExistsError)     something is there already
    ├── CheckpointCorrupt     (ValueError)          bytes differ from what was saved: .file, .leaf
    ├── StructureMismatch     (ValueError)          saved and wanted trees differ: .mismatches
    ├── UnsupportedLeaf       (TypeError)           cannot be saved or restored: .leaf, .type_name
    ├── BarrierTimeout        (TimeoutError)        processes that did not arrive: .absent
    ├── GraceExceeded         (TimeoutError)        a save did not end within the grace period
    ├── RestoredValueIgnored  (RuntimeError)        restored state was never read: .item
    └── ForkedProcess         (RuntimeError)        called in a forked child

A checkpoint of a later version of ckpt is a ``CheckpointError`` that says so, and is not damaged. Each class also inherits
from the builtin in parentheses, so ``except FileNotFoundError`` works. Errors of the system (disk full, permission denied)
are raised unchanged, as ``OSError``; so are those of the machine (``MemoryError``, ``RecursionError``, no further thread),
which say nothing of the bytes that were being read.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import traceback
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T", bound=BaseException)

VISIBLE = "visible, durability unknown"
"""Contained in the error of a save that failed after the rename made the checkpoint visible."""


def is_visible(error: BaseException) -> bool:
    """Whether a save that failed with this error has made the checkpoint visible: its text says it, also to other processes."""
    return any(VISIBLE in text for text in (str(error), *getattr(error, "__notes__", ())))


class CheckpointError(Exception):
    """Base class of all errors of ckpt."""


class RefusedArgument(CheckpointError, ValueError):
    """A path or name that no checkpoint or item can have. It has no public name: callers catch ``ValueError``."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no checkpoint, step or item of that name."""


class CheckpointExists(CheckpointError, FileExistsError):
    """Something exists already at the path, and ``overwrite=True`` was not given."""


class CheckpointCorrupt(CheckpointError, ValueError):
    """The bytes on disk are not the bytes that were saved.

    Attributes:
        file: the damaged or missing file, relative to the checkpoint; None if unknown.
        leaf: the damaged leaf; None if unknown.
    """

    def __init__(self, message: str, *, file: str | None = None, leaf: str | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.leaf = leaf


class NewerFormat(CheckpointError, ValueError):
    """A checkpoint that a later version of ckpt wrote; it is not damaged. It has no public name: callers catch ``CheckpointError``."""


@dataclass(frozen=True)
class Mismatch:
    """One difference between checkpoint and target.

    Attributes:
        path: path of the leaf, as text with ``/``.
        kind: ``missing`` (wanted, not saved), ``unexpected`` (saved, not wanted), ``shape``, ``dtype``, ``sharding``
            (the mesh does not divide the shape), ``function`` (another name, or on one side only), ``static`` (a
            number, flag, enum or dtype that jax does not flatten, which the target keeps), ``rename``, ``rule`` (an
            entry of ``rename=``, ``rules=`` that matches nothing), ``select`` (no such part of the leaf), or
            ``kind`` (for example an array where a string was saved).
        saved: description of the saved leaf, or None.
        wanted: description of the target's leaf, or None.
        nearest: the most similar path on the other side, or None.
        item: name of the item that has the leaf, or None.
    """

    path: str
    kind: str
    saved: str | None
    wanted: str | None
    nearest: str | None = None
    item: str | None = None

    def __str__(self) -> str:
        where = f"{self.item}: {self.path}" if self.item else self.path
        hint = f" (nearest name: {self.nearest})" if self.nearest else ""
        match self.kind:
            case "missing":
                return f"{where}: wanted {self.wanted}, not in the checkpoint{hint}"
            case "unexpected":
                return f"{where}: saved {self.saved}, not in the target{hint}"
            case "rename":
                return f"{where}: no saved path begins with this; rename= maps it to {self.wanted!r}{hint}"
            case "rule":
                return f"{where}: no saved path fits the rule for {self.wanted}{hint}"
            case "select":
                return f"{where}: saved {self.saved}; select=: {self.wanted}"
            case "function" if self.wanted is None:
                return f"{where}: is the function {self.saved}"
            case _:
                both = f"saved {self.saved}, wanted {self.wanted}"
                return f"{where}: {self.kind} differs: {both}{hint}"


class StructureMismatch(CheckpointError, ValueError):
    """Checkpoint and target do not match; ``mismatches`` has every difference."""

    def __init__(
        self, mismatches: Iterable[Mismatch], *, where: str = "", advice: str = ""
    ) -> None:
        self.mismatches = tuple(mismatches)
        count, place = len(self.mismatches), f" in {where}" if where else ""
        head = f"{count} mismatch{'es' * (count != 1)} between checkpoint and target{place}:"
        lines = [head, *(f"  {mismatch}" for mismatch in self.mismatches), advice]
        super().__init__("\n".join(filter(None, lines)))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_mismatch, (self.mismatches, str(self)))


def _rebuild_mismatch(mismatches: tuple[Mismatch, ...], message: str) -> StructureMismatch:
    error = StructureMismatch(mismatches)
    error.args = (message,)
    return error


class UnsupportedLeaf(CheckpointError, TypeError):
    """A value that cannot be saved, or that cannot be the target of a restore.

    Attributes:
        leaf: path of the leaf, as text with ``/``.
        type_name: name of its type.
    """

    def __init__(
        self, message: str, *, leaf: str | None = None, type_name: str | None = None
    ) -> None:
        super().__init__(message)
        self.leaf = leaf
        self.type_name = type_name


class BarrierTimeout(CheckpointError, TimeoutError):
    """Processes did not arrive within ``Options.timeout_secs``; ``absent`` has their indices."""

    def __init__(self, message: str, *, absent: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.absent = tuple(absent)


class GraceExceeded(CheckpointError, TimeoutError):
    """The run was asked to stop, and its last save did not end within ``Options.grace_secs``."""


class RestoredValueIgnored(CheckpointError, RuntimeError):
    """An item is saved although its restored value was never read from ``Restored``, or the restore left it out.

    Attributes:
        item: the item that was restored and ignored.
    """

    def __init__(self, message: str, *, item: str | None = None) -> None:
        super().__init__(message)
        self.item = item


class ForkedProcess(CheckpointError, RuntimeError):
    """Called in a forked child, where JAX and TensorStore do not work."""


ANSWERS = CheckpointNotFound, CheckpointExists, StructureMismatch, UnsupportedLeaf, RefusedArgument
"""Errors that answer the call: their message says all, and where in ckpt they were raised says nothing."""

_OTHERS = (CheckpointCorrupt, GraceExceeded, RestoredValueIgnored)
_RAISED_AS_THEY_ARE: dict[str, type[CheckpointError]] = {
    cls.__name__: cls for cls in (*ANSWERS, *_OTHERS) if cls is not StructureMismatch
}


def raised_by_another(kind: str, message: str) -> CheckpointError:
    """The error to raise here for one of another process, of the same class; one of the system or of the user's code becomes a
    CheckpointError, which no handler takes for one of this process.
    """
    if kind == "StructureMismatch":
        return _rebuild_mismatch((), message)
    return _RAISED_AS_THEY_ARE.get(kind, CheckpointError)(message)


def kind_of(error: BaseException) -> str:
    """Name of the class that an error counts as in the other processes."""
    names = [cls.__name__ for cls in type(error).__mro__]
    return next((name for name in names if name in _RAISED_AS_THEY_ARE), names[0])


def at_the_call(error: T) -> T:
    """The error without its frames inside of ckpt; as it is if code of others raised it."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = all(file.startswith(_OURS) for file in files)
    return error.with_traceback(None) if ours else error


def drop_locals(error: BaseException) -> None:
    """Clears the locals, which may hold a training state, of the tracebacks of an error and its causes."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            chain += [link.__cause__, link.__context__]
            chain += getattr(link, "exceptions", ())


_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def name_file(error: OSError, path: str) -> None:
    """Adds the file to the error of a read or a write, in which the system does not say it."""
    if error.errno is not None and error.filename is None:
        error.filename = path


@contextlib.contextmanager
def naming_file(path: str) -> Generator[None]:
    """``name_file`` for errors of the block."""
    try:
        yield
    except OSError as error:
        name_file(error, path)
        raise


_AGREED = "_ckpt_agreed_kind"


def mark_agreed(error: BaseException, kind: str) -> None:
    """Notes that every process raises for one failure, of class ``kind``: they can agree on what to do next."""
    with contextlib.suppress(AttributeError):  # an error with slots
        setattr(error, _AGREED, kind)


def agreed_kind(error: BaseException) -> str:
    """The class of the failure for which every process raises; empty if not all know of it."""
    found: BaseException | None = error
    while found is not None and not getattr(found, _AGREED, ""):
        found = found.__cause__  # it was raised again with more of a message
    return "" if found is None else getattr(found, _AGREED)


def counts_as(error: BaseException, cls: type[Exception], alone: bool) -> bool:
    """Whether a failed load counts as one of this class, in every process alike: what is done next depends on it. What not all
    learned of counts only for a process that is alone.
    """
    kind = agreed_kind(error)
    if not kind:
        return alone and isinstance(error, cls)
    known = getattr(builtins, kind, None)  # PermissionError is an OSError
    return kind == cls.__name__ or (isinstance(known, type) and issubclass(known, cls))


SET = "set before the restore failed"  # in the note that names the objects


def has_set(error: BaseException | None) -> bool:
    """Whether a restore that failed with this error, or with its cause, has set an object."""
    notes = getattr(error, "__notes__", ())
    return any(SET in one for one in notes) or (error is not None and has_set(error.__cause__))


_OF_TARGET = "_ckpt_of_target"


def is_of_target(error: BaseException) -> bool:
    """Whether a live object refused to be set, which says nothing about the files that were read."""
    return getattr(error, _OF_TARGET, False)


def mark_of_target(error: BaseException) -> None:
    """Notes that an error was raised while a live object was set; damage that the object found stays damage."""
    if not isinstance(error, CheckpointCorrupt):
        with contextlib.suppress(AttributeError):  # an error with slots
            setattr(error, _OF_TARGET, True)
