"""Every exception that ckpt raises on its own account.

::

    CheckpointError
    ├── CheckpointNotFound    (FileNotFoundError)   no checkpoint, step or item of that name
    ├── CheckpointExists      (FileExistsError)     something is there already
    ├── CheckpointCorrupt     (ValueError)          bytes differ from what was saved: .file, .leaf
    ├── StructureMismatch     (ValueError)          saved and wanted trees differ: .mismatches
    ├── UnsupportedLeaf       (TypeError)           a value that cannot be saved, or be a target: .leaf, .type_name
    ├── BarrierTimeout        (TimeoutError)        processes that did not arrive: .absent
    ├── GraceExceeded         (TimeoutError)        a save did not end before the process must
    ├── RestoredValueIgnored  (RuntimeError)        restored state was never read: .item
    └── ForkedProcess         (RuntimeError)        called in a forked child

Each class is also the builtin that a caller would expect, so ``except FileNotFoundError`` works.
Errors of the system (disk full, permission denied, read-only file system) keep their own type,
``OSError``.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

VISIBLE = "visible, durability unknown"
"""What the error of a save says that came after the rename which made the checkpoint visible."""


def is_visible(error: BaseException) -> bool:
    """Whether a save that failed with this error can be seen all the same.

    Of the text, because that is what the other processes of a save hear.
    """
    return any(VISIBLE in text for text in (str(error), *getattr(error, "__notes__", ())))


class CheckpointError(Exception):
    """The root: whatever ckpt refuses or finds wrong."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no checkpoint, step or item of that name."""


class CheckpointExists(CheckpointError, FileExistsError):
    """Something is there already, and ``overwrite=True`` was not given."""


class CheckpointCorrupt(CheckpointError, ValueError):
    """The bytes on disk are not the bytes that were saved.

    Attributes:
        file: the damaged or missing file, relative to the checkpoint, where known.
        leaf: the leaf that cannot be trusted, where known.
    """

    def __init__(self, message: str, *, file: str | None = None, leaf: str | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.leaf = leaf


@dataclass(frozen=True)
class Mismatch:
    """One difference between what was saved and what is wanted.

    Attributes:
        path: the leaf, written with ``/``.
        kind: ``missing`` (wanted, not saved), ``unexpected`` (saved, not wanted), ``shape``,
            ``dtype``, ``sharding`` (the mesh does not divide the shape), ``function`` (of another
            name, or on one side only), ``rename`` (an entry of ``rename=`` that fits nothing), or
            ``kind`` (an array where a string was saved, say).
        saved: what the checkpoint holds, or None.
        wanted: what the target asks for, or None.
        nearest: the most similar name on the other side, or None.
        item: the item that the leaf belongs to, or None.
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
                return (
                    f"{where}: nothing saved begins so, which rename= makes {self.wanted!r}{hint}"
                )
            case "function" if self.wanted is None:
                return f"{where}: is the function {self.saved}"
            case _:
                both = f"saved {self.saved}, wanted {self.wanted}"
                return f"{where}: {self.kind} differs: {both}{hint}"


class StructureMismatch(CheckpointError, ValueError):
    """What was saved and what is wanted do not fit; every difference is in ``mismatches``."""

    def __init__(
        self, mismatches: Iterable[Mismatch], *, where: str = "", advice: str = ""
    ) -> None:
        self.mismatches = tuple(mismatches)
        count = len(self.mismatches)
        place = f" in {where}" if where else ""
        lines = [
            f"{count} mismatch{'es' if count != 1 else ''} between checkpoint and target{place}:"
        ]
        lines += [f"  {mismatch}" for mismatch in self.mismatches]
        if advice:
            lines.append(advice)
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_mismatch, (self.mismatches, str(self)))


def _rebuild_mismatch(mismatches: tuple[Mismatch, ...], message: str) -> StructureMismatch:
    error = StructureMismatch(mismatches)
    error.args = (message,)
    return error


class UnsupportedLeaf(CheckpointError, TypeError):
    """A value that no checkpoint can hold, or a target that cannot be one.

    Attributes:
        leaf: its path, written with ``/``.
        type_name: the type that was found.
    """

    def __init__(
        self, message: str, *, leaf: str | None = None, type_name: str | None = None
    ) -> None:
        super().__init__(message)
        self.leaf = leaf
        self.type_name = type_name


class BarrierTimeout(CheckpointError, TimeoutError):
    """Other processes did not arrive in time; ``absent`` holds their indices."""

    def __init__(self, message: str, *, absent: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.absent = tuple(absent)


class GraceExceeded(CheckpointError, TimeoutError):
    """The run was told to stop, and its last save is not done within the grace period."""


class RestoredValueIgnored(CheckpointError, RuntimeError):
    """Something is saved under the name of an item whose restored value nobody took.

    The value could not be set in place and was never read out of ``Restored``; or the restored step
    holds the item, and the restore left it out.

    Attributes:
        item: the item that was restored and ignored.
    """

    def __init__(self, message: str, *, item: str | None = None) -> None:
        super().__init__(message)
        self.item = item


class ForkedProcess(CheckpointError, RuntimeError):
    """The process is a forked child: neither JAX nor TensorStore survive a fork."""


def drop_locals(error: BaseException) -> None:
    """Empties the frames that an error and its causes came through: they may hold a whole state.

    Lines and text of the traceback stay. Frames that still run keep what they hold.
    """
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
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_LIBRARIES = ("crc32c", "jax", "jaxlib", "ml_dtypes", "numpy", "tensorstore")
"""Of which functions fail on what was read."""


def raised_by_a_handler(error: BaseException | None) -> BaseException | None:
    """Of an error and its causes the one that a signal handler raised; None where there is none.

    Python calls a handler from whatever line the main thread is at, and what it raises looks as if that line
    had failed: a ValueError while a file is parsed is no damage of that file, though. A handler is code
    that neither we nor the libraries below us have, and in which the traceback ends.
    """
    while error is not None:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None and not _is_known(trace.tb_frame.f_code.co_filename):
            return error
        error = error.__cause__
    return None


def passed_a_handler(error: BaseException) -> bool:
    """Whether an error came out of a signal handler that is installed now.

    For where a user's own functions are called, whose errors ``raised_by_a_handler`` takes for those of
    a handler. Only the main thread runs handlers.
    """
    codes = set[object]()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler):
            function = getattr(handler, "func", handler)  # of functools.partial
            function = getattr(function, "__func__", function)
            if not hasattr(function, "__code__"):
                function = type(function).__call__
            codes.add(getattr(function, "__code__", None))
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _is_known(file: str) -> bool:
    if file.startswith(("<", _OURS)):
        return True
    parts = file.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return any(library in parts for library in _LIBRARIES)
    return file.startswith(_STANDARD)
