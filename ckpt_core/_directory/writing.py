"""One attempt to write a checkpoint in a file system: under a hidden name, made durable, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import zlib
from collections.abc import Iterable, Mapping

from ckpt_core._directory import hidden_names
from ckpt_core._directory.backend import SIGNS, Attempt, has_sign, is_meant
from ckpt_core._directory.files import file_sizes, read_bounded
from ckpt_core._directory.paths import refuse_lost_link
from ckpt_core._directory.syscalls import (
    exchange,
    kind_at,
    refuse_file,
    remove,
    sync_file,
    unless_absent,
)
from ckpt_core._errors import VISIBLE, CheckpointError, CheckpointExists
from ckpt_core._format.record import FileRecord
from ckpt_core._format.untrusted import most_bytes
from ckpt_core._platform import FOLDER, of_tasks

_BUFFER_BYTES = 256 * 1024
_ABORT_TRIES = 100
_ABORT_PAUSE_SECS = 0.02


class LocalAttempt(Attempt):
    """One attempt; see ``Attempt``."""

    def __init__(
        self, target: str, temporary: str, *, overwrite: bool, durable: bool, created: list[str]
    ) -> None:
        self._target = target
        self.path = temporary
        self.data_prefix = ""
        self._overwrite = overwrite
        self._durable = durable
        self._created = created
        self.superseded: list[str] = []
        """Old checkpoints of this name, deleted after the commit."""
        self._making = threading.Lock()  # of directories: two threads would both try
        self._identity: tuple[int, int] | None = None  # device and inode, set by commit()
        self._replaced: str | None = None  # path to which the commit moves the old checkpoint

    def write(self, name: str, data: bytes, *, until_commit: bool = False) -> FileRecord:
        self.write_data(name, (data,))
        return FileRecord(len(data), zlib.crc32(data))

    def write_data(self, name: str, parts: Iterable[bytes]) -> None:
        full = os.path.join(self.path, name)
        if "/" in name:
            with self._making:
                os.makedirs(os.path.dirname(full), exist_ok=True)
        try:
            with open(full, "xb", buffering=_BUFFER_BYTES) as file:
                for part in parts:
                    file.write(part)
                file.flush()
                if self._durable:
                    sync_file(file.fileno())
        except OSError as error:
            if error.errno is not None:  # else it is a signal handler's
                error.filename = error.filename or full  # neither write nor fsync says it
            raise

    def read(self, name: str) -> bytes:
        with open(os.path.join(self.path, name), "rb") as file:
            return file.read()

    def take(self, name: str) -> bytes:
        data = self.read(name)
        os.unlink(os.path.join(self.path, name))
        return data

    def small_files(self) -> Mapping[str, bytes]:
        return {}

    def files(self, known_bytes: Mapping[str, int]) -> dict[str, int]:
        return file_sizes(self.path)

    def make_durable(self, record_name: str, record: bytes) -> None:
        if self._durable:
            for directory, _, _ in os.walk(self.path, topdown=False, onerror=unless_absent):
                if directory != self.path:
                    sync_directory(directory, durable=True)
        # The record comes last: a directory without it is not a checkpoint.
        self.write(record_name, record)
        if self._durable:
            sync_directory(self.path, durable=True)

    def commit(self) -> None:
        status = os.lstat(self.path)
        self._identity = status.st_dev, status.st_ino
        try:
            self._put_in_place()
            if self._durable:
                sync_directory(os.path.dirname(self._target))
        except BaseException as error:
            if not self._stands_at(self._target, unknown=True):
                raise  # not visible: the caller aborts
            # The checkpoint is visible: even a failed rename may have been carried out.
            self._keep_replaced()
            shown = _visible(error, self._target)
            if shown is error:
                raise
            raise shown from error
        self._created = []
        old = self.superseded if self._replaced is None else [self._replaced, *self.superseded]
        if old:
            hidden_names.discard(old)

    def _put_in_place(self) -> None:
        """Renames the attempt to its target; a checkpoint there is moved to a hidden name."""
        if not self._overwrite or not hidden_names.inside(self._target):
            self._rename_to_target()
            return
        self._replaced = self.path
        if exchange(self.path, self._target):
            return
        parent, name = os.path.split(self._target)
        if self.superseded:  # between the two renames, only one old checkpoint may be found
            sync_directory(parent)
            hidden_names.discard(self.superseded)
        aside = self._replaced = hidden_names.make(hidden_names.REPLACED, parent, name)
        try:
            os.rename(self._target, aside)
            self._rename_to_target()
        except BaseException:
            if not os.path.lexists(self._target):
                with contextlib.suppress(OSError):  # readers find it under the hidden name too
                    os.rename(aside, self._target)
            raise

    def _rename_to_target(self) -> None:
        try:
            os.rename(self.path, self._target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise _exists(self._target) from error
            if error.errno in (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP):
                error.add_note(
                    f"if {self._target} is in a mounted bucket, give its gs:// or s3:// URL"
                )
            raise

    def _keep_replaced(self) -> None:
        """Renames the replaced checkpoint to ``KEPT``: the new one may not be durable."""
        if self._replaced is not None:
            parent, name = os.path.split(self._target)
            with contextlib.suppress(OSError):  # it then keeps its current hidden name
                os.rename(self._replaced, hidden_names.make(hidden_names.KEPT, parent, name))

    def _stands_at(self, path: str, *, unknown: bool) -> bool:
        """Whether this attempt's directory is at ``path``; ``unknown`` if lstat fails."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return False
        except OSError:
            return unknown
        return (status.st_dev, status.st_ino) == self._identity

    def abort(self) -> None:
        if self._identity is not None and not self._stands_at(self.path, unknown=False):
            return  # already visible; the hidden name is now the replaced checkpoint's, or free
        # Other threads and processes may still be writing and recreate directories: retry for 2 s.
        for _ in range(_ABORT_TRIES):
            remove(self.path)
            time.sleep(_ABORT_PAUSE_SECS)
            if not os.path.lexists(self.path):
                break
        remove_empty(self._created)


