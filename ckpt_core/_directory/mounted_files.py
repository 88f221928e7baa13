"""The files of a mounted bucket, with the interface of TensorStore's key-value stores.

gcsfuse, s3fs, rclone and the like show a bucket as a directory, in which little is as on a disk: to rename a
directory copies every object, or is refused; there are no locks and no links; a file is in the bucket when it was
closed, and an error of the upload comes then. TensorStore's own driver opens each file for reading and writing,
which some refuse, and renames it, which others do by a copy.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ckpt_core._directory.syscalls import sync_file
from ckpt_core._platform import BINARY

Value = TypeVar("Value")

_HALF = ".ckpt-put."
"""Begins the name of a file that is renamed when it is whole."""
_HALF_SECS = 86_400.0
"""Age at which such a file is left of a dead writer."""
_CANNOT = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EPERM, errno.EXDEV})
"""What a mount answers that does not know a call."""
_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_TRIES = 20


class KeyRange(Protocol):
    """Keys from ``inclusive_min`` to before ``exclusive_max``, which is empty for no end; of TensorStore."""

    @property
    def inclusive_min(self) -> bytes: ...

    @property
    def exclusive_max(self) -> bytes: ...


@dataclass(frozen=True)
class Stamp:
    """What a write returns. ``generation`` is a digest of the value, or empty if nothing was written."""

    generation: bytes


@dataclass(frozen=True)
class Found:
    """What a read returns; ``state`` is ``"value"`` or ``"missing"``."""

    state: str
    value: bytes
    stamp: Stamp


class Done(Generic[Value]):
    """A future of something that was done when it was made."""

    def __init__(self, work: Callable[[], Value]) -> None:
        self._value: Value | None = None
        self._error: OSError | None = None
        try:
            self._value = work()
        except OSError as error:
            self._error = error

    def exception(self, timeout: float | None = None) -> OSError | None:
        """The error, or None."""
        return self._error

    def result(self) -> Any:
        """What the call returned."""
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        """True."""
        return True

    def cancel(self) -> bool:
        """False: it is done."""
        return False


class MountedFiles:
    """The files below a directory, which need not exist, as keys and values; every call blocks, and returns a future
    all the same. A conditional write compares and then writes: of two writers on two hosts, both may believe to have
    won.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def read(self, key: str, *, byte_range: slice | None = None) -> Done[Found]:
        """The value, or a range of it."""
        return Done(lambda: self._read(key, byte_range))

    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> Done[Stamp]:
        """Writes the value, or deletes the key if it is None. With ``if_equal``, only if the value has this
        generation; the file then appears at once, whole, if the mount can rename.
        """
        if value is None:
            return Done(lambda: self._delete(key))
        if if_equal is None:
            return Done(lambda: self._write(self._path(key), value))
        return Done(lambda: self._replace(key, value, if_equal))

    def list(self, keys: KeyRange) -> Done[list[bytes]]:
        """Every key in the range."""
        first, end = keys.inclusive_min, keys.exclusive_max
        return Done(
            lambda: [key for key in self._keys() if key >= first and (not end or key < end)]
        )

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _read(self, key: str, byte_range: slice | None) -> Found:
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                if byte_range is None:
                    value = file.read()
                else:
                    file.seek(byte_range.start)
                    value = b"".join(_pieces(file, byte_range.stop - byte_range.start))
        except _NO_FILE:
            return Found("missing", b"", Stamp(_generation(None)))
        return Found("value", value, Stamp(_generation(value)))

    def _write(self, path: str, value: bytes) -> Stamp:
        descriptor = _open_for_writing(path)
        try:
            rest = memoryview(value)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            _if_it_can(lambda: sync_file(descriptor))
        finally:
            os.close(descriptor)  # raises if the upload failed
        return Stamp(_generation(value))

    def _replace(self, key: str, value: bytes, if_equal: bytes) -> Stamp:
        if self._read(key, None).stamp.generation != if_equal:
            return Stamp(b"")
        path = self._path(key)
        # A mount uploads what there is of a file if the writer dies: half of it must not bear the name.
        half = f"{os.path.dirname(path)}/{_HALF}{secrets.token_hex(8)}"
        try:
            self._write(half, value)
            if _if_it_can(lambda: os.replace(half, path)):
                return Stamp(_generation(value))
        finally:
            with contextlib.suppress(OSError):
                os.unlink(half)
        return self._write(path, value)

    def _delete(self, key: str) -> Stamp:
        path = self._path(key)
        with contextlib.suppress(*_NO_FILE):
            os.unlink(path)
        # a bucket has no empty directories, though some mounts keep them
        while len(path) > len(self._root):
            path = os.path.dirname(path)
            try:
                os.rmdir(path)
            except OSError:
                break
        return Stamp(_generation(None))

    def _keys(self) -> Iterator[bytes]:
        for folder, folders, names in os.walk(self._root, onerror=_unless_it_is_gone):
            folders.sort()
            for name in sorted(names):
                path = f"{folder}/{name}"
                if name.startswith(_HALF):
                    _remove_if_old(path)
                else:
                    yield os.fsencode(path.removeprefix(f"{self._root}/"))


def _pieces(file: io.RawIOBase, size_bytes: int) -> Iterator[bytes]:
    """So many bytes from here, or all to the end; one call may give less, of 2 GiB and of some mounts."""
    while size_bytes > 0 and (piece := file.read(size_bytes)):
        size_bytes -= len(piece)
        yield piece


def _open_for_writing(path: str) -> int:
    """The descriptor of a new or emptied file; makes its directory."""
    # not for reading: rclone without a cache refuses that
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY
    for _ in range(_TRIES):
        # a deletion that goes on may remove the directory when it is empty, at any moment
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return os.open(path, flags)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return os.open(path, flags)


def _generation(value: bytes | None) -> bytes:
    return b"missing" if value is None else hashlib.sha256(value).digest()


def _if_it_can(call: Callable[[], Any]) -> bool:
    """Makes a system call; False if the mount does not know it."""
    try:
        call()
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        return False
    return True


def _unless_it_is_gone(error: OSError) -> None:
    """A directory that cannot be listed is not an empty one."""
    if not isinstance(error, _NO_FILE):
        raise error


def _remove_if_old(path: str) -> None:
    with contextlib.suppress(OSError):
        if time.time() - os.stat(path).st_mtime > _HALF_SECS:
            os.unlink(path)