def _visible(error: BaseException, path: str) -> BaseException:
    """The error of a commit after which the checkpoint is visible, with advice; keeps its type."""
    advice = (
        f"the checkpoint is {VISIBLE}: it was renamed, but its directory is not known to be synced, so "
        "a power cut may still take it back. What it replaced, if anything, is kept beside it. To be "
        "sure, save it again, with overwrite=True"
    )
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, f"{os.strerror(error.errno)}: {advice}", path)
    error.add_note(advice)
    return error


def _exists(path: str) -> CheckpointExists:
    return CheckpointExists(
        f"{path} exists already: choose another path, or pass overwrite=True to replace it{of_tasks()}"
    )


def refuse_occupied(path: str, *, overwrite: bool) -> None:
    """Raises CheckpointExists if something is at ``path`` that must not or cannot be replaced, or a checkpoint is around it."""
    if overwrite and os.path.islink(path):
        raise CheckpointExists(
            f"{path} is a link to {os.path.realpath(path)}: overwrite=True would replace the link and leave what it leads to "
            "as it is. Name that, or remove the link"
        )
    if os.path.lexists(path) and kind_at(path) != "directory":
        what = "a file" if os.path.exists(path) else "a link that leads nowhere"
        raise CheckpointExists(
            f"{path} is {what}: a checkpoint is a directory; choose another path"
        )
    around = path
    while (around := os.path.dirname(around)) != os.path.dirname(around):
        here = os.path.isfile(os.path.join(around, SIGNS[0]))
        if here and _is_meant(around):
            raise CheckpointExists(
                f"{path} lies inside the checkpoint {around}, which would no longer be what was saved: "
                "choose another path"
            )
    inside = hidden_names.inside(path)
    if not inside:
        return
    named = [sign for sign in SIGNS if sign in inside]
    # what is replaced is deleted: the name of a file is not enough for that
    if not named or not _is_meant(path):
        steps = [name for name in inside if has_sign(os.path.join(path, name))]
        if steps and not named:
            raise CheckpointExists(
                f"{path} is a directory that holds no checkpoint itself, but others ({', '.join(sorted(steps)[:5])}): "
                "save a step into it with ckpt.Checkpointer(path).save(step, ...), or choose another path"
            )
        hint = f", whose {named[0]} is another file of that name" if named else ""
        raise CheckpointExists(
            f"{path} is a directory that holds no checkpoint ({', '.join(sorted(inside)[:5])}){hint}: "
            "choose another path, or move it away; overwrite=True replaces checkpoints only"
        )
    if not overwrite:
        raise _exists(path)


def _is_meant(path: str) -> bool:
    return is_meant(lambda name: read_bounded(path, name, most_bytes(name)))


def refuse_path(path: str) -> None:
    """Raises CheckpointError if TensorStore cannot take a path of a file system, since it is not valid UTF-8."""
    if any("\udc80" <= character <= "\udcff" for character in path):
        raise CheckpointError(
            f"{path!r} is no UTF-8, and TensorStore, which reads compressed arrays, takes no other paths: give the "
            "directory another name"
        )


def make_directories(path: str, durable: bool) -> list[str]:
    """Creates ``path`` and its missing parents; returns the created ones, deepest first."""
    missing: list[str] = []
    current = path
    while not os.path.isdir(current):
        missing.append(current)
        current = os.path.dirname(current)
    try:
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
            if kind_at(directory) != "directory":
                refuse_lost_link(directory)
                refuse_file(directory)
            if durable:
                sync_directory(os.path.dirname(directory))
    except OSError:
        remove_empty(missing)
        raise
    return missing


def remove_empty(directories: Iterable[str]) -> None:
    """Removes those directories that are there and empty."""
    for directory in directories:
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def is_synced(path: str) -> bool:
    """Fsyncs a directory; whether that succeeded."""
    try:
        sync_directory(path)
    except OSError:
        return False
    return True


def sync_directory(path: str, *, durable: bool = False) -> None:
    """Fsyncs a directory. Some network file systems cannot, with EINVAL, which only a ``durable`` checkpoint raises."""
    descriptor = os.open(path, FOLDER)
    try:
        sync_file(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        if durable:
            what = "directories cannot be synced here, so that a power cut could lose a checkpoint: save with Options(durable=False)"
            raise OSError(errno.EINVAL, what, path) from error
    finally:
        os.close(descriptor)
